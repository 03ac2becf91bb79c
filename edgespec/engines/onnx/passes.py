"""One pass over consecutive rows of one KV cache, and the caches that passes read and extend.

`SharedPasses`: GroupQueryAttention writes new keys and values into the buffer that holds the old ones, so nothing is
copied and a rollback only changes a length. Inputs and outputs are bound once per width.

`ConcatenatedPasses`: of exports whose cache grows by concatenation (Optimum), where every pass copies all keys and
values: 1.6 to 1.9 times slower per token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.onnx.graph import LENGTHS, MASK, POSITIONS, TOTAL, CacheEntry, Graph
from edgespec.engines.onnx.head import HIDDEN, LOGITS, OUTPUT_ROWS
from edgespec.engines.onnx.library import library, translated
from edgespec.engines.onnx.pages import untouched_zeros
from edgespec.engines.onnx.sessions import Bindings
from edgespec.engines.onnx.settings import OnnxSettings
from edgespec.errors import CapabilityError
from edgespec.types import Logits, TokenIds

ELEMENTS = {1: np.float32, 10: np.float16, 3: np.int8, 2: np.uint8}


@dataclass(slots=True)
class PassRows:
    """`token_ids` [n], a chain for the cells from `base` on; `outputs` [m], rows whose logits are wanted."""

    base: int
    token_ids: TokenIds
    outputs: NDArray[np.intp]


class Passes(ABC):
    """`bytes_per_token` of one cache; `capacity`, its cells; `logits` [outputs, vocabulary], which passes overwrite.

    `hidden_size` of the states that `hidden` gives, 0 if none.
    """

    hidden_size = 0

    bytes_per_token: int
    capacity: int
    logits: Logits

    @abstractmethod
    def run(self, cache: int, rows: PassRows) -> Logits:
        """Logits [m, vocabulary], a view that the next call overwrites; raises Cancelled, EngineError."""

    @abstractmethod
    def copy(self, source: int, destination: int, length: int) -> None:
        """Make the first `length` cells of `destination` those of `source`."""

    @abstractmethod
    def read(self, cache: int, length: int) -> bytes:
        """Keys and values of the first `length` cells."""

    @abstractmethod
    def write(self, cache: int, payload: bytes | memoryview) -> None:
        """Write what `read` returned into the first cells."""

    def hidden(self) -> NDArray[np.float32]:
        """Last hidden states [rows, hidden size] of the last pass, which the next one overwrites."""
        raise CapabilityError("this model was loaded without an output 'hidden_states'; load it with one")


def element_of(entry: CacheEntry) -> Any:
    if entry.element_type not in ELEMENTS:
        raise CapabilityError(f"a KV cache of onnx element type {entry.element_type} is not supported; use float32")
    return ELEMENTS[entry.element_type]


def bytes_per_token(graph: Graph, head_size: int) -> int:
    """Bytes of a token's keys and values."""
    return sum(entry.heads * head_size * np.dtype(element_of(entry)).itemsize for entry in graph.cache)


