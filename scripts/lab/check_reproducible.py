"""Long check of the promise of the same text: token ids and log probabilities, for every drafter and none.

    python scripts/lab/check_reproducible.py --prompts FILE [--model NAME] [--engine NAME] [--tokens N]
        [--runs-per-cell N] [--drafters NAME ...] [--exit-layer N]

FILE holds one prompt per line. Every prompt is decoded plainly at each temperature, with one of 20 seeds and an empty
cache, then again with drafters and lengths (none, 1..12, auto) that rotate, so that all combinations meet all
temperatures. What the cache holds before rotates too: nothing, the same prompt, one that was edited, an answer that was
cancelled half-way. Every other prompt of a model that chats is asked as the second turn of a conversation, whose first
may be in the cache. What needs models of its own is loaded by itself and compared with the same plain texts. Prints the
tokens compared for each drafter, and how many ids and log probabilities differ; exit code 1 when any does.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import edgespec
from edgespec import GenerateOptions, Model, Sampling
from edgespec.config.values import DRAFTERS, DrafterName, DraftLength
from edgespec.drafters.spec import DRAFT, HEAD_FILES, SPECS

Answer = tuple[tuple[int, float], ...]  # of each token its id and its log probability
TEMPERATURES = (0.0, 0.8, 1.2)
GREEDY = Sampling(temperature=0.0)
HISTORIES = (
    "the same prompt",
    "nothing",
    "an edited prompt",
    "a cancelled answer",
    "its first turn",
    "what came before",
)
FIRST_TURN = "Tell me what you know about this, in three sentences."
NUM_SEEDS = 20
# Those that need more than a draft model are opened only when asked for.
BY_NAME = tuple(name for name, spec in SPECS.items() if spec.needs and spec.needs[-1] is not DRAFT)
# A head takes the place of the draft model, so that a pair with one is another check.
ALL: tuple[DrafterName, ...] = ("auto", *(name for name in SPECS if name not in HEAD_FILES))


def lengths_of(drafters: Sequence[DrafterName]) -> Iterator[tuple[DrafterName, DraftLength]]:
    """Every drafter with every length, for ever. Automatic lengths are decided by the clock, so they come often."""
    fixed = [name for name in drafters if name not in ("auto", "none")]
    for n in itertools.cycle(range(1, 13)):
        yield "none", 0
        yield from ((name, n) for name in fixed)
        yield from ((name, "auto") for name in drafters if name == "auto" or (fixed and name == fixed[n % len(fixed)]))


def encoded(model: Model, *turns: str) -> list[int]:
    """Questions to a model that chats, with the answers between; a base model continues the text."""
    if model.target.vocabulary.chat_template is None:
        return model.encode(turns[-1])
    roles = itertools.cycle(("user", "assistant"))
    return model.encode_chat([{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)])


@dataclass
class Check:
    """What was compared so far, in tokens by drafter; `plain` texts by prompt and temperature."""

    prompts: list[str]
    tokens: int
    plain: dict[tuple[str, str], Answer] = field(default_factory=dict)
    compared: Counter[str] = field(default_factory=Counter)
    different: Counter[str] = field(default_factory=Counter)

    def run(self, model: Model, drafters: Sequence[DrafterName], runs_per_cell: int) -> None:
        rotation, histories = lengths_of(drafters), itertools.cycle(HISTORIES)
        for index, (prompt, temperature) in enumerate(itertools.product(self.prompts, TEMPERATURES)):
            sampling = Sampling(temperature=temperature, seed=index % NUM_SEEDS)
            turns = self._conversation(model, prompt) if index % 2 else (prompt,)
            ids = encoded(model, *turns)
            place = prompt, f"{sampling}"  # a prompt may stand there twice, with two seeds
            if place not in self.plain:
                model.forget()
                self.plain[place] = self._answer(model, ids, sampling, "none", 0)
            for drafter, length in itertools.islice(rotation, runs_per_cell):
                history = next(histories)
                self._make_history(model, turns, history, drafter)
                found = self._answer(model, ids, sampling, drafter, length)
                wrong = self._count(drafter, self.plain[place], found)
                if wrong:
                    what = f"T={temperature} seed={sampling.seed} {drafter} {length} after {history}"
                    print(f"differs in {wrong} places: {what}: {prompt[:60]!r}")
        for drafter in dict.fromkeys(("none", *drafters)):
            print(
                f"{model.target.facts.name:9} {drafter:13} {self.compared[drafter]:7} tokens compared, "
                f"{self.different[drafter]} differ",
                flush=True,
            )

    def _count(self, drafter: DrafterName, plain: Answer, found: Answer) -> int:
        """Places where the token or its log probability differs."""
        self.compared[drafter] += max(len(plain), len(found))
        wrong = sum(int(ours != theirs) for ours, theirs in itertools.zip_longest(plain, found))
        self.different[drafter] += wrong
        return wrong

    def _conversation(self, model: Model, prompt: str) -> tuple[str, ...]:
        """A first question about a prompt, the model's answer to it, and the prompt."""
        first = f"{FIRST_TURN} {prompt[: len(prompt) // 2]}"
        options = GenerateOptions(max_tokens=self.tokens, drafter="none")
        return first, model.generate(encoded(model, first), GREEDY, options).text, prompt

    def _make_history(self, model: Model, turns: tuple[str, ...], history: str, drafter: DrafterName) -> None:
        """What the cache holds before an answer is decoded."""
        if history == "nothing":
            model.forget()
        elif history == "its first turn":
            ids = encoded(model, turns[0])
            model.generate(ids, GREEDY, GenerateOptions(max_tokens=self.tokens, drafter=drafter))
        elif history == "an edited prompt":
            *earlier, prompt = turns
            ids = encoded(model, *earlier, f"{prompt[: len(prompt) * 2 // 3]} and now?")
            model.generate(ids, GREEDY, GenerateOptions(max_tokens=5, drafter=drafter))
        elif history == "a cancelled answer":
            ids = encoded(model, *turns)
            with model.stream(ids, Sampling(seed=99), GenerateOptions(max_tokens=40, drafter=drafter)) as events:
                for _ in zip(range(7), events, strict=False):
                    pass
                events.cancel()

    def _answer(
        self, model: Model, ids: list[int], sampling: Sampling, drafter: DrafterName, length: DraftLength
    ) -> Answer:
        options = GenerateOptions(max_tokens=self.tokens, drafter=drafter, draft_length=length, ignore_eos=True)
        result = model.generate(ids, sampling, options)
        if not result.reproducible:
            print("the class of widths was dropped: a pass gave other bits than promised")
            self.different[drafter] += 1
        return tuple(zip(result.token_ids, result.logprobs, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--runs-per-cell", type=int, default=4, help="of the drafters that are loaded together")
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=ALL)
    parser.add_argument("--exit-layer", type=int, default=5)
    chosen = parser.parse_args()
    prompts = [line for line in chosen.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    check = Check(prompts, chosen.tokens)
    together = [name for name in chosen.drafters if name not in BY_NAME]
    sittings = [(together, "auto", chosen.runs_per_cell)] if together else []
    sittings += [([name], name, 1) for name in chosen.drafters if name in BY_NAME]
    for drafters, opens, runs_per_cell in sittings:
        loaded: dict[str, Any] = {"model": chosen.model, "draft": chosen.draft, "engine": chosen.engine}
        if opens == "early-exit":
            loaded["exit_layer"] = chosen.exit_layer
        with edgespec.load(**loaded, drafter=cast(DrafterName, opens), reproducible=True, max_slowdown=1.0) as model:
            check.run(model, drafters, runs_per_cell)
    print(f"{len(prompts)} prompts, {check.compared.total()} tokens compared, {check.different.total()} differ")
    return int(check.different.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
