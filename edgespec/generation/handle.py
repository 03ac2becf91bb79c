"""One request and its handle: token events one by one, blocking or not, and a result of all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from edgespec.acceptance import LOSSY
from edgespec.config import DrafterName, RuleName
from edgespec.errors import Cancelled
from edgespec.generation.executor import Events, Executor, Request
from edgespec.generation.turn import Caller, Claim
from edgespec.types import Closing, FinishReason, Stats, TokenEvent

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Result:
    """One finished generation. `token_ids` include the end token; `text` ends before it and before a stop string.

    `seed`: the one that was used. `logprobs`: natural log probabilities of the tokens under the target's raw softmax,
    before temperature, bias, penalties and truncation; `top_logprobs`: of each place, those of the likeliest tokens, as
    far as they were asked for.
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


class Generation(Closing):
    """The handle of one request; made by `Model.stream` and `Model.chat`.

    Iterate over it (`for` or `async for`) for its token events, or read it whole with `result()` (`await aresult()`).
    The model is touched when its first event is asked for: the request then waits for its turn, behind all that asked
    before, and keeps it until its last event was read, it is closed, or nobody holds the handle any more.
    `stats` are its own and fill while it runs. Any thread may call; steps of two threads follow one another.
    """

    def __init__(self, executor: Executor, request: Request, is_reproducible: Callable[[RuleName], bool]) -> None:
        self.stats = Stats(prompt_tokens=int(request.prompt_ids.size))
        self._executor, self._request, self._is_reproducible = executor, request, is_reproducible
        self._claim = Claim()
        self._source: Events | None = None
        self._emitted: list[TokenEvent] = []
        self._failure: Exception | None = None
        self._is_over = False

    # -- what is known of it

    @property
    def text(self) -> str:
        """What was read of it so far."""
        return "".join(event.text for event in self._emitted)

    @property
    def seed(self) -> int:
        """The seed in use, also where the request left it open."""
        return self._request.sampler.seed

    @property
    def is_over(self) -> bool:
        """Whether no more events come."""
        return self._is_over

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it has not, or when it failed."""
        return self.stats.finish_reason

    def __repr__(self) -> str:
        state = "not begun" if self._source is None else "running"
        if self._is_over:
            state = f"failed: {self._failure}" if self._failure else f"finished: {self.finish_reason}"
        tokens = f"{self.stats.new_tokens} tokens of a prompt of {self.stats.prompt_tokens}"
        return f"<Generation: {tokens}, drafter {self._request.drafter}, seed {self.seed}, {state}>"

    # -- reading it

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TokenEvent:
        """Raises Busy when the turn cannot come, StateError on a closed model, EngineError when decoding fails."""
        event = self._step(Caller.now())
        if event is None:
            raise StopIteration
        return event

    def result(self) -> Result:
        """Read it to its end and return all of it; what was read before is included. Raises as iterating."""
        return self._whole(Caller.now())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        """As `__next__`; a worker thread runs the step. Cancelling the task ends the generation."""
        event = await self._in_worker(self._step)
        if event is None:
            raise StopAsyncIteration
        return event

    async def aresult(self) -> Result:
        """As `result`, in a worker thread. Cancelling the task ends the generation."""
        return await self._in_worker(self._whole)

    async def _in_worker(self, function: Callable[[Caller], Answer]) -> Answer:
        """`function` in a worker thread once the turn is there; until then no thread waits."""
        import asyncio  # 30 ms that only async callers need, who have it

        caller = Caller.now()
        try:
            if not self._is_over:
                await self._executor.turn.wait(self._claim, caller, self._request.options.max_wait_s)
            step = asyncio.ensure_future(asyncio.to_thread(function, caller))
            step.add_done_callback(lambda done: done.cancelled() or done.exception())  # may come after a cancellation
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _whole(self, caller: Caller) -> Result:
        while self._step(caller) is not None:
            pass
        if self._failure is not None:
            raise self._failure
        request, events = self._request, self._emitted
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
            reproducible=self._is_reproducible(request.rule),
            lossless=request.rule not in LOSSY,
            stats=self.stats,
            top_logprobs=tops,
        )

    def _step(self, caller: Caller) -> TokenEvent | None:
        """The next event, or None when it is over. Waits for the turn when it has none yet."""
        if self._is_over:
            self._executor.settle(self._claim)
            return None
        with self._executor.turn.inside(self._claim, caller, self._request.options.max_wait_s):
            event = self._advance()
            if event is not None:
                self._emitted.append(event)
            if event is not None and event.finish_reason is not None:
                # The turn ends now, since a caller may know that this was the last one and not ask again; what is told
                # of the answer comes behind it, with the next call or the next turn.
                self._is_over = True
                self._executor.turn.give_back(self._claim)
            elif event is None or self._is_cancelled():
                self._end()
            return event

    def _advance(self) -> TokenEvent | None:
        if self._is_over or self._is_cancelled():
            return None
        try:
            if self._source is None:
                self._source = self._executor.begin(self._claim, self._request, self.stats)
            # A cancellation reaches the engines from `begin` on; one that came just before it is seen here.
            return None if self._is_cancelled() else next(self._source, None)
        except Cancelled:  # before the loop began, such as while costs were measured
            return None
        except BaseException as exc:
            self._failure = exc if isinstance(exc, Exception) else None
            self._end(failed=isinstance(exc, Exception))
            raise

    def _is_cancelled(self) -> bool:
        return self._claim.is_withdrawn

    def _end(self, *, failed: bool = False) -> None:
        if self._is_over:
            return
        self._is_over = True
        if not failed:
            self.stats.finish_reason = self.stats.finish_reason or "cancelled"
        try:
            self._executor.finish(self._claim)
        finally:
            self._executor.turn.give_back(self._claim)

    # -- ending it

    def cancel(self) -> None:
        """End it after at most one pass; before its first event it ends without one. Any thread, or a signal handler.

        No later generation is touched, however late this comes. Does not wait.
        """
        self._claim.withdraw()
        self._executor.interrupt(self._claim)

    def close(self) -> None:
        """End it now and give its turn back; waits for a step of another thread. Closing twice is allowed."""
        if self._is_over:
            self._executor.settle(self._claim)
            return
        self.cancel()
        if self._claim.inside is threading.current_thread():
            return  # from within its own step, which ends it
        with self._claim.step:
            self._end()

    async def aclose(self) -> None:
        """As `close`, without blocking the event loop."""
        import asyncio

        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # Nobody can read on: the next one's turn begins, and clears up. No lock may be taken in a finaliser.
        if not getattr(self, "_is_over", True):
            self._executor.turn.give_back(self._claim)
