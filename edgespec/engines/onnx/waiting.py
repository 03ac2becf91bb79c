"""How the threads of a session wait for one another between operators: spinning, or asleep.

Spinning is faster on an idle machine, by 5 to 12% for a model of 1.2 billion weights. Beside another busy program a
thread that spins takes the core that the thread it waits for needs, and sleeping is up to 1.4 times as fast. ONNX
Runtime fixes the way when a session is made, so the other one needs a second session. It is made in a thread of its
own while passes go on, takes the first one's place, and the one that is no longer used is freed soon after. A core is
busy with it for as long as with the load, seconds for such a model: whoever asks for it weighs that (`ThreadControl`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import Any

from edgespec.engines.onnx.graph import Graph
from edgespec.engines.onnx.library import Device
from edgespec.engines.onnx.sessions import open_session
from edgespec.engines.onnx.settings import OnnxSettings
from edgespec.engines.onnx.source import Source
from edgespec.errors import EdgespecError
from edgespec.platform.memory import keep_one_arena, return_freed_memory, spare_memory

KEPT_S = 5.0  # the session that was replaced, in which a trial of the other may be given up again
ROOM = 1.5  # times the weights: what nobody may have planned for before they are held twice


class Sessions:
    """The session in use. `make(spins)` opens one, in `make_s`; `session` is open and spins; `weight_bytes` of each."""

    def __init__(self, make: Callable[[bool], Any], session: Any, weight_bytes: int, make_s: float = 0.0) -> None:
        self._make, self._weight_bytes, self.make_s = make, weight_bytes, make_s
        self._open: dict[bool, Any] = {True: session}
        self._spins = True
        self._making: threading.Thread | None = None
        self._left_s = 0.0  # when the other one was last in use
        self._was_dropped = False  # since the last pass

    @property
    def is_settled(self) -> bool:
        """Whether the session in use waits as was asked for."""
        return self._making is None

    def want(self, *, spins: bool) -> None:
        """Use a session that waits in this way as soon as there is one; the present one where memory is short."""
        if spins == self._spins:
            return
        self._spins, self._left_s = spins, 0.0
        if spins in self._open or self._making is not None or not self._has_room():
            return
        # In an arena of its own, what the thread allocates in between would keep the session's memory after its end.
        keep_one_arena()
        self._making = threading.Thread(target=self._add, args=(spins,), name="edgespec-session", daemon=True)
        self._making.start()

    @property
    def spins(self) -> bool:
        """Whether the session for the next pass spins."""
        return self._spins if self._spins in self._open else not self._spins

    def current(self) -> Any:
        """The session for the next pass."""
        if self._making is not None and not self._making.is_alive():
            self._making = None
        if self._was_dropped:  # and freed by now: the last pass may still have held it
            self._was_dropped = False
            return_freed_memory()
        found = self._open[self.spins]
        if len(self._open) > 1 and self._making is None:
            now_s = monotonic()
            self._left_s = self._left_s or now_s
            if now_s > self._left_s + KEPT_S:
                self._open = {self.spins: found}
                self._left_s, self._was_dropped = 0.0, True
        return found

    def close(self) -> None:
        """Wait for a session that is being made, which reads the model's files, and drop all."""
        if self._making is not None:
            self._making.join()
        self._open.clear()

    def _has_room(self) -> bool:
        spare = spare_memory()
        return spare is None or spare > ROOM * self._weight_bytes

    def _add(self, spins: bool) -> None:
        try:
            self._open[spins] = self._make(spins)
        except (EdgespecError, MemoryError, OSError):  # the last: the model's folder is gone
            return  # passes go on in the present one


def open_sessions(graph: Graph, source: Source, settings: OnnxSettings) -> tuple[Sessions, Device]:
    """Sessions of `graph`, whose weights are those of `source`. Raises as `open_session`."""

    arrays, folder = source.arrays(graph.cells), source.folder

    def make(spins: bool) -> tuple[Any, Device]:
        return open_session(
            graph.serialised,
            folder,
            arrays=arrays,
            threads=settings.threads,
            provider=settings.provider,
            spins=spins,
            flash=settings.flash,
        )

    started_s = perf_counter()
    session, device = make(True)
    make_s = perf_counter() - started_s
    return Sessions(lambda spins: make(spins)[0], session, graph.weight_bytes, make_s), device
