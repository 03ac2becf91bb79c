"""Checks a graph that edgespec's own writer made: a wrong conversion is refused, what its type loses is told.

The reference is transformers where it is installed and the source is its folder, else llama.cpp on the same weights. A
graph that differs from it more than is usual for its type may be wrong, may hold a model with outliers, or llama.cpp
itself may be off, since it rounds inputs to 8 bits where weights are quantised. The weights as float32 tell these
apart: the reference and a graph of the same conversion must then agree as closely as any float32 export, and both the
graph and llama.cpp on the file are compared with that. Not quite as closely with GELU, which llama.cpp looks up in a
table of 16 bits: on Gemma 3 270M this moves logits by up to 0.11 of their spread, while the float32 graph is within
1e-4 of a computation in float64.

Without either the reference is the float32 graph of the same weights, which shows the loss but no fault.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import Engine
from edgespec.export.accuracy import (
    BLOCK,
    ExportRefused,
    Limits,
    blocks_of_logits,
    check_begin,
    compare_logits,
    limits_of,
    open_engine,
)
from edgespec.export.plan import PROBE_TOKENS, PROGRAM_BYTES
from edgespec.export.reference import Reference, probe_ids
from edgespec.export.resources import free_bytes, human
from edgespec.export.tokens import PROBE_TEXTS
from edgespec.formats.onnx.llama_config import LlamaConfig
from edgespec.platform.memory import free_memory
from edgespec.types import Progress, no_progress

CHECK_CONTEXT = 320
ABSURD = Limits(None, 0.40, 1.5)  # as for the types below 4 bits
FLOAT, HALF, FLOAT_GGUF = "fp32", "fp16", "f32"
MOST_LOGITS = 1 << 27  # 512 MB; of a larger vocabulary every second row of logits is compared, or fewer
STEPS = 4  # the last two only where the first two differ much
Figures = dict[str, dict[str, float]]
Logits = Sequence[NDArray[np.float32]]
Kept = Callable[[NDArray[np.float32]], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Made:
    """A graph that was made of a model of `config`, and what it is compared with, where it has not all tokens by those
    it has.

    `write_float`: writes the same as float32 into an empty folder, returns the graph; `gguf`: a file of the weights for
    llama.cpp; `reference`: what transformers makes of the folder. Both may be None.
    """

    graph: Path
    quant: str
    config: LlamaConfig
    num_parameters: int
    write_float: Callable[[Path], Path]
    gguf: Path | None = None
    reference: Reference | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found: differences by what was compared with the reference, and a warning or nothing."""

    reference: str
    figures: Figures
    warning: str = ""


def check_conversion(made: Made, temporary: Path, threads: int | None, progress: Progress = no_progress) -> Checked:
    """Compare a graph with its reference. `temporary`: a folder for models in float32.

    Raises ExportRefused for a wrong graph, and the errors of the engines.
    """
    return _Check(made, temporary, threads, progress).run()


