"""Graphs for the kernels of `edgespec.kernels`: a file's own blocks, in tiles of 16 outputs, and our own operators.

What this module does not know: how tiles are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from edgespec.formats.onnx.forms import EMBEDDING, HEAD, NamedWeights, weight_name
from edgespec.formats.onnx.graph import Nodes

DOMAIN, PRODUCT, LOOKUP, ATTENTION, NORM = "edgespec", "TiledMatMul", "TiledLookup", "Attention", "Norm"
DELTA_NET, MAMBA, SHORT_CONV, EXPERTS = "DeltaNet", "Mamba2", "ShortConv", "Experts"
# Inputs of a graph: slot, position, cell, parent of rows; a cache; running states; states of another model.
ROWS, CACHE, STATES, FEATURES = "edgespec.rows", "edgespec.cache", "edgespec.states", "edgespec.features"
NEXT_STATES = "hidden_states"  # an output: what takes the place of the latter behind a row
LAYOUT_VERSION = 2  # of tiles and operators, which exports keep in files: increase it when they change
GATES = {"silu": 1, "gelu": 2, "clamped": 3}  # of the input of a product: the first half through this, times the second


class TiledWeights(NamedWeights, Protocol):
    """Weights as the blocks of a GGUF."""

    def type_number(self, name: str) -> int:
        """GGML's number of a matrix's type."""

    def num_bytes(self, name: str) -> int:
        """Size of its tiles."""

    def pack(self, name: str, tiles: NDArray[np.uint8]) -> list[Callable[[], None]]:
        """Calls that fill `tiles` [num_bytes] together, in any order and on any thread."""


class Tiles:
    """The form of a graph whose products are the kernels'. A tied embedding is looked up in the head's tiles."""

    def __init__(self, weights: TiledWeights, nodes: Nodes) -> None:
        self._weights, self._nodes = weights, nodes
        self.vector, self.type_number = weights.vector, weights.type_number

    def embed(self, output: str) -> None:
        self.look_up(EMBEDDING, output, "/model/embed_tokens/TiledLookup")

    def look_up(self, source: str, output: str, name: str) -> None:
        """The rows of `input_ids` in the matrix `source`."""
        tokens, width = self._weights.shape(source)
        self._nodes.add(
            LOOKUP,
            ["input_ids", self.tiles(source)],
            [output],
            name,
            domain=DOMAIN,
            K=width,
            N=tokens,
            type=self._weights.type_number(source),
            layout=LAYOUT_VERSION,
        )

    def product(self, name: str, value: str, sources: Sequence[str], output: str) -> None:
        self.products(name, value, sources, [output])

    def products(
        self,
        name: str,
        value: str,
        sources: Sequence[str],
        outputs: Sequence[str],
        bias: str = "",
        gate: str = "",
        cap: float = 0.0,
    ) -> None:
        """As `product`, with one output for each of the matrices, or one for all; `bias`: of all, side by side.

        With a `gate`, `value` is twice as wide, see `GATES`; with a `cap`, results are cap * tanh(result / cap).
        """
        shapes = [self._weights.shape(source) for source in sources]
        self._nodes.add(
            PRODUCT,
            [value, bias, *map(self.tiles, sources)],
            outputs,
            f"{name}_tiles",
            domain=DOMAIN,
            K=shapes[0][1],
            types=[self._weights.type_number(source) for source in sources],
            layout=LAYOUT_VERSION,
            **({"gate": GATES[gate]} if gate else {}),
            **({"cap": cap} if cap else {}),
        )
        # A keyword of this name is the node's own.
        self._nodes.operators[-1].attribute.append(helper.make_attribute("outputs", [rows for rows, _ in shapes]))

    def tiles(self, source: str) -> str:
        """The name under which the tiles of a matrix are kept."""
        source = EMBEDDING if source == HEAD and self._weights.is_tied else source
        name = tiles_name(source)
        if not self._nodes.has(name):
            self._nodes.store_later(name, self._weights.num_bytes(source), lambda out: self._weights.pack(source, out))
        return name


def tiles_name(source: str) -> str:
    """What the tiles of a matrix are called in a graph."""
    return f"{weight_name(source.removesuffix('.weight'))}_tiles"


def q8_0(weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rows [n, k] as GGML's blocks of 32 codes of 8 bits with a half-precision scale [n, k / 32 * 34]; k % 32 = 0."""
    groups = weights.reshape(len(weights), -1, 32)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    scales = (largest / np.float32(127)).astype(np.float16)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    codes = np.rint(groups * inverse).astype(np.int8)
    return np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=2).reshape(len(weights), -1)
