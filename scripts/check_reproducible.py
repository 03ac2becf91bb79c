"""Long check of the first promise: the same token ids for every drafter and draft length as without one.

    python scripts/check_reproducible.py --prompts FILE [--model NAME] [--engine NAME] [--tokens N]
        [--runs-per-cell N] [--drafters NAME ...] [--exit-layer N]

FILE holds one prompt per line. Every prompt is decoded plainly at each temperature, with one of 20 seeds, then again
with drafters and lengths (1..12, auto) that rotate, so that all combinations meet all temperatures. What needs models
of its own is loaded by itself and compared with the same plain texts. A GGUF target is cut for its early exit in a
temporary folder. Prints the number of tokens compared and of tokens that differ for each drafter; exit code 1 when any
does.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import edgespec
from edgespec import GenerateOptions, Model, Sampling
from edgespec.config import DRAFTERS, DrafterName, DraftLength
from edgespec.models import resolve

TEMPERATURES = (0.0, 0.8, 1.2)
NUM_SEEDS = 20
BY_NAME: tuple[DrafterName, ...] = ("hierarchical", "early-exit", "medusa", "eagle")  # are opened only when asked for
# An EAGLE-3 head takes the place of the draft model, so that a pair with one is another check.
ALL = tuple(name for name in DRAFTERS if name not in ("none", "eagle3"))


def lengths_of(drafters: Sequence[DrafterName]) -> Iterator[tuple[DrafterName, DraftLength]]:
    """Every drafter with every length, for ever. Automatic lengths are decided by the clock, so they come often."""
    fixed = [name for name in drafters if name != "auto"]
    for n in itertools.cycle(range(1, 13)):
        yield from ((name, n) for name in fixed)
        yield from ((name, "auto") for name in drafters if name == "auto" or name == fixed[n % len(fixed)])


@dataclass
class Check:
    """What was compared so far, in tokens by drafter; `plain` texts by prompt and temperature."""

    prompts: list[str]
    tokens: int
    plain: dict[tuple[str, float], tuple[int, ...]] = field(default_factory=dict)
    compared: Counter[str] = field(default_factory=Counter)
    different: Counter[str] = field(default_factory=Counter)

    def run(self, model: Model, drafters: Sequence[DrafterName], runs_per_cell: int) -> None:
        rotation = lengths_of(drafters)
        for index, (prompt, temperature) in enumerate(itertools.product(self.prompts, TEMPERATURES)):
            sampling = Sampling(temperature=temperature, seed=index % NUM_SEEDS)
            ids = model.encode_chat([{"role": "user", "content": prompt}])
            if (prompt, temperature) not in self.plain:
                self.plain[prompt, temperature] = self._text(model, ids, sampling, "none", 0)
            plain = self.plain[prompt, temperature]
            for drafter, length in itertools.islice(rotation, runs_per_cell):
                found = self._text(model, ids, sampling, drafter, length)
                self.compared[drafter] += max(len(plain), len(found))
                wrong = sum(ours != theirs for ours, theirs in itertools.zip_longest(plain, found))
                if wrong:
                    self.different[drafter] += wrong
                    print(f"differs: T={temperature} seed={sampling.seed} {drafter} {length}: {prompt[:60]!r}")
        for drafter in drafters:
            print(
                f"{model.target.facts.name:9} {drafter:13} {self.compared[drafter]:7} tokens compared, "
                f"{self.different[drafter]} differ",
                flush=True,
            )

    def _text(
        self, model: Model, ids: list[int], sampling: Sampling, drafter: DrafterName, length: DraftLength
    ) -> tuple[int, ...]:
        options = GenerateOptions(max_tokens=self.tokens, drafter=drafter, draft_length=length)
        return model.generate(ids, sampling, options).token_ids


def with_exit(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What to load so that the first layers draft: GGUF files are cut anew, an ONNX graph is cut when it is loaded."""
    target = resolve(chosen.model, chosen.draft, chosen.engine).files["target"]
    if target.engine == "onnx":
        return {"model": chosen.model, "draft": chosen.draft, "exit_layer": chosen.exit_layer}
    from edgespec.export.gguf import early_exit_gguf

    cut = early_exit_gguf(target.path, folder, chosen.exit_layer)
    return {"model": str(cut.target), "draft": cut.draft}


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
        with tempfile.TemporaryDirectory() as folder:
            loaded: dict[str, Any] = {"model": chosen.model, "draft": chosen.draft}
            if opens == "early-exit":
                loaded = with_exit(chosen, Path(folder))
            loaded |= {"engine": chosen.engine, "drafter": opens}
            with edgespec.load(**loaded, reproducible=True, never_slower=1.0) as model:
                check.run(model, drafters, runs_per_cell)
    print(f"{len(prompts)} prompts, {check.compared.total()} tokens compared, {check.different.total()} differ")
    return int(check.different.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
