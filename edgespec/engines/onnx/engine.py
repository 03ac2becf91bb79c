"""The ONNX Runtime engine on its own kernels: chains only, and a cache for each sequence.

A sequence's bits depend on its own tokens alone, and what others hold does not slow it down: sequences of a batch go
through the model one after another. In reproducible mode passes are padded into the width class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.closing import closed_on_failure
from edgespec.engines.base import Engine
from edgespec.engines.booked import SequenceRows, fault_of
from edgespec.engines.model_use import ModelUse
from edgespec.engines.onnx.graph import (
    HALF_ONLY,
    HIDDEN,
    LENGTHS,
    LOGITS,
    MASK,
    OUTPUT_ROWS,
    POSITIONS,
    TOTAL,
    Graph,
    bytes_per_token,
    read_graph,
)
from edgespec.engines.onnx.kernel_engine import HybridEngine, KernelEngine
from edgespec.engines.onnx.library import (
    Inputs,
    SessionEngine,
    Translated,
    bind_inputs,
    device_identity,
    library,
    open_session,
    providers_for,
    reason,
    version,
)
from edgespec.engines.onnx.settings import VALUES_AT_ONCE, OnnxSettings
from edgespec.engines.onnx.source import GraphSource, open_source
from edgespec.engines.onnx.tokenizer import TokenizerFile
from edgespec.engines.widths import METHOD, PREFIX, pinned_facts
from edgespec.errors import CapabilityError, EngineError, ModelFileError
from edgespec.platform.disk_cache import file_key, key_of
from edgespec.platform.machine import processor
from edgespec.types import Batch, Logits, TokenIds

LARGEST_HEAD, HEAD_STEP = 256, 8  # of attention in float16
CAST_NOTE = "attention is computed in float16 on this device, and cached keys and values are at most 16 bits"


class OnnxEngine(SessionEngine):
    """On ONNX Runtime's own kernels. Make it with `load`, which also makes those on ours.

    GroupQueryAttention writes new keys and values into the buffer that holds the old ones, so nothing is copied and a
    rollback only changes a length. Inputs and outputs are bound once per width.
    """

    def __init__(self, session: Any, source: GraphSource, graph: Graph, settings: OnnxSettings, note: str = "") -> None:
        """`graph`: as `settings.provider` runs it in `session`; `note`: what the user should know of that."""
        rows = settings.max_rows
        super().__init__(
            session,
            source,
            graph,
            settings,
            TokenizerFile(source.folder, graph.vocabulary_size),
            (rows, settings.max_outputs(graph.vocabulary_size)),
            (graph.cache[0].dtype,),
            max_batch=min(settings.max_batch, settings.context_length),
            kv_bytes_per_token=bytes_per_token(graph, settings.head_size),
            pinned_class=None,
            notes=(note,) if note else (),
            placement=device_identity(settings.provider),
        )
        self._graph = graph
        self._caches: dict[int, list[Any]] = {}  # by sequence, made when first used: an array for each of `graph.cache`
        self._tokens = np.zeros((settings.max_sequences, settings.context_length), np.int32)  # in their cells
        self._least_rows = 1  # narrower passes are padded
        self._ids, self._positions, self._output_rows = (np.zeros(rows, np.int64) for _ in range(3))
        self._lengths, self._total = np.zeros(1, np.int32), np.zeros(1, np.int32)
        self._counting = np.arange(settings.context_length + rows, dtype=np.int64)

    @classmethod
    def load(cls, path: Path, use: ModelUse | None = None, **changes: Any) -> OnnxEngine | KernelEngine:
        """Load `path` (model.onnx, its weights and tokenizer beside it) and measure what it can do.

        `changes`: of `use`.

        Raises ModelNotFound, ModelFileError, ConfigError for an option out of range, CapabilityError when this build
        or model cannot do what was asked.
        """
        use = replace(use or ModelUse(), **changes)
        try:
            source = open_source(path, is_draft=use.is_draft)
            read = partial(read_graph, source, hidden_states=use.hidden_states, state_layers=use.state_layers)
            graph, config = read(), source.config()
        except OSError as exc:
            raise ModelFileError(f"{path.parent} cannot be read: {exc.strerror or exc}") from exc
        settings = OnnxSettings.checked(graph, config, use)
        engine: OnnxEngine | KernelEngine
        if graph.head_sizes:
            if source.max_positions is not None:  # its rotary tables are made as long as they are needed
                graph = read(cells=settings.context_length)
            engine = _on_kernels(source, graph, settings)
        else:
            engine = _opened(read, source, graph, settings)
        engine.state_layers = use.state_layers
        with closed_on_failure(engine):
            _check_logits(engine, path)
            if use.reproducible and isinstance(engine, OnnxEngine):
                engine._find_class(source)
        return engine

    def _find_class(self, source: GraphSource) -> None:
        """Have a width class from now on. Raises CapabilityError where there is none."""
        settings, device = self.settings, self.facts.device
        if device == "cpu" and not settings.has_classes:
            raise CapabilityError(
                f"{source.path} has no reproducible mode on this processor: its attention heads have "
                f"{settings.head_size} values, ONNX Runtime's own kernels allow {VALUES_AT_ONCE} on x86, none "
                "elsewhere. Run the GGUF that it was made from, export it as q8_0 or q4_k_m, or use --no-reproducible"
            )
        widest = min(settings.widest, settings.max_batch, settings.context_length // 2 + 1)
        # What the bits depend on: files, machine, device, library and settings.
        kernels = settings.threads, device, device_identity(device), settings.state_layers or settings.hidden_states
        measured = widest, settings.context_length > PREFIX + widest
        files = map(file_key, source.files)
        key = key_of(METHOD, "onnx chains", *files, version(), processor(), kernels, measured)
        advice = "Use --no-reproducible, or another export (int8, int4)"
        self.facts = pinned_facts(self, key, widest=widest, advice=advice)
        assert self.facts.pinned_class is not None
        self._least_rows = self.facts.pinned_class[0]

    def drop_class(self) -> None:
        super().drop_class()
        self._least_rows = 1

    def _score(self, batch: Batch, placed: dict[int, SequenceRows]) -> Logits:
        if any(part.is_tree for part in placed.values()):
            raise CapabilityError(
                "ONNX Runtime's own kernels score chains only: trees need a GGUF, or an export to one of its types"
            )
        self._held.check()
        if len(placed) == 1:
            ((sequence, part),) = placed.items()
            return self._run(sequence, part, batch.outputs)
        logits, states = list[Logits](), list[NDArray[np.float32]]()
        for sequence, part in placed.items():
            logits.append(self._run(sequence, part, batch.outputs[part.rows]).copy())
            states.append(self._last_states.copy())
        self._last_states = np.concatenate(states)
        return np.concatenate(logits)

    def _run(self, sequence: int, part: SequenceRows, wanted: NDArray[np.bool_]) -> Logits:
        """One pass over a chain, with at least `_least_rows` rows, with and without logits.

        Tokens before the chain are scored again, with the same bits, so that no cell after it is needed. Where there
        are too few, at the start of a text, scratch rows follow instead.
        """
        width = part.count
        missing = max(self._least_rows - width, 0)
        shift = missing if missing <= part.base else 0
        ids = part.token_ids
        if missing:
            before = self._tokens[sequence, part.base - shift : part.base]
            ids = np.concatenate((before, ids, np.zeros(missing - shift, np.int32)))
        asked = np.flatnonzero(wanted)
        outputs = (asked if asked.size else np.array([width - 1])) + shift  # one is computed in any case
        outputs = np.concatenate((outputs, np.repeat(outputs[-1:], max(self._least_rows - outputs.size, 0))))
        self._pass(sequence, part.base - shift, ids, outputs)
        self._tokens[sequence, part.base : part.base + width] = part.token_ids
        self._last_states = self._hidden[shift : shift + width]
        return self._logits[: asked.size]

    def _pass(self, sequence: int, base: int, token_ids: TokenIds, outputs: NDArray[np.intp]) -> None:
        """Score `token_ids` [n], for the cells from `base` on: logits of the rows `outputs`, and hidden states."""
        width, count, total = token_ids.size, outputs.size, base + token_ids.size
        self._ids[:width] = token_ids
        self._positions[:width] = self._counting[base:total]
        self._output_rows[:count] = outputs
        self._lengths[0], self._total[0] = total - 1, total
        binding, on_device = self._bindings.of((sequence, width, count), self._bind), self.settings.provider != "cpu"
        if on_device:
            self._bind_rows(binding, width, count)  # which copies them to the device: a binding keeps that copy
        self._bindings.run(binding, on_device=on_device)

    def _bind_rows(self, binding: Any, width: int, count: int) -> None:
        inputs: Inputs = {
            "input_ids": ((1, width), self._ids),
            POSITIONS: ((1, width), self._positions),
            LENGTHS: ((1,), self._lengths),
            TOTAL: ((), self._total),
            OUTPUT_ROWS: ((count,), self._output_rows),
        }
        bind_inputs(binding, {name: each for name, each in inputs.items() if name in self._graph.inputs})

    def _bind(self, binding: Any, sequence: int, width: int, count: int) -> None:
        """For `width` rows, `count` of them with logits."""
        self._bind_rows(binding, width, count)
        for entry, buffer in zip(self._graph.cache, self._buffers(sequence), strict=True):
            binding.bind_ortvalue_input(entry.past, buffer)
            binding.bind_ortvalue_output(entry.present, buffer)
        self._bind_results(binding, width, count)

    def _buffers(self, sequence: int) -> list[Any]:
        """[1, heads, cells, head size] each, in the device's memory."""
        if sequence not in self._caches:
            settings, make = self.settings, library().OrtValue.ortvalue_from_numpy
            device = () if settings.provider == "cpu" else (settings.provider, 0)
            sizes = settings.context_length, settings.head_size
            self._caches[sequence] = [
                make(np.zeros((1, entry.heads, *sizes), entry.dtype), *device) for entry in self._graph.cache
            ]
        return self._caches[sequence]

    def _arrays(self, sequence: int) -> Iterator[NDArray[Any]]:
        """Keys and values [heads, cells, head size], by entry of the cache; from a device copies."""
        return (buffer.numpy()[0] for buffer in self._buffers(sequence))

    def _fill(self, sequence: int, arrays: Sequence[NDArray[Any]]) -> None:
        """Write `arrays`, as `_arrays` gives them, into the first cells."""
        for buffer, values in zip(self._buffers(sequence), arrays, strict=True):
            whole = buffer.numpy()
            whole[0, :, : values.shape[1]] = values
            if self.settings.provider != "cpu":
                buffer.update_inplace(whole)

    def _copy(self, source: int, destination: int) -> None:
        length = self._book.lengths[source]
        self._book.settle(destination, 0)
        self._fill(destination, [array[:, :length] for array in self._arrays(source)])
        self._tokens[destination] = self._tokens[source]

    def _state(self, sequence: int) -> bytes:
        length = self._book.lengths[sequence]
        tokens = self._tokens[sequence, :length].tobytes()
        return b"".join((tokens, *(array[:, :length].tobytes() for array in self._arrays(sequence))))

    def _restore(self, state: memoryview, length: int, sequence: int) -> None:
        self._book.settle(sequence, 0)
        self._tokens[sequence, :length] = np.frombuffer(state, np.int32, length)
        arrays, start = [], 4 * length
        for entry in self._graph.cache:
            shape = entry.heads, length, self.settings.head_size
            arrays.append(np.frombuffer(state, entry.dtype, np.prod(shape), start).reshape(shape))
            start += arrays[-1].nbytes
        self._fill(sequence, arrays)

    def _free(self) -> None:
        super()._free()
        self._caches.clear()


