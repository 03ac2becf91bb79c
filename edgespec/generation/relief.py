"""Frees memory between rounds where the budget is exceeded: saved states first, then draft models, never the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edgespec.config.values import DrafterName, as_size
from edgespec.control.base import Controller
from edgespec.engines.parked import ParkedStates
from edgespec.memory.watch import MemoryWatch
from edgespec.platform.memory import return_freed_memory


class Relief:
    """What a model can give up. `drop_models` closes its draft models and returns the drafters that had one."""

    def __init__(
        self, watch: MemoryWatch, parked: ParkedStates, drop_models: Callable[[], tuple[DrafterName, ...]]
    ) -> None:
        self._watch, self._parked, self._drop_models = watch, parked, drop_models
        self._is_helpless = False  # nothing was left to release, which was said

    def relieve(self, controllers: Callable[[], Iterable[Controller]]) -> str:
        """Free what is needed and say what was given up; empty where nothing is. `controllers` in use learn of it."""
        if not self._watch.excess():
            return ""
        return_freed_memory()  # what the allocator keeps for later is in the way of nobody
        excess = self._watch.excess_now()
        if not excess:
            return ""
        over = f"memory: {as_size(excess)} {self._watch.why}"
        saved = self._parked.num_bytes
        self._parked.clear()
        if saved >= excess:
            return f"{over}: saved states of other conversations dropped"
        names = self._drop_models()
        for controller in controllers():
            controller.drop(names)
        return_freed_memory()
        if names:
            return f"{over}: draft model released ({', '.join(names)}), drafters that need none stay on"
        if self._is_helpless:
            return ""
        self._is_helpless = True
        return f"{over}, and there is nothing left to release: use a smaller --ctx-size"
