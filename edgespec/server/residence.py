"""When a model is in memory: loaded once a request needs it, unloaded when none has for a while or another model needs
its place.

One thread loads and unloads, so that both never happen at once. Requests count as users from before they wait until
their answer has ended; nothing is unloaded under them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING

from edgespec.config.options import LoadOptions
from edgespec.config.sources import Settings
from edgespec.errors import CapabilityError
from edgespec.formats.gguf.header import keeping_headers
from edgespec.formats.manifest import ModelPair
from edgespec.memory.fit import fit
from edgespec.memory.plan import Room
from edgespec.server.http_errors import HttpError

if TYPE_CHECKING:
    from edgespec.runtime import Model
    from edgespec.server.service import Service


class Places:
    """`most`: models that may be loaded at once. One is loaded or unloaded at a time, so that plans of memory hold."""

    def __init__(self, most: int = 1) -> None:
        self.changed = threading.Condition()
        self._most = most
        self._in_line: list[Residence] = []
        self._taken: list[Residence] = []

    def keep(self, one: Residence) -> None:
        """`one` has a place from the start: its owner loads it."""
        with self.changed:
            self._taken.append(one)

    def take(self, one: Residence) -> bool:
        """Wait for a place for `one`, which counts as being loaded then; False where nobody wants it any more."""
        with self.changed:
            self._in_line.append(one)
        try:
            return self._has_come_first(one)
        finally:
            with self.changed:
                self._in_line.remove(one)
                for each in self._taken:  # who comes next in line chooses again
                    each.make_way(False)
                self.changed.notify_all()

    def release(self, one: Residence) -> None:
        with self.changed:
            self._taken.remove(one)
            self.changed.notify_all()

    def _has_come_first(self, one: Residence) -> bool:
        beside: list[Residence] | None = None
        has_room = False
        while True:
            with self.changed:
                if not one.is_wanted:
                    return False
                is_next = self._in_line[0] is one and not any(each.is_changing for each in self._taken)
                if not is_next:
                    self.changed.wait()
                    continue
                if self._taken == beside:
                    if has_room:
                        one.is_loading = True
                        self._taken.append(one)
                        return True
                    self._clear()
                    self.changed.wait()
                    continue
                beside = list(self._taken)
            # Outside the lock, which requests take too: only who is first in line adds to those that are loaded.
            has_room = len(beside) < self._most and (not beside or one.fits())

    def _clear(self) -> None:
        """Have one of the loaded models make way."""
        idle = [each for each in self._taken if each.is_idle]
        leaving = min(idle, key=lambda each: each.used_s) if idle else min(self._taken, key=lambda each: each.loaded_s)
        for each in self._taken:
            each.make_way(each is leaving)


logger = logging.getLogger("edgespec")
_JOIN_S = 30.0
_LONGEST_WAIT_S = 3600.0  # of a lock, which takes no infinite times


@dataclass(frozen=True, slots=True)
class Loading:
    """How a model comes into memory. `load` calls `Residence.has_loaded`; `check` raises what can be known before.

    `fits`: whether there is memory for it beside the models that are loaded.
    """

    load: Callable[[], None]
    check: Callable[[], None] = lambda: None
    fits: Callable[[], bool] = lambda: True

    @classmethod
    def of(cls, given: Callable[[], None] | Loading) -> Loading:
        """`given`, or it as the load of a model that is alone."""
        return given if isinstance(given, Loading) else cls(given)


class Residence:
    """`unload`: frees the model; `places`: shared with the server's other models, None where there are none.

    `idle_s`: seconds without a request after which it is unloaded, None for never; a client may choose others for as
    long as the model then stays loaded. `name`: what messages call it. `is_at_rest`: nothing loads it until a request
    does, else its owner does the first time.
    """

    def __init__(
        self,
        loading: Loading,
        unload: Callable[[], None],
        idle_s: float | None,
        places: Places | None = None,
        *,
        name: str = "the model",
        is_at_rest: bool = False,
    ) -> None:
        self._loading, self._unload, self._name = loading, unload, name
        self._usual_s = self._idle_s = math.inf if idle_s is None else idle_s
        self._places = Places() if places is None else places
        self._changed = self._places.changed
        self._num_users = 0
        self.num_waiting = 0  # of them
        self.used_s = self.loaded_s = 0.0  # when a request for it last ended, when it was last loaded
        self._awaited: Future[None] | None = None  # of the users that wait until it is loaded
        self._is_loaded = self._is_stopping = self._is_unloading = self._has_to_leave = False
        self._was_loaded = not is_at_rest
        self.is_loading = not is_at_rest
        if not is_at_rest:
            self._places.keep(self)
        self._thread = threading.Thread(target=self._run, name="edgespec-residence", daemon=True)
        self._thread.start()

    @property
    def left_s(self) -> float:
        """Seconds until the model is unloaded if no request comes; infinite for never."""
        used_s = 0.0 if self._num_users else monotonic() - self.used_s
        return max(self._idle_s - used_s, 0.0)

    @property
    def is_open(self) -> bool:
        """Whether a request that comes now need not wait."""
        return self._is_loaded and not self._has_to_leave

    @property
    def is_wanted(self) -> bool:
        """Whether a request waits until it is loaded."""
        return self.num_waiting > 0 and not self._is_stopping

    @property
    def is_changing(self) -> bool:
        return self.is_loading or self._is_unloading

    @property
    def is_idle(self) -> bool:
        """Whether no request uses it."""
        return self._num_users == self.num_waiting

    def fits(self) -> bool:
        """Whether there is memory for it beside those that are loaded. Takes its time."""
        return self._loading.fits()

    def make_way(self, has_to: bool) -> None:
        """Take no new requests and go once it is idle; `has_to` False: stay."""
        if has_to == self._has_to_leave:
            return
        self._has_to_leave = has_to
        if self.is_open:
            self._answer(None)
        self._changed.notify_all()

    async def enter(self) -> None:
        """Be a user from now on, and wait until the model is loaded. Raises HttpError 503 where that fails."""
        with self._changed:
            if self._is_stopping:
                raise _stopping()
            self._num_users += 1
            if self.is_open:
                return
            if self._awaited is None:
                self._awaited = Future()
                self._awaited.set_running_or_notify_cancel()  # one of its waiters cannot cancel it for all
            awaited = self._awaited
            self.num_waiting += 1
            self._changed.notify_all()
        try:
            await asyncio.wrap_future(awaited)
        except BaseException:
            with self._changed:
                if self._awaited is awaited:  # it is still waited for
                    self.num_waiting -= 1
                self.leave()
            raise

    def leave(self) -> None:
        with self._changed:
            self._num_users -= 1
            self.used_s = monotonic()
            self._changed.notify_all()

    def keep_for(self, idle_s: float) -> None:
        """Unload the model after `idle_s` without a request, infinite for never, until it is loaded the next time."""
        with self._changed:
            self._idle_s = idle_s
            self._changed.notify_all()

    def has_loaded(self) -> None:
        with self._changed:
            self._is_loaded, self.is_loading = True, False
            self._idle_s, self.used_s = self._usual_s, monotonic()
            self.loaded_s = self.used_s
            self._answer(None)
            self._changed.notify_all()

    def stop(self) -> None:
        """Load and unload nothing from now on, and refuse whoever waits."""
        with self._changed:
            self._is_stopping = True
            self._answer(_stopping())
            self._changed.notify_all()

    def close(self) -> None:
        """`stop`, and wait for what is being unloaded. A load cannot be interrupted: its model is freed after it."""
        self.stop()
        if not self.is_loading:
            self._thread.join(_JOIN_S)

    def _answer(self, failure: Exception | None) -> None:
        awaited, self._awaited = self._awaited, None
        self.num_waiting = 0
        if awaited is None:
            return
        if failure is None:
            awaited.set_result(None)
        else:
            awaited.set_exception(failure)

    def _run(self) -> None:
        while (step := self._next_step()) is not None:
            step()

    def _next_step(self) -> Callable[[], None] | None:
        """Wait until there is something to do; None when the server stops."""
        with self._changed:
            while not self._is_stopping:
                if self.is_wanted and not self._is_loaded and not self.is_loading:
                    return self._load
                is_unused = self._is_loaded and self.is_idle
                if is_unused and (self._has_to_leave or self.left_s <= 0):
                    self._is_loaded = self._has_to_leave = False  # who comes from now on waits until it is loaded again
                    self._is_unloading = True
                    return self._unload_now
                self._changed.wait(min(self.left_s, _LONGEST_WAIT_S) if is_unused else None)
        return None

    def _load(self) -> None:
        again = " again" if self._was_loaded else ""
        try:
            self._loading.check()  # before another model makes way for nothing
            if not self._places.take(self):
                return
            began_s = monotonic()
            self._loading.load()
            self._was_loaded = True
            logger.info("%s is loaded%s, which took %.1f s", self._name, again, monotonic() - began_s)
        except BaseException as exc:  # whatever it is, who waits must learn of it and the thread must go on
            logger.warning("%s cannot be loaded%s: %s", self._name, again, exc)
            message = f"{self._name} cannot be loaded{again}: the server's log says why"
            failure = HttpError(503, message, code="load_failed")
            with self._changed:
                has_place, self.is_loading = self.is_loading, False
                self._answer(failure)
            if has_place:
                self._places.release(self)
            return
        if self._is_stopping:
            self._unload_now()

    def _unload_now(self) -> None:
        try:
            self._unload()
            logger.info("%s is unloaded: the next request loads it again", self._name)
        except Exception as exc:  # as above
            logger.warning("unloading %s failed: %s: %s", self._name, type(exc).__name__, exc)
        with self._changed:
            self._is_unloading = False
            self._places.release(self)


def _stopping() -> HttpError:
    return HttpError(503, "the server is stopping", code="stopping")


_SIGNALS = [signal.SIGINT, signal.SIGTERM]
if sys.platform == "win32":
    _SIGNALS.append(signal.SIGBREAK)  # the only one that a program can send to another one there


@contextmanager
def handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Within the block SIGINT and SIGTERM call `handler`. Only the main thread can do that: elsewhere, nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, former in previous.items():
            signal.signal(number, former)


# -- the memory that several models share


@dataclass(slots=True)
class SharedMemory:
    """What the models of a server that has room for several may take together. `room`: before any was loaded."""

    room: Room
    services: Sequence[Service] = ()

    @property
    def taken(self) -> tuple[int, int]:
        """(own, mapped) bytes of the loaded models, by their plans, and of own ones what they may keep beyond them."""
        own = mapped = 0
        for service in self.services:
            report = None if (loaded := service.loaded) is None else loaded.model.memory
            if report is not None:
                plan = report.plan
                used = plan.working_bytes - plan.process.own - plan.process.mapped
                own += plan.own_bytes - plan.process.own + report.parked_bytes
                mapped += max(used - (plan.own_bytes - plan.process.own), 0)
        return own, mapped

    @property
    def left_bytes(self) -> int | None:
        """What the budget leaves for one more; None without a budget."""
        return None if self.room.budget_bytes is None else self.room.budget_bytes - sum(self.taken)

    def fits(self, options: LoadOptions, pair: ModelPair) -> bool:
        """Whether there is memory for one more, with nothing given up for it."""
        left = self.left_bytes
        if options.context_length == "auto" or (left is not None and left < 1):  # auto takes all there is
            return False
        with keeping_headers():
            try:
                found = fit(replace(options, memory=left), pair)
            except CapabilityError:
                return False
        more = self.taken[1] if left is None else 0  # other models' weights seem to be free memory to the system
        fits = found.verdict.needed_bytes + more <= found.verdict.free_bytes
        return found.verdict.fit == "fits" and not found.given_up and fits

    def share(self, settings: Settings) -> Settings:
        """`settings` with what is left in place of the whole budget."""
        left = self.left_bytes
        if left is None:
            return settings
        return Settings({**settings.values, "memory": max(left, 1)}, settings.sources)

    def keep(self, model: Model) -> None:
        """Hold `model` to the budget of all, of which it was told its share only."""
        if model.memory is not None and self.room.budget_bytes is not None:
            model.memory.watch.limit_bytes = self.room.most_in_budget(model.memory.plan)
