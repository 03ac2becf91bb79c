"""Passes of exports whose cache grows by concatenation (Optimum): every pass copies all keys and values.

1.6 to 1.9 times slower per token than a shared buffer; chains only, because such a graph makes its own causal mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.onnx.graph import MASK, Graph
from edgespec.engines.onnx.head import HIDDEN, LOGITS
from edgespec.engines.onnx.library import Device, library, translated
from edgespec.engines.onnx.pages import untouched_zeros
from edgespec.engines.onnx.passes import Cells, Passes, PassRows, bytes_per_token, element_of
from edgespec.engines.onnx.rewriting import POSITIONS
from edgespec.engines.onnx.settings import OnnxSettings
from edgespec.engines.onnx.waiting import Sessions
from edgespec.errors import CapabilityError
from edgespec.types import Logits

KNOWN_INPUTS = frozenset({"input_ids", MASK, POSITIONS})


class ConcatenatedPasses(Passes):
    """Caches as one array per layer and sequence, [1, heads, cells, head size], cut to size before each pass."""

    def __init__(
        self, sessions: Sessions, graph: Graph, device: Device, run_options: Any, settings: OnnxSettings
    ) -> None:
        past = {entry.past for entry in graph.cache}
        unknown = sorted(graph.inputs - KNOWN_INPUTS - past)
        if unknown:
            raise CapabilityError(f"this export has inputs that edgespec does not know: {', '.join(unknown)}")
        self.sessions = (sessions,)
        self._graph, self._options, self._head_size = graph, run_options, settings.head_size
        self.capacity = settings.cells(graph)
        self._caches: dict[int, list[Any]] = {}
        self.logits = untouched_zeros((settings.max_outputs(graph.vocabulary_size), graph.vocabulary_size), np.float32)
        hidden = [HIDDEN] if HIDDEN in graph.outputs else []
        self._outputs = [LOGITS, *hidden, *(entry.present for entry in graph.cache)]
        self.hidden_size = graph.hidden_size or 0
        self._hidden: NDArray[np.float32] | None = None
        self.bytes_per_token = bytes_per_token(graph, settings.head_size)

    def run(self, cache: int, rows: PassRows) -> Logits:
        total = rows.base + rows.token_ids.size
        feeds: dict[str, Any] = {"input_ids": rows.token_ids.astype(np.int64)[None]}
        if MASK in self._graph.inputs:
            feeds[MASK] = np.ones((1, total), np.int64)
        if POSITIONS in self._graph.inputs:
            feeds[POSITIONS] = np.arange(rows.base, total, dtype=np.int64)[None]
        make = library().OrtValue.ortvalue_from_numpy
        feeds = {name: make(array) for name, array in feeds.items()}
        for entry, array in zip(self._graph.cache, self._cells(cache), strict=True):
            whole = array.shape[2] == rows.base
            feeds[entry.past] = make(array if whole else np.ascontiguousarray(array[:, :, : rows.base]))
        with translated(self._options):
            found, *present = self.sessions[0].current().run_with_ort_values(self._outputs, feeds, self._options)
        if HIDDEN in self._graph.outputs:
            self._hidden = present.pop(0).numpy()[0]
        self._caches[cache] = [value.numpy() for value in present]
        count = rows.outputs.size
        np.take(found.numpy()[0], rows.outputs, axis=0, out=self.logits[:count])
        return self.logits[:count]

    def hidden(self) -> NDArray[np.float32]:
        return super().hidden() if self._hidden is None else self._hidden

    def _cells(self, cache: int) -> list[Any]:
        if cache not in self._caches:
            self._caches[cache] = [
                np.zeros((1, entry.heads, 0, self._head_size), element_of(entry)) for entry in self._graph.cache
            ]
        return self._caches[cache]

    def copy(self, source: int, destination: int, length: int) -> None:
        self._caches[destination] = [array[:, :, :length].copy() for array in self._cells(source)]

    def read(self, cache: int, cells: Cells) -> bytes:
        return b"".join(array[0][:, cells].tobytes() for array in self._cells(cache))

    def write(self, cache: int, cells: Cells, payload: bytes | memoryview) -> None:
        length = len(payload) // self.bytes_per_token
        self._caches[cache], start = [], 0
        for entry in self._graph.cache:
            values = np.frombuffer(payload, element_of(entry), entry.heads * length * self._head_size, start)
            self._caches[cache].append(values.reshape(1, entry.heads, length, self._head_size).copy())
            start += values.nbytes
