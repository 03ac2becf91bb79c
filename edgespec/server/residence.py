"""When a model is in memory: loaded once a request needs it, unloaded when none has for a while or another model needs
its place.

One thread loads and unloads all models, so that both never happen at once. Requests count as users from before they
wait until their answer has ended; nothing is unloaded under them.
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
from typing import TYPE_CHECKING, Protocol

from edgespec.config.options import LoadOptions
from edgespec.config.sources import Settings
from edgespec.errors import CapabilityError
from edgespec.formats.gguf.header import keeping_headers
from edgespec.formats.manifest import ModelPair
from edgespec.memory.fit import fit
from edgespec.memory.plan import Room
from edgespec.server.http_errors import HttpError, stopping

if TYPE_CHECKING:
    from edgespec.runtime import Model
    from edgespec.server.service import Known, Service


logger = logging.getLogger("edgespec")
_JOIN_S = 30.0
_LONGEST_WAIT_S = 3600.0  # of a lock, which takes no infinite times


class Places:
    """`most`: models that may be loaded at once. One thread loads and unloads them, so that plans of memory hold."""

    def __init__(self, most: int = 1) -> None:
        self.changed = threading.Condition()
        self._most = most
        self._all: list[Residence] = []
        self._thread = threading.Thread(target=self._run, name="edgespec-residence", daemon=True)

    def add(self, one: Residence) -> None:
        with self.changed:
            self._all.append(one)
            if len(self._all) == 1:
                self._thread.start()

    def close(self) -> None:
        """Wait for what is being unloaded, once all are stopped. A load cannot be interrupted."""
        with self.changed:
            is_over = all(each.is_stopping and not each.is_loading for each in self._all)
        if is_over and self._thread.is_alive():
            self._thread.join(_JOIN_S)

    @property
    def _loaded(self) -> list[Residence]:
        return [each for each in self._all if each.is_loaded]

    def _run(self) -> None:
        while (one := self._awaited()) is not None:
            try:
                if one.is_loaded:
                    one.unload()
                else:
                    self._load(one)
            except BaseException as exc:  # whatever it is, who waits must learn of it and the thread must go on
                one.fail(exc)

    def _awaited(self) -> Residence | None:
        """Wait until one is to be unloaded or loaded; None when the server stops."""
        with self.changed:
            while not all(each.is_stopping for each in self._all):
                over = next((each for each in self._loaded if each.is_over), None)
                if over is not None:
                    over.make_way(True)
                    return over
                wanted = [each for each in self._all if each.is_wanted]
                if wanted:
                    return min(wanted, key=lambda each: each.asked_s)
                left_s = (each.left_s for each in self._loaded if each.is_idle)
                self.changed.wait(min((*left_s, _LONGEST_WAIT_S)))
        return None

    def _load(self, one: Residence) -> None:
        if self._loaded:
            one.loading.check()  # before another model makes way for nothing
        while one.is_wanted and (beside := self._loaded) and not (len(beside) < self._most and one.loading.fits()):
            if (leaving := self._leaving(one)) is not None:
                leaving.unload()
        if one.is_wanted:
            one.load()

    def _leaving(self, one: Residence) -> Residence | None:
        """Wait until a loaded model is idle that can make way for `one`; None where that is not wanted any more."""
        with self.changed:
            while one.is_wanted:
                idle = [each for each in self._loaded if each.is_idle]
                leaving = min(idle or self._loaded, key=lambda each: each.used_s if idle else each.loaded_s)
                for each in self._loaded:
                    each.make_way(each is leaving)
                if idle:
                    return leaving
                self.changed.wait()
            for each in self._loaded:
                each.make_way(False)
        return None


class Loading(Protocol):
    """How a model comes into memory."""

    def known(self) -> Known:
        """What its files and options say of it before it is loaded. Raises as `check`."""

    def load(self) -> None:
        """Calls `Residence.has_loaded`."""

    def check(self) -> None:
        """Raises what can be known before."""

    def fits(self) -> bool:
        """Whether there is memory for it beside the models that are loaded. Takes its time."""


class Residence:
    """`unload`: frees the model; `places`: shared with the server's other models, None where there are none.

    `idle_s`: seconds without a request after which it is unloaded, None for never; a client may choose others for as
    long as the model then stays loaded. `name`: what messages call it.
    """

    loading: Loading

    def __init__(
        self,
        unload: Callable[[], None],
        idle_s: float | None,
        places: Places | None = None,
        *,
        name: str = "",
    ) -> None:
        self.can_load = False  # else it stays as it is
        self._unload, self._name = unload, f"model {name!r}"
        self._usual_s = self._idle_s = math.inf if idle_s is None else idle_s
        self._places = Places() if places is None else places
        self._changed = self._places.changed
        self._num_users = 0
        self.num_waiting = 0  # of them
        self.used_s = self.loaded_s = self.asked_s = 0.0  # when a request last ended, a load, the wait for it began
        self._awaited: Future[None] | None = None  # of the users that wait until it is loaded
        self._preloaded: Future[None] | None = None
        self.is_loaded = self.is_loading = self.is_stopping = self._has_to_leave = False

    def begin(self, loading: Loading) -> None:
        """Load the model when it is needed, and unload it when it is not used."""
        self.loading, self.can_load = loading, True
        self._places.add(self)

    @property
    def left_s(self) -> float:
        """Seconds until the model is unloaded if no request comes; infinite for never."""
        used_s = 0.0 if self._num_users else monotonic() - self.used_s
        return max(self._idle_s - used_s, 0.0)

    @property
    def is_open(self) -> bool:
        """Whether a request that comes now need not wait."""
        return self.is_loaded and not self._has_to_leave

    @property
    def is_wanted(self) -> bool:
        """Whether it is to be loaded."""
        return not self.is_loaded and not self.is_stopping and (self.num_waiting > 0 or self.is_loading)

    @property
    def is_idle(self) -> bool:
        """Whether no request uses it."""
        return self._num_users == self.num_waiting

    @property
    def is_over(self) -> bool:
        """Whether it is to be unloaded now."""
        return self.is_idle and not self.is_stopping and (self._has_to_leave or self.left_s <= 0)

    def make_way(self, has_to: bool) -> None:
        """Take no new requests and go once it is idle; `has_to` False: stay."""
        self._has_to_leave = has_to
        if self.is_open:
            self._answer(None)

    def preload(self) -> Future[None]:
        """Load it now, before a request needs it. Raises what loading raises, in the future."""
        with self._changed:
            self.is_loading, self.asked_s = True, monotonic()
            self._preloaded = Future()
            self._changed.notify_all()
        return self._preloaded

    async def enter(self) -> None:
        """Be a user from now on, and wait until the model is loaded. Raises HttpError 503 where that fails."""
        with self._changed:
            if self.is_stopping:
                raise stopping()
            if not self.is_loaded and not self.can_load:
                raise HttpError(503, "the model is not loaded: try again soon", code="loading")
            self._num_users += 1
            if self.is_open:
                return
            if self._awaited is None:
                self._awaited = Future()
                self._awaited.set_running_or_notify_cancel()  # one of its waiters cannot cancel it for all
                self.asked_s = monotonic()
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
            self.is_loaded, self.is_loading = True, False
            self._idle_s, self.used_s = self._usual_s, monotonic()
            self.loaded_s = self.used_s
            self._answer(None)
            self._changed.notify_all()

    def stop(self) -> None:
        """Load and unload nothing from now on, and refuse whoever waits."""
        with self._changed:
            self.is_stopping = True
            self._answer(stopping())
            self._changed.notify_all()

    def close(self) -> None:
        """`stop`, and wait for what is being unloaded. A load cannot be interrupted: its model is freed after it."""
        self.stop()
        self._places.close()

    def _answer(self, failure: Exception | None) -> None:
        awaited, self._awaited = self._awaited, None
        self.num_waiting = 0
        if awaited is None:
            return
        if failure is None:
            awaited.set_result(None)
        else:
            awaited.set_exception(failure)

    # -- what the thread of its places calls

    def load(self) -> None:
        self.is_loading, began_s = True, monotonic()
        self.loading.load()
        logger.info("%s is loaded, which took %.1f s", self._name, monotonic() - began_s)
        if (preloaded := self._preloaded) is not None and not preloaded.done():
            preloaded.set_result(None)
        if self.is_stopping:
            self.unload()

    def fail(self, why: BaseException) -> None:
        """It could not be loaded."""
        if (preloaded := self._preloaded) is not None and not preloaded.done():
            preloaded.set_exception(why)  # whose owner says it
        else:
            logger.warning("%s cannot be loaded: %s", self._name, why)
        message = f"{self._name} cannot be loaded: the server's log says why"
        with self._changed:
            self.is_loading = False
            self._answer(HttpError(503, message, code="load_failed"))

    def unload(self) -> None:
        """Who comes from now on waits until it is loaded again."""
        with self._changed:
            self.is_loaded = self._has_to_leave = False
        try:
            self._unload()
            logger.info("%s is unloaded: the next request loads it again", self._name)
        except Exception as exc:  # the next load may say more
            logger.warning("unloading %s failed: %s: %s", self._name, type(exc).__name__, exc)


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
        return settings if left is None else settings.above({"memory": max(left, 1)}, "this server")

    def keep(self, model: Model) -> None:
        """Hold `model` to the budget of all, of which it was told its share only."""
        if model.memory is not None and self.room.budget_bytes is not None:
            model.memory.watch.limit_bytes = self.room.most_in_budget(model.memory.plan)
