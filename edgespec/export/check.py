"""Checks that an exported file is the same model as its source: compares its logits with transformers in float32.

The reference runs first and is freed before an engine opens the file, so that both are never in memory together. Both
get the same token ids, so tokenizer errors and weight errors are detected separately.

Limits by quantisation, on the probe texts (`tokens.PROBE_TEXTS`). Top-1 agreement counts only positions where the
reference's best logit leads by a tenth of the logits' standard deviation, since any rounding may change a near-tie.
Agreement and KL leave out each text's first token: where a model has no begin-of-text token, it becomes the attention
sink, whatever it is, and what a model makes of it alone is used by nobody. llama.cpp is off by 3 to 9 nats there on
Qwen2.5-Coder 1.5B Q4_K_M, and by .02 elsewhere.

| types                        | largest difference / std | top-1 agreement | mean KL, nats |
|------------------------------|--------------------------|-----------------|---------------|
| f32, fp32                    | 0.005                    | 0.99            | 0.0001        |
| f16, bf16                    |                          | 0.98            | 0.001         |
| q8_0, int8                   |                          | 0.97            | 0.005         |
| q6_k                         |                          | 0.95            | 0.02          |
| q5_*                         |                          | 0.85            | 0.1           |
| q4_*, iq4_*, int4            |                          | 0.60            | 0.4           |
| all below 4 bits             |                          | 0.40            | 1.5           |

Measured on the demo target (KL, agreement): f32 0 and 1.00, f16 6e-7 and 1.00, bf16 8e-5 and 1.00, q8_0 and int8 9e-4
and 1.00, q6_k 0.007 and 1.00, int4 0.05 and 0.97, q4_k_m 0.06 and 0.96, q3_k_m 0.13 and 0.91. On
its draft with 0.9 M parameters, agreement falls to 0.90 with q5_k_m, 0.84 with int4 and 0.83 with iq4_nl. Random models
of nine architectures: f32 at most 9e-4 of the spread, q8_0 at most 0.002 and at least 0.985, q4_k_m 0.04 and 0.78. A
rotary base that is wrong by a factor of two gives KL 0.06, queries in the wrong order 1.0. Faults that 4 bits would
hide are found in a 16-bit file of the same conversion (see `file_checks`).

A graph of edgespec's own writer: a wrong conversion is refused, what its type loses is told.

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

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import Engine
from edgespec.errors import EdgespecError
from edgespec.export.reference import PROBE_TEXTS, Reference, probe_ids, rows_per_compared
from edgespec.export.request import Format
from edgespec.export.room import PROGRAM_BYTES, free_bytes, human, logits_bytes
from edgespec.formats.onnx.llama_config import LlamaConfig
from edgespec.platform.memory import free_memory
from edgespec.types import Batch, Progress, no_progress

DECIDED = 0.1  # of the logits' standard deviation
BLOCK = 32  # rows compared at once: 20 MB for a vocabulary of 150k, twice that as float64
CHECK_CONTEXT = 320
FLOAT, HALF, FLOAT_GGUF = "fp32", "f16", "f32"
STEPS = 4  # the last two only where the first two differ much
Rows = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]
Figures = dict[str, dict[str, float]]
Logits = Sequence[NDArray[np.float32]]


class ExportRefused(EdgespecError):
    """An exported file differs from the model it was made from."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Allowed differences. `max_difference` in standard deviations of the logits, `max_kl` in nats."""

    max_difference: float | None
    min_agreement: float
    max_kl: float


_LIMITS = {
    ("f32", "fp32"): Limits(0.005, 0.99, 1e-4),
    ("f16", "bf16"): Limits(None, 0.98, 0.001),
    ("q8_0", "int8"): Limits(None, 0.97, 0.005),
    ("q6_k",): Limits(None, 0.95, 0.02),
    ("q5",): Limits(None, 0.85, 0.1),
    ("q4", "iq4", "int4"): Limits(None, 0.60, 0.4),
}


