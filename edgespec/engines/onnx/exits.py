"""An early exit: the first layers and the head of a graph draft, and the target's pass goes on behind these layers.

The graph is cut into three: embeddings and the first layers; the other layers; final norm and head. Between two layers
the hidden state is two values, `residual` and `delta`, which the next layer's first norm adds; parts pass on both, so
that their results are bitwise those of the whole graph. The exit's keys and values stay in the target's own cache and
its states here; the target's pass reuses those of rows whose tokens were drafted. In reproducible mode all parts have
passes of the pinned width class, so that the bits of a state do not depend on which pass computed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import EarlyExit
from edgespec.engines.onnx.graph import PAST, CacheEntry, Graph, drop_dead
from edgespec.engines.onnx.head import LOGITS
from edgespec.engines.onnx.library import Device
from edgespec.engines.onnx.passes import ELEMENTS, Passes, PassRows, SharedPasses, end_of_pass, rows_before
from edgespec.engines.onnx.sessions import open_sessions
from edgespec.engines.onnx.settings import OnnxSettings
from edgespec.engines.onnx.source import Source
from edgespec.errors import CapabilityError, ConfigError, ContextFull
from edgespec.types import Logits, TokenIds

_DRAFTED = 128  # rows of states beyond those of the widest pass
NO_ROWS = np.zeros(0, np.intp)
HIDDEN_IN = ("edgespec.in.residual", "edgespec.in.delta")
HIDDEN_OUT = ("edgespec.out.residual", "edgespec.out.delta")


@dataclass(frozen=True, slots=True)
class Partition:
    """The three parts of one graph; `hidden_size` of a state, `element_type` as onnx numbers it."""

    first: Graph
    rest: Graph
    head: Graph
    hidden_size: int
    element_type: int


def partition(graph: Graph, path: Path, layers: int) -> Partition:
    """`graph`, as `read_graph` rewrote it, cut after layer `layers`.

    Raises ConfigError for a number of layers outside 1..all but one, CapabilityError for a graph whose layers have not
    the names that edgespec gives.
    """
    import onnx  # not before a graph is cut

    total = len(graph.cache) // 2
    model = onnx.ModelProto.FromString(graph.serialised)
    nodes = {node.name: node for node in model.graph.node}
    final = nodes.get(f"/model/layers.{total}/final_norm_layernorm/SkipLayerNorm")
    if graph.is_shared and final is not None and not 0 < layers < total:
        raise ConfigError(f"an exit after layer {layers} was asked for; {path} allows 1..{total - 1}")
    entry = nodes.get(f"/model/layers.{layers}/input_layernorm/SkipLayerNorm")
    if entry is None or final is None or not graph.is_shared:
        raise CapabilityError(
            f"{path} cannot be cut between layers: export it again with edgespec, or use another drafter"
        )
    cut, end = list(entry.input[:2]), list(final.input[:2])
    scale = next(tensor for tensor in model.graph.initializer if tensor.name == entry.input[2])
    kind = scale.data_type

    def part(low: int, high: int, taken: Sequence[str], given: Sequence[str]) -> Graph:
        """Layers low <= N < high: from the tokens or two `taken` values to the logits or two `given` ones."""
        found = onnx.ModelProto.FromString(graph.serialised)
        incoming, outgoing = dict(zip(taken, HIDDEN_IN, strict=False)), dict(zip(given, HIDDEN_OUT, strict=False))
        for node in found.graph.node:
            node.input[:] = [incoming.get(value, outgoing.get(value, value)) for value in node.input]
            node.output[:] = [outgoing.get(value, value) for value in node.output]
        cache = tuple(entry for entry in graph.cache if low <= _layer(entry) < high)
        wanted = {entry.present for entry in cache} | (set() if given else {LOGITS})
        outputs = [value for value in model.graph.output if value.name in wanted]
        del found.graph.output[:]
        found.graph.output.extend([*outputs, *_states(HIDDEN_OUT if given else (), kind)])
        found.graph.input.extend(_states(HIDDEN_IN if taken else (), kind))
        drop_dead(found.graph)
        return replace(
            graph,
            serialised=found.SerializeToString(),
            cache=cache,
            vocabulary_size=0 if given else graph.vocabulary_size,
            inputs=frozenset(value.name for value in found.graph.input),
            outputs=frozenset(value.name for value in found.graph.output),
            hidden_size=None,
        )

    return Partition(
        part(0, layers, (), cut),
        part(layers, total, cut, end),
        part(0, 0, end, ()),
        int(scale.dims[0]),
        kind,
    )


def _layer(entry: CacheEntry) -> int:
    found = PAST.fullmatch(entry.past)
    assert found is not None
    return int(found[1])


def _states(names: Sequence[str], kind: int) -> list[Any]:
    from onnx import helper

    return [helper.make_tensor_value_info(name, kind, [1, "sequence_length", None]) for name in names]


class Part(SharedPasses):
    """Passes of one part; `taken` and `given` are its two incoming and outgoing states, [2, rows, hidden size]."""

    def run_part(
        self, cache: int, rows: PassRows, taken: NDArray[Any] | None = None, given: NDArray[Any] | None = None
    ) -> Logits:
        binding = self._bound(cache, rows)
        for states, names, bind in (
            (taken, HIDDEN_IN, binding.bind_input),
            (given, HIDDEN_OUT, binding.bind_output),
        ):
            if states is not None:
                for name, state in zip(names, states, strict=True):
                    bind(name, "cpu", 0, state.dtype.type, (1, *state.shape), state.ctypes.data)
        self._run(binding)
        return self.logits[: rows.outputs.size]


@dataclass(slots=True)
class Drafted:
    """Tokens after a cache's text that the first layers have read: their states are rows of the buffer, in order."""

    cache: int = -1
    start: int = 0
    token_ids: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    def shared(self, cache: int, base: int, token_ids: TokenIds) -> int:
        """How many of `token_ids` [n], for the cells from `base` on, are the ones that were read there."""
        if cache != self.cache or not self.start <= base <= self.end:
            return 0
        held = self.token_ids[base - self.start :][: token_ids.size]
        differs = np.flatnonzero(np.array(held, np.int64) != token_ids[: len(held)])
        return int(differs[0]) if differs.size else len(held)


