"""The ONNX Runtime engine: every sequence has caches of its own, and a batch is one pass per sequence.

So the bits of a sequence depend on its own tokens alone, whatever the others do.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import Engine, EngineFacts, check_batch
from edgespec.engines.envelope import StateStamp
from edgespec.engines.measurements import file_key, key_of
from edgespec.engines.onnx.graph import Graph, read_graph
from edgespec.engines.onnx.library import library, version
from edgespec.engines.onnx.opening import cache_scales, open_passes, weight_files
from edgespec.engines.onnx.passes import PassRows
from edgespec.engines.onnx.settings import ModelConfig, OnnxSettings
from edgespec.engines.onnx.vocabulary import TokenizerFile
from edgespec.engines.rows import SequenceBook, SequenceRows, split_by_sequence
from edgespec.engines.widths import METHOD, pinned_facts
from edgespec.errors import BatchError, Cancelled, CapabilityError, EngineError, StateError
from edgespec.types import NO_PARENT, Batch, Logits


class OnnxEngine(Engine):
    """One ONNX model. Make it with `load`. Logits stay valid until the next `forward`."""

    vocabulary: TokenizerFile

    def __init__(self, path: Path, graph: Graph, settings: OnnxSettings, config: ModelConfig) -> None:
        self.vocabulary = TokenizerFile(path.parent, graph.vocabulary_size)
        self._options = library().RunOptions()
        self._max_outputs = settings.max_outputs(graph.vocabulary_size)
        self._passes, device = open_passes(path, graph, settings, self._options)
        self._book = SequenceBook(settings.max_sequences)
        self._ids = np.zeros((settings.max_sequences, settings.context_length), np.int32)
        self._gathered = np.zeros((0, graph.vocabulary_size), np.float32)
        self._hidden_rows = slice(0, 0)
        self._is_open = True
        self._stamp = StateStamp.of("onnx", weight_files(path), version(), device.provider, settings.cache_type)
        self.facts = EngineFacts(
            name="onnx",
            architecture=config.architecture,
            context_length=settings.context_length,
            max_sequences=settings.max_sequences,
            max_batch=min(settings.max_batch, settings.context_length),
            can_rollback=True,
            can_tree=self._passes.can_tree and not (graph.window and graph.window < settings.context_length),
            weight_bytes=graph.weight_bytes,
            kv_bytes_per_token=self._passes.bytes_per_token,
            width_classes=(),
            pinned_class=None,
            device=device.provider,
            threads=settings.threads,
        )

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        context_length: int | None = None,
        threads: int | None = None,
        max_sequences: int = 1,
        max_batch: int = 512,
        provider: str = "auto",
        cache_type: str = "f32",
        reproducible: bool | None = None,
        widest: int = 63,
    ) -> Self:
        """Load `path` (model.onnx, its weights and tokenizer beside it) and measure what it can do.

        `context_length` in tokens per sequence, None for the trained one (at most 4096); `threads` None for the
        physical cores; `provider`: auto, cpu, cuda, dml, webgpu; `cache_type`: f32 for what the export has, int8 for
        a quarter of its bytes; `reproducible` True demands a width class, None takes one if the model has it, False
        skips the measurement; `widest`, the widest pass measured.

        Raises ModelNotFound, ModelFileError, ConfigError for an option out of range, CapabilityError when this build
        or model cannot do what was asked.
        """
        graph = read_graph(path)
        config = ModelConfig.read(path.parent)
        settings = OnnxSettings.checked(
            graph,
            config,
            context_length=context_length,
            threads=threads,
            max_sequences=max_sequences,
            max_batch=max_batch,
            provider=provider,
            cache_type=cache_type,
            reproducible=reproducible,
            widest=widest,
        )
        if cache_type == "int8":
            graph = read_graph(path, cache_scales(path, graph, settings))
        engine = cls(path, graph, settings, config)
        if reproducible is not False:
            key = key_of(METHOD, "onnx", *map(file_key, weight_files(path)), version(), settings)
            advice = "Use an int8 or int4 export, or --no-reproducible"
            widest = settings.measured_widths
            facts = pinned_facts(engine, key, widest=widest, reproducible=reproducible, advice=advice)
            # A side branch is added up among its masked siblings, in another order than alone.
            engine.facts = replace(facts, can_tree=facts.can_tree and facts.pinned_class is None)
        return engine

    def forward(self, batch: Batch) -> Logits:
        self._require_open()
        check_batch(batch, self.facts, self.vocabulary.size, self._book.lengths)
        if np.count_nonzero(batch.outputs) > self._max_outputs:
            raise BatchError(f"a batch may ask for at most {self._max_outputs} rows of logits; split it")
        placed = split_by_sequence(batch, self._book.lengths)
        for sequence, part in placed.items():
            self._book.check_settled(sequence)
            if part.is_tree and not self.facts.can_tree:
                raise CapabilityError(f"{self._chains_only()}; draft chains")
        if self._options.terminate:
            self._options.terminate = False
            raise Cancelled("the pass was cancelled before it began; the cache is as before")
        logits = self._run_all(batch, placed)
        for sequence, part in placed.items():
            if not part.is_tree:
                self._ids[sequence, part.base : part.base + len(part.rows)] = part.token_ids
        self._book.record(placed)
        return logits

    def _run_all(self, batch: Batch, placed: dict[int, SequenceRows]) -> Logits:
        """One pass per sequence; the wanted rows of logits in the order of the batch."""
        if len(placed) == 1:
            ((sequence, part),) = placed.items()
            return self._run(sequence, part, batch.outputs)
        count = int(np.count_nonzero(batch.outputs))
        if len(self._gathered) < count:
            self._gathered = np.zeros((count, self.vocabulary.size), np.float32)
        place = np.cumsum(batch.outputs) - 1
        for sequence, part in placed.items():
            wanted = batch.outputs[part.rows]
            if not wanted.any():  # the rows are needed in the cache all the same
                self._run(sequence, part, np.arange(wanted.size) == wanted.size - 1)
            else:
                self._gathered[place[np.array(part.rows)[wanted]]] = self._run(sequence, part, wanted)
        return self._gathered[:count]

    def _run(self, sequence: int, part: SequenceRows, wanted: NDArray[np.bool_]) -> Logits:
        """One pass; a chain is padded into the pinned class, trees come only where there is none."""
        if part.is_tree and part.base == 0:
            return self._run_from_nothing(sequence, part, wanted)
        outputs = np.flatnonzero(wanted)
        if part.is_tree:
            rows, shift = PassRows(part.base, part.token_ids, part.parents, part.positions(), outputs), 0
        else:
            rows, shift = self._padded(sequence, part, outputs)
        self._hidden_rows = slice(shift, shift + len(part.rows))
        return self._passes.run(sequence, rows)[: outputs.size]

    def _padded(self, sequence: int, part: SequenceRows, outputs: NDArray[np.intp]) -> tuple[PassRows, int]:
        """A chain of at least as many rows, with and without logits, as the pinned class begins with, and where in it
        the part's own begin.

        Tokens before the part are scored again, to the same bits, so that no cell behind it is needed; at the start of
        a text, where there are not enough of them, scratch rows follow instead.
        """
        low = self.facts.pinned_class[0] if self.facts.pinned_class else 1
        missing = max(low - len(part.rows), 0)
        shift = missing if missing <= part.base else 0
        before = self._ids[sequence, part.base - shift : part.base]
        after = np.zeros(missing - shift, np.int32)
        ids = np.concatenate((before, part.token_ids, after)) if missing else part.token_ids
        outputs = outputs + shift
        if outputs.size < low:
            outputs = np.concatenate((outputs, np.repeat(outputs[-1:], low - outputs.size)))
        return PassRows(part.base - shift, ids, None, None, outputs), shift

    def _run_from_nothing(self, sequence: int, part: SequenceRows, wanted: NDArray[np.bool_]) -> Logits:
        """A tree on an empty cache: the first pass of a text counts positions by itself, so its root goes ahead."""
        if part.parents.count(NO_PARENT) > 1:
            raise BatchError("a tree with several roots needs at least one cached token; feed the prompt first")
        root = SequenceRows(0, [0], [NO_PARENT], part.token_ids[:1])
        first = self._run(sequence, root, np.ones(1, np.bool_)).copy()
        self._ids[sequence, 0] = part.token_ids[0]
        parents = [parent - 1 for parent in part.parents[1:]]
        rest = SequenceRows(1, part.rows[1:], parents, part.token_ids[1:])
        logits = self._run(sequence, rest, wanted[1:] if wanted[1:].any() else np.ones(len(parents), np.bool_))
        return np.concatenate((first[: int(wanted[0])], logits[: int(np.count_nonzero(wanted[1:]))]))

    def _chains_only(self) -> str:
        if self.facts.pinned_class:
            return "in reproducible mode ONNX Runtime scores chains only: a side branch's last bits would differ"
        return "this export scores chains only: its attention cannot be told who sees whom"

    def length(self, sequence: int = 0) -> int:
        self._require_open()
        self._book.check(sequence)
        return self._book.lengths[sequence]

    def rollback(self, to_length: int, sequence: int = 0) -> None:
        self._require_open()
        self._book.check_rollback(to_length, sequence)
        self._book.settle(sequence, to_length)

    def keep_path(self, rows: tuple[int, ...], sequence: int = 0) -> None:
        self._require_open()
        part, path = self._book.chosen(rows, sequence)
        if path != list(range(len(path))):
            self._passes.keep(sequence, part.base, path)
        self._ids[sequence, part.base : part.base + len(path)] = part.token_ids[path]
        self._book.settle(sequence, part.base + len(path))

    def fork(self, source: int, destination: int) -> None:
        self._require_open()
        self._book.check_settled(source)
        self._book.check(destination)
        if source != destination:
            length = self._book.lengths[source]
            self._book.settle(destination, 0)
            self._passes.copy(source, destination, length)
            self._ids[destination] = self._ids[source]
            self._book.settle(destination, length)

    def save_state(self, sequence: int = 0) -> bytes:
        self._require_open()
        self._book.check_settled(sequence)
        length = self._book.lengths[sequence]
        return self._stamp.wrap(self._ids[sequence, :length].tobytes() + self._passes.save(sequence, length), length)

    def load_state(self, state: bytes, sequence: int = 0) -> None:
        self._require_open()
        self._book.check(sequence)
        payload, length = self._stamp.unwrap(state)
        if length > self.facts.context_length:
            raise StateError(f"the state holds {length} tokens, this context {self.facts.context_length}")
        self._book.settle(sequence, 0)
        self._ids[sequence, :length] = np.frombuffer(payload, np.int32, length)
        self._passes.load(sequence, payload[4 * length :], length)
        self._book.settle(sequence, length)

    def hidden_states(self) -> NDArray[np.float32]:
        self._require_open()
        return self._passes.hidden()[self._hidden_rows]

    def cancel(self) -> None:
        self._require_open()
        self._options.terminate = True

    def clear_cancel(self) -> None:
        self._require_open()
        self._options.terminate = False

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            del self._passes

    def _require_open(self) -> None:
        if not self._is_open:
            raise EngineError("this engine is closed; load the model again")
