"""What automatic speculation gains in simulated time: recorded texts and adversaries on machines of several kinds.

    python scripts/lab/simulate_control.py [--json OUT] [--against FORMER.json]

Each cell is a world: texts, a machine's costs by rows, and drafters whose time passes on a simulated clock
(tests/support/simulation.py). A figure is the geometric mean of plain decoding's time over the controller's, and the
least of them; with `--against` also of the former run's time over this one's. To ablate a mechanism, remove it and
compare with a run before.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import chain, repeat
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from edgespec.config.options import Sampling
from edgespec.control.auto import AutoController
from edgespec.control.cost import CostCurve, DraftCost
from edgespec.control.prices import RunCosts
from edgespec.drafters.base import Drafter
from edgespec.drafters.ngram import NgramDrafter
from simulation import CURVES, Machine, Text, World, always, beta_chances, bursts, honest, made_up, opposite, recorded

NOISY = partial(Machine, noise=0.05, outliers=0.01, drift=0.15)
Times = dict[str, tuple[float, float]]  # by cell: seconds of the controller, and of plain decoding
ADVERSARIES: dict[str, Callable[[int, int], Text]] = {
    "claims .9, right .1": lambda size, seed: made_up(size, repeat(0.1), always(0.9), seed),
    "never right": lambda size, seed: made_up(size, repeat(0.0), always(0.9), seed),
    "the surer the more wrong": lambda size, seed: made_up(size, beta_chances(0.3, seed, 0.5), opposite, seed),
    "good, then bad": lambda size, seed: made_up(size, chain(repeat(0.95, size // 4), repeat(0.02)), always(0.9), seed),
    "bursts without a sign": lambda size, seed: made_up(size, bursts(0.95, 0.05, 30, seed), always(0.8), seed),
    "as good as plain": lambda size, seed: made_up(size, beta_chances(0.3, seed), honest, seed),
}


def lookup_only(world: World) -> AutoController:
    drafters: dict[str, Drafter] = {"ngram": NgramDrafter()}
    return AutoController(drafters, RunCosts(world.machine.curve(), {}), clock=world.clock)


def cold(world: World) -> AutoController:
    """Nothing is known of the machine, and the draft model is guessed to be cheaper than it is."""
    drafters: dict[str, Drafter] = {"ngram": NgramDrafter(), "model": world.model()}
    costs = {"model": DraftCost.guessed(0.02)}
    return AutoController(drafters, RunCosts(CostCurve(0.2 * world.machine.plain_s), costs), clock=world.clock)


def usual(world: World) -> AutoController:
    return world.auto()


WORLDS: dict[str, tuple[Callable[[World], AutoController], Callable[[dict[int, float]], Machine], float]] = {
    "costs known": (usual, Machine, 0.04),
    "noise, outliers, drift": (usual, NOISY, 0.04),
    "first run": (cold, Machine, 0.04),
    "lookups only": (lookup_only, Machine, 0.04),
    "dear draft": (usual, Machine, 0.3),
}


def times_of(name: str, ratios: dict[int, float], texts: list[Text], temperature: float) -> tuple[float, float]:
    """Seconds of the controller and of plain decoding in one world."""
    make, machine, share = WORLDS[name]
    world = World(machine(ratios), draft_share=share)
    taken_s = world.run(make(world), texts, Sampling(temperature=temperature))
    return taken_s, World(machine(ratios)).plain_s(texts)


def beside_lookups(ratios: dict[int, float], texts: list[Text], temperature: float) -> tuple[float, float]:
    """Seconds with a dear draft model, and without it."""
    both, alone = World(Machine(ratios), 0.43), World(Machine(ratios), 0.43)
    sampling = Sampling(temperature=temperature)
    return both.run(both.auto(), texts, sampling), alone.run(lookup_only(alone), texts, sampling)


def cells(curves: Collection[str]) -> Iterator[tuple[str, str, tuple[float, float]]]:
    """(world, cell, its times) on the machines named `curves`."""
    for curve, ratios in CURVES.items():
        if curve not in curves:
            continue
        for domain, by_heat in recorded().items():
            for temperature, texts in by_heat.items():
                cell = f"{curve}, {domain}, {temperature}"
                for name in WORLDS:
                    yield name, cell, times_of(name, ratios, texts, temperature)
                yield "draft over lookups alone", cell, beside_lookups(ratios, texts, temperature)
        for adversary, make in ADVERSARIES.items():
            for count, size in ((75, 8), (10, 64), (1, 1000)):
                texts = [make(size, seed) for seed in range(count)]
                yield "adversaries", f"{curve}, {adversary}, {size} tokens", times_of("costs known", ratios, texts, 0.0)


def mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--curves", nargs="+", choices=list(CURVES), default=list(CURVES), help="machines")
    given = parser.parse_args()
    former: Mapping[str, list[float]] = json.loads(given.against.read_text()) if given.against else {}
    found: dict[str, Times] = defaultdict(dict)
    for world, cell, times in cells(given.curves):
        found[world][cell] = times
    for world, by_cell in found.items():
        known = [cell for cell in by_cell if f"{world}: {cell}" in former]
        over_plain = {cell: plain_s / taken_s for cell, (taken_s, plain_s) in by_cell.items()}
        worst = min(over_plain, key=over_plain.__getitem__)
        line = f"{world:24} {mean(list(over_plain.values())):.3f}  least {over_plain[worst]:.3f} ({worst})"
        gains = [former[f"{world}: {cell}"][0] / by_cell[cell][0] for cell in known]
        print(line, f" over the former run {mean(gains):.4f}" if gains else "")
    if given.json:
        kept = {f"{world}: {cell}": times for world, by_cell in found.items() for cell, times in by_cell.items()}
        given.json.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
