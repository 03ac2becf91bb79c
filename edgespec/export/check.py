"""Checks that an exported file is the same model as its source: compares its logits with those of a reference.

The reference is transformers in float32 where it is installed and the source is its folder, else llama.cpp on the GGUF
that everything is made of. It runs first and is freed before an engine opens the file, so that both are never in memory
together. Both get the same token ids, so tokenizer errors and weight errors are detected separately.

Limits by quantisation, on the probe texts, are in `_LIMITS`. A file that was only converted must keep to those of its
type; one that was quantised is refused beyond `ABSURD`, and otherwise told: its type may lose more of this model than
of most. Where llama.cpp on a quantised file is the reference, the limits are at least those of that file's type, since
llama.cpp rounds inputs to 8 bits there. Top-1 agreement counts only positions where the reference's best logit leads by
a tenth of the logits' standard deviation, since any rounding may change a near-tie. Agreement and KL leave out each
text's first token: where a model has no begin-of-text token, it becomes the attention sink, whatever it is, and what a
model makes of it alone is used by nobody. llama.cpp is off by 3 to 9 nats there on Qwen2.5-Coder 1.5B Q4_K_M, and by
.02 elsewhere.

Measured on the demo target (KL, agreement): f32 0 and 1.00, f16 6e-7 and 1.00, bf16 8e-5 and 1.00, q8_0 and int8 9e-4
and 1.00, q6_k 0.007 and 1.00, int4 0.05 and 0.97, q4_k_m 0.06 and 0.96, q3_k_m 0.13 and 0.91. On
its draft with 0.9 M parameters, agreement falls to 0.90 with q5_k_m, 0.84 with int4 and 0.83 with iq4_nl. A rotary base
that is wrong by a factor of two gives KL 0.06, queries in the wrong order 1.0: faults that 4 bits would hide, and that
the 16-bit file of the same conversion shows, which is compared, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import Engine
from edgespec.errors import EdgespecError
from edgespec.export.reference import PROBE_TEXTS, Reference, probe_ids, rows_per_compared
from edgespec.export.request import Format
from edgespec.types import Batch

DECIDED = 0.1  # of the logits' standard deviation
BLOCK = 32  # rows compared at once: 20 MB for a vocabulary of 150k, twice that as float64
CHECK_CONTEXT = 320
Rows = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]
Logits = Sequence[NDArray[np.float32]]


class ExportRefused(EdgespecError):
    """An exported file differs from the model it was made from."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Allowed differences. `max_difference` in standard deviations of the logits, `max_kl` in nats."""

    max_difference: float | None
    min_agreement: float
    max_kl: float

    def or_wider(self, other: Limits) -> Limits:
        return max(self, other, key=lambda each: each.max_kl)


_LIMITS = {
    ("f32", "fp32"): Limits(0.005, 0.99, 1e-4),
    ("f16", "bf16"): Limits(None, 0.98, 0.001),
    ("q8_0", "int8"): Limits(None, 0.97, 0.005),
    ("q6_k",): Limits(None, 0.95, 0.02),
    ("q5",): Limits(None, 0.85, 0.1),
    ("q4", "iq4", "int4"): Limits(None, 0.60, 0.4),
}
ABSURD = Limits(None, 0.40, 1.5)  # and what types below 4 bits may lose


def limits_of(quant: str) -> Limits:
    """The limits of a quantisation."""
    return next((limits for begins, limits in _LIMITS.items() if quant.startswith(begins)), ABSURD)


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
        from edgespec.engines.llamacpp.engine import LlamaCppEngine

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