class ConcatenatedEngine(OnnxEngine):
    """Of exports whose cache grows by concatenation (Optimum): every pass copies all keys and values.

    It is 1.6 to 1.9 times slower per token.
    """

    def _pass(self, sequence: int, base: int, token_ids: TokenIds, outputs: NDArray[np.intp]) -> None:
        total, make = base + token_ids.size, library().OrtValue.ortvalue_from_numpy
        inputs = {
            "input_ids": token_ids.astype(np.int64)[None],
            MASK: np.ones((1, total), np.int64),
            POSITIONS: self._counting[None, base:total],
        }
        feeds = {name: make(array) for name, array in inputs.items() if name in self._graph.inputs}
        for entry, array in zip(self._graph.cache, self._buffers(sequence), strict=True):
            feeds[entry.past] = make(np.ascontiguousarray(array[:, :, :base]))
        names = [LOGITS, *([HIDDEN] if self._hidden.size else []), *(entry.present for entry in self._graph.cache)]
        with Translated(self._bindings.options):
            found, *present = self._bindings.session.run_with_ort_values(names, feeds, self._bindings.options)
        if self._hidden.size:
            self._hidden[: token_ids.size] = present.pop(0).numpy()[0]
        self._caches[sequence] = [value.numpy() for value in present]
        np.take(found.numpy()[0], outputs, axis=0, out=self._logits[: outputs.size])

    def _buffers(self, sequence: int) -> list[Any]:
        nothing = (np.zeros((1, each.heads, 0, self.settings.head_size), each.dtype) for each in self._graph.cache)
        return self._caches.get(sequence) or list(nothing)

    def _arrays(self, sequence: int) -> Iterator[NDArray[Any]]:
        return (array[0] for array in self._buffers(sequence))

    def _fill(self, sequence: int, arrays: Sequence[NDArray[Any]]) -> None:
        self._caches[sequence] = [values[None].copy() for values in arrays]


