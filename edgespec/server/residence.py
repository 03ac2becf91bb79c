"""When a model is in memory: loaded once a request needs it, unloaded when none has for a while or another model needs
its place.

One thread loads and unloads all models, so that both never happen at once. Requests count as users from before they
wait until their answer has ended; nothing is unloaded under them.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from edgespec.config.options import LoadOptions
from edgespec.config.sources import Settings
from edgespec.errors import CapabilityError
from edgespec.formats.gguf.header import keeping_headers
from edgespec.formats.manifest import ModelPair
from edgespec.memory.fit import fit
from edgespec.memory.plan import Room

if TYPE_CHECKING:
    from edgespec.runtime import Model
    from edgespec.server.service import Known, Service


_JOIN_S = 30.0
_LONGEST_WAIT_S = 3600.0  # of a lock, which takes no infinite times


class Places:
    """`most`: models that may be loaded at once. One thread loads and unloads them, so that plans of memory hold."""

    def __init__(self, most: int = 1) -> None:
        self.changed = threading.Condition()
        self._most = most
        self._all: list[Service] = []
        self._thread = threading.Thread(target=self._run, name="edgespec-residence", daemon=True)

    def add(self, one: Service) -> None:
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
    def _loaded(self) -> list[Service]:
        return [each for each in self._all if each.loaded is not None]

    def _run(self) -> None:
        while (one := self._awaited()) is not None:
            try:
                if one.loaded is not None:
                    one.unload()
                else:
                    self._load(one)
            except BaseException as exc:  # whatever it is, who waits must learn of it and the thread must go on
                one.fail(exc)

    def _awaited(self) -> Service | None:
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

    def _load(self, one: Service) -> None:
        if self._loaded:
            one.files.known()  # raises before another model makes way for nothing
        while one.is_wanted and (beside := self._loaded) and not (len(beside) < self._most and one.files.fits()):
            if (leaving := self._leaving(one)) is not None:
                leaving.unload()
        if one.is_wanted:
            one.load()

    def _leaving(self, one: Service) -> Service | None:
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
        """What its files and options say of it before it is loaded. Raises what can be known then."""

    def load(self) -> None:
        """Calls `Service.use`."""

    def fits(self) -> bool:
        """Whether there is memory for it beside the models that are loaded. Takes its time."""


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