class ExitPasses(Passes):
    """`least_rows` of every pass of the first layers; `bytes_used` by states."""

    def __init__(self, source: Source, graph: Graph, settings: OnnxSettings, run_options: Any, layers: int) -> None:
        cut = partition(graph, source.path, layers)
        self.capacity = settings.cells
        self.least_rows, self.edge = 1, settings.edge
        self._parts: list[Part] = []
        self.device: Device
        for part in (cut.first, cut.rest, cut.head):
            sessions, self.device = open_sessions(part, source, settings)
            self._parts.append(Part(sessions, part, self.device, run_options, settings))
        self.sessions = [sessions for part in self._parts for sessions in part.sessions]
        self.bytes_per_token = sum(part.bytes_per_token for part in self._parts)
        self.logits = self._parts[-1].logits
        shape = 2, settings.max_rows + _DRAFTED, cut.hidden_size
        self._states, self._last_states = (np.zeros(shape, ELEMENTS[cut.element_type]) for _ in range(2))
        self._drafted = Drafted()
        self.bytes_used = self._states.nbytes + self._last_states.nbytes

    def run(self, cache: int, rows: PassRows) -> Logits:
        start = self._run_first(cache, rows.base, rows.token_ids)
        width = rows.token_ids.size
        states, last = self._states[:, start : start + width], self._last_states[:, :width]
        self._parts[1].run_part(cache, rows, states, last)
        self._drafted = Drafted()
        return self._run_head(rows.outputs, last)

    def draft(self, cache: int, base: int, token_ids: TokenIds) -> Logits:
        """Let the first layers read `token_ids` [n] into the cells from `base` on; the exit's logits [1, vocabulary].

        Scratch rows follow if there are fewer tokens than a pass needs.
        """
        scratch = max(self.least_rows - token_ids.size, 0)
        padded = np.concatenate((token_ids, np.zeros(scratch, np.int32)))
        start = self._run_first(cache, base, padded)
        row = start + token_ids.size - 1
        del self._drafted.token_ids[row + 1 :]
        return self._run_head(np.zeros(1, np.intp), self._states[:, row : row + 1])

    def drafted_length(self, cache: int, length: int, token_ids: TokenIds) -> int:
        """How many of `token_ids` [n] the first layers have read, if the cache holds the first `length` of them.

        States of other tokens are dropped.
        """
        drafted = self._drafted
        if drafted.cache != cache or not drafted.start <= length <= drafted.end:
            self._drafted = Drafted()
            return length
        agreed = drafted.shared(cache, drafted.start, token_ids[drafted.start :])
        del drafted.token_ids[agreed:]
        return max(length, drafted.end)

    def _run_first(self, cache: int, base: int, token_ids: TokenIds) -> int:
        """Compute missing states of `token_ids` for the cells from `base` on; the first one's row in the buffer."""
        drafted = self._drafted
        known = drafted.shared(cache, base, token_ids)
        fits = base - drafted.start + token_ids.size <= self._states.shape[1]
        if cache != drafted.cache or not drafted.start <= base <= drafted.end or not fits:
            drafted = self._drafted = Drafted(cache, base)
            known = 0
        start = base - drafted.start
        if known < token_ids.size:
            first = min(known, max(token_ids.size - self.least_rows, 0))
            del drafted.token_ids[start + first :]
            given = self._states[:, start + first : start + token_ids.size]
            self._parts[0].run_part(cache, PassRows(base + first, token_ids[first:], NO_ROWS), given=given)
            drafted.token_ids.extend(token_ids[first:].tolist())
        return start

    def _run_head(self, outputs: NDArray[np.intp], states: NDArray[Any]) -> Logits:
        """Logits of the rows `outputs` of the states [2, n, hidden size]."""
        low, high = int(outputs[0]), int(outputs[-1]) + 1
        ids = np.zeros(high - low, np.int32)
        return self._parts[2].run_part(0, PassRows(0, ids, outputs - low), states[:, low:high])

    def copy(self, source: int, destination: int, length: int) -> None:
        self._drafted = Drafted()
        for part in self._parts:
            part.copy(source, destination, length)

    def read(self, cache: int, length: int) -> bytes:
        return b"".join(part.read(cache, length) for part in self._parts)

    def write(self, cache: int, payload: bytes | memoryview) -> None:
        self._drafted = Drafted()
        length = len(payload) // self.bytes_per_token
        start = 0
        for part in self._parts[:2]:
            end = start + length * part.bytes_per_token
            part.write(cache, payload[start:end])
            start = end


