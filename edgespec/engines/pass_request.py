"""A pass that a sequence waits for: who decodes asks for it, and whoever runs the engine answers with its logits."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from edgespec.types import Batch, Logits

if TYPE_CHECKING:
    from edgespec.engines.sequence import CachedSequence

Event = TypeVar("Event")
Returned = TypeVar("Returned")


class PassRequest(NamedTuple):
    """Rows of one sequence, of a target or of a draft model, that wait for a pass of its engine.

    The reply is their logits, a view until the next pass. `hidden`: with hidden states or without them; None: as the
    engine does now. Other sequences of the same pass may want them and these rows not. `is_alone`: rows of others would
    change the bits of these.
    """

    cache: CachedSequence
    batch: Batch
    hidden: bool | None = None
    is_alone: bool = False

    def run(self) -> Logits:
        """The logits of a pass of its own. Raises as `Engine.forward`."""
        self.cache.took_part(0)
        if self.hidden is not None:
            self.cache.engine.give_hidden_states(self.hidden)
        if self.cache.layers:
            self.cache.engine.give_layer_inputs(self.cache.layers)
        return self.cache.engine.forward(self.batch)


Passes = Generator[PassRequest, Logits, Returned]
"""Asks for passes one after another, is given the logits of each, and returns what it makes of them."""


def answered(steps: Generator[Event | PassRequest, Any, Returned]) -> Generator[Event, None, Returned]:
    """Run each pass as soon as `steps` ask for it; yield their events and return their result.

    Whoever asked is told of a failed pass, restores its cache, and may go on. Raises as `Engine.forward`.
    """
    try:
        step = next(steps)
        while True:
            if isinstance(step, PassRequest):
                try:
                    logits = step.run()
                except BaseException as exc:
                    step = steps.throw(exc)
                else:
                    step = steps.send(logits)
            else:
                yield step
                step = next(steps)
    except StopIteration as end:
        made: Returned = end.value
        return made
    finally:
        steps.close()


def at_once(passes: Passes[Returned]) -> Returned:
    """Run each pass as soon as it is asked for, and return the result of `passes`. Raises as `Engine.forward`."""
    try:
        next(answered(passes))
    except StopIteration as end:
        made: Returned = end.value
        return made
    raise AssertionError("what asks for passes only has no events")
