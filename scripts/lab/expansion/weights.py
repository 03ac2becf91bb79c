"""An expanded model's weights as writers ask for them: whole numbers of 8 bits for a graph, floats for a GGUF.

Copies are quantised together: each takes what the running sum of their shares adds in whole steps, so that all codes of
a weight add up to its own rounding, finer than a single code could be. Codes are found once for every row of the small
model and copied to the rows that repeat it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.formats.checkpoint import Checkpoint, StoredTensor
from edgespec.formats.onnx.forms import RowWeights
from edgespec.formats.onnx.w8a8 import GROUP_SIZES, LARGEST, MIDDLE, quantise_rows, scales_of
from expansion.model import CONSTANT, PUSH, Expansion, Floats, Indices, TensorPlan

Codes = tuple[NDArray[np.int8], Floats]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def plans_of(expansion: Expansion) -> dict[str, TensorPlan]:
    """Every tensor by name. What they are made from is the small model, so all of them together are small."""
    return {plan.name: plan for plans in expansion.shards() for plan in plans}


class ExpandedWeights:
    """Weights of `expansion` by name, quantised when they are asked for."""

    def __init__(self, expansion: Expansion) -> None:
        self._seed = expansion.seed
        self._plans = plans_of(expansion)

    def vector(self, name: str) -> Floats:
        return self._plans[name].source

    def product(self, name: str) -> Codes:
        is_tied = name == HEAD and HEAD not in self._plans
        return product_codes(self._plans[EMBEDDING if is_tied else name], self._seed)

    def embedding(self) -> tuple[NDArray[np.uint8], Floats]:
        return embedding_codes(self._plans[EMBEDDING])


@dataclass(frozen=True)
class ExpandedCheckpoint(Checkpoint):
    """Whole tensors, made when they are asked for. `folder` is the small model's, whose tokenizer it shares."""

    plans: Mapping[str, TensorPlan] = field(default_factory=dict)
    seed: int = 0

    @classmethod
    def of(cls, expansion: Expansion) -> Self:
        folder = expansion.small.folder
        plans = plans_of(expansion)
        tensors = {name: StoredTensor(folder, "F32", plan.shape, 0, 0) for name, plan in plans.items()}
        return cls(folder, expansion.config(), tensors, plans, expansion.seed)

    def weights(self, name: str) -> Floats:
        plan = self.plans[name]
        if len(plan.shape) == 1:
            return plan.source
        found, start = np.empty(plan.shape, np.float32), 0
        for block in plan.blocks(self.seed):
            found[start : start + len(block)] = block
            start += len(block)
        return found


def product_codes(plan: TensorPlan, seed: int) -> Codes:
    """Codes [columns, rows] and scales [rows] of a planned matrix [rows, columns]."""
    count, columns, shares = len(plan.source), plan.columns, plan.shares
    known = np.flatnonzero(columns >= 0)
    most = np.zeros(plan.source.shape[1], np.float32)
    np.maximum.at(most, columns[known], np.abs(shares[known]))
    # one less than the largest: a difference of two rounded numbers may be one more than that of the numbers
    scales = scales_of(np.abs(plan.source * most).max(axis=1), LARGEST - 1)
    steps = np.ascontiguousarray((plan.source / scales[:, None]).T)[columns[known]]
    before, after = running_sums(columns[known], shares[known])
    codes = np.zeros((columns.size, count + 1), np.int8)  # the last column is what rows without a source take
    codes[known, :count] = np.rint(steps * after[:, None]) - np.rint(steps * before[:, None])
    if not plan.quiet_columns:
        free = np.flatnonzero(columns < 0)
        noise = plan.random(seed).standard_normal((free.size, count), np.float32) * np.float32(plan.std)
        codes[free, :count] = np.clip(np.rint(noise / scales), -LARGEST, LARGEST)
    rows = np.where(plan.rows < 0, count, plan.rows)
    made, found = np.take(codes, rows, axis=1), np.append(scales, np.float32(1))[rows]
    if plan.padded_from is not None:
        made[-1, plan.padded_from :], found[plan.padded_from :] = -LARGEST, PUSH / LARGEST
    return made, found


