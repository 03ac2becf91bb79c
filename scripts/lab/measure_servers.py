"""Total tokens per second of 1, 2, 4 and 8 chats at once over HTTP: `edgespec serve` against llama.cpp's server.

    python scripts/lab/measure_servers.py FILE.gguf --data DATA --llama-server PATH [--seconds 280] [--lookups KIND ...]

Same file, same number of threads, same contexts, greedy, answers end where the model ends them. The servers run side by
side and one of them is asked at a time: edgespec's by default and without drafts, llama.cpp's without and, for each of
`--lookups`, with drafts of this `--spec-type` (`default`: those of its `--spec-default`). A turn is n clients with
n + 2 questions, from the first request to the last answer; the servers take turns with the same questions, and each of
them is asked every question once. Ratios are those of one turn.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean, stdev
from time import monotonic, perf_counter

from measure_concurrency import MOST_PROMPTS, turns_of
from measure_default import fresh_home, prompts_of
from peers.llama_server import Server

OWN, OWN_PLAIN, THEIRS = "edgespec", "edgespec without drafts", "llama-server"


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one server: `tokens` of all `texts` in `seconds`."""

    tokens: int
    seconds: float
    texts: tuple[str, ...]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def commands_of(chosen: argparse.Namespace) -> dict[str, list[str]]:
    """How each server is started; addresses are added."""
    most, threads = max(chosen.counts), str(chosen.threads)
    own = [sys.executable, "-m", "edgespec", "serve", str(chosen.model), "-c", str(chosen.context), "-t", threads]
    own += ["-np", str(most)]
    theirs = [str(chosen.llama_server), "--model", str(chosen.model), "--ctx-size", str(most * chosen.context)]
    theirs += ["--parallel", str(most), "--threads", threads, "--threads-batch", threads, "--cache-ram", "0"]
    found = {OWN: own, OWN_PLAIN: [*own, "--no-reproducible", "--drafter", "none"], THEIRS: theirs}
    for kind in chosen.lookups:
        found[f"{THEIRS} {kind}"] = [*theirs, *(["--spec-default"] if kind == "default" else ["--spec-type", kind])]
    return found


@contextmanager
def running(command: list[str], log: Path) -> Iterator[Server]:
    server = Server(command, log)
    try:
        yield server
    finally:
        server.stop()


def taken(server: Server, questions: Sequence[str], count: int, max_tokens: int) -> Turn:
    """All answers to `questions`, `count` clients at once."""

    def answer(question: str) -> tuple[int, str]:
        messages = [{"role": "user", "content": question}]
        body = {"messages": messages, "temperature": 0, "max_tokens": max_tokens}
        told = server.ask("/v1/chat/completions", body)
        return told["usage"]["completion_tokens"], told["choices"][0]["message"]["content"]

    started_s = perf_counter()
    with ThreadPoolExecutor(count) as clients:
        found = list(clients.map(answer, questions))
    return Turn(sum(tokens for tokens, _ in found), perf_counter() - started_s, tuple(text for _, text in found))


def measure(chosen: argparse.Namespace) -> None:
    texts = [text[: chosen.prompt_chars] for _, text in prompts_of(chosen.data, MOST_PROMPTS)]
    Random(chosen.seed).shuffle(texts)
    with fresh_home(), tempfile.TemporaryDirectory() as logs, ExitStack() as stack:
        servers = {
            name: stack.enter_context(running(command, Path(logs, f"{place}.log")))
            for place, (name, command) in enumerate(commands_of(chosen).items())
        }
        for server in servers.values():
            taken(server, ["Hello."], 1, 8)
        found: dict[int, list[dict[str, Turn]]] = defaultdict(list)
        until_s = monotonic() + chosen.seconds
        for number, (count, asked) in enumerate(turns_of(texts, chosen.counts)):
            if monotonic() > until_s:
                break
            order = list(servers) if (number // len(chosen.counts)) % 2 else list(reversed(servers))
            turn = {name: taken(servers[name], asked, count, chosen.max_tokens) for name in order}
            found[count].append(turn)
            print(f"  {count} chats: " + "  ".join(f"{name} {turn[name].rate:.1f}" for name in servers), flush=True)
        report(list(servers), found)


def report(names: Sequence[str], found: dict[int, list[dict[str, Turn]]]) -> None:
    print("tokens per second of all chats together; edgespec over each, mean of turns; equal answers")
    for count, turns in sorted(found.items()):
        for name in names:
            ratios = [turn[OWN].rate / turn[name].rate for turn in turns]
            error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
            rate = sum(turn[name].tokens for turn in turns) / sum(turn[name].seconds for turn in turns)
            pairs = [pair for turn in turns for pair in zip(turn[OWN].texts, turn[name].texts, strict=True)]
            same = sum(own == other for own, other in pairs)
            print(
                f"{count:3} chats  {name:26} {rate:7.1f}  {mean(ratios):.3f} +- {error:.3f} of {len(turns)} turns  "
                f"{same}/{len(pairs)}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--lookups", nargs="*", default=["ngram-simple"])
    parser.add_argument("--seconds", type=float, default=280, help="no turn begins later (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--prompt-chars", type=int, default=1200, help="longer prompts are cut (default %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the prompts")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