def limits_of(quant: str) -> Limits:
    """The limits of a quantisation, as in the table above."""
    return next((limits for begins, limits in _LIMITS.items() if quant.startswith(begins)), Limits(None, 0.40, 1.5))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences over `num_tokens` positions; `max_difference` in standard deviations, `mean_kl` in nats."""

    num_tokens: int
    max_difference: float
    top1_agreement: float
    mean_kl: float

    def figures(self) -> dict[str, float]:
        """By name, in four digits."""
        return {key: float(f"{value:.4g}") for key, value in asdict(self).items()}

    def complaint(self, limits: Limits) -> str:
        """The exceeded limits as text; empty if there are none."""
        wrong = []
        # `not a <= b` rather than `a > b`, so that NaN fails
        if limits.max_difference is not None and not self.max_difference <= limits.max_difference:
            wrong.append(
                f"logits differ by {self.max_difference:.2g} of their spread (limit {limits.max_difference:g})"
            )
        if not self.top1_agreement >= limits.min_agreement:
            wrong.append(f"top-1 agreement is {self.top1_agreement:.3f} (limit {limits.min_agreement:g})")
        if not self.mean_kl <= limits.max_kl:
            wrong.append(f"mean KL is {self.mean_kl:.3g} nats (limit {limits.max_kl:g})")
        return ", ".join(wrong)


def open_engine(wanted: Format, path: Path, context_length: int, threads: int | None) -> Engine:
    """Open a file in edgespec's engine with its most exact settings. Raises the errors of the engine's `load`."""
    if wanted == "gguf":
        from edgespec.engines.llamacpp import LlamaCppEngine

        return LlamaCppEngine.load(
            path,
            context_length=context_length,
            threads=threads,
            cache_type_k="f32",
            cache_type_v="f32",
            flash_attention=False,
            reproducible=False,
            check_tensors=True,
        )
    from edgespec.engines.onnx import OnnxEngine

    return OnnxEngine.load(path, context_length=context_length, threads=threads, reproducible=False)


def compare(reference: Reference, engine: Engine) -> Comparison:
    """Compare an open engine with the reference. Raises ExportRefused if their begin-of-text tokens differ."""
    return compare_logits(reference, logits_of(reference, engine))


def logits_of(reference: Reference, engine: Engine) -> Logits:
    """What an engine makes of the reference's texts, as far as it is compared. Raises as `compare`."""
    check_begin(reference, engine)
    return [_logits_of(engine, token_ids, reference.step) for token_ids in reference.token_ids]


def check_begin(reference: Reference, engine: Engine) -> None:
    """Raise ExportRefused if the begin-of-text tokens of an engine and of the reference differ."""
    vocabulary = engine.vocabulary
    begins_with = vocabulary.bos_id if vocabulary.adds_bos else None
    if begins_with != reference.begins_with:
        raise ExportRefused(
            f"{engine.facts.name} begins texts with token {begins_with}, {reference.version} with "
            f"{reference.begins_with}"
        )


def compare_logits(reference: Reference, found: Logits) -> Comparison:
    """Compare logits of the reference's texts, some rows at a time, which as float64 take room."""
    spread = _spread(reference.logits)
    blocks = [
        _compare_rows(rows[start : start + BLOCK], others[start : start + BLOCK], spread, start == 0 and len(rows) > 1)
        for rows, others in zip(reference.logits, found, strict=True)
        for start in range(0, len(rows), BLOCK)
    ]
    differences, divergences, agreed = (np.concatenate(part) for part in zip(*blocks, strict=True))
    return Comparison(
        num_tokens=differences.size,
        max_difference=float(differences.max()),
        top1_agreement=float(agreed.mean()) if agreed.size else 1.0,
        mean_kl=float(divergences.mean()) if divergences.size else 0.0,
    )


