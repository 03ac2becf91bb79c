"""Many clients at once for a long time: nothing may leak, stick or be left over.

    python scripts/lab/soak_server.py [--requests 10000] [--clients 64] [--model demo] [--tokens 8] [--queue 64]

Starts `edgespec serve` and lets the clients send random requests: whole and streamed, of every protocol, some of them
wrong; some clients hang up before, while or after their answer comes. The server's memory after three tenths of the
requests, its warm-up, is the base line. Ends with exit code 1 when memory has grown by 1% or more since, when a status
is none that was expected, when a request hangs, when the server does not come to rest, or when it leaves a process.

Every answer is compared with the one that the server gave to the same request when nothing ran beside it. With
`--reproducible` one that differs is wrong too; without, a token may differ where two are about equally likely, and how
many answers do is printed. `--engine llamacpp --reproducible` shares passes between the answers. The time to the first
token is that of streamed answers, from the connection on, the queue included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles
from typing import Any

_QUESTIONS = ("Find me a bus to Fresno.", "Book a hotel in Paris.", "What is the weather?", "Play some jazz.")
_HANGS_AFTER_S = 900.0
_WARM_UP = 0.3
_PART = 0.1  # of the requests, between two lines of the report


Request = tuple[str, dict[str, Any]]  # path and body
SAMPLINGS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8, "seed": 7})


def request_of(chance: random.Random, tokens: int) -> Request:
    """A random request."""
    question, count = chance.choice(_QUESTIONS), chance.randint(1, tokens)
    kind, is_stream = chance.random(), chance.random() < 0.7
    if kind < 0.55:
        path, body = "/v1/chat/completions", _chat(question, count) | chance.choice(SAMPLINGS)
        body["timings_per_token"] = True
    elif kind < 0.7:
        path, body = "/v1/messages", _chat(question, count)
    elif kind < 0.8:
        path, body = "/v1/responses", {"input": question, "max_output_tokens": count, "temperature": 0}
    elif kind < 0.9:
        path, body = "/v1/completions", {"prompt": question, "max_tokens": count, "temperature": 0}
    elif kind < 0.95:
        return "/v1/chat/completions", _chat(question, count) | {"temperature": "hot"}  # 400
    else:
        return "/tokenize", {"content": question}
    return path, body | {"stream": is_stream}


def _chat(question: str, count: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "max_tokens": count, "temperature": 0}


def key_of(path: str, body: dict[str, Any]) -> str:
    """What the text of an answer depends on."""
    return path + json.dumps(body | {"stream": False}, sort_keys=True)


def texts_of(content: bytes, *, is_stream: bool) -> Iterator[str]:
    """The parts of an answer's text in a body, or in one line of a streamed one."""
    start = content.find(b"{")
    if start < 0 or (is_stream and not content.startswith(b"data: ")):
        return
    told = json.loads(content[start : content.rindex(b"}") + 1])
    if is_stream and told.get("type") in ("content_block_delta", "response.output_text.delta"):
        yield told["delta"]["text"] if isinstance(told["delta"], dict) else told["delta"]
    for choice in told.get("choices", ()):
        yield choice.get("text") or choice.get("delta" if is_stream else "message", {}).get("content") or ""
    if not is_stream:
        for part in (*told.get("content", ()), *(p for each in told.get("output", ()) for p in each["content"])):
            yield part["text"]


