"""Long check of the promise of the same text: token ids and log probabilities, for all drafters, in any order.

    python scripts/lab/check_reproducible.py [--prompts FILE] [--model NAME] [--engine NAME] [--draft FILE] [--tokens N]
        [--runs-per-cell N] [--drafters NAME ...] [--exit-layer N] [--threads N]

FILE holds one prompt per line. Every prompt is decoded plainly at each temperature, with one of 20 seeds; every other
one, of a model that chats, as the second turn of a conversation. Then these are asked again in a random order, each as
often as `--runs-per-cell` says on average, with drafters and lengths (1..12, auto) drawn anew, and read in a random
way: whole, in part and closed, in part and dropped, cancelled before or meanwhile by another thread, handed to another
thread, in an event loop. So the cache holds anything before; some calls between forget it. With `--threads` so many ask
at once. What needs models of its own is loaded by itself and compared with the same plain texts. Prints the tokens
compared for each drafter, and how many ids and log probabilities differ; exit code 1 when any does, or a count is not
the request's own. `faulthandler` tells where a crash came from.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import itertools
import math
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import edgespec
from edgespec import GenerateOptions, Generation, Model, Result, Sampling
from edgespec.config.values import DRAFTERS, DrafterName
from edgespec.drafters.spec import DRAFT, HEAD_FILES, SPECS

Request = tuple[tuple[int, ...], int, float, int]  # token ids, length in tokens, temperature, seed
PROMPTS = (
    "Find me a cheap Italian restaurant in San Jose for tonight.",
    "def clamp(value, low, high):",
    "Tom has 12 apples and gives away a third of them. How many are left? " * 3,
    "Once upon a time",
)
TEMPERATURES = (0.0, 0.8, 1.2)
NUM_SEEDS = 20
# Those that need more than a draft model are opened only when asked for.
BY_NAME = tuple(name for name, spec in SPECS.items() if spec.needs and spec.needs[-1] is not DRAFT)
# A head takes the place of the draft model, so that a pair with one is another check.
ALL: tuple[DrafterName, ...] = ("none", "auto", *(name for name in SPECS if name not in HEAD_FILES))


class Check:
    """Readers of `model`, which stays open. `lengths` of answers in tokens; `drafters`: None is the model's own.

    `plain`: texts that are known from another check.
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[str] = PROMPTS,
        lengths: Sequence[int] = (4, 24, 48),
        drafters: Sequence[DrafterName | None] = (None,),
        plain: dict[Request, Result] | None = None,
    ) -> None:
        self._model, self._drafters = model, drafters
        self.counts: Counter[str] = Counter()  # of ways
        self.compared: Counter[str] = Counter()  # tokens, by drafter, like the next one
        self.different: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.plain = {} if plain is None else plain
        cells = itertools.product(prompts, TEMPERATURES, lengths)
        self._requests: list[Request] = [
            (tuple(self._encoded(text, is_second=number % 2 > 0)), length, temperature, number % NUM_SEEDS)
            for number, (text, temperature, length) in enumerate(cells)
        ]
        for request in self._requests:
            if request not in self.plain:
                model.forget()
                self.plain[request] = self._stream(request, "none").result()

    def _encoded(self, text: str, *, is_second: bool) -> list[int]:
        """A question to a model that chats, perhaps behind itself and an answer; a base model continues the text."""
        model, question = self._model, {"role": "user", "content": text}
        if model.target.vocabulary.chat_template is None:
            return model.encode(text)
        if not is_second:
            return model.encode_chat([question])
        options = GenerateOptions(max_tokens=16, drafter="none")
        first = model.generate(model.encode_chat([question]), Sampling(temperature=0.0), options)
        return model.encode_chat([question, {"role": "assistant", "content": first.text}, question])

    def _stream(self, request: Request, drafter: Any = None, draft_length: Any = None) -> Generation:
        ids, length, temperature, seed = request
        options = GenerateOptions(max_tokens=length, ignore_eos=True, drafter=drafter, draft_length=draft_length)
        return self._model.stream(list(ids), Sampling(temperature=temperature, seed=seed), options)

    def run(self, num_threads: int, seconds: float = math.inf, count: int = sys.maxsize) -> bool:
        """Ask for so long, or so often; whether everything was right."""
        deadline_s, turns = time.monotonic() + seconds, itertools.count()
        workers = [
            threading.Thread(target=self._work, args=(seed, deadline_s, turns, count)) for seed in range(num_threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(None if math.isinf(seconds) else seconds + 120)
            if worker.is_alive():
                self.wrong.append("a worker hangs")
                faulthandler.dump_traceback(all_threads=True)
                return False
        return not self.wrong

    def _work(self, seed: int, deadline_s: float, turns: itertools.count[int], count: int) -> None:
        chance = random.Random(seed)
        ways: tuple[tuple[int, Callable[[random.Random], None]], ...] = (
            (8, self._whole), (3, self._in_part), (3, self._dropped), (3, self._cancelled), (2, self._early),
            (2, self._in_tasks), (2, self._handed_on), (1, self._aside),
        )  # fmt: skip
        weights, functions = zip(*ways, strict=True)
        while time.monotonic() < deadline_s and next(turns) < count and len(self.wrong) < 20:
            (way,) = chance.choices(functions, weights)
            try:
                way(chance)
                self.counts[way.__name__.strip("_")] += 1
            except BaseException:  # a worker must tell what happened to it
                self.wrong.append(traceback.format_exc())

    def _asked(self, chance: random.Random) -> tuple[Request, str, Generation]:
        """A request, how it is drafted, and its generation."""
        request, drafter = chance.choice(self._requests), chance.choice(self._drafters)
        length = None if drafter is None else chance.choice((*range(1, 13), *["auto"] * 6))
        return request, f"{drafter or 'as loaded'} {length or ''}", self._stream(request, drafter, length)

    def _check(self, request: Request, drafted: str, found: Result, *, whole: bool) -> None:
        plain, stats, count = self.plain[request], found.stats, len(found.token_ids)
        ours, theirs = (list(zip(each.token_ids, each.logprobs, strict=True)) for each in (found, plain))
        wrong = sum(one != other for one, other in zip(ours, theirs, strict=False))
        self.compared[drafted.split()[0]] += count
        self.different[drafted.split()[0]] += wrong
        about = f"{drafted}, T={request[2]} seed={request[3]}, {request[1]} tokens behind {len(request[0])}"
        if wrong:
            self.wrong.append(f"differs in {wrong} places: {about}: {found.token_ids} for {plain.token_ids}")
        if whole and (found.finish_reason, count) != (plain.finish_reason, len(plain.token_ids)):
            self.wrong.append(f"another end: {about}: {found.finish_reason} after {count}")
        told = stats.finish_reason, stats.new_tokens, stats.prompt_tokens, found.seed
        if told != (found.finish_reason, count, len(request[0]), request[3]):
            self.wrong.append(f"another request's figures: {about}: {stats}")
        if stats.notes or stats.accepted_tokens > stats.drafted_tokens or not found.reproducible:
            self.wrong.append(f"odd figures: {about}: {found}")

    def _whole(self, chance: random.Random) -> None:
        request, drafted, generation = self._asked(chance)
        self._check(request, drafted, generation.result(), whole=True)

    def _in_part(self, chance: random.Random) -> None:
        request, drafted, generation = self._asked(chance)
        with generation:
            for _, _ in zip(range(chance.randint(0, 8)), generation, strict=False):
                pass
        self._check(request, drafted, generation.result(), whole=False)

    def _dropped(self, chance: random.Random) -> None:
        for _, _ in zip(range(chance.randint(1, 8)), self._asked(chance)[2], strict=False):
            pass

    def _cancelled(self, chance: random.Random) -> None:
        request, drafted, generation = self._asked(chance)
        timer = threading.Timer(chance.random() * 0.05, generation.cancel)
        timer.start()
        self._check(request, drafted, generation.result(), whole=False)
        timer.join()

    def _early(self, chance: random.Random) -> None:
        _, _, generation = self._asked(chance)
        generation.cancel()
        found = generation.result()
        if found.token_ids or found.finish_reason != "cancelled":
            self.wrong.append(f"cancelled before it began: {found}")

    def _in_tasks(self, chance: random.Random) -> None:
        asked = [self._asked(chance) for _ in range(3)]

        async def together() -> list[Result]:
            return await asyncio.gather(*(generation.aresult() for _, _, generation in asked))

        for (request, drafted, _), found in zip(asked, asyncio.run(together()), strict=True):
            self._check(request, drafted, found, whole=True)

    def _handed_on(self, chance: random.Random) -> None:
        """Begun here, read to its end by another thread."""
        (request, drafted, generation), found = self._asked(chance), list[Result]()
        next(generation)
        reader = threading.Thread(target=lambda: found.append(generation.result()))
        reader.start()
        reader.join()
        self._check(request, drafted, found[0], whole=True)

    def _aside(self, chance: random.Random) -> None:
        model = self._model
        asides: tuple[Callable[[], object], ...] = (
            model.forget, model.prepare, lambda: model.notes,
            lambda: model.decode(list(self._requests[0][0])), lambda: repr(model),
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--runs-per-cell", type=int, default=4, help="of the drafters that are loaded together")
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=ALL)
    parser.add_argument("--exit-layer", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="that ask at once (default %(default)s)")
    chosen = parser.parse_args()
    faulthandler.enable()
    lines = [] if chosen.prompts is None else chosen.prompts.read_text(encoding="utf-8").splitlines()
    prompts = [line for line in lines if line.strip()] or list(PROMPTS)
    together = [name for name in chosen.drafters if name not in BY_NAME]
    sittings = [(together, "auto", chosen.runs_per_cell)] if together else []
    sittings += [(["none", name], name, 1) for name in chosen.drafters if name in BY_NAME]
    plain: dict[Request, Result] = {}
    compared, wrong = 0, 0
    for drafters, opens, runs_per_cell in sittings:
        loaded: dict[str, Any] = {"model": chosen.model, "draft": chosen.draft, "engine": chosen.engine}
        loaded |= {"drafter": cast(DrafterName, opens), "reproducible": True, "max_slowdown": 1.0}
        loaded |= {"exit_layer": chosen.exit_layer} if opens == "early-exit" else {}
        with edgespec.load(**loaded) as model:
            check = Check(model, prompts, (chosen.tokens,), drafters, plain)
            check.run(chosen.threads, count=len(prompts) * len(TEMPERATURES) * runs_per_cell)
            name = model.target.facts.name
        if chosen.threads > 1:
            close_while_running(lambda given=loaded: edgespec.load(**given))  # type: ignore[misc]
        print(", ".join(f"{count} {way}" for way, count in sorted(check.counts.items())))
        for each in check.compared:
            print(f"{name:9} {each:13} {check.compared[each]:7} tokens compared, {check.different[each]} differ")
        print("\n".join(line[:2000] for line in check.wrong[:5]), flush=True)
        compared, wrong = compared + check.compared.total(), wrong + len(check.wrong)
    print(f"{len(prompts)} prompts, {compared} tokens compared, {wrong} things wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