def _compare_rows(wanted: NDArray[np.float32], found: NDArray[np.float32], spread: float, left_out: bool) -> Rows:
    """Largest difference per row [n]; KL divergence, and whether the best token is equal, where it has a clear lead.

    `left_out`: the latter two without the first row.
    """
    width = min(found.shape[1], wanted.shape[1])  # either may be padded
    found, wanted = found[:, :width], wanted[:, :width]
    difference = np.abs(found - wanted).max(axis=1) / spread
    found, wanted = found[int(left_out) :], wanted[int(left_out) :]
    divergences = np.array([_divergence(*rows) for rows in zip(wanted, found, strict=True)], np.float64)
    second, best = np.partition(wanted, -2, axis=1)[:, -2:].T
    agrees = found.argmax(axis=1) == wanted.argmax(axis=1)
    return difference.astype(np.float64), divergences, agrees[best - second >= DECIDED * spread]


def _divergence(wanted: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    """KL divergence of one row, as many as stay in a CPU's cache as float64."""
    p, q = (np.subtract(row, row.max(), dtype=np.float64) for row in (wanted, found))
    differences = p - q
    weights, others = np.exp(p, out=p), np.exp(q, out=q)
    total = weights.sum()
    return float(weights @ differences / total - np.log(total) + np.log(others.sum()))


def _spread(logits: Sequence[NDArray[np.float32]]) -> float:
    """Standard deviation of all logits, computed without copying them."""
    count = sum(rows.size for rows in logits)
    mean = sum(float(rows.sum(dtype=np.float64)) for rows in logits) / count
    return float(np.sqrt(sum(float(np.square(rows - mean).sum(dtype=np.float64)) for rows in logits) / count))


# graphs of edgespec's own writer

ABSURD = Limits(None, 0.40, 1.5)  # as for the types below 4 bits


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found: differences by what was compared with the reference, and a warning or nothing."""

    reference: str
    figures: Figures
    warning: str = ""


@dataclass(frozen=True)
class GraphCheck:
    """Compares a graph that was made of a model of `config` with a reference.

    `num_parameters`: of that model; `write_float`: writes the same as
    float32 into an empty folder, returns the graph; `gguf`: a file of the weights for llama.cpp; `transformers`: what
    that makes of the folder. Both may be None. `temporary`: a folder for models in float32.
    """

    graph: Path
    quant: str
    config: LlamaConfig
    num_parameters: int
    write_float: Callable[[Path], Path]
    temporary: Path
    gguf: Path | None = None
    transformers: Reference | None = None
    threads: int | None = None
    progress: Progress = no_progress

    def run(self) -> Checked:
        """Raises ExportRefused for a wrong graph, and the errors of the engines."""
        reference = self.transformers
        if reference is None and self.gguf is None:
            if room := self._missing_room():
                return Checked("nothing", {}, f"not compared with its weights in float32: {room}")
            with self._float_graph() as path, self._opened(path) as engine:
                reference = engine_reference(engine, "the float32 graph of the same weights")
            return self._judged(reference, {}, self._logits(reference))
        if reference is None:
            assert self.gguf is not None
            self.progress(0, STEPS, "llama.cpp on the file")
            with self._opened(self.gguf) as engine:
                reference = engine_reference(engine, "llama.cpp on the same weights")
        self.progress(1, STEPS, "the graph")
        logits = self._logits(reference)
        found = compare_logits(reference, logits)
        if not (excess := found.complaint(limits_of(self.quant))):
            return Checked(reference.version, {"onnx": found.figures()})
        if room := self._missing_room():
            _refuse(found.complaint(ABSURD), reference)
            return Checked(reference.version, {"onnx": found.figures()}, f"{excess}; the cause was not found: {room}")
        return self._against_floats(reference, logits)

    def _against_floats(self, first: Reference, made: Logits) -> Checked:
        """The comparison with the weights as float32; the first reference's and the graph's logits."""
        reference, figures = first, Figures()
        if self.transformers is None:
            self.progress(2, STEPS, "llama.cpp on the weights as float32")
            with self._float_gguf() as path, self._opened(path) as engine:
                reference = engine_reference(engine, "llama.cpp on the weights as float32")
            figures = {"llamacpp": compare_logits(reference, first.logits).figures()}
        if self.quant == FLOAT:
            _refuse(compare_logits(reference, made).complaint(self._exact_limits()), reference)
            return self._judged(reference, figures, made)
        self.progress(3, STEPS, "the graph in float32")
        with self._float_graph() as path, self._opened(path) as engine:
            exact = compare(reference, engine)
        _refuse(exact.complaint(self._exact_limits()), reference)
        return self._judged(reference, {f"onnx_{FLOAT}": exact.figures(), **figures}, made)

    def _judged(self, reference: Reference, figures: Figures, made: Logits) -> Checked:
        found = compare_logits(reference, made)
        _refuse(found.complaint(ABSURD), reference)
        figures = {"onnx": found.figures(), **figures}
        excess = found.complaint(limits_of(self.quant))
        loss = f"the conversion is correct, but {self.quant} loses more of this model than of most: {excess}"
        return Checked(reference.version, figures, loss if excess else "")

    def _exact_limits(self) -> Limits:
        """How closely a float32 graph must agree with the reference."""
        rounds = self.transformers is None and self.config.activation == "gelu"
        return limits_of(HALF if rounds else FLOAT)

    def _opened(self, path: Path) -> Engine:
        context = min(CHECK_CONTEXT, self.config.max_positions)
        return open_engine("gguf" if path.suffix == ".gguf" else "onnx", path, context, self.threads)

    def _logits(self, reference: Reference) -> Logits:
        """Those of the graph on the texts of `reference`, kept, since a second opening takes as long as the passes."""
        with self._opened(self.graph) as engine:
            return logits_of(reference, engine)

    @contextmanager
    def _float_gguf(self) -> Iterator[Path]:
        from edgespec.export.gguf.convert import quantise

        assert self.gguf is not None
        path = self.temporary / f"float32-{self.gguf.stem}.gguf"
        try:
            quantise(self.gguf, path, FLOAT_GGUF, threads=self.threads, may_requantise=True)
            yield path
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def _float_graph(self) -> Iterator[Path]:
        folder = self.temporary / "float32"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            yield self.write_float(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _missing_room(self) -> str:
        """What a model in float32 would need and is not there; empty if it is."""
        table = self.config.vocab_size * self.config.hidden_size
        size = 4 * (self.num_parameters + table)
        memory = PROGRAM_BYTES + size + logits_bytes(self.config.vocab_size)
        disk, available = free_bytes(self.temporary), free_memory()
        if size > disk:
            return f"that needs {human(size)} of disk, {human(disk)} are free"
        if available is not None and memory > available:
            return f"that needs {human(memory)} of memory, {human(available)} are available"
        return ""


def engine_reference(engine: Engine, name: str) -> Reference:
    """What an open engine makes of the probe texts, as far as it is compared."""
    vocabulary = engine.vocabulary
    ids = probe_ids([vocabulary.encode(text) for text in PROBE_TEXTS.values()], engine.facts.context_length)
    step = rows_per_compared(vocabulary.size)
    logits = tuple(_logits_of(engine, row, step) for row in ids)
    return Reference(tuple(ids), logits, vocabulary.bos_id if vocabulary.adds_bos else None, name, step)


def _logits_of(engine: Engine, token_ids: NDArray[np.int32], step: int) -> NDArray[np.float32]:
    """One row of logits in `step`, a divisor of BLOCK."""
    engine.rollback(0)
    parts = (token_ids[start : start + BLOCK] for start in range(0, token_ids.size, BLOCK))
    return np.concatenate([engine.forward(Batch.chain(part))[::step].copy() for part in parts])


def _refuse(complaint: str, reference: Reference) -> None:
    if complaint:
        raise ExportRefused(
            f"the conversion is wrong and was removed: compared with {reference.version}, {complaint}. Please report "
            "this with the model's name"
        )