def embedding_codes(plan: TensorPlan) -> tuple[NDArray[np.uint8], Floats]:
    """Codes [rows, columns] and scales [rows, groups] of a planned embedding; padded rows, never looked up, are 0."""
    size = next(size for size in GROUP_SIZES if plan.shape[1] % size == 0)
    real, known = np.flatnonzero(plan.rows >= 0), np.flatnonzero(plan.columns >= 0)
    table = np.zeros((real.size, plan.shape[1]), np.float32)
    table[:, known] = plan.source[np.ix_(plan.rows[real], plan.columns[known])] * plan.shares[known]
    if plan.padded_from is not None:
        table[:, -1] = CONSTANT
    codes, scales = np.full(plan.shape, MIDDLE, np.uint8), np.ones((plan.shape[0], plan.shape[1] // size), np.float32)
    codes[real], scales[real] = quantise_rows(table, size)
    return codes, scales


def running_sums(owners: Indices, shares: Floats) -> tuple[Floats, Floats]:
    """For every share the sum of its owner's before it, and with it."""
    sums = np.zeros(int(owners.max(initial=-1)) + 1, np.float32)
    before, after = np.empty_like(shares), np.empty_like(shares)
    for place, owner in enumerate(owners):
        before[place] = sums[owner]
        sums[owner] += shares[place]
        after[place] = sums[owner]
    return before, after


@dataclass(frozen=True)
class RowCheckpoint(Checkpoint):
    """Whole tensors of `rows`, read when they are asked for. `folder` holds the tokenizer."""

    rows: RowWeights

    @classmethod
    def of(cls, rows: RowWeights, config: dict[str, Any], folder: Path, names: Sequence[str]) -> Self:
        """`names`: those of all tensors; the head's is added where `rows` has one of its own."""
        known = [*names] if rows.is_tied or HEAD in names else [*names, HEAD]
        shapes = {name: rows.vector(name).shape if is_vector(name) else rows.shape(name) for name in known}
        tensors = {name: StoredTensor(folder, "F32", shape, 0, 0) for name, shape in shapes.items()}
        return cls(folder, config | {"tie_word_embeddings": rows.is_tied}, tensors, rows)

    def weights(self, name: str) -> Floats:
        return self.rows.vector(name) if is_vector(name) else np.concatenate(list(self.rows.rows(name)))


class NoisyHead:
    """`RowWeights` whose head is off by `sigma` deviations: it approximates the model that it is made of."""

    is_tied = False

    def __init__(self, rows: RowWeights, sigma: float, seed: int) -> None:
        self._rows, self._sigma, self._seed = rows, sigma, seed
        self.vector, self.shape = rows.vector, rows.shape
        self._deviation = float(np.concatenate(list(rows.rows(HEAD))).std())

    def rows(self, name: str) -> Iterator[Floats]:
        if name != HEAD:
            yield from self._rows.rows(name)
            return
        random = np.random.default_rng([self._seed, 1])
        size = np.float32(self._sigma * self._deviation)
        for rows in self._rows.rows(name):
            yield rows + size * random.standard_normal(rows.shape, np.float32)


class ExpandedRows:
    """`RowWeights` of an expanded model."""

    def __init__(self, expansion: Expansion) -> None:
        self._seed, self._plans = expansion.seed, plans_of(expansion)
        self.is_tied = HEAD not in self._plans

    def vector(self, name: str) -> Floats:
        return self._plans[name].source

    def shape(self, name: str) -> tuple[int, int]:
        outputs, inputs = self._plan(name).shape
        return outputs, inputs

    def rows(self, name: str) -> Iterator[Floats]:
        blocks: Iterator[Floats] = self._plan(name).blocks(self._seed)
        return blocks

    def _plan(self, name: str) -> Any:
        return self._plans[EMBEDDING if name == HEAD and self.is_tied else name]


def is_vector(name: str) -> bool:
    return name.endswith("norm.weight")
