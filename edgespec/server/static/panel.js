// The measurements beside a conversation: speed, acceptance, width, who drafted, and the memory plan.

import { $, h, svg } from "./dom.js";
import { colourOf } from "./message.js";

const WINDOW_MS = 150; // of decoding, for one point of the curve
const MOST_POINTS = 120;

export function bytes(count) {
  return count < 2 ** 30 ? `${Math.round(count / 2 ** 20)} MiB` : `${(count / 2 ** 30).toFixed(2)} GiB`;
}

const set = (id, value, digits, unit = "") => { $(id).textContent = Number.isFinite(value) ? value.toFixed(digits) + unit : "–"; };

/** The figures of one answer while it is written and afterwards. */
export class Live {
  begin() {
    this.points = [];
    this.last = null;
    this.show(null, []);
  }

  /** `timings` of the answer so far, and its `runs`. */
  update(timings, runs) {
    const last = this.last ?? { predicted_n: 1, predicted_ms: 0 };
    const took = timings.predicted_ms - last.predicted_ms;
    if (took >= WINDOW_MS) {
      this.points.push(1000 * (timings.predicted_n - last.predicted_n) / took);
      if (this.points.length > MOST_POINTS) this.points.shift();
      this.last = timings;
    }
    this.show(timings, runs);
  }

  show(timings, runs) {
    const rounds = timings?.rounds ?? 0, drafted = timings?.draft_n ?? 0;
    set("f-speed", timings && timings.predicted_n > 1 ? timings.predicted_per_second : null, 1);
    set("f-acceptance", drafted ? 100 * timings.draft_n_accepted / drafted : null, 0, "%");
    set("f-length", rounds ? timings.mean_accepted_length : null, 2);
    set("f-width", rounds ? (drafted + rounds) / rounds : null, 1);
    this.curve();
    this.legend(runs);
  }

  curve() {
    const points = this.points, most = Math.max(...points, 1), x = 240 / Math.max(points.length - 1, 1);
    const path = points.map((value, i) => `${i ? "L" : "M"}${(i * x).toFixed(1)} ${(42 - 38 * value / most).toFixed(1)}`).join("");
    $("spark").firstElementChild.setAttribute("d", points.length > 1 ? path : "");
  }

  legend(runs) {
    const shares = new Map();
    let all = 0;
    for (const [length, drafter] of runs) {
      shares.set(drafter, (shares.get(drafter) ?? 0) + length);
      all += length;
    }
    const names = [...shares.keys()].sort((a, b) => shares.get(b) - shares.get(a));
    $("legend").replaceChildren(...names.map((name) => h("li", {},
      h("span", { class: `swatch ${name ? colourOf(name) : "plain"}`, "aria-hidden": "true" }),
      h("span", {}, name ? `drafted by ${name}` : "written by the target"),
      h("b", {}, `${Math.round(100 * shares.get(name) / all)}%`))));
  }
}

let contextLength = 0, lastTimings = null;

export function setContextLength(length) {
  contextLength = length ?? 0;
  showContext(lastTimings);
}

/** How much of the context the conversation takes, after the answer that `timings` are of. */
export function showContext(timings) {
  lastTimings = timings ?? null;
  const used = timings ? timings.prompt_n + timings.cache_n + timings.predicted_n : 0;
  const share = contextLength ? used / contextLength : 0, shown = $("context");
  shown.hidden = !share;
  shown.textContent = `Context: ${used.toLocaleString("en")} of ${contextLength.toLocaleString("en")} tokens (${Math.round(100 * share)}%)`;
  shown.classList.toggle("error", share > 0.9);
}

export function showQueue(health) {
  $("queue").textContent = health.waiting ? `${health.running} running, ${health.waiting} waiting on this server` : "";
}

/** The plan of /props: a bar with its parts, largest first, and what the process takes now. */
export function showMemory(memory) {
  $("memory").hidden = !memory;
  if (!memory) return;
  const parts = memory.parts.map(({ name, own, mapped }) => ({ name, size: own + mapped }))
    .filter((part) => part.size > 0).sort((a, b) => b.size - a.size);
  const total = parts.reduce((sum, part) => sum + part.size, 0);
  $("memory-total").textContent = `${bytes(memory.total_bytes)} planned, peak so far ${bytes(memory.peak_rss_bytes)}`;
  let x = 0;
  $("memory-bar").replaceChildren(...parts.map((part, i) => {
    const width = 100 * part.size / total;
    const bar = svg("rect", { x, y: 0, width: Math.max(width - 0.4, 0.1), height: 6, class: `m${Math.min(i, 5)}` });
    x += width;
    return bar;
  }));
  $("memory-parts").replaceChildren(...parts.map((part, i) => h("li", {},
    h("span", { class: `swatch m${Math.min(i, 5)}`, "aria-hidden": "true" }), h("span", {}, part.name), h("b", {}, bytes(part.size)))));
  const note = memory.verdict === "fits" ? `Fits: ${bytes(memory.free_bytes)} free (${memory.limit}).` : "Will page: slow.";
  $("memory-note").textContent = [note, ...memory.given_up.map((each) => each.text)].join(" ");
}
