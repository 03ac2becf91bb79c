"""Continuous batching: the rows of several generations on one engine, packed into shared passes; one alone is a case.

Each generation is the loop of `decode`, which asks for its passes. Every `step` packs the waiting rows - a chunk of a
prompt, plain rows, drafts - into one pass, as many as fit, longest waiting first. Generations that use a draft model
first share its passes, one token each, until their drafts are complete. If an engine cannot pack, as those of other
kernels in reproducible mode, each gets its own pass in turn. Controllers are told what another row costs at the
width that the pass already has.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Self
from weakref import WeakMethod

import numpy as np

from edgespec.control.base import Controller
from edgespec.control.cost import WIDEST
from edgespec.control.threads import Started
from edgespec.engines.base import Engine
from edgespec.engines.sequence import PassRequest
from edgespec.errors import Cancelled, EdgespecError
from edgespec.generation.decode import Steps, steps
from edgespec.generation.handle import Generation, Result
from edgespec.generation.run_state import Run
from edgespec.generation.slots import Slot
from edgespec.generation.turn import Claim
from edgespec.reports import PromptProgress, TokenEvent
from edgespec.sampling.acceptance import RULES
from edgespec.types import Logits, packed

if TYPE_CHECKING:
    from edgespec.generation.executor import Executor

# Of prompts in a pass that answers wait for: more would make them wait for long. Half where hidden states are read,
# since a pass with those may ask for logits of all its rows.
PROMPT_ROWS = 64
_ALONE = 1, 0, 0
MOST_OUTPUTS = WIDEST - 1  # rows with logits in a pass


def no_event(_event: TokenEvent) -> None:
    """Ignores an event."""


@dataclass(eq=False, slots=True)
class Member:
    """One running generation. `on_event` is called with each of its events, `on_end` with what ended it.

    `waiting`: the pass that its loop asked for at `asked_s`, one of a draft model if it `is_drafting`; `reply`: the
    logits or the failure of that pass, with which the loop goes on. `beside`: how many sequences decode in the target's
    next pass, and the others' rows, those of prompts among them, that its latest draft was priced with; `latest_pass`:
    number of its latest pass of the target, in which it had `latest_rows`.
    """

    claim: Claim
    run: Run
    slot: Slot
    steps: Steps[None]
    controller: Controller | None
    on_event: Callable[[TokenEvent], None]
    on_end: Callable[[Exception | None], None]
    latest_pass: int
    waiting: PassRequest | None = None
    reply: Logits | Exception | None = None
    asked_s: float = 0.0
    is_drafting: bool = False
    beside: tuple[int, int, int] = _ALONE
    latest_rows: int = 1

    @property
    def is_reading(self) -> bool:
        """Whether its prompt is still being read."""
        return not self.run.stats.new_tokens

    @property
    def asked(self) -> PassRequest:
        """The pass that it waits for."""
        assert self.waiting is not None
        return self.waiting

    @property
    def expected_rows(self) -> int:
        """Its rows in the target's next pass; as many as in its last one while it drafts or decides."""
        return self.latest_rows if self.waiting is None or self.is_drafting else self.waiting.batch.width


