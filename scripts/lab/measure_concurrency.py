"""Total tokens per second of 1, 2, 4 and 8 chats at once: the default against plain decoding in the fastest mode.

    python scripts/lab/measure_concurrency.py MODEL --data DATA [--seconds 280] [--counts 1 2 4 8]

DATA is the folder with spec_bench_dev.jsonl.xz. Every setting has a model of its own. A turn is one number of chats:
so many run all the time, the next question following as soon as an answer ends, until the answers together have as many
tokens as ANSWERS of full length for each chat; what still runs is cut off there. So all settings do the same work, also
where some chats get ahead of others; the first answers end one after another, as they would if people had begun them.
Other answers end where the model ends them. All settings answer the same questions, from an empty cache folder on, and
take turns every half second, so that a machine which is slow for a while is slow for all of them. A ratio is that of
one turn. `--again` loads and measures plain decoding twice: ratios are over the mean of both, and how far theirs are
from 1 is what the others may be off by.
`--reproducible` adds both settings in reproducible mode. With `--fixed` drafts of that many tokens are verified in
every round, which shows what standing back is worth.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count as counting
from itertools import cycle, islice
from pathlib import Path
from random import Random
from statistics import mean, stdev
from time import monotonic, perf_counter
from typing import Any

import edgespec
from edgespec import GenerateOptions, Model, Sampling
from edgespec.reports import Stats, TokenEvent
from measure_default import fresh_home, prompts_of

PLAIN, AGAIN = "fastest plain", "fastest plain again"
MOST_PROMPTS = 240
SLICE_S = 0.5
ANSWERS = 2  # of `--max-tokens` for each chat of a turn
QUESTIONS = 6  # for each chat of a turn: more than are begun


class Turn:
    """One turn of one setting: `tokens` in `seconds`, while `count` chats ran; `answers`: counters of its answers."""

    def __init__(self, model: Model, prompts: Sequence[list[int]], count: int, options: GenerateOptions) -> None:
        model.forget()
        self.tokens, self.seconds, self.is_over = 0, 0.0, False
        most = options.max_tokens
        assert most is not None
        lengths = (min(place * most // count, most) for place in counting(1))
        self._waiting = (
            model.stream(ids, Sampling(), replace(options, max_tokens=length or 1))
            for ids, length in zip(prompts, lengths, strict=False)
        )
        self.answers: list[Stats] = []
        self._count, self._stack = count, ExitStack()
        self._most_tokens = ANSWERS * count * most
        self._batch = self._stack.enter_context(model.batch())

    @property
    def rate(self) -> float:
        """Tokens per second of all chats together."""
        return self.tokens / self.seconds

    def go_on(self, seconds: float) -> None:
        """Run for so long, or until the turn's work is done; then the chats end."""
        started_s = perf_counter()
        while not self.is_over and perf_counter() - started_s < seconds:
            for generation in islice(self._waiting, self._count - self._batch.num_running):
                self._batch.begin(generation, self._received)
                self.answers.append(generation.stats)
            self._batch.step()
            self.is_over = self.tokens >= self._most_tokens or not self._batch.num_running
        self.seconds += perf_counter() - started_s
        if self.is_over:
            self._stack.close()

    def _received(self, _event: TokenEvent) -> None:
        self.tokens += 1


def taken(
    models: Mapping[str, Model], prompts: Sequence[list[int]], count: int, options: GenerateOptions
) -> dict[str, Turn]:
    """The same turn of every model, in short slices by turns."""
    turns = {name: Turn(model, prompts, count, options) for name, model in models.items()}
    order = list(turns.values())
    while any(not turn.is_over for turn in order):
        for turn in order:
            if not turn.is_over:
                turn.go_on(SLICE_S)
        order.reverse()
    return turns


def turns_of(prompts: Sequence[str], counts: Sequence[int]) -> Iterator[tuple[int, list[str]]]:
    """(chats at once, questions) of every turn, for ever: models forget the texts of earlier turns."""
    left = cycle(prompts)
    for count in cycle(counts):
        yield count, list(islice(left, QUESTIONS * count))


