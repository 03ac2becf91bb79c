"""Continuous batching: the rows of several generations on one engine, packed into shared passes.

Each generation is the loop of `decode`, which asks for its passes. Every `step` packs those that wait - a chunk of a
prompt, plain rows, the rows of drafts - into one pass, as many as it may hold, longest waiting first. Where an engine
cannot pack, or packing would change bits in reproducible mode, they take passes of their own, in turn. What a further
row costs is told to the controllers at the width that the pass has already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter, thread_time

import numpy as np

from edgespec.acceptance import RULES
from edgespec.control.base import Controller
from edgespec.control.cost import WIDEST
from edgespec.decode import PassShare, Run, Steps, steps
from edgespec.engines.sequence import PassRequest
from edgespec.errors import Cancelled
from edgespec.generation.executor import Executor
from edgespec.generation.handle import Generation, Result
from edgespec.generation.slots import Slot, Slots
from edgespec.types import Logits, TokenEvent, packed

PROMPT_ROWS = 64  # of prompts in a pass that answers wait for: more would make them wait for long
MOST_OUTPUTS = WIDEST - 1  # rows with logits in a pass


def no_event(_event: TokenEvent) -> None:
    """Ignores an event."""


@dataclass(eq=False, slots=True)
class Member:
    """One generation of a batch. `on_event` is called with each of its events.

    `other_rows`: rows of the others that its latest draft was priced beside; `latest_pass`: number of its latest pass.
    """

    generation: Generation
    run: Run
    slot: Slot
    steps: Steps[None]
    controller: Controller | None
    on_event: Callable[[TokenEvent], None]
    waiting: PassRequest | None = None
    other_rows: int = 0
    latest_pass: int = 0

    @property
    def is_reading(self) -> bool:
        """Whether its prompt is still being read."""
        return not self.run.stats.new_tokens

    @property
    def num_rows(self) -> int:
        """Rows of the pass that it waits for; one while that is not known."""
        return 1 if self.waiting is None else self.waiting.batch.width

    @property
    def num_outputs(self) -> int:
        return 1 if self.is_reading else self.num_rows

    @property
    def num_branches(self) -> int:
        """Side branches of the tree that it waits to score."""
        if self.waiting is None:
            return 0
        parents = self.waiting.batch.parents
        return self.num_rows - np.unique(parents).size


class ContinuousBatch:
    """The generations that run at once on one model; made by `Model.batch`, within which it may be used.

    One thread calls it. `Generation.cancel`, which any thread may call, ends a generation before the next pass.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor, self._slots = executor, Slots(executor)
        self._members: list[Member] = []
        self._num_passes = 0
        self._can_pack = False

    @property
    def num_running(self) -> int:
        """Generations that have begun and not ended."""
        return len(self._members)

    @property
    def is_wanted_elsewhere(self) -> bool:
        """Whether another caller waits for the model, which it gets when this batch is over."""
        return self._executor.turn.num_queued > 1

    def has_room(self, generation: Generation) -> bool:
        """Whether it can begin now."""
        return self._slots.has_one_for(generation.request.options)

    def begin(self, generation: Generation, on_event: Callable[[TokenEvent], None] = no_event) -> None:
        """Begin a generation of this model that nobody reads; there must be room for it. Its handle is filled.

        Raises CapabilityError for a drafter that the model lacks.
        """
        request = generation.request
        slot = self._slots.take(request)
        try:
            controller = slot.pool.controller(request.options)
            relieve = self._executor.reliever(self._controllers)
            run = self._executor.run_of(request, generation.stats, slot.sequence, relieve)
        except BaseException:
            slot.is_taken = False
            raise
        rule = RULES[request.rule]
        loop = steps(run, controller, rule)
        member = Member(generation, run, slot, loop, controller, on_event, latest_pass=self._num_passes)
        self._members.append(member)
        self._executor.join_batch(generation.claim)
        self._advance(member, partial(next, loop))

    def results(self, generations: Sequence[Generation]) -> list[Result]:
        """Run all of them, as many at once as there is room for. Raises the first error."""
        waiting = deque(generations)
        while waiting or self._members:
            while waiting and self.has_room(waiting[0]):
                self.begin(waiting.popleft())
            self.step()
        return [generation.result() for generation in generations]

    def _controllers(self) -> list[Controller]:
        return [member.controller for member in self._members if member.controller is not None]

    def step(self) -> None:
        """Run one pass for those that wait longest, and each of them up to its next pass; drop the withdrawn ones.

        Raises StateError if the model was closed meanwhile.
        """
        self._executor.turn.require_open()
        for member in [member for member in self._members if member.generation.is_cancelled]:
            self._leave(member)
        chosen = self._chosen()
        if chosen:
            self._num_passes += 1
            self._run(chosen)

    def close(self) -> None:
        """End all of them."""
        for member in list(self._members):
            self._leave(member)

    # -- choosing

    def _chosen(self) -> list[Member]:
        """Whose rows make up the next pass."""
        engine = self._executor.target
        waiting = sorted(self._members, key=lambda member: member.latest_pass)
        if not waiting:
            return []
        first = waiting[0]
        self._can_pack = engine.facts.can_pack
        if not self._can_pack or first.waiting is None or not first.waiting.can_share:
            return [first]
        is_decoding = any(not member.is_reading for member in waiting)
        rows_left, outputs_left, branches_left = engine.widest_pass, MOST_OUTPUTS, engine.most_branches
        prompt_rows_left = PROMPT_ROWS if is_decoding else rows_left
        found = []
        for member in waiting:
            prompt_rows = member.num_rows if member.is_reading else 0
            fits = (
                member.num_rows <= rows_left
                and member.num_outputs <= outputs_left
                and member.num_branches <= branches_left
                and prompt_rows <= prompt_rows_left
            )
            is_alone = member is first  # one that would never fit beside others goes first when it waits longest
            if is_alone or (fits and member.waiting is not None and member.waiting.can_share):
                found.append(member)
                rows_left -= member.num_rows
                outputs_left -= member.num_outputs
                branches_left -= member.num_branches
                prompt_rows_left -= prompt_rows
        return found

    # -- running

    def _run(self, chosen: Sequence[Member]) -> None:
        started_s, started_cpu_s = perf_counter(), thread_time()
        try:
            logits = self._logits(chosen)
        except Cancelled:  # of a generation that has ended since: the caches are as before, and the pass is repeated
            return
        except Exception as exc:
            if len(chosen) > 1:  # whose fault it is shows when each runs alone
                for member in chosen:
                    member.run.target.restore()
                    self._run([member])
            else:
                self._throw(chosen[0], exc)
            return
        seconds = perf_counter() - started_s
        num_rows = sum(member.num_rows for member in chosen)
        threads = self._executor.pool.threads
        is_disturbed = threads is not None and threads.passed(num_rows, seconds, thread_time() - started_cpu_s)
        self._account(chosen, seconds, is_disturbed)
        for member in chosen:
            member.latest_pass, member.waiting = self._num_passes, None
        for member, rows in zip(chosen, logits, strict=True):
            self._advance(member, partial(member.steps.send, rows))

    def _logits(self, chosen: Sequence[Member]) -> list[Logits]:
        """The logits of each member's rows. A copy where several share a pass, as the loops may run passes between."""
        requests = [member.waiting for member in chosen if member.waiting is not None]
        if len(requests) == 1:
            return [requests[0].run()]
        engine = self._executor.target
        if self._slots.have_features:
            engine.give_hidden_states(False)
        batches = [request.batch for request in requests]
        logits = engine.forward(packed(batches)).copy()
        first_rows = np.cumsum([0, *(batch.width for batch in batches)]).tolist()
        for request, row in zip(requests, first_rows, strict=False):
            request.target.first_row = row
        ends = np.cumsum([np.count_nonzero(batch.outputs) for batch in batches])
        return np.split(logits, ends[:-1])

    def _account(self, chosen: Sequence[Member], seconds: float, is_disturbed: bool) -> None:
        """Tell each member its part of the pass, and the controllers' cost curves what all of it took."""
        decoding = [member for member in chosen if not member.is_reading]
        num_rows = sum(member.num_rows for member in chosen)
        widths = [member.num_rows for member in decoding]
        is_pure = len(decoding) == len(chosen)
        context = sum(member.run.target.length for member in decoding) // max(len(decoding), 1)
        seen: set[int] = set()
        for member in chosen:
            member.run.share = PassShare(seconds * member.num_rows / num_rows, is_disturbed)
            costs = None if member.controller is None else member.controller.shared_costs
            if costs is None or member.is_reading or not costs.is_shared:
                continue
            if is_pure and not is_disturbed and id(costs) not in seen:
                seen.add(id(costs))
                costs.observe_shared(sum(widths), context, seconds)
            part = costs.part_of(len(decoding), member.other_rows, member.num_rows, context)
            whole = costs.curve.at(min(num_rows, WIDEST), context)
            member.run.share = PassShare(part * seconds / whole if is_pure else part, is_disturbed)

    def _advance(self, member: Member, resume: Callable[[], TokenEvent | PassRequest]) -> None:
        """Run a member's loop up to its next pass."""
        self._join(member)
        try:
            step = resume()
            while not isinstance(step, PassRequest):
                member.generation.receive(step)
                member.on_event(step)
                step = next(member.steps)
            member.waiting = step
        except StopIteration:
            self._leave(member)
        except Exception as exc:
            self._leave(member, exc)

    def _throw(self, member: Member, exc: Exception) -> None:
        self._advance(member, partial(member.steps.throw, exc))

    def _join(self, member: Member) -> None:
        """Tell its controller and its prompt what else the next pass holds."""
        others = [other for other in self._members if other is not member]
        member.run.target.most_rows = PROMPT_ROWS if others else self._executor.target.widest_pass
        decoding = [other for other in others if not other.is_reading] if self._can_pack else []
        reading = [other.num_rows for other in others if other.is_reading] if self._can_pack else []
        member.other_rows = sum(other.num_rows for other in decoding) + max(reading, default=0)
        if member.controller is not None:
            member.controller.share_passes(len(decoding) + 1, member.other_rows)

    def _leave(self, member: Member, failure: Exception | None = None) -> None:
        """End a member and free its slot; its answer is learnt."""
        self._members.remove(member)
        self._executor.leave_batch(member.generation.claim)
        member.steps.close()
        stats = member.run.stats
        if failure is None:
            stats.finish_reason = stats.finish_reason or "cancelled"
        self._executor.conclude(member.run, member.slot.pool)
        member.slot.is_taken = False
        member.slot.latest_use = self._num_passes
        member.generation.ended(failure)
