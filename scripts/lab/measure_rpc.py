"""A target on RPC servers over a network with a delay: speed without and with speculation, and whether texts agree.

`PYTHONPATH=. python scripts/lab/measure_rpc.py MODEL [--draft FILE] [--servers 2] [--round-trips local,0,1,5,20]`.
Starts the servers, with --server-threads each, and the delay (scripts/lab/delay_proxy.py) on this machine. Prints a
line of JSON for each delay (local: without servers): milliseconds of a pass of one row, what the delay adds to it in
round trips, and for each of --drafters (NAME, or NAME:LENGTH) tokens per second and per pass, and how many texts are
those of the first.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

import edgespec
from edgespec import GenerateOptions, Sampling
from edgespec.engines.llamacpp.rpc import ask
from edgespec.errors import Unreachable
from edgespec.loading.sample_prompts import PROMPTS
from edgespec.types import Batch

START_S = 60.0
PROXY = Path(__file__).with_name("delay_proxy.py")


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


@contextmanager
def running(*command: str) -> Iterator[None]:
    """A program of this Python, until the block ends."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def wait_for(endpoint: str) -> None:
    """Return when the server at `endpoint` answers."""
    deadline_s = monotonic() + START_S
    while True:
        try:
            ask(endpoint)
        except Unreachable:
            if monotonic() > deadline_s:
                raise
            sleep(0.1)
        else:
            return


@contextmanager
def servers(count: int, threads: int, round_trip_ms: float) -> Iterator[str]:
    """RPC servers behind the delay, as --rpc takes them."""
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            port, seen = free_port(), free_port()
            stack.enter_context(running("-m", "edgespec", "rpc-server", "--port", str(port), "--threads", str(threads)))
            wait_for(f"127.0.0.1:{port}")
            if round_trip_ms:
                delay = ["--to", f"127.0.0.1:{port}", "--port", str(seen), "--round-trip", str(round_trip_ms)]
                stack.enter_context(running(str(PROXY), *delay))
                wait_for(f"127.0.0.1:{seen}")
            found.append(f"127.0.0.1:{seen if round_trip_ms else port}")
        yield ",".join(found)


def run(model: edgespec.Model, prompts: list[str], tokens: int, drafter: str) -> tuple[dict[str, float], list[Any]]:
    """Tokens per second of greedy answers, prompts aside, and per pass; and the answers' token ids."""
    name, _, length = drafter.partition(":")
    chosen: dict[str, Any] = {"drafter": name, "draft_length": int(length) if length else None}
    options = GenerateOptions(max_tokens=tokens, ignore_eos=True, **chosen)
    taken_s, count, passes = 0.0, 0, 0
    answers: list[Any] = []
    for prompt in prompts:
        generation = model.stream(prompt_ids(model, prompt), Sampling(temperature=0.0), options)
        ids = [next(generation).token_id]
        started_s = perf_counter()
        ids += [event.token_id for event in generation]
        taken_s += perf_counter() - started_s
        count += len(ids) - 1
        passes += generation.stats.rounds
        answers.append(ids)
    return {"tokens_per_s": round(count / taken_s, 2), "tokens_per_pass": round(count / max(passes, 1), 2)}, answers


def prompt_ids(model: edgespec.Model, prompt: str) -> list[int]:
    """A prompt as the first message of a conversation, where the model has conversations."""
    if model.target.vocabulary.chat_template is None:
        return model.encode(prompt)
    return model.encode_chat([{"role": "user", "content": prompt}])


def single_pass_ms(model: edgespec.Model) -> float:
    """Median time of a pass of one row after 64 tokens."""
    with model.measuring() as (target, _):
        target.forward(Batch.chain(list(range(5, 69)), last_only=True))
        taken = []
        for _ in range(20):
            started_s = perf_counter()
            target.forward(Batch.chain([7]))
            taken.append(1e3 * (perf_counter() - started_s))
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--round-trips", default="local,0,1,5,20", metavar="local|MS,...")
    parser.add_argument("--server-threads", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--drafters", default="none,auto")
    parser.add_argument("--reproducible", action="store_true")
    options = parser.parse_args()
    prompts = [prompt.text for prompt in PROMPTS[: options.prompts]]
    drafters = options.drafters.split(",")
    shared: dict[str, Any] = {
        "engine": "llamacpp",
        "threads": options.threads,
        "reproducible": options.reproducible,
        "draft": options.draft,
    }
    expected: list[Any] = []
    fastest_ms = 0.0
    for text in options.round_trips.split(","):
        with ExitStack() as stack:
            if text != "local":
                delayed = servers(options.servers, options.server_threads, float(text))
                shared["rpc"] = stack.enter_context(delayed)
            model = stack.enter_context(edgespec.load(options.model, **shared))
            pass_ms = single_pass_ms(model)
            found = {drafter: run(model, prompts, options.tokens, drafter) for drafter in drafters}
        line: dict[str, Any] = {"round_trip_ms": text, "pass_ms": round(pass_ms, 2)}
        if text == "0":
            fastest_ms = pass_ms
        elif text != "local" and fastest_ms:
            line["round_trips_per_pass"] = round((pass_ms - fastest_ms) / float(text), 2)
        for drafter, (speeds, answers) in found.items():
            expected = expected or answers
            agree = sum(ours == theirs for ours, theirs in zip(answers, expected, strict=True))
            line[drafter] = speeds | {"texts_as_first": f"{agree} of {len(answers)}"}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