def settings_of(chosen: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By name, the options that a model is loaded with."""
    shared = {"context_length": chosen.context, "parallel": max(chosen.counts), "engine": chosen.engine}
    if chosen.threads is not None:
        shared["threads"] = chosen.threads
    found = {PLAIN: shared | {"reproducible": False, "drafter": "none"}, "default": shared}
    if chosen.again:
        found[AGAIN] = found[PLAIN]
    if chosen.fixed:
        found[f"drafts of {chosen.fixed}"] = shared | {"draft_length": chosen.fixed}
    if chosen.reproducible:
        found["reproducible plain"] = shared | {"reproducible": True, "drafter": "none"}
        found["reproducible"] = shared | {"reproducible": True}
    return found


def measure(chosen: argparse.Namespace) -> None:
    texts = [text[: chosen.prompt_chars] for _, text in prompts_of(chosen.data, MOST_PROMPTS)]
    Random(chosen.seed).shuffle(texts)
    options = GenerateOptions(max_tokens=chosen.max_tokens, logprobs=False)
    with fresh_home(), ExitStack() as stack:
        models = {
            name: stack.enter_context(edgespec.load(chosen.model, **given))
            for name, given in settings_of(chosen).items()
        }
        for name, model in models.items():
            shares = "shares passes" if model.target.facts.can_pack else "passes in turn"
            print(f"{name}: {model}, {shares}")
        first = models[PLAIN]
        encoded = {text: first.encode_chat([{"role": "user", "content": text}]) for text in texts}
        taken(models, [encoded[texts[-1]][-20:]], 1, GenerateOptions(max_tokens=8))  # touches pages and buffers
        report(models, texts[:-1], encoded, options, chosen)


def report(
    models: dict[str, Model],
    texts: Sequence[str],
    encoded: dict[str, list[int]],
    options: GenerateOptions,
    chosen: argparse.Namespace,
) -> None:
    found: dict[int, list[dict[str, Turn]]] = defaultdict(list)
    until_s = monotonic() + chosen.seconds
    for count, asked in turns_of(texts, chosen.counts):
        if monotonic() > until_s:
            break
        turn = taken(models, [encoded[text] for text in asked], count, options)
        found[count].append(turn)
        rates = "  ".join(f"{name} {turn[name].rate:.1f}" for name in models)
        print(f"  {count} chats: {rates}  ratio {turn['default'].rate / plain_rate(turn):.3f}", flush=True)
    print(f"{chosen.model}: tokens per second of all chats; ratios over {PLAIN}, mean of turns")
    for count, turns in sorted(found.items()):
        for name in models:
            print(line_of(count, name, turns))
    for name in models:
        one, most = (total_rate([turn[name] for turn in found[count]]) for count in (min(found), max(found)))
        print(f"{name}: {most / one:.2f}x of {min(found)} at {max(found)}")


def plain_rate(turn: Mapping[str, Turn]) -> float:
    """Tokens per second of plain decoding, of both where it was measured twice."""
    return mean(each.rate for name, each in turn.items() if name in (PLAIN, AGAIN))


def line_of(count: int, name: str, found: Sequence[Mapping[str, Turn]]) -> str:
    turns = [turn[name] for turn in found]
    ratios = [turn[name].rate / plain_rate(turn) for turn in found]
    error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    answers = [stats for turn in turns for stats in turn.answers]
    drafted, accepted, rounds = (
        sum(getattr(stats, of) for stats in answers) for of in ("drafted_tokens", "accepted_tokens", "rounds")
    )
    return (
        f"{count:3} chats  {name:19} {total_rate(turns):7.1f}  ratio {mean(ratios):.3f} +- {error:.3f} of {len(turns)} "
        f"turns, worst {min(ratios):.2f}; "
        f"{sum(turn.tokens for turn in turns)} tokens, {drafted} drafted in {rounds} rounds, {accepted} accepted"
    )


def total_rate(turns: Sequence[Turn]) -> float:
    return sum(turn.tokens for turn in turns) / sum(turn.seconds for turn in turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=280, help="no turn begins later (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--prompt-chars", type=int, default=1200, help="longer prompts are cut (default %(default)s)")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the prompts")
    parser.add_argument("--again", action="store_true", help="measure plain decoding twice")
    parser.add_argument("--fixed", type=int, help="measure drafts of this length in every round, too")
    parser.add_argument("--reproducible", action="store_true", help="measure reproducible mode, too")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