class ContinuousBatch:
    """The generations that run at once on one model; `Model.batch` lends it, within which it may be used.

    One thread calls it. `Generation.cancel`, which any thread may call, ends a generation before the next pass.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._members: list[Member] = []
        self._num_passes = 0
        self._can_pack = False

    @property
    def claims(self) -> list[Claim]:
        """Of those that have begun and not ended. For any thread."""
        return [member.claim for member in list(self._members)]

    @property
    def num_running(self) -> int:
        """How many have begun and not ended."""
        return len(self._members)

    @property
    def is_wanted_elsewhere(self) -> bool:
        """Whether another caller waits for the model, which it gets when this batch is over."""
        return self._executor.turn.num_queued > 1

    def has_room(self, generation: Generation) -> bool:
        """Whether it can begin now."""
        return bool(self._executor.slots.free(generation.request.options))

    def begin(
        self,
        generation: Generation,
        on_event: Callable[[TokenEvent], None] = no_event,
        on_prompt: Callable[[PromptProgress], None] | None = None,
    ) -> None:
        """Begin a generation of this model that nobody reads; there must be room for it. Its handle is filled.

        `on_prompt` is told how much of its prompt is read. Raises CapabilityError for a drafter that the model lacks.
        """

        def receive(event: TokenEvent) -> None:
            generation.receive(event)
            on_event(event)

        slot = self._executor.slots.take(generation.request)
        self._move_on(self._joined(generation, slot, receive, generation.ended, on_prompt))

    def begin_alone(self, generation: Generation) -> None:
        """Begin one that its handle reads with `next_event`; nothing else runs. Raises as `begin`."""
        self.end_all()  # a handle that was dropped gave its turn back, but could not end its generation
        ended = WeakMethod(generation.ended)  # the handle is not kept, so that it can be dropped

        def end(failure: Exception | None) -> None:
            if (method := ended()) is not None:
                method(failure)

        member = self._joined(generation, self._executor.slots.take_first(), no_event, end)
        self._look_around(member)

    def _joined(
        self,
        generation: Generation,
        slot: Slot,
        on_event: Callable[[TokenEvent], None],
        on_end: Callable[[Exception | None], None],
        on_prompt: Callable[[PromptProgress], None] | None = None,
    ) -> Member:
        request, threads = generation.request, self._executor.pool.threads
        try:
            controller = slot.pool.controller(request.options)
            run = self._executor.run_of(request, generation.stats, slot.sequence, self._controllers)
        except BaseException:
            slot.is_taken = False
            raise
        run.on_prompt = on_prompt
        loop = steps(run, controller, RULES[request.rule])
        member = Member(generation.claim, run, slot, loop, controller, on_event, on_end, self._num_passes)
        if threads is not None and not self._members:
            threads.begin()
        self._members.append(member)
        self._executor.clear_cancel()
        return member

    def _controllers(self) -> list[Controller]:
        return [member.controller for member in self._members if member.controller is not None]

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

    def step(self) -> None:
        """Run one pass for those that wait longest, and each of them up to its next pass; drop the withdrawn ones.

        Raises StateError if the model was closed meanwhile, and what a callback raises, which ends all of them.
        """
        self._executor.turn.require_open()
        for member in [member for member in self._members if member.claim.is_withdrawn]:
            self._leave(member)
        chosen = self._chosen()
        try:
            for member in self._run(chosen) if chosen else ():
                self._move_on(member)
        except BaseException:  # of a callback: the others' passes have run, and would run again
            self.end_all()
            raise

    def next_event(self, claim: Claim) -> TokenEvent | None:
        """The next event of the one that began alone; None where it has ended, which its handle was told."""
        while self._members and not claim.is_withdrawn:
            (member,) = self._members
            if member.waiting is not None:
                if not self._run([member]):
                    continue
                self._look_around(member)
            if (event := self._resumed(member)) is not None:
                if event.finish_reason is not None:
                    self._leave(member)
                return event
        self.end_all()
        return None

    def end_all(self) -> None:
        """End all of them, finished or not. Their answers are learnt."""
        while self._members:
            self._leave(self._members[0])

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
        if len(waiting) == 1 or not engine.facts.can_pack:
            return [first]
        room = PassRoom.of(engine, gives_states=any(member.asked.hidden for member in waiting))
        if not first.is_drafting and any(not member.is_reading for member in waiting):
            room.prompt_rows = PROMPT_ROWS
        found = [first]
        room.takes(first, at_least=True)
        for member in waiting:
            if member is first or member.asked.cache.engine is not engine:
                continue
            if room.takes(member):
                found.append(member)
        return found

    # -- running

    def _run(self, chosen: Sequence[Member]) -> list[Member]:
        """Run one pass with the rows of the chosen; those that can go on, which are told its outcome."""
        started = Started.now()
        try:
            logits = self._logits([member.asked for member in chosen])
        except Cancelled:  # of a generation that has ended since: the caches are as before, and the pass is repeated
            return []
        except Exception as exc:
            if len(chosen) == 1:
                chosen[0].reply = exc
                return list(chosen)
            for member in chosen:  # each alone, to find out whose fault it is
                with suppress(EdgespecError):  # it fails again, alone
                    member.asked.cache.restore()
                for able in self._run([member]):
                    self._move_on(able)
            return []
        self._share(chosen, started)
        for member, rows in zip(chosen, logits, strict=True):
            member.reply = rows
        return list(chosen)

    def _share(self, chosen: Sequence[Member], started: Started) -> None:
        """Charge each member its part of a pass, by its rows or what these cost, and teach the costs what it took."""
        seconds = perf_counter() - started.wall_s
        widths = [member.asked.batch.width for member in chosen]
        num_rows = sum(widths)
        is_drafting = chosen[0].is_drafting
        if not is_drafting:
            self._num_passes += 1
            if (threads := self._executor.pool.threads) is not None:
                threads.passed(num_rows, seconds, started.lacking_s(threads.threads))
        for member, rows in zip(chosen, widths, strict=True):
            member.run.share_s = seconds * rows / num_rows
            if not is_drafting:
                member.latest_pass, member.latest_rows = self._num_passes, 1 if member.is_reading else rows
        if is_drafting or not any(member.controller is not None for member in chosen):
            return
        costs = self._executor.pool.costs
        costs.was_shared = len(chosen) > 1
        decoding = [member for member in chosen if not member.is_reading]
        if len(chosen) == 1 or not decoding:
            return
        widths = [member.latest_rows for member in decoding]
        prompt_rows = num_rows - sum(widths)
        if not prompt_rows:
            costs.observe_shared(widths, seconds)
        parts = costs.parts_of(widths, prompt_rows)
        scale = 1.0 if prompt_rows else seconds / sum(parts)  # the cost of a prompt cannot be separated
        for member, part in zip(decoding, parts, strict=True):
            member.run.share_s = part * scale

    def _logits(self, requests: Sequence[PassRequest]) -> list[Logits]:
        """The logits of each request's rows: of a shared pass a copy, where the loops may run passes between."""
        engine = requests[0].cache.engine
        gives_states = any(request.hidden for request in requests)
        if engine is self._executor.target and self._executor.slots.have_features:
            engine.give_hidden_states(gives_states)
        if len(requests) == 1:
            return [requests[0].run()]
        batches = [request.batch for request in requests]
        logits = engine.forward(packed(batches))
        if engine.facts.class_key:  # bits may be checked again
            logits = logits.copy()
        states = engine.hidden_states() if gives_states else None
        found: list[Logits] = []
        row = output = 0
        for request, batch in zip(requests, batches, strict=True):
            own = slice(row, row + batch.width)
            own_states = states[own].copy() if states is not None and request.hidden else None
            request.cache.took_part(row, own_states)
            row, begin = own.stop, output
            output += int(np.count_nonzero(batch.outputs))
            found.append(logits[begin:output])
        return found

    def _move_on(self, member: Member) -> None:
        """Run a member's loop up to its next pass, and hand its events on."""
        self._look_around(member)
        while (event := self._resumed(member)) is not None:
            member.on_event(event)

    def _resumed(self, member: Member) -> TokenEvent | None:
        """Run a member's loop up to its next event; None: it waits for a pass, or has ended."""
        reply, member.reply, member.waiting, member.is_drafting = member.reply, None, None, False
        try:
            step = member.steps.throw(reply) if isinstance(reply, Exception) else member.steps.send(reply)
        except StopIteration:
            self._leave(member)
        except Exception as exc:
            self._leave(member, exc)
        else:
            if not isinstance(step, PassRequest):
                return step
            member.waiting, member.asked_s = step, perf_counter()
            member.is_drafting = step.cache is not member.run.target
        return None

    def _look_around(self, member: Member) -> None:
        """Before a member goes on: how long it waited for others, and what else the target's next pass holds."""
        if member.waiting is not None and member.run.share_s is not None:
            member.run.others_s += perf_counter() - member.asked_s - member.run.share_s
        if not member.is_drafting:
            self._note_others(member)
        if member.controller is not None:  # all controllers decide by the same costs
            self._executor.pool.costs.share_passes(*member.beside)

    def _note_others(self, member: Member) -> None:
        if len(self._members) == 1:
            member.run.target.most_rows, member.beside = sys.maxsize, _ALONE
            return
        member.run.target.most_rows = PROMPT_ROWS // 2 if member.run.target.keeps_features else PROMPT_ROWS
        others = [other for other in self._members if other is not member] if self._can_pack else []
        decoding = [other.expected_rows for other in others if not other.is_reading]
        prompt_rows = max((other.expected_rows for other in others if other.is_reading), default=0)
        member.beside = 1 + len(decoding), sum(decoding) + prompt_rows, prompt_rows

    def _leave(self, member: Member, failure: Exception | None = None) -> None:
        """End a member and free its slot; its answer is learnt."""
        self._members.remove(member)
        stats = member.run.stats
        if failure is None:
            stats.finish_reason = stats.finish_reason or "cancelled"
        try:
            member.steps.close()
            if member.waiting is not None:  # its loop learnt nothing of a pass that was interrupted
                with suppress(EdgespecError):
                    member.run.target.restore()
            self._executor.conclude(member.run, member.slot.pool)
        finally:
            member.slot.is_taken = False
            member.slot.latest_use = self._num_passes
            member.on_end(failure)


@dataclass(slots=True)
class PassRoom:
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
        return cls(engine.widest_pass, MOST_OUTPUTS, engine.facts.max_branches, engine.widest_pass, gives_states)

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