class SharedPasses(Passes):
    """Independent caches of one buffer per layer, made when first used."""

    def __init__(self, session: Any, graph: Graph, run_options: Any, settings: OnnxSettings) -> None:
        max_rows, tokens = settings.max_rows, graph.vocabulary_size
        max_outputs = settings.max_outputs(tokens)
        self._bindings = Bindings(session, run_options)
        self._graph, self._memory = graph, settings.provider
        self.capacity, self._head_size = settings.context_length, settings.head_size
        self._buffers: dict[int, list[Any]] = {}  # by cache: [1, heads, capacity, head size] per input
        self._ids = np.zeros(max_rows, np.int64)
        self._positions = np.zeros(max_rows, np.int64)
        self._output_rows = np.zeros(max_rows, np.int64)
        self._lengths = np.zeros(1, np.int32)
        self._total = np.zeros(1, np.int32)
        self.logits = untouched_zeros((max_outputs, tokens), np.float32)
        self.hidden_size = graph.hidden_size or 0
        self._hidden = np.zeros((max_rows if self.hidden_size else 0, self.hidden_size), np.float32)
        self._counting = np.arange(self.capacity + max_rows, dtype=np.int64)
        self.bytes_per_token = bytes_per_token(graph, settings.head_size)

    def run(self, cache: int, rows: PassRows) -> Logits:
        width, count, total = rows.token_ids.size, rows.outputs.size, rows.base + rows.token_ids.size
        self._ids[:width] = rows.token_ids
        self._positions[:width] = self._counting[rows.base : total]
        self._output_rows[:count] = rows.outputs
        self._lengths[0], self._total[0] = total - 1, total
        binding, on_device = self._bindings.of((cache, width, count), self._bind), self._memory != "cpu"
        if on_device:
            self._bind_rows(binding, width, count)  # which copies them to the device: a binding keeps that copy
        self._bindings.run(binding, on_device=on_device)
        return self.logits[:count]

    def _bind_rows(self, binding: Any, width: int, count: int) -> None:
        inputs: dict[str, tuple[tuple[int, ...], NDArray[Any]]] = {
            "input_ids": ((1, width), self._ids),
            POSITIONS: ((1, width), self._positions),
            LENGTHS: ((1,), self._lengths),
            TOTAL: ((), self._total),
            OUTPUT_ROWS: ((count,), self._output_rows),
        }
        for name, (shape, array) in inputs.items():
            if name in self._graph.inputs:
                binding.bind_input(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)

    def _bind(self, binding: Any, cache: int, width: int, count: int) -> None:
        """For `width` rows, `count` of them with logits."""
        self._bind_rows(binding, width, count)
        for entry, buffer in zip(self._graph.cache, self._cache_buffers(cache), strict=True):
            binding.bind_ortvalue_input(entry.past, buffer)
            binding.bind_ortvalue_output(entry.present, buffer)
        wanted = 1, count, self._graph.vocabulary_size
        binding.bind_output(LOGITS, "cpu", 0, np.float32, wanted, self.logits.ctypes.data)
        if HIDDEN in self._graph.outputs:
            shape = (1, width, self.hidden_size)
            binding.bind_output(HIDDEN, "cpu", 0, np.float32, shape, self._hidden.ctypes.data)

    def _cache_buffers(self, cache: int) -> list[Any]:
        if cache not in self._buffers:
            make = library().OrtValue.ortvalue_from_numpy
            device = () if self._memory == "cpu" else (self._memory, 0)
            self._buffers[cache] = [
                make(untouched_zeros((1, entry.heads, self.capacity, self._head_size), element_of(entry)), *device)
                for entry in self._graph.cache
            ]
        return self._buffers[cache]

    def _put(self, buffer: Any, values: NDArray[Any]) -> None:
        """Write `values` [heads, n, head size] to the beginning of a buffer; that of a device is read and sent back."""
        whole = buffer.numpy()
        whole[0, :, : values.shape[1]] = values
        if self._memory != "cpu":
            buffer.update_inplace(whole)

    def copy(self, source: int, destination: int, length: int) -> None:
        for ours, theirs in zip(self._cache_buffers(source), self._cache_buffers(destination), strict=True):
            self._put(theirs, ours.numpy()[0, :, :length])

    def read(self, cache: int, length: int) -> bytes:
        return b"".join(buffer.numpy()[0, :, :length].tobytes() for buffer in self._cache_buffers(cache))

    def write(self, cache: int, payload: bytes | memoryview) -> None:
        parts = _parts(payload, self._graph, self._head_size, self.bytes_per_token)
        for buffer, values in zip(self._cache_buffers(cache), parts, strict=True):
            self._put(buffer, values)

    def hidden(self) -> NDArray[np.float32]:
        return self._hidden if self.hidden_size else super().hidden()


KNOWN_INPUTS = frozenset({"input_ids", MASK, POSITIONS})


class ConcatenatedPasses(Passes):
    """Caches as one array per layer and sequence, [1, heads, cells, head size], cut to size before each pass."""

    def __init__(self, session: Any, graph: Graph, run_options: Any, settings: OnnxSettings) -> None:
        past = {entry.past for entry in graph.cache}
        unknown = sorted(graph.inputs - KNOWN_INPUTS - past)
        if unknown:
            raise CapabilityError(f"this export has inputs that edgespec does not know: {', '.join(unknown)}")
        self._session, self._graph, self._options, self._head_size = session, graph, run_options, settings.head_size
        self.capacity = settings.context_length
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
            found, *present = self._session.run_with_ort_values(self._outputs, feeds, self._options)
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

    def read(self, cache: int, length: int) -> bytes:
        return b"".join(array[0, :, :length].tobytes() for array in self._cells(cache))

    def write(self, cache: int, payload: bytes | memoryview) -> None:
        parts = _parts(payload, self._graph, self._head_size, self.bytes_per_token)
        self._caches[cache] = [values[None].copy() for values in parts]


def _parts(payload: bytes | memoryview, graph: Graph, head_size: int, bytes_per_token: int) -> Iterator[NDArray[Any]]:
    """The keys or values of a state [heads, tokens, head size], by entry of the cache."""
    length, start = len(payload) // bytes_per_token, 0
    for entry in graph.cache:
        values = np.frombuffer(payload, element_of(entry), entry.heads * length * head_size, start)
        yield values.reshape(entry.heads, length, head_size)
        start += values.nbytes
