"""What every drafter brings on one pair: acceptance, mean accepted length, and speed over plain decoding of one run.

    python scripts/lab/measure_drafters.py MODEL --prompts FILE [--engine onnx] [--drafters model,suffix:8,eagle:4,auto]
        [--heads FILE ...] [--draft FILE] [--medium FILE] [--length N]

FILE holds one JSON object per line: {"domain": ..., "text": ...}. All runs are without the reproducible mode, plain
decoding's best setting; the drafters take turns on every prompt, in an order that rotates, each with a fixed draft
length (its own behind a colon), `auto` with its own. Time is that of all prompts of a domain, prefill left out; memory
is what the drafter adds. `--heads` may be given several times, a file of each kind; without it those of the pair are
measured. `hierarchical` comes beside its two parts: `model` is the draft alone, and `medium`, which is no drafter by
that name elsewhere, the medium alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import edgespec
from edgespec import GenerateOptions, Sampling
from edgespec.drafters.base import Drafter
from edgespec.drafters.hierarchical import HierarchicalDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.spec import SPECS
from edgespec.formats.head_file import read_head_file
from edgespec.loading.heads import open_heads
from edgespec.loading.registry import resolve
from edgespec.reports import Stats

PLAIN, MEDIUM = "none", "medium"
NEED_MEDIUM = {"hierarchical", MEDIUM}
BORROWING = {name for name, spec in SPECS.items() if spec.borrows_model}  # the draft model of drafter `model`


@dataclass(frozen=True)
class Setting:
    """A drafter with a draft length, None for its own."""

    name: str
    length: int | None

    @classmethod
    def of(cls, text: str, length: int) -> Setting:
        name, _, own = text.partition(":")
        return cls(name, None if name == "auto" and not own else int(own or length))

    def __str__(self) -> str:
        return self.name if self.length is None else f"{self.name} {self.length}"


class Bench:
    """One loaded pair with all the drafters that are compared."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self._chosen = chosen
        pair = resolve(chosen.model, chosen.draft, chosen.engine, chosen.medium)
        names = {setting.name for setting in chosen.drafters}
        heads = chosen.heads or [pair.heads[kind].path for kind in sorted(names & pair.heads.keys())]
        medium = pair.files["medium"].path if names & NEED_MEDIUM and "medium" in pair.files else None
        if names & NEED_MEDIUM and medium is None:
            raise SystemExit(f"{chosen.model} has no medium: give --medium FILE, or leave out {', '.join(NEED_MEDIUM)}")
        self.model = edgespec.load(
            chosen.model,
            reproducible=False,
            context_length=1024,
            engine=chosen.engine,
            draft=chosen.draft,
            medium=medium,
            heads=heads[0] if heads else None,
            exit_layer=chosen.exit_layer,
            threads=chosen.threads,
        )
        self.drafters: dict[str, Drafter] = self.model._pool.drafters  # type: ignore[assignment]
        for path in heads[1:]:
            file = read_head_file(path)
            self.drafters[file.manifest.kind] = open_heads(file, path, self.model.target)

    @contextmanager
    def drafting(self, name: str) -> Iterator[str]:
        """The name by which the model knows the drafter `name`; the medium stands in for the draft meanwhile."""
        hierarchical = self.drafters.get("hierarchical")
        if name != MEDIUM or not isinstance(hierarchical, HierarchicalDrafter):
            yield name
            return
        draft = self.drafters["model"]
        self.drafters["model"] = ModelDrafter(hierarchical._engine, hierarchical.cache)
        try:
            yield "model"
        finally:
            self.drafters["model"] = draft

    def run(self, setting: Setting, ids: list[int]) -> Stats:
        self.model.forget()
        with self.drafting(setting.name) as name:
            options = GenerateOptions(
                max_tokens=self._chosen.tokens,
                ignore_eos=True,
                logprobs=False,
                drafter=name,  # type: ignore[arg-type]
                draft_length="auto" if setting.length is None else setting.length,
            )
            return self.model.generate(ids, Sampling(temperature=self._chosen.temp, seed=1), options).stats

    def bytes_of(self, name: str) -> int:
        """Memory that a drafter takes beside the target's, with the parts that it borrows."""
        if name == "auto":
            return sum(drafter.bytes_used for drafter in self.drafters.values())
        with self.drafting(name) as known:
            parts = {known, "model"} if known in BORROWING else {known}
            return sum(self.drafters[part].bytes_used for part in parts if part in self.drafters)


def measured(bench: Bench, prompts: list[dict[str, str]], settings: list[Setting]) -> dict[str, dict[str, list[Stats]]]:
    """The statistics of every run, by domain and setting."""
    names = [Setting(PLAIN, 0), *settings]
    found: dict[str, dict[str, list[Stats]]] = defaultdict(lambda: {str(each): [] for each in names})
    for index, prompt in enumerate(prompts):
        ids = bench.model.encode(prompt["text"], parse_special=True)
        turn = index % len(names)
        for setting in names[turn:] + names[:turn]:
            found[prompt["domain"]][str(setting)].append(bench.run(setting, ids))
        print(f"\r{index + 1}/{len(prompts)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return found


def tell(domain: str, setting: Setting, by_setting: dict[str, list[Stats]], num_bytes: int) -> None:
    runs, plain = by_setting[str(setting)], by_setting[str(Setting(PLAIN, 0))]
    ratio = sum(stats.decode_s for stats in plain) / sum(stats.decode_s for stats in runs)
    drafted = sum(stats.drafted_tokens for stats in runs)
    accepted = sum(stats.accepted_tokens for stats in runs)
    rounds, tokens = sum(stats.rounds for stats in runs), sum(stats.new_tokens - 1 for stats in runs)
    print(
        f"{domain:12} {setting!s:16} acceptance {accepted / drafted if drafted else 0:.3f}  mean accepted length "
        f"{tokens / rounds:.2f}  over plain {ratio:.2f}  {num_bytes / 2**20:.1f} MiB  of {tokens} tokens"
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--medium", type=Path)
    parser.add_argument("--heads", type=Path, nargs="+", action="extend", default=[], metavar="FILE")
    parser.add_argument("--exit-layer", type=int)
    parser.add_argument("--drafters", default="model,ngram,suffix,auto", metavar="NAME[:LENGTH],...")
    parser.add_argument("--length", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--threads", type=int)
    chosen = parser.parse_args()
    chosen.drafters = [Setting.of(text, chosen.length) for text in chosen.drafters.split(",")]
    return chosen


def main() -> None:
    chosen = parsed()
    prompts = [json.loads(line) for line in chosen.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    bench = Bench(chosen)
    with bench.model as model:
        print(
            f"{chosen.model}: {model.target.facts.name}, {model.target.facts.threads} threads, {len(prompts)} prompts"
        )
        for domain, by_setting in measured(bench, prompts, chosen.drafters).items():
            for setting in chosen.drafters:
                tell(domain, setting, by_setting, bench.bytes_of(setting.name))


if __name__ == "__main__":
    main()