class Soak:
    """The clients. `statuses`: answers by status; "left": the client hung up, "cut": the server did.

    `first_s`: seconds to the first token of each streamed answer; `num_checked`, `odd`: answers that were compared with
    the one that they are alone, and those that differ.
    """

    def __init__(self, port: int, options: argparse.Namespace) -> None:
        self._port, self._options = port, options
        self._left = options.requests
        self._alone: dict[str, str] = {}
        self.statuses: Counter[str] = Counter()
        self.first_s: list[float] = []
        self.num_checked, self.odd = 0, list[tuple[str, str, str]]()

    @property
    def done(self) -> int:
        """Requests that are over."""
        return sum(self.statuses.values())

    async def learn(self) -> None:
        """Ask every request alone that `client` may ask."""
        chance = random.Random(0)
        for _ in range(200 * self._options.tokens):
            path, body = request_of(chance, self._options.tokens)
            key = key_of(path, body)
            if key not in self._alone and path != "/tokenize" and body.get("temperature") != "hot":
                reader, writer = await self._opened()
                writer.write(_bytes_of(path, body | {"stream": False}))
                status, text, _ = await self._answer(reader, is_stream=False)
                writer.close()
                if status != "200":
                    raise SystemExit(f"the server answered {status} to {path}")
                self._alone[key] = text

    async def client(self, number: int) -> None:
        """Send requests, one after another, as long as some are left."""
        chance = random.Random(f"{self._options.seed} {number}")
        while self._left > 0:
            self._left -= 1
            try:
                async with asyncio.timeout(_HANGS_AFTER_S):
                    status = await self._ask(chance)
            except TimeoutError:
                status = "hangs"
            self.statuses[status] += 1
            if status == "429":
                await asyncio.sleep(chance.random() * 0.2)

    async def _opened(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def _ask(self, chance: random.Random) -> str:
        path, body = request_of(chance, self._options.tokens)
        content = _bytes_of(path, body)
        reader, writer = await self._opened()
        leaves = chance.choice(("never", "never", "sending", "waiting", "reading"))
        try:
            if leaves == "sending":
                writer.write(content[: len(content) // 2])
                await writer.drain()
                return "left"
            writer.write(content)
            await writer.drain()
            if leaves == "waiting":
                await asyncio.sleep(chance.random() * 0.3)
                return "left"
            if leaves == "reading":
                await reader.readline()
                await reader.read(200)
                return "left"
            is_stream = bool(body.get("stream"))
            status, text, first_s = await self._answer(reader, is_stream=is_stream)
            if status == "200" and path != "/tokenize":
                self._check(key_of(path, body), text)
                self.first_s += [first_s] if is_stream else []
            return status
        except ConnectionError:
            return "cut"
        finally:
            writer.transport.abort() if leaves != "never" else writer.close()

    async def _answer(self, reader: asyncio.StreamReader, *, is_stream: bool) -> tuple[str, str, float]:
        """(status, text, seconds to the first token of a streamed one)."""
        began_s, first_s = time.monotonic(), 0.0
        line = await reader.readline()
        status = line.split(b" ")[1].decode() if line else "cut"
        while line.strip():
            line = await reader.readline()
        if status != "200" or not is_stream:
            return status, "".join(texts_of(await reader.read(), is_stream=False)) if status == "200" else "", 0.0
        parts: list[str] = []
        async for line in reader:
            parts += texts_of(line, is_stream=True)
            first_s = first_s or (time.monotonic() - began_s if parts else 0.0)
        return status, "".join(parts), first_s

    def _check(self, key: str, text: str) -> None:
        self.num_checked += 1
        if text != self._alone[key]:
            self.odd.append((key, text, self._alone[key]))


def _bytes_of(path: str, body: dict[str, Any]) -> bytes:
    """The whole request."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    return head.encode() + content


def resident_kb(pid: int) -> int:
    """Memory of a process in KiB, without the files that it maps: those are the weights."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0])


async def at_rest(port: int) -> bool:
    """Whether the server has nothing left to do, after some time to get there."""
    for _ in range(100):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        answer = json.loads((await reader.read()).rpartition(b"\r\n\r\n")[2])
        writer.close()
        if answer["running"] == answer["waiting"] == 0:
            return True
        await asyncio.sleep(0.1)
    return False


async def soak(port: int, pid: int, options: argparse.Namespace) -> list[str]:
    """What went wrong; prints how it goes."""
    run = Soak(port, options)
    await run.learn()
    clients = [asyncio.create_task(run.client(number)) for number in range(options.clients)]
    began_s, base, shown = time.monotonic(), 0, 0.0
    while not all(client.done() for client in clients):
        await asyncio.sleep(0.2)
        if not base and run.done >= _WARM_UP * options.requests:
            base = resident_kb(pid)
        if run.done >= shown * options.requests:
            files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            print(f"{run.done:6} requests, {resident_kb(pid) / 1024:.1f} MiB, {files} files", flush=True)
            shown += _PART
    await asyncio.gather(*clients)
    is_free, last = await at_rest(port), resident_kb(pid)
    growth = last / base - 1 if base else 0.0
    print(f"{dict(sorted(run.statuses.items()))} in {time.monotonic() - began_s:.0f} s; memory {growth:+.2%}")
    if len(run.first_s) > 1:
        each = quantiles(run.first_s, n=100)
        print(f"first token of {len(run.first_s)} streamed answers: p50 {each[49]:.3f} s, p99 {each[98]:.3f} s")
    print(f"{len(run.odd)} of {run.num_checked} answers differ from the one that the request alone has")
    for key, found, alone in run.odd[:3]:
        print(f"  {key}: {found!r}, alone {alone!r}")
    unexpected = {status for status in run.statuses if status not in ("200", "400", "429", "left")}
    wrong = [f"unexpected: {sorted(unexpected)}"] if unexpected else []
    wrong += ["answers differ"] if run.odd and options.reproducible else []
    wrong += [] if is_free else ["a generation still runs or waits although every client is gone"]
    return wrong + ([f"memory grew by {growth:.2%}"] if growth >= 0.01 else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("-np", "--parallel", type=int, default=4, help="answers at once (default %(default)s)")
    parser.add_argument("--queue", type=int, default=64, help="requests that may wait; fewer than clients give 429s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--reproducible", action="store_true")
    options = parser.parse_args()
    command = [sys.executable, "-m", "edgespec", "serve", options.model, "-t", "1", "--port", "0", "--exit-with-stdin"]
    command += ["-np", str(options.parallel), "--max-queue", str(options.queue), "--engine", options.engine]
    command += ["--timeout", str(int(_HANGS_AFTER_S))]
    command += ["--reproducible"] if options.reproducible else []
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None and server.stdout is not None
    try:
        url = json.loads(server.stdout.readline())["url"]
        wrong = asyncio.run(soak(int(url.rpartition(":")[2]), server.pid, options))
        server.stdin.close()
        code = server.wait(60)
        wrong += [f"the server ended with code {code}"] if code else []
    finally:
        server.kill()
    wrong += ["a process is left over"] if Path(f"/proc/{server.pid}").exists() and server.poll() is None else []
    for each in wrong:
        print(f"WRONG: {each}")
    print("wrong" if wrong else "all right", f"on {os.uname().machine}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
