"""The layer of an EAGLE head in ONNX Runtime: a pass of one session reads pairs into the drafter's cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.head import HeadLayer, NewPairs, Pairs, States, frequencies_of, rotary_tables
from edgespec.engines.onnx.eagle_graph import Graph, fuse_graph, layer_graph, state_name
from edgespec.engines.onnx.library import run_options, translated
from edgespec.engines.onnx.pages import untouched_zeros
from edgespec.engines.onnx.sessions import open_session
from edgespec.formats.head_file import HeadFile

MOST_BOUND = 16  # pairs of a pass whose memory is kept
FIRST_POSITIONS = 2048  # in the rotary tables, which grow


class OnnxLayer(HeadLayer):
    """The layer of `heads` of the kind eagle, of any generation, on `threads` threads of the CPU.

    Raises ModelFileError for weights that are no numbers. `read` needs heads that it `takes`.
    """

    def __init__(self, heads: HeadFile, *, threads: int) -> None:
        self._sizes, self._frequencies = heads.manifest, frequencies_of(heads)
        self._state, self._num_scores = state_name(self._sizes), len(heads.frequent_rows)
        self.num_bytes = 0
        self._options = run_options()
        fuse = fuse_graph(heads)
        self._fuse = None if fuse is None else self._open(fuse, threads)
        self._session = self._open(layer_graph(heads), threads)
        self._bound: dict[tuple[int, int], _Bound] = {}
        self._tables = rotary_tables(self._frequencies, np.arange(FIRST_POSITIONS))
        self._sees_all = untouched_zeros(FIRST_POSITIONS, np.float32)
        self.num_bytes += sum(table.nbytes for table in self._tables)

    @staticmethod
    def takes(heads: HeadFile) -> bool:
        """Whether ONNX Runtime's attention takes the size of these heads."""
        return heads.manifest.head_dim % 16 == 0

    def _open(self, graph: Graph, threads: int) -> Any:
        self.num_bytes += graph.num_bytes
        return open_session(graph.serialised(), Path(), threads=threads, provider="cpu", arrays=graph.arrays)

    def fuse(self, features: States) -> States:
        assert self._fuse is not None
        with translated(self._options):
            found: States = self._fuse.run(None, {"features": features}, self._options)[0]
        return found

    def read(self, pairs: Pairs, new: NewPairs) -> tuple[States, States]:
        """As in the base class; on an empty cache the operator counts on from the first of the positions."""
        count, total = len(new.states), pairs.length + len(new.states)
        self._reach(max(total, int(new.positions.max()) + 1))
        bound = self._bound_for(count, new.scored)
        bound.fill(states=new.states, embedded=new.embedded, places=new.positions, latest=total - 1, total=total)
        bound.give(keys=pairs.keys, values=pairs.values, cos=self._tables[0], sin=self._tables[1])
        bound.give(bias=self._bias(count, total, new.sees))
        bound.take(new_keys=pairs.keys, new_values=pairs.values)
        with translated(self._options):
            self._session.run_with_iobinding(bound.binding, self._options)
        pairs.length = total
        return bound.arrays[self._state][0].copy(), bound.arrays["scores"][0]

    def _bound_for(self, count: int, scored: int) -> _Bound:
        """What a pass over `count` pairs reads and writes; that of a few is kept, since a draft is many of them."""
        found = self._bound.get((count, scored))
        if found is None:
            width = self._sizes.hidden_size
            found = _Bound(self._session.io_binding())
            found.give(states=np.zeros((1, count, width), np.float32), embedded=np.zeros((1, count, width), np.float32))
            found.give(places=np.zeros((1, count), np.int64), asked=np.arange(count - scored, count))
            found.give(latest=np.zeros(1, np.int32), total=np.zeros((), np.int32))
            found.take(scores=np.zeros((1, scored, self._num_scores), np.float32))
            found.take(**{self._state: np.zeros((1, scored, width), np.float32)})
            if count <= MOST_BOUND:
                self._bound[count, scored] = found
        return found

    def _reach(self, end: int) -> None:
        """See that the rotary tables hold the positions before `end`."""
        size = len(self._tables[0])
        if size < end:
            self._tables = rotary_tables(self._frequencies, np.arange(max(end, 2 * size)))

    def _bias(self, count: int, total: int, sees: NDArray[np.bool_] | None) -> NDArray[np.float32]:
        """What is added to scores of attention [1, 1, count, total]; that none sees a later pair is the operator's."""
        if sees is not None:
            return np.where(sees, np.float32(0), np.float32(-np.inf))[None, None]
        if self._sees_all.size < count * total:
            self._sees_all = untouched_zeros(2 * count * total, np.float32)
        return self._sees_all[: count * total].reshape(1, 1, count, total)

    def close(self) -> None:
        self._fuse = self._session = None
        self._bound.clear()


class _Bound:
    """Arrays that a session reads and writes; one is bound again only where it is another."""

    def __init__(self, binding: Any) -> None:
        self.binding = binding
        self.arrays: dict[str, NDArray[Any]] = {}

    def give(self, **arrays: NDArray[Any]) -> None:
        for name, array in self._new(arrays):
            self.binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def take(self, **arrays: NDArray[Any]) -> None:
        for name, array in self._new(arrays):
            self.binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def fill(self, **values: Any) -> None:
        """Write `values` into arrays that are bound."""
        for name, value in values.items():
            self.arrays[name][...] = value

    def _new(self, arrays: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, NDArray[Any]]]:
        for name, array in arrays.items():
            if self.arrays.get(name) is not array:
                self.arrays[name] = array
                yield name, array
