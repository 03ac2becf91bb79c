"""Many clients at once for a long time: nothing may leak, stick or be left over.

    python scripts/lab/soak_server.py [--requests 10000] [--clients 64] [--model demo] [--tokens 8] [--queue 64]

Starts `edgespec serve` and lets the clients send random requests: whole and streamed, of every protocol, some of them
wrong; some clients hang up before, while or after their answer comes. The server's memory after three tenths of the
requests, its warm-up, is the base line. Ends with exit code 1 when memory has grown by 1% or more since, when a status
is none that was expected, when a request hangs, when the server does not come to rest, or when it leaves a process.
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
from pathlib import Path
from typing import Any

_QUESTIONS = ("Find me a bus to Fresno.", "Book a hotel in Paris.", "What is the weather?", "Play some jazz.")
_HANGS_AFTER_S = 300.0
_WARM_UP = 0.3
_PART = 0.1  # of the requests, between two lines of the report


def body_of(chance: random.Random, tokens: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a random request."""
    question = chance.choice(_QUESTIONS)
    messages = [{"role": "user", "content": question}]
    is_stream = chance.random() < 0.7
    chat = {"messages": messages, "stream": is_stream, "max_tokens": chance.randint(1, tokens)}
    kind = chance.random()
    if kind < 0.55:
        return "/v1/chat/completions", chat | {"temperature": chance.choice((0, 0.8)), "timings_per_token": True}
    if kind < 0.7:
        return "/v1/messages", chat
    if kind < 0.8:
        return "/v1/responses", {"input": question, "stream": is_stream, "max_output_tokens": chat["max_tokens"]}
    if kind < 0.9:
        return "/v1/completions", {"prompt": question, "stream": is_stream, "max_tokens": chat["max_tokens"]}
    if kind < 0.95:
        return "/v1/chat/completions", chat | {"temperature": "hot"}  # 400
    return "/tokenize", {"content": question}


class Soak:
    """The clients. `statuses`: answers by status; "left": the client hung up, "cut": the server did."""

    def __init__(self, port: int, options: argparse.Namespace) -> None:
        self._port, self._options = port, options
        self._left = options.requests
        self.statuses: Counter[str] = Counter()

    @property
    def done(self) -> int:
        """Requests that are over."""
        return sum(self.statuses.values())

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

    async def _ask(self, chance: random.Random) -> str:
        path, body = body_of(chance, self._options.tokens)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        leaves = chance.choice(("never", "never", "sending", "waiting", "reading"))
        try:
            if leaves == "sending":
                writer.write(head.encode() + content[: len(content) // 2])
                await writer.drain()
                return "left"
            writer.write(head.encode() + content)
            await writer.drain()
            if leaves == "waiting":
                await asyncio.sleep(chance.random() * 0.3)
                return "left"
            line = await reader.readline()
            if leaves == "reading":
                await reader.read(200)
                return "left"
            await reader.read()
            return line.split(b" ")[1].decode() if line else "cut"
        except ConnectionError:
            return "cut"
        finally:
            writer.transport.abort() if leaves != "never" else writer.close()


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
    unexpected = {status for status in run.statuses if status not in ("200", "400", "429", "left")}
    wrong = [f"unexpected: {sorted(unexpected)}"] if unexpected else []
    wrong += [] if is_free else ["a generation still runs or waits although every client is gone"]
    return wrong + ([f"memory grew by {growth:.2%}"] if growth >= 0.01 else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--queue", type=int, default=64, help="requests that may wait; fewer than clients give 429s")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    command = [sys.executable, "-m", "edgespec", "serve", options.model, "-t", "1", "--port", "0", "--exit-with-stdin"]
    command += ["--max-queue", str(options.queue)]
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
