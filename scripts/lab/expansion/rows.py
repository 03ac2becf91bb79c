"""A model that is read row by row (`RowWeights`, such as a GGUF's) as what expansion and converters read, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from edgespec.bench.expanded_tensors import Floats
from edgespec.bench.expanded_weights import EMBEDDING, HEAD, plans_of
from edgespec.bench.expansion import Expansion
from edgespec.formats.checkpoint import Checkpoint, StoredTensor
from edgespec.formats.onnx.forms import RowWeights


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
