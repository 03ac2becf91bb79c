"""Checks a graph made of a GGUF: a wrong conversion is refused, what its type of weights loses is told.

The reference is llama.cpp on the same file. A graph that differs from it more than is usual for its type may be wrong,
may hold a model with outliers, or llama.cpp itself may be off, since it rounds inputs to 8 bits where weights are
quantised. The weights as float32 tell these apart: llama.cpp and a graph of the same conversion must then agree as
closely as any float32 export, and both the graph and llama.cpp on the file are compared with that.

Without llama.cpp the reference is the float32 graph of the same file, which shows the loss but no fault.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import Engine
from edgespec.export.accuracy import (
    Comparison,
    ExportRefused,
    Limits,
    blocks_of_logits,
    check_begin,
    compare,
    compare_logits,
    limits_of,
    open_engine,
)
from edgespec.export.onnx.from_gguf import convert_gguf
from edgespec.export.onnx.gguf_model import GgufModel
from edgespec.export.plan import PROBE_TOKENS, PROGRAM_BYTES
from edgespec.export.reference import Reference, probe_ids
from edgespec.export.resources import available_memory, free_bytes, human
from edgespec.export.tokens import PROBE_TEXTS, check_round_trip
from edgespec.installation import has_engine
from edgespec.types import Progress, no_progress

CHECK_CONTEXT = 320
ABSURD = Limits(None, 0.40, 1.5)  # as for the types below 4 bits
FLOAT, FLOAT_GGUF = "fp32", "f32"
STEPS = 4  # the last two only where the first two differ much
Figures = dict[str, dict[str, float]]
Logits = Sequence[NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found: differences by what was compared with the reference, and a warning or nothing."""

    reference: str
    figures: Figures
    warning: str = ""


def check_conversion(
    model: GgufModel, graph: Path, quant: str, temporary: Path, threads: int | None, progress: Progress = no_progress
) -> Checked:
    """Compare `graph`, made of `model` as `quant`, with llama.cpp or with the float32 graph.

    `temporary`: a folder for models in float32. Raises ExportRefused for a wrong graph, and the errors of the engines.
    """
    return _Check(model, graph, quant, temporary, threads, progress).run()


def check_vocabulary(model: GgufModel, folder: Path) -> str:
    """Check the tokenizer beside a graph; 'equal' to llama.cpp's, or 'round trip' without it. Raises ModelFileError."""
    check_round_trip(folder)
    if not has_engine("llamacpp"):
        return "round trip"
    from edgespec.export.gguf.tokenizer_check import check_tokenizer

    check_tokenizer(folder, model.path)
    return "equal"


@dataclass(frozen=True)
class _Check:
    model: GgufModel
    graph: Path
    quant: str
    temporary: Path
    threads: int | None
    progress: Progress

    def run(self) -> Checked:
        if not has_engine("llamacpp"):
            with self._float_graph() as path, self._opened(path) as engine:
                reference = reference_of(engine, "the float32 graph of the same file")
            return self._judged(reference, {}, self._logits(reference))
        self.progress(0, STEPS, "llama.cpp on the file")
        with self._opened(self.model.path) as engine:
            reference = reference_of(engine, "llama.cpp on the same file")
        self.progress(1, STEPS, "the graph")
        made = self._logits(reference)
        found = compare_logits(reference, made)
        if not (excess := found.complaint(limits_of(self.quant))):
            return Checked(reference.version, {"onnx": _figures(found)})
        if room := self._missing_room():
            _refuse(found.complaint(ABSURD), reference)
            return Checked(reference.version, {"onnx": _figures(found)}, f"{excess}; the cause was not found: {room}")
        return self._against_floats(reference.logits, made)

    def _against_floats(self, of_the_file: Logits, made: Logits) -> Checked:
        """The comparison with the weights as float32; the logits of llama.cpp on the file, and of the graph made."""
        self.progress(2, STEPS, "llama.cpp on the weights as float32")
        with self._float_gguf() as path, self._opened(path) as engine:
            reference = reference_of(engine, "llama.cpp on the file's weights as float32")
        figures = {"llamacpp": _figures(compare_logits(reference, of_the_file))}
        if self.quant == FLOAT:
            _refuse(compare_logits(reference, made).complaint(limits_of(FLOAT)), reference)
            return self._judged(reference, figures, made)
        self.progress(3, STEPS, "the graph in float32")
        with self._float_graph() as path, self._opened(path) as engine:
            exact = compare(reference, engine)
        _refuse(exact.complaint(limits_of(FLOAT)), reference)
        return self._judged(reference, {f"onnx_{FLOAT}": _figures(exact), **figures}, made)

    def _judged(self, reference: Reference, figures: Figures, made: Logits) -> Checked:
        found = compare_logits(reference, made)
        _refuse(found.complaint(ABSURD), reference)
        figures = {"onnx": _figures(found), **figures}
        excess = found.complaint(limits_of(self.quant))
        loss = f"the conversion is right, but {self.quant} loses more of this model than of most: {excess}"
        return Checked(reference.version, figures, loss if excess else "")

    def _opened(self, path: Path) -> Engine:
        context = min(CHECK_CONTEXT, self.model.config.max_positions)
        return open_engine("gguf" if path.suffix == ".gguf" else "onnx", path, context, self.threads)

    def _logits(self, reference: Reference) -> Logits:
        """Those of the graph on the texts of `reference`, kept, since a second opening takes as long as the passes."""
        with self._opened(self.graph) as engine:
            check_begin(reference, engine)
            return [_whole(engine, token_ids) for token_ids in reference.token_ids]

    @contextmanager
    def _float_gguf(self) -> Iterator[Path]:
        from edgespec.export.gguf.quantise import quantise

        path = self.temporary / f"float32-{self.model.path.stem}.gguf"
        try:
            quantise(self.model.path, path, FLOAT_GGUF, threads=self.threads, may_requantise=True)
            yield path
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def _float_graph(self) -> Iterator[Path]:
        folder = self.temporary / "float32"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            yield convert_gguf(self.model, folder, FLOAT)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _missing_room(self) -> str:
        """What a model in float32 would need and is not there; empty if it is."""
        table = self.model.config.vocab_size * self.model.config.hidden_size
        size = 4 * (self.model.num_parameters + table)
        memory = PROGRAM_BYTES + size + 3 * 4 * PROBE_TOKENS * self.model.config.vocab_size
        disk, available = free_bytes(self.temporary), available_memory()
        if size > disk:
            return f"that needs {human(size)} of disk, {human(disk)} are free"
        if available is not None and memory > available:
            return f"that needs {human(memory)} of memory, {human(available)} are available"
        return ""


def reference_of(engine: Engine, name: str) -> Reference:
    """What an open engine makes of the probe texts."""
    vocabulary = engine.vocabulary
    ids = probe_ids([vocabulary.encode(text) for text in PROBE_TEXTS.values()], engine.facts.context_length)
    logits = tuple(_whole(engine, row) for row in ids)
    return Reference(tuple(ids), logits, vocabulary.bos_id if vocabulary.adds_bos else None, name)


def _whole(engine: Engine, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
    return np.concatenate([rows.copy() for rows in blocks_of_logits(engine, token_ids)])


def _figures(found: Comparison) -> dict[str, float]:
    return {key: float(f"{value:.4g}") for key, value in dataclasses.asdict(found).items()}


def _refuse(complaint: str, reference: Reference) -> None:
    if complaint:
        raise ExportRefused(
            f"the conversion is wrong and was removed: compared with {reference.version}, {complaint}. Please report "
            "this with the model's name"
        )
