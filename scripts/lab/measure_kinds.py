"""What the default gains on each kind of text: acceptance, tokens per pass, speed over plain decoding, with errors.

    python scripts/lab/measure_kinds.py MODEL --data DATA [--draft FILE] [--temps 0,0.8] [--seconds N]

DATA is the folder with spec_bench_dev.jsonl.xz and sgd_dev.jsonl.xz; kinds are Spec-Bench's, dialogues and documented
Python functions, by turns, so that a run which `--seconds` ends has seen all of them alike. The base line is plain
decoding in the fastest mode (`--no-reproducible --drafter none`), whole answers with the reading of the prompt, which
is cut at `--characters`. Both settings answer every prompt, each from an empty KV cache, the one that begins by turns;
answers end where the model ends them. An error is the standard error of the mean over prompts.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import mean, stdev
from time import monotonic
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import edgespec
from edgespec import GenerateOptions, Model, Sampling
from edgespec.bench.prompts import SPEC_BENCH_FILE, BenchPrompt, read_data
from edgespec.reports import Stats
from measure_default import fresh_home

OTHERS = ("dialogue", "code")
SPEED_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Answered:
    """One prompt by both settings."""

    plain: Stats
    default: Stats

    @property
    def ratio(self) -> float:
        """Speed over plain decoding, per token: sampled answers of the two may differ in length."""
        plain, default = (stats.wall_s / stats.new_tokens for stats in (self.plain, self.default))
        return plain / default


def prompts_of(folder: Path, characters: int) -> Iterator[BenchPrompt]:
    """Prompts of all kinds by turns."""
    kinds: dict[str, list[BenchPrompt]] = defaultdict(list)
    with lzma.open(folder / SPEC_BENCH_FILE, "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            kinds[record["category"]].append(BenchPrompt(record["category"], (record["turns"][0],)))
    kinds |= {name: prompts for name, prompts in read_data(folder).items() if name in OTHERS}
    draw = random.Random(0)
    for prompts in kinds.values():
        draw.shuffle(prompts)
    for row in zip_longest(*kinds.values()):
        yield from (replace(p, turns=(*p.turns[:-1], p.text[:characters])) for p in row if p is not None)


def run(model: Model, ids: list[int], temperature: float, tokens: int) -> Stats:
    model.forget()
    return model.generate(ids, Sampling(temperature=temperature, seed=1), GenerateOptions(max_tokens=tokens)).stats


def tell(name: str, answered: list[Answered]) -> None:
    drafted = sum(a.default.drafted_tokens for a in answered)
    accepted = sum(a.default.accepted_tokens for a in answered)
    passes, tokens = sum(a.default.rounds for a in answered), sum(a.default.new_tokens - 1 for a in answered)
    ratios = [a.ratio for a in answered]
    error = f" +- {stdev(ratios) / len(ratios) ** 0.5:.3f}" if len(ratios) > 1 else ""
    print(
        f"{name:26} {len(ratios):3} prompts  accepted {accepted / drafted if drafted else 0:.2f} of {drafted:4}  "
        f"per pass {tokens / passes if passes else 0:.2f}  over plain {mean(ratios):.3f}{error}, "
        f"worst {min(ratios):.2f}"
    )


def tell_draft(draft: Path, plain: Model, ids: list[int]) -> None:
    """What a token of the draft costs in tokens of the target, by turns."""
    options = GenerateOptions(max_tokens=SPEED_TOKENS, ignore_eos=True)
    with edgespec.load(str(draft), context_length=1024, reproducible=False, drafter="none") as alone:
        shares = []
        for _ in range(4):
            small, big = (m.generate(ids, Sampling(temperature=0.0), options).stats for m in (alone, plain))
            shares.append(small.decode_s / big.decode_s)
    print(f"a drafted token takes {mean(shares):.3f} +- {stdev(shares) / 2:.3f} of a plain one")


def measure(chosen: argparse.Namespace) -> None:
    began_s = monotonic()
    found: dict[tuple[float, str], list[Answered]] = defaultdict(list)
    drafts: dict[str, Any] = {"draft": str(chosen.draft)} if chosen.draft else {}
    with fresh_home(), ExitStack() as stack:
        loaded = [
            edgespec.load(chosen.model, context_length=1024, reproducible=False, drafter="none"),
            edgespec.load(chosen.model, context_length=1024, **drafts),
        ]
        plain, default = (stack.enter_context(model) for model in loaded)
        prompts = list(prompts_of(chosen.data, chosen.characters))
        ids = prompts[0].encode(plain)
        for model in loaded:
            run(model, ids, 0.0, 8)  # pages and buffers are touched before anything counts
        if chosen.draft:
            tell_draft(chosen.draft, plain, ids)
        for number, prompt in enumerate(prompts):
            if number and monotonic() - began_s > chosen.seconds:
                break
            ids = prompt.encode(plain)
            for temperature in chosen.temps:
                order = (plain, default) if number % 2 else (default, plain)
                stats = {model: run(model, ids, temperature, chosen.tokens) for model in order}
                answered = Answered(stats[plain], stats[default])
                found[temperature, prompt.domain].append(answered)
                print(f"  T={temperature:g} {prompt.domain:14} {answered.ratio:.2f}", file=sys.stderr, flush=True)
    print(f"{chosen.model}, {'draft ' + str(chosen.draft) if chosen.draft else 'no draft'}, {number} prompts")
    for temperature in chosen.temps:
        kinds = {kind: answered for (temp, kind), answered in found.items() if temp == temperature}
        for kind, answers in kinds.items():
            tell(f"T={temperature:g} {kind}", answers)
        tell(f"T={temperature:g} all", [each for answers in kinds.values() for each in answers])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--temps", default="0,0.8", type=lambda text: [float(part) for part in text.split(",")])
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--characters", type=int, default=500, help="longer prompts are cut (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=280, help="no prompt begins later, loading included")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
