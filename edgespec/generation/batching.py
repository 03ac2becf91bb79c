"""Continuous batching: the rows of several generations on one engine, packed into shared passes.

Each generation is the loop of `decode`, which asks for its passes. Every `step` packs the waiting rows - a chunk of a
prompt, plain rows, drafts - into one pass, as many as fit, longest waiting first. Generations that use a draft model
first share its passes, one token each, until their drafts are complete. If an engine cannot pack, or packing would
change bits in reproducible mode, each gets its own pass in turn. Controllers are told what another row costs at the
width that the pass already has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter

import numpy as np

from edgespec.control.base import Controller
from edgespec.control.threads import Started
from edgespec.engines.pass_request import PassRequest
from edgespec.errors import Cancelled, EdgespecError
from edgespec.generation.decode import steps
from edgespec.generation.executor import Executor
from edgespec.generation.handle import Generation, Result
from edgespec.generation.members import Member, Room, num_rows_of
from edgespec.generation.pass_shares import share_draft, share_target, shared_costs
from edgespec.generation.slots import Slots
from edgespec.reports import PromptProgress, TokenEvent
from edgespec.sampling.acceptance import RULES
from edgespec.types import Logits, packed

# Of prompts in a pass that answers wait for: more would make them wait for long. Half where hidden states are read,
# since a pass with those may ask for logits of all its rows.
PROMPT_ROWS = 64


def no_event(_event: TokenEvent) -> None:
    """Ignores an event."""


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

    def begin(
        self,
        generation: Generation,
        on_event: Callable[[TokenEvent], None] = no_event,
        on_prompt: Callable[[PromptProgress], None] | None = None,
    ) -> None:
        """Begin a generation of this model that nobody reads; there must be room for it. Its handle is filled.

        `on_prompt` is told how much of its prompt is read.

        Raises CapabilityError for a drafter that the model lacks.
        """
        request, threads = generation.request, self._executor.pool.threads
        if threads is not None and not self._members:
            threads.begin()
        slot = self._slots.take(request)
        try:
            controller = slot.pool.controller(request.options)
            run = self._executor.run_of(request, generation.stats, slot.sequence, self._controllers)
            run.on_prompt = on_prompt
        except BaseException:
            slot.is_taken = False
            raise
        rule = RULES[request.rule]
        loop = steps(run, controller, rule)
        member = Member(generation, run, slot, loop, controller, on_event, latest_pass=self._num_passes)
        self._members.append(member)
        self._executor.interruption.join(generation.claim)
        self._advance(member, partial(next, loop))

    def results(self, generations: Sequence[Generation]) -> list[Result]:
        """Run all of them, as many at once as there is room for. Raises the first error."""
        waiting = deque(generations)
        while waiting or self._members:
            while waiting and self.has_room(waiting[0]):
                self.begin(waiting.popleft())
            self.step()
            if (failure := next((each.failure for each in generations if each.failure), None)) is not None:
                raise failure
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
            self._run(chosen)

    def close(self) -> None:
        """End all of them."""
        for member in list(self._members):
            self._leave(member)
        if not self._executor.turn.is_shut:  # else nothing follows, and the engine may be gone
            self._slots.alone_again()

    # -- choosing

    def _chosen(self) -> list[Member]:
        """Whose rows make up the next pass."""
        waiting = sorted(self._members, key=lambda member: member.latest_pass)
        if not waiting:
            return []
        self._can_pack = self._executor.target.facts.can_pack
        first = waiting[0]
        if self._can_pack:  # they go on together, so all drafts come before the target's pass
            first = next((member for member in waiting if member.is_drafting), first)
        return self._beside(first, waiting)

    def _beside(self, first: Member, waiting: Sequence[Member]) -> list[Member]:
        """`first`, which runs even if it would never fit beside others, and those that fit into the same pass."""
        engine = first.asked.cache.engine
        if not engine.facts.can_pack or first.asked.is_alone:
            return [first]
        is_target = not first.is_drafting
        room = Room.of(engine, gives_states=any(member.asked.hidden for member in waiting))
        if is_target and any(not member.is_reading for member in waiting):
            room.prompt_rows = PROMPT_ROWS
        found = [first]
        room.takes(first, at_least=True)
        for member in waiting:
            if member is first or member.asked.is_alone or member.asked.cache.engine is not engine:
                continue
            if room.takes(member):
                found.append(member)
        return found

    # -- running

    def _run(self, chosen: Sequence[Member]) -> None:
        for costs in shared_costs(chosen):
            costs.follow_threads()  # while all of them rest, nobody else does
        started = Started.now()
        try:
            logits = self._logits([member.asked for member in chosen])
        except Cancelled:  # of a generation that has ended since: the caches are as before, and the pass is repeated
            return
        except Exception as exc:
            if len(chosen) > 1:  # run each alone to find out whose fault it is
                for member in chosen:
                    with suppress(EdgespecError):  # it fails again, alone
                        member.asked.cache.restore()
                    self._run([member])
            else:
                self._throw(chosen[0], exc)
            return
        seconds = perf_counter() - started.wall_s
        if chosen[0].is_drafting:
            share_draft(chosen, seconds)
        else:
            self._num_passes += 1
            is_disturbed = self._was_disturbed(num_rows_of(chosen), seconds, started)
            share_target(chosen, seconds, self._num_passes, is_disturbed=is_disturbed)
        for member, rows in zip(chosen, logits, strict=True):
            self._advance(member, partial(member.steps.send, rows))

    def _was_disturbed(self, num_rows: int, seconds: float, started: Started) -> bool:
        """Whether other load disturbed a pass of the target, as thread control sees it."""
        threads = self._executor.pool.threads
        if threads is None:
            return False
        cached = sum(member.run.target.length for member in self._members)
        return threads.passed(num_rows, seconds, started.lacking_s(threads.threads), cached)

    def _logits(self, requests: Sequence[PassRequest]) -> list[Logits]:
        """The logits of each request's rows. A copy where several share a pass, as the loops may run passes between."""
        engine = requests[0].cache.engine
        gives_states = any(request.hidden for request in requests)
        if engine is self._executor.target and self._slots.have_features:
            engine.give_hidden_states(gives_states)
        if len(requests) == 1:
            return [requests[0].run()]
        layers = next(filter(None, (request.cache.layers for request in requests)), ())
        if layers:
            engine.give_layer_inputs(layers)
        batches = [request.batch for request in requests]
        logits = engine.forward(packed(batches)).copy()
        states = engine.hidden_states() if gives_states else None
        inputs = engine.layer_inputs() if layers else None
        found: list[Logits] = []
        row = output = 0
        for request, batch in zip(requests, batches, strict=True):
            own = slice(row, row + batch.width)
            own_states = states[own].copy() if states is not None and request.hidden else None
            request.cache.took_part(row, own_states, None if inputs is None else inputs[own])
            row, begin = own.stop, output
            output += int(np.count_nonzero(batch.outputs))
            found.append(logits[begin:output])
        return found

    def _advance(self, member: Member, resume: Callable[[], TokenEvent | PassRequest]) -> None:
        """Run a member's loop up to its next pass."""
        if member.waiting is not None and member.run.share is not None:
            member.run.others_s += perf_counter() - member.asked_s - member.run.share.seconds
        if not member.is_drafting:
            self._join(member)
        if member.controller is not None:  # controllers share what they know of costs
            member.controller.share_passes(member.num_sharing, member.other_rows, member.prompt_rows)
        member.waiting = None
        try:
            step = resume()
            while not isinstance(step, PassRequest):
                member.generation.receive(step)
                member.on_event(step)
                step = next(member.steps)
            member.waiting, member.asked_s = step, perf_counter()
        except StopIteration:
            self._leave(member)
        except Exception as exc:
            self._leave(member, exc)

    def _throw(self, member: Member, exc: Exception) -> None:
        self._advance(member, partial(member.steps.throw, exc))

    def _join(self, member: Member) -> None:
        """Note what else the target's next pass holds, for its controller and its prompt."""
        rows = PROMPT_ROWS // 2 if member.run.target.keeps_features else PROMPT_ROWS
        is_alone = len(self._members) == 1
        member.run.target.most_rows = self._executor.target.widest_pass if is_alone else rows
        num_sharing, decoded_rows, prompt_rows = 1, 0, 0
        for other in self._members if self._can_pack else ():  # every member comes here after every pass
            if other is member:
                continue
            if other.is_reading:
                prompt_rows = max(prompt_rows, other.expected_rows)
            else:
                num_sharing, decoded_rows = num_sharing + 1, decoded_rows + other.expected_rows
        member.num_sharing, member.prompt_rows = num_sharing, prompt_rows
        member.other_rows = decoded_rows + prompt_rows

    def _leave(self, member: Member, failure: Exception | None = None) -> None:
        """End a member and free its slot; its answer is learnt."""
        self._members.remove(member)
        self._executor.interruption.leave(member.generation.claim)
        stats = member.run.stats
        if failure is None:
            stats.finish_reason = stats.finish_reason or "cancelled"
        try:
            member.steps.close()
            if member.waiting is not None:  # an interrupt came between its pass and its loop, which knows nothing of it
                with suppress(EdgespecError):
                    member.run.target.restore()
            self._executor.conclude(member.run, member.slot.pool)
        finally:
            member.slot.is_taken = False
            member.slot.latest_use = self._num_passes
            member.generation.ended(failure)