def _opened(read: Callable[..., Graph], source: GraphSource, exported: Graph, settings: OnnxSettings) -> OnnxEngine:
    """On the provider of `settings`, or on the best one that can run the whole graph, which `read` adapts to it.

    Raises as `providers_for` and `read_graph`, ModelFileError and CapabilityError as `open_session`.
    """
    *others, last = (replace(settings, provider=name) for name in providers_for(settings.provider))
    for each in others:
        if each.provider in HALF_ONLY and exported.is_shared and not exported.is_half:
            continue  # casting its attention was checked on processors only, so far: for those who ask for it
        with suppress(CapabilityError):  # the next one may have what this one lacks
            return _opened_on(read, source, exported, each)
    return _opened_on(read, source, exported, last)


def _opened_on(read: Callable[..., Graph], source: GraphSource, exported: Graph, settings: OnnxSettings) -> OnnxEngine:
    graph, provider = exported, settings.provider
    if provider in HALF_ONLY and exported.is_shared:
        if settings.head_size % HEAD_STEP or settings.head_size > LARGEST_HEAD:
            raise CapabilityError(
                f"attention on {provider} takes heads of at most {LARGEST_HEAD} values, in multiples of {HEAD_STEP}; "
                f"this model's have {settings.head_size}. Use --provider cpu"
            )
        graph = read(half=True)
    past = {entry.past for entry in graph.cache}
    if not graph.is_shared and (unknown := graph.inputs - {"input_ids", MASK, POSITIONS} - past):
        raise CapabilityError(f"this export has inputs that edgespec does not know: {', '.join(sorted(unknown))}")
    session = open_session(graph.serialised, source.folder, threads=settings.threads, provider=provider)
    kind = OnnxEngine if graph.is_shared else ConcatenatedEngine
    return kind(session, source, graph, settings, CAST_NOTE if graph.is_half > exported.is_half else "")


def _on_kernels(source: GraphSource, graph: Graph, settings: OnnxSettings) -> KernelEngine:
    if "cpu" not in providers_for(settings.provider):
        raise CapabilityError(
            f"this model cannot run on {settings.provider}: {reason(settings.provider, graph.serialised, '')}. Use "
            "--provider cpu"
        )
    kind = HybridEngine if graph.states else KernelEngine
    return kind(source, graph, replace(settings, provider="cpu"))


def _check_logits(engine: Engine, path: Path) -> None:
    """Raises ModelFileError where the weights are damaged; else leaves the engine empty."""
    count = min(2, engine.facts.max_batch, engine.vocabulary.size)
    try:
        fault = fault_of(engine.forward(Batch.chain(list(range(count)))))
    except EngineError as exc:
        fault = str(exc)
    if fault:
        raise ModelFileError(f"{path} is not a usable model: {fault}. Download or export it again")
    engine.rollback(0)