class OnnxExit(EarlyExit):
    """The exit of sequence 0. `lengths` of all and its `cached_ids` are the engine's; `widest`: most rows of a pass."""

    def __init__(self, passes: ExitPasses, lengths: list[int], cached_ids: TokenIds, widest: int) -> None:
        self._passes, self._lengths, self._cached_ids, self._widest = passes, lengths, cached_ids, widest
        self._ids = np.zeros(passes.capacity, np.int32)
        self._end = 0
        self.bytes_used = passes.bytes_used

    def follow(self, token_ids: TokenIds) -> int | None:
        length = self._lengths[0]
        if not length < token_ids.size <= self._ids.size:
            return None
        if not np.array_equal(token_ids[:length], self._cached_ids[:length]):
            return None
        self._ids[: token_ids.size] = token_ids
        self._end = min(self._passes.drafted_length(0, length, token_ids), token_ids.size - 1)
        return self._end

    def feed(self, token_ids: TokenIds) -> Logits:
        if self._end + token_ids.size > self._ids.size:
            raise ContextFull(f"the context of {self._ids.size} tokens is full: draft fewer")
        self._ids[self._end : self._end + token_ids.size] = token_ids
        last, step = self._end + token_ids.size, self._widest
        while self._end < last:
            stop = end_of_pass(self._end, min(self._end + step, last), self._passes.edge)
            missing = max(self._passes.least_rows - (stop - self._end), 0)
            start = self._end - rows_before(self._end, missing, self._passes.edge)
            logits = self._passes.draft(0, start, self._ids[start:stop])
            self._end = stop
        row: Logits = logits[0]
        return row
