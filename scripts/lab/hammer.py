"""Threads and tasks hammer one model: every text is compared with its plain text, every count with its own request.

    python scripts/lab/hammer.py [--seconds 60] [--model demo] [--engine llamacpp] [--threads 6] [--drafter auto]

Each worker asks for random requests and reads them in a random way: whole, in part and closed, in part and dropped,
cancelled before or meanwhile by another thread, step by step, in an event loop; some ask for what needs a turn of its
own (costs, forgetting). Prints how many of each there were; exit code 1 when a text or a count was wrong.
`faulthandler` tells where a crash came from.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import edgespec
from edgespec import GenerateOptions, Generation, Model, Result, Sampling

PROMPTS = (
    "Find me a cheap Italian restaurant in San Jose for tonight.",
    "def clamp(value, low, high):",
    "Tom has 12 apples and gives away a third of them. How many are left? " * 3,
    "Once upon a time",
)


class Hammer:
    """Workers on `model`, which stays open; `lengths` of answers in tokens."""

    def __init__(self, model: Model, prompts: Sequence[str] = PROMPTS, lengths: Sequence[int] = (4, 24, 48)) -> None:
        self._model = model
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._requests: list[tuple[str, int, float, int]] = [
            (prompt, length, temperature, seed)
            for prompt in prompts
            for length in lengths
            for temperature, seed in ((0.0, 0), (0.9, 1), (0.9, 2))
        ]
        self._plain: dict[tuple[str, int, float, int], Result] = {}
        for request in self._requests:
            self._plain[request] = self._stream(request, "none").result()

    def _stream(self, request: tuple[str, int, float, int], drafter: Any = None) -> Generation:
        prompt, length, temperature, seed = request
        options = GenerateOptions(max_tokens=length, ignore_eos=True, drafter=drafter)
        return self._model.stream(prompt, Sampling(temperature=temperature, seed=seed), options)

    def run(self, seconds: float, num_threads: int) -> bool:
        """Hammer for so long; whether everything was right."""
        deadline_s = time.monotonic() + seconds
        workers = [threading.Thread(target=self._work, args=(seed, deadline_s)) for seed in range(num_threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(seconds + 120)
            if worker.is_alive():
                self.wrong.append("a worker hangs")
                faulthandler.dump_traceback(all_threads=True)
                return False
        return not self.wrong

    def _work(self, seed: int, deadline_s: float) -> None:
        chance = random.Random(seed)
        ways: tuple[tuple[int, Callable[[random.Random], None]], ...] = (
            (8, self._whole), (3, self._in_part), (3, self._dropped), (3, self._cancelled), (2, self._early),
            (2, self._in_tasks), (2, self._handed_on), (1, self._aside),
        )  # fmt: skip
        weights, functions = zip(*ways, strict=True)
        while time.monotonic() < deadline_s and not self.wrong:
            (way,) = chance.choices(functions, weights)
            try:
                way(chance)
                self.counts[way.__name__.strip("_")] += 1
            except BaseException:  # a worker must tell what happened to it
                self.wrong.append(traceback.format_exc())

    def _check(self, request: tuple[str, int, float, int], found: Result, *, whole: bool) -> None:
        plain, stats, count = self._plain[request], found.stats, len(found.token_ids)
        self.counts["tokens compared"] += count
        if found.token_ids != plain.token_ids[:count] or found.logprobs != plain.logprobs[:count]:
            self.wrong.append(f"another text: {request}: {found.token_ids} for {plain.token_ids}")
        if whole and (found.finish_reason, count) != (plain.finish_reason, len(plain.token_ids)):
            self.wrong.append(f"another end: {request}: {found.finish_reason} after {count}")
        told = stats.new_tokens, stats.prompt_tokens
        if stats.finish_reason != found.finish_reason or told != (count, len(plain.prompt_token_ids)):
            self.wrong.append(f"another request's figures: {request}: {stats}")
        if found.seed != request[3] or stats.notes or stats.accepted_tokens > stats.drafted_tokens:
            self.wrong.append(f"odd figures: {request}: {found}")

    def _whole(self, chance: random.Random) -> None:
        request = chance.choice(self._requests)
        self._check(request, self._stream(request).result(), whole=True)

    def _in_part(self, chance: random.Random) -> None:
        request = chance.choice(self._requests)
        with self._stream(request) as generation:
            for _, _ in zip(range(chance.randint(0, 8)), generation, strict=False):
                pass
        self._check(request, generation.result(), whole=False)

    def _dropped(self, chance: random.Random) -> None:
        for _, _ in zip(range(chance.randint(1, 8)), self._stream(chance.choice(self._requests)), strict=False):
            pass

    def _cancelled(self, chance: random.Random) -> None:
        request = chance.choice(self._requests)
        generation = self._stream(request)
        timer = threading.Timer(chance.random() * 0.05, generation.cancel)
        timer.start()
        self._check(request, generation.result(), whole=False)
        timer.join()

    def _early(self, chance: random.Random) -> None:
        request = chance.choice(self._requests)
        generation = self._stream(request)
        generation.cancel()
        found = generation.result()
        if found.token_ids or found.finish_reason != "cancelled":
            self.wrong.append(f"cancelled before it began: {found}")

    def _in_tasks(self, chance: random.Random) -> None:
        requests = [chance.choice(self._requests) for _ in range(3)]

        async def together() -> list[Result]:
            return await asyncio.gather(*(self._stream(request).aresult() for request in requests))

        for request, found in zip(requests, asyncio.run(together()), strict=True):
            self._check(request, found, whole=True)

    def _handed_on(self, chance: random.Random) -> None:
        """Begun here, read to its end by another thread."""
        request = chance.choice(self._requests)
        generation, found = self._stream(request), list[Result]()
        next(generation)
        reader = threading.Thread(target=lambda: found.append(generation.result()))
        reader.start()
        reader.join()
        self._check(request, found[0], whole=True)

    def _aside(self, chance: random.Random) -> None:
        model = self._model
        asides: tuple[Callable[[], object], ...] = (
            model.forget, model.prepare, lambda: model.notes,
            lambda: model.decode(model.encode(self._requests[0][0])), lambda: repr(model),
        )  # fmt: skip
        chance.choice(asides)()


def close_while_running(load: Callable[[], Model]) -> None:
    """Close a model while threads decode with it: they end by a typed error or a cancelled result."""
    model, failures = load(), list[BaseException]()

    def decode() -> None:
        try:
            while True:
                model.generate(PROMPTS[0], options=GenerateOptions(max_tokens=200, ignore_eos=True))
        except edgespec.EdgespecError:
            return
        except BaseException as exc:
            failures.append(exc)

    workers = [threading.Thread(target=decode) for _ in range(3)]
    for worker in workers:
        worker.start()
    time.sleep(0.1)
    model.close()
    for worker in workers:
        worker.join(60)
    if failures or any(worker.is_alive() for worker in workers):
        raise AssertionError(f"closing while {len(workers)} threads decode: {failures}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--engine", default="llamacpp")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--threads", type=int, default=6)
    chosen = parser.parse_args()
    faulthandler.enable()
    options: dict[str, Any] = {"engine": chosen.engine, "drafter": chosen.drafter, "reproducible": True, "threads": 1}
    with edgespec.load(chosen.model, **options) as model:
        hammer = Hammer(model)
        is_right = hammer.run(chosen.seconds, chosen.threads)
    close_while_running(lambda: edgespec.load(chosen.model, **options))
    print(", ".join(f"{count} {name}" for name, count in sorted(hammer.counts.items())))
    for line in hammer.wrong[:5]:
        print(line)
    print("all right" if is_right else f"{len(hammer.wrong)} wrong")
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