@dataclass(frozen=True)
class _Check:
    made: Made
    temporary: Path
    threads: int | None
    progress: Progress

    def run(self) -> Checked:
        reference = None if self.made.reference is None else self._drafted(self.made.reference)
        if reference is None and self.made.gguf is None:
            if room := self._missing_room():
                return Checked("nothing", {}, f"not compared with its weights in float32: {room}")
            with self._float_graph() as path, self._opened(path) as engine:
                reference = self._reference(engine, "the float32 graph of the same weights")
            return self._judged(reference, {}, self._logits(reference))
        if reference is None:
            assert self.made.gguf is not None
            self.progress(0, STEPS, "llama.cpp on the file")
            with self._opened(self.made.gguf) as engine:
                reference = self._reference(engine, "llama.cpp on the same weights")
        self.progress(1, STEPS, "the graph")
        logits = self._logits(reference)
        found = compare_logits(reference, logits)
        if not (excess := found.complaint(limits_of(self.made.quant))):
            return Checked(reference.version, {"onnx": found.figures()})
        if room := self._missing_room():
            _refuse(found.complaint(ABSURD), reference)
            return Checked(reference.version, {"onnx": found.figures()}, f"{excess}; the cause was not found: {room}")
        return self._against_floats(reference, logits)

    def _against_floats(self, first: Reference, made: Logits) -> Checked:
        """The comparison with the weights as float32; the first reference's and the graph's logits."""
        reference, figures = first, Figures()
        if self.made.reference is None:
            self.progress(2, STEPS, "llama.cpp on the weights as float32")
            with self._float_gguf() as path, self._opened(path) as engine:
                reference = self._reference(engine, "llama.cpp on the weights as float32")
            figures = {"llamacpp": compare_logits(reference, first.logits).figures()}
        if self.made.quant == FLOAT:
            _refuse(compare_logits(reference, made).complaint(self._exact_limits()), reference)
            return self._judged(reference, figures, made)
        self.progress(3, STEPS, "the graph in float32")
        with self._float_graph() as path, self._opened(path) as engine:
            exact = compare_logits(reference, self._rows(reference, engine))
        _refuse(exact.complaint(self._exact_limits()), reference)
        return self._judged(reference, {f"onnx_{FLOAT}": exact.figures(), **figures}, made)

    def _judged(self, reference: Reference, figures: Figures, made: Logits) -> Checked:
        found = compare_logits(reference, made)
        _refuse(found.complaint(ABSURD), reference)
        figures = {"onnx": found.figures(), **figures}
        excess = found.complaint(limits_of(self.made.quant))
        loss = f"the conversion is correct, but {self.made.quant} loses more of this model than of most: {excess}"
        return Checked(reference.version, figures, loss if excess else "")

    def _exact_limits(self) -> Limits:
        """How closely a float32 graph must agree with the reference."""
        rounds = self.made.reference is None and self.made.config.activation == "gelu"
        return limits_of(HALF if rounds else FLOAT)

    def _opened(self, path: Path) -> Engine:
        context = min(CHECK_CONTEXT, self.made.config.max_positions)
        return open_engine("gguf" if path.suffix == ".gguf" else "onnx", path, context, self.threads)

    def _logits(self, reference: Reference) -> Logits:
        """Those of the graph on the texts of `reference`, kept, since a second opening takes as long as the passes."""
        with self._opened(self.made.graph) as engine:
            return self._rows(reference, engine)

    def _rows(self, reference: Reference, engine: Engine) -> Logits:
        check_begin(reference, engine)
        return [_logits_of(engine, token_ids, self._compared) for token_ids in reference.token_ids]

    def _reference(self, engine: Engine, name: str) -> Reference:
        return reference_of(engine, name, self._compared)

    def _drafted(self, reference: Reference) -> Reference:
        return dataclasses.replace(reference, logits=tuple(map(self._compared, reference.logits)))

    def _compared(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Of logits, the rows that are compared and the tokens that the graph has, copied."""
        config = self.made.config
        rows = rows[:: rows_per_compared(config.vocab_size)]
        return rows[:, list(config.drafted)] if config.drafted else rows.copy()

    @contextmanager
    def _float_gguf(self) -> Iterator[Path]:
        from edgespec.export.gguf.quantise import quantise

        assert self.made.gguf is not None
        path = self.temporary / f"float32-{self.made.gguf.stem}.gguf"
        try:
            quantise(self.made.gguf, path, FLOAT_GGUF, threads=self.threads, may_requantise=True)
            yield path
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def _float_graph(self) -> Iterator[Path]:
        folder = self.temporary / "float32"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            yield self.made.write_float(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _missing_room(self) -> str:
        """What a model in float32 would need and is not there; empty if it is."""
        table = self.made.config.vocab_size * self.made.config.hidden_size
        size = 4 * (self.made.num_parameters + table)
        memory = PROGRAM_BYTES + size + logits_bytes(self.made.config.vocab_size)
        disk, available = free_bytes(self.temporary), free_memory()
        if size > disk:
            return f"that needs {human(size)} of disk, {human(disk)} are free"
        if available is not None and memory > available:
            return f"that needs {human(memory)} of memory, {human(available)} are available"
        return ""


def reference_of(engine: Engine, name: str, kept: Kept = np.copy) -> Reference:
    """What an open engine makes of the probe texts; `kept` copies from some rows of logits what is to be compared."""
    vocabulary = engine.vocabulary
    ids = probe_ids([vocabulary.encode(text) for text in PROBE_TEXTS.values()], engine.facts.context_length)
    logits = tuple(_logits_of(engine, row, kept) for row in ids)
    return Reference(tuple(ids), logits, vocabulary.bos_id if vocabulary.adds_bos else None, name)


def _logits_of(engine: Engine, token_ids: NDArray[np.int32], kept: Kept) -> NDArray[np.float32]:
    return np.concatenate([kept(rows) for rows in blocks_of_logits(engine, token_ids)])


def logits_bytes(vocabulary_size: int) -> int:
    """Memory for the logits of a check, of which it holds three at a time."""
    return 3 * 4 * PROBE_TOKENS * vocabulary_size // rows_per_compared(vocabulary_size)


def rows_per_compared(vocabulary_size: int) -> int:
    """One row of logits in how many is compared, a divisor of BLOCK."""
    step = 1
    while step < BLOCK and PROBE_TOKENS * vocabulary_size > step * MOST_LOGITS:
        step *= 2
    return step


def _refuse(complaint: str, reference: Reference) -> None:
    if complaint:
        raise ExportRefused(
            f"the conversion is wrong and was removed: compared with {reference.version}, {complaint}. Please report "
            "this with the model's name"
        )
