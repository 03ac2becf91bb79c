"""The generations of a batch, and how many of their rows fit into one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from edgespec.control.base import Controller
from edgespec.control.cost import WIDEST
from edgespec.engines.base import Engine
from edgespec.engines.pass_request import PassRequest
from edgespec.generation.decode import Steps
from edgespec.generation.handle import Generation
from edgespec.generation.run_state import Run
from edgespec.generation.slots import Slot
from edgespec.reports import TokenEvent

MOST_OUTPUTS = WIDEST - 1  # rows with logits in a pass


def num_rows_of(members: Sequence[Member]) -> int:
    """Rows of the passes that they wait for."""
    return sum(member.asked.batch.width for member in members)


@dataclass(eq=False, slots=True)
class Member:
    """One generation of a batch. `on_event` is called with each of its events.

    `waiting`: the pass that it asked for at `asked_s`; `num_sharing`, `other_rows`: how many sequences decode in
    the target's next pass, and the others' rows (`prompt_rows` of them prompts) that its latest draft was priced with;
    `latest_pass`: number of its latest pass of the target, in which it had `latest_rows` rows.
    """

    generation: Generation
    run: Run
    slot: Slot
    steps: Steps[None]
    controller: Controller | None
    on_event: Callable[[TokenEvent], None]
    waiting: PassRequest | None = None
    asked_s: float = 0.0
    num_sharing: int = 1
    other_rows: int = 0
    prompt_rows: int = 0
    latest_pass: int = 0
    latest_rows: int = 1

    @property
    def is_reading(self) -> bool:
        """Whether its prompt is still being read."""
        return not self.run.stats.new_tokens

    @property
    def asked(self) -> PassRequest:
        """The pass that it waits for, which it always does between steps."""
        assert self.waiting is not None
        return self.waiting

    @property
    def is_drafting(self) -> bool:
        """Whether the pass that it waits for is one of a draft model."""
        return self.waiting is not None and self.waiting.cache is not self.run.target

    @property
    def expected_rows(self) -> int:
        """Its rows in the target's next pass; as many as in its last one while it drafts or decides."""
        return self.latest_rows if self.waiting is None or self.is_drafting else self.waiting.batch.width


@dataclass(slots=True)
class Room:
    """What a pass can still hold: `rows`, of these with `outputs`, side `branches` of trees, and rows of prompts.

    `gives_states`: it gives hidden states, for which llama.cpp mostly computes logits of all its rows.
    """

    rows: int
    outputs: int
    branches: int
    prompt_rows: int
    gives_states: bool

    @classmethod
    def of(cls, engine: Engine, *, gives_states: bool) -> Self:
        """The room in an empty pass."""
        return cls(engine.widest_pass, MOST_OUTPUTS, engine.most_branches, engine.widest_pass, gives_states)

    def takes(self, member: Member, *, at_least: bool = False) -> bool:
        """Whether the member's rows fit; they have their room then, and with `at_least` in any case."""
        batch = member.asked.batch
        rows, outputs, branches = batch.width, 1, 0
        if rows > 1:
            outputs = rows if self.gives_states else int(np.count_nonzero(batch.outputs))
            branches = rows - len(set(batch.parents.tolist()))
        prompt_rows = rows if member.is_reading else 0
        fits = rows <= self.rows and outputs <= self.outputs
        fits = fits and branches <= self.branches and prompt_rows <= self.prompt_rows
        if fits or at_least:
            self.rows, self.outputs = self.rows - rows, self.outputs - outputs
            self.branches, self.prompt_rows = self.branches - branches, self.prompt_rows - prompt_rows
        return fits
