"""The handle of one request (`Generation`): token events one by one, sync or async, or the whole `Result`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from edgespec.closing import Closing
from edgespec.config.values import LOSSY, DrafterName, RuleName
from edgespec.errors import StateError
from edgespec.generation.request import Request
from edgespec.generation.turn import Claim
from edgespec.reports import FinishReason, Stats, TokenEvent

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from edgespec.generation.executor import Executor

Returned = TypeVar("Returned")
_MOST_WORKERS = 4096  # made as they are needed


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation. `token_ids` include the end token; `text` excludes it, and the stop string if one matched.

    `seed`: the seed in use. `logprobs`: natural log probability of each token under the target's raw softmax, before
    temperature, bias, penalties and truncation; empty if not requested. `top_logprobs`: per token, (token id, log
    probability) of the most likely tokens; empty if not requested. `reproducible`: speculation did not change the
    tokens. `lossless`: it did not change their distribution.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[float, ...]
    seed: int
    drafter: DrafterName
    verify: RuleName
    reproducible: bool
    lossless: bool
    stats: Stats
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


@cache
def _workers() -> ThreadPoolExecutor:
    """Threads for asyncio tasks: those that wait for a turn must not keep the one that has it from going on."""
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(_MOST_WORKERS, "edgespec")


class Generation(Closing):
    """The handle of one request; returned by `Model.stream` and `Model.chat`.

    Iterate over it (`for` or `async for`) for its token events, or call `result()` (`await aresult()`) for all of them.
    The request joins the model's queue when its first event is read. It then uses the model alone until its last event
    was read, it is closed, or the handle is garbage collected. `stats` is updated while it runs. Any thread may call
    it; calls from several threads run one after another.
    """

    def __init__(self, executor: Executor, request: Request) -> None:
        self.stats = Stats(prompt_tokens=int(request.prompt_ids.size), notes=list(request.notes))
        self.request = request  # checked
        self.claim = Claim()  # its place in the queue, by which it is cancelled
        self.is_over = False  # whether there are no more events
        self.failure: Exception | None = None  # that ended it
        self._executor = executor
        self._has_begun = False
        self._emitted: list[TokenEvent] = []

    # -- state

    @property
    def text(self) -> str:
        """Text of the events read so far."""
        return "".join(event.text for event in self._emitted)

    @property
    def seed(self) -> int:
        """The seed in use; chosen at random if the request gave none."""
        return self.request.sampler.seed

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it runs, or if it failed."""
        return self.stats.finish_reason

    def __repr__(self) -> str:
        state = "running" if self._has_begun else "not started"
        if self.is_over:
            state = f"failed: {self.failure}" if self.failure else f"finished: {self.finish_reason}"
        tokens = f"{self.stats.new_tokens} tokens after a prompt of {self.stats.prompt_tokens}"
        return f"<Generation: {tokens}, drafter {self.request.drafter}, seed {self.seed}, {state}>"

    # -- reading

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TokenEvent:
        """The next event. Raises Busy if waiting for the model is not possible, StateError if the model was closed,
        EngineError if decoding fails.
        """
        event = self._step(self.request.options.max_wait_s)
        if event is None:
            raise StopIteration
        return event

    def result(self) -> Result:
        """Generate to the end; includes the events that were read before. Raises the errors of iterating."""
        self._step(self.request.options.max_wait_s, to_end=True)
        if self.failure is not None:
            raise self.failure
        request, events = self.request, self._emitted
        tops = tuple(event.top_logprobs for event in events) if request.options.top_logprobs else ()
        return Result(
            text=self.text,
            token_ids=tuple(event.token_id for event in events),
            prompt_token_ids=tuple(request.prompt_ids.tolist()),
            finish_reason=self.finish_reason or "cancelled",
            logprobs=tuple(event.logprob for event in events if event.logprob is not None),
            seed=self.seed,
            drafter=request.drafter,
            verify=request.rule,
            reproducible=request.rule == "coupled" and self._executor.target.facts.pinned_class is not None,
            lossless=request.rule not in LOSSY,
            stats=self.stats,
            top_logprobs=tops,
        )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        """`__next__` in a worker thread. Cancelling the asyncio task ends the generation."""
        event = await self._in_worker(lambda: self._step(self.request.options.max_wait_s))
        if event is None:
            raise StopAsyncIteration
        return event

    async def aresult(self) -> Result:
        """`result` in a worker thread. Cancelling the asyncio task ends the generation."""
        return await self._in_worker(self.result)

    async def _in_worker(self, function: Callable[[], Returned]) -> Returned:
        """Run `function` in a worker thread, which waits for the turn."""
        import asyncio  # takes 30 ms, and only async callers need it

        self._executor.turn.require_open()
        try:
            step = asyncio.get_running_loop().run_in_executor(_workers(), function)
            step.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may end after a cancellation
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _step(self, max_wait_s: float | None, *, to_end: bool = False) -> TokenEvent | None:
        """The next event, or None at the end, to which `to_end` goes on. The first call waits for the turn."""
        if self.is_over:
            return None
        turn, batch = self._executor.turn, self._executor.batch
        with turn.inside(self.claim, max_wait_s):
            try:
                event = self._next()
                while to_end and event is not None:
                    event = self._next()
                return event
            except BaseException as exc:
                if turn.is_of(self.claim):
                    batch.end_all()
                if not self.is_over:
                    self.ended(exc if isinstance(exc, Exception) else None)
                raise
            finally:
                if self.is_over:
                    turn.leave(self.claim, for_good=True)

    def _next(self) -> TokenEvent | None:
        if self.is_over:  # by another reader
            return None
        batch = self._executor.batch
        if not self._has_begun and not self.claim.is_withdrawn:
            batch.begin_alone(self)
            self._has_begun = True
        event = batch.next_event(self.claim) if self._has_begun else None
        if event is not None:
            self._emitted.append(event)
        elif not self.is_over:  # cancelled before it began
            self.ended(None)
        elif self.failure is not None:
            raise self.failure
        return event

    # -- run by a batch

    def receive(self, event: TokenEvent) -> None:
        """The next event, from the batch that runs it in place of this handle."""
        self._emitted.append(event)

    def ended(self, failure: Exception | None) -> None:
        """The batch ended it, with `failure` if it failed."""
        turn, claim = self._executor.turn, self.claim
        if claim.inside is None and turn.is_shut:
            return  # the model was closed, which the next call says
        self.failure = failure
        if failure is None:
            self.stats.finish_reason = self.stats.finish_reason or "cancelled"
        self.is_over = True
        if claim.inside is None:  # a reader in another thread may wait for its turn behind the batch
            turn.leave(claim, for_good=True)

    # -- ending

    def cancel(self) -> None:
        """End this generation after at most one pass. Does not wait, and never affects a later generation.

        May be called from any thread or a signal handler.
        """
        self._executor.cancel(self.claim)

    def close(self) -> None:
        """End this generation and release the model; waits for a step in another thread. Closing twice is allowed."""
        if self.is_over:
            return
        self.cancel()
        if self.claim.inside is threading.current_thread():
            return  # called inside its own step, which will end it
        with suppress(StateError):  # the model was closed, which ended it
            self._step(None)

    async def aclose(self) -> None:
        """`close` without blocking the event loop."""
        import asyncio

        await asyncio.get_running_loop().run_in_executor(_workers(), self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # Release the turn; the next generation ends this one.
        if not getattr(self, "is_over", True):
            self._executor.turn.leave(self.claim, for_good=True)
