"""Long contexts in simulated time: attention may make every row of a pass dearer, and drafts that paid then lose."""

from __future__ import annotations

from itertools import repeat

import pytest

from edgespec.control.auto import AutoController
from edgespec.control.cost import CostCurve, DraftCost
from edgespec.control.prices import RunCosts
from edgespec.reports import RoundRecord
from simulation import (
    DRAFT_SHARE,
    ORT_INT8,
    PLAIN_S,
    PREFILL_SHARE,
    READ_SHARE,
    ContextCost,
    Machine,
    Text,
    World,
    honest,
    known_curve,
    made_up,
    simulate,
)

SHORT, LONG, ANSWER = 200, 7000, 400
RIGHT = 0.8  # of the draft's tokens
# In plain passes per cached token: all that each row reads for itself, or all that a pass reads once.
BY_ROW, BY_PASS = ContextCost(row=5e-4), ContextCost(fixed=5e-4)


def text(prompt_tokens: int, seed: int = 0) -> Text:
    return made_up(ANSWER, repeat(RIGHT), honest, seed, prompt_tokens)


def controller(world: World, known: str) -> AutoController:
    """One that knows the costs of short contexts, or that starts with guesses."""
    short = known_curve({width: ratio * PLAIN_S for width, ratio in ORT_INT8.items()})
    curves = {"short": short, "guessed": CostCurve(0.3 * PLAIN_S)}
    cost = DraftCost(DRAFT_SHARE * PLAIN_S, READ_SHARE * PLAIN_S)
    return AutoController({"model": world.model()}, RunCosts(curves[known], {"model": cost}), 0.02, world.clock)


def answered(
    world: World, auto: AutoController, prompt_tokens: int, seed: int = 0
) -> tuple[list[RoundRecord], float, float]:
    """The rounds of one answer, and how many times as fast as plain decoding: without its prompt, and with it."""
    told = text(prompt_tokens, seed)
    started_s = world.clock()
    records = simulate(auto, told, world.machine, world.clock)
    taken_s, prompt_s = world.clock() - started_s, prompt_tokens * PREFILL_SHARE * PLAIN_S
    plain_s = World(Machine(ORT_INT8, context=world.machine.context)).plain_s([told])
    return records, plain_s / taken_s, (prompt_s + plain_s) / (prompt_s + taken_s)


def drafted(records: list[RoundRecord]) -> float:
    """Share of rounds with a draft."""
    return sum(record.drafted_tokens > 0 for record in records) / len(records)


KNOWN = ("short", "guessed")


@pytest.mark.parametrize("known", KNOWN)
def test_drafting_stops_where_the_context_makes_it_lose(known: str) -> None:
    """Five rows take 2.0 plain passes behind 200 tokens and 4.3 behind 7000: only the first pays."""
    world = World(Machine(ORT_INT8, context=BY_ROW))
    records, speed, _ = answered(world, controller(world, known), SHORT)
    assert drafted(records) > 0.7 and speed > 1.2
    world = World(Machine(ORT_INT8, context=BY_ROW))
    records, _, speed = answered(world, controller(world, known), LONG)
    assert speed >= 0.98 and drafted(records[len(records) // 4 :]) < 0.4


@pytest.mark.parametrize("known", KNOWN)
def test_drafting_goes_on_where_rows_share_what_the_context_costs(known: str) -> None:
    world = World(Machine(ORT_INT8, context=BY_PASS))
    auto = controller(world, known)
    speeds = []
    for seed, size in enumerate((SHORT, LONG)):
        records, speed, _ = answered(world, auto, size, seed)
        assert drafted(records) > 0.3
        speeds.append(speed)
    assert speeds[1] > speeds[0] > 1.2


@pytest.mark.parametrize("known", KNOWN)
def test_a_conversation_between_short_and_long_contexts(known: str) -> None:
    """What was learnt behind one context is put right behind the other. A first jump may cost more than the bound.

    What plain decoding would have taken is credited by what it took at the context before, until it is timed again.
    Later ones stay within the bank's bound: 2%, and where the draft's cost has to be tried out three passes of 400.
    """
    world = World(Machine(ORT_INT8, context=BY_ROW))
    auto = controller(world, known)
    found = [answered(world, auto, size, seed) for seed, size in enumerate((SHORT, LONG) * 3)]
    assert all(speed > 1.05 for _, speed, _ in found[::2])
    long = [speed for _, _, speed in found[1::2]]
    assert long[0] >= (0.95 if known == "short" else 0.98)
    assert min(long[1:]) >= (0.97 if known == "guessed" else 0.98)
    assert drafted(found[-1][0]) < 0.5
