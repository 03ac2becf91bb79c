"""Clients of one server, without and with a hostile one among them: how long the others wait for their first token.

    python scripts/lab/hostile_client.py [--clients 64] [--seconds 30] [--model demo]

The hostile client sends what `fuzz_structures.py` makes, and bodies of 8 MB. Prints the others' p50, p99 and longest
wait, and exit code 1 when the server died, an answer of the others failed, or their p99 more than doubled. All on
127.0.0.1.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fuzz_structures import body, grammar, large_schema, schema

_PATHS = ("/v1/chat/completions", "/v1/completions", "/completion", "/v1/responses", "/v1/messages", "/apply-template")


class Clients:
    """Those that behave: each asks for a few tokens again and again; `waits_s` until the first one of each answer."""

    def __init__(self, port: int, count: int, seconds: float) -> None:
        self._port, self._end_s = port, time.monotonic() + seconds
        self.waits_s: list[float] = []
        self.failures: list[str] = []
        threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _ask(self, number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < self._end_s:
            began_s = time.monotonic()
            fields = {
                "messages": [{"role": "user", "content": f"Word {chance.random()}"}],
                "max_tokens": 4,
                "stream": True,
            }
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
                connection.request("POST", _PATHS[0], json.dumps(fields), {"Content-Type": "application/json"})
                answer = connection.getresponse()
                first = answer.read(1)
                self.waits_s.append(time.monotonic() - began_s)
                answer.read()
                if answer.status != 200 or not first:
                    self.failures.append(f"status {answer.status}")
            except (OSError, http.client.HTTPException) as exc:
                self.failures.append(repr(exc))
                return


def hostile(port: int, ended: threading.Event, sent: list[int]) -> None:
    """Send what is hard to take, one request after the other; some of them are left at once."""
    chance = random.Random(1)
    while not ended.is_set():
        data = _request(chance)
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=chance.choice((0.2, 60)))
            connection.request("POST", chance.choice(_PATHS), data, {"Content-Type": "application/json"})
            sent.append(connection.getresponse().status)
        except (OSError, http.client.HTTPException):
            sent.append(0)
        finally:
            connection.close()


def _request(chance: random.Random) -> bytes:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "max_tokens": 32}
    kind = chance.randrange(5)
    if kind == 0:
        found = chance.choice((large_schema, schema))(chance)
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": found if isinstance(found, dict) else {}}}
        return json.dumps(fields | {"response_format": form}).encode()
    if kind == 1:
        return json.dumps(fields | dict([grammar(chance)])).encode()
    if kind == 2:
        return json.dumps(fields | {"prompt": "<|im_start|>" * 600_000, "messages": fields["messages"] * 9000}).encode()
    if kind == 3:
        return b'{"messages":[' + b'{"role":"user","content":"a"},' * 60_000 + b'{"role":"user","content":"a"}]}'
    return body(chance)


@contextmanager
def served(model: str, clients: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server of its own, and its port."""
    command = [sys.executable, "-m", "edgespec", "serve", model, "--port", "0", "--max-queue", str(2 * clients)]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        told = next(json.loads(line) for line in process.stdout if '"listening"' in line)
        yield process, int(told["url"].rpartition(":")[2].strip("/"))
    finally:
        process.terminate()
        process.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--model", default="demo")
    given = parser.parse_args()
    p99_s, is_bad = dict[bool, float](), False
    with served(given.model, given.clients) as (process, port):
        Clients(port, given.clients, 3)  # what a first request makes is made
        for has_hostile in (False, True):
            ended, sent = threading.Event(), list[int]()
            enemy = threading.Thread(target=hostile, args=(port, ended, sent))
            if has_hostile:
                enemy.start()
            clients = Clients(port, given.clients - has_hostile, given.seconds)
            ended.set()
            if has_hostile:
                enemy.join()
            waits_s = sorted(clients.waits_s)
            p99_s[has_hostile] = waits_s[int(len(waits_s) * 0.99)]
            print(
                f"{'with' if has_hostile else 'without'} a hostile client: {len(waits_s)} answers, first token after "
                f"{waits_s[len(waits_s) // 2]:.3f} s, p99 {p99_s[has_hostile]:.3f} s, at most {waits_s[-1]:.3f} s; "
                f"{len(sent)} hostile requests; {len(clients.failures)} failures {clients.failures[:3]}",
                flush=True,
            )
            is_bad = is_bad or bool(clients.failures) or process.poll() is not None
    return int(is_bad or p99_s[True] > 2 * p99_s[False])


if __name__ == "__main__":
    sys.exit(main())
