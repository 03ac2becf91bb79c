// Drives `edgespec serve --stdio` from Node or Electron: JSON lines over the child's standard streams, no port.
//
//     node docs/examples/sidecar.mjs [PROGRAM [ARGUMENTS...]]
//
// The child ends by itself when this process ends, however it ends: its standard input closes then.

import { spawn } from "node:child_process";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const PROTOCOL = 1;

export class Sidecar {
  /** `program`: the edgespec command, or the one of a bundle. Await `ready` before the first request. */
  constructor(program = "edgespec", args = ["serve", "demo", "--stdio"]) {
    this.child = spawn(program, args, { stdio: ["pipe", "pipe", "inherit"] });
    this.requests = new Map(); // id: { onText, resolve, reject }
    this.number = 0;
    this.ready = new Promise((resolve, reject) => Object.assign(this, { isReady: resolve, isNot: reject }));
    this.ended = new Promise((resolve) => this.child.on("close", resolve));
    this.child.on("error", (error) => this.isNot(error));
    this.child.on("close", (code) => {
      const error = new Error(`edgespec has ended with code ${code}`);
      this.isNot(error);
      for (const { reject } of this.requests.values()) reject(error);
    });
    createInterface({ input: this.child.stdout }).on("line", (line) => this.take(JSON.parse(line)));
  }

  take(event) {
    const request = this.requests.get(event.id);
    if (event.event === "hello" && event.protocol !== PROTOCOL) this.isNot(new Error(`protocol ${event.protocol}`));
    else if (event.event === "ready") this.isReady(event);
    else if (event.event === "delta") request?.onText(event.text);
    else if (event.event === "done" || event.event === "error") {
      this.requests.delete(event.id);
      if (event.event === "done") request?.resolve(event);
      else request?.reject(new Error(event.error.message));
    }
  }

  send(op, fields = {}) {
    this.child.stdin.write(`${JSON.stringify({ op, ...fields })}\n`);
  }

  /** The answer's `done` event, with usage and timings; its text goes to `onText` as it comes. Abort with `signal`. */
  chat(messages, { onText = () => {}, signal, ...options } = {}) {
    const id = String(++this.number);
    return new Promise((resolve, reject) => {
      this.requests.set(id, { onText, resolve, reject });
      signal?.addEventListener("abort", () => this.requests.has(id) && this.send("cancel", { id }), { once: true });
      this.send("chat", { id, messages, ...options });
    });
  }

  /** The child's exit code. */
  async close() {
    this.child.stdin.end();
    return this.ended;
  }
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  const [program, ...args] = process.argv.slice(2);
  const sidecar = new Sidecar(program, args.length ? args : undefined);
  const { model, context_length } = await sidecar.ready;
  console.log(`${model}, ${context_length} tokens of context`);
  const question = [{ role: "user", content: "Find me a bus to Fresno." }];
  const done = await sidecar.chat(question, { max_tokens: 40, onText: (text) => process.stdout.write(text) });
  console.log(`\n${done.finish_reason}, ${done.timings.predicted_per_second.toFixed(0)} tokens/s`);
  const stopper = new AbortController();
  const stopped = await sidecar.chat(question, { signal: stopper.signal, seed: 1, temperature: 5, onText: () => stopper.abort() });
  console.log(`stopped: ${stopped.finish_reason}`);
  console.log(`ended with code ${await sidecar.close()}`);
}
