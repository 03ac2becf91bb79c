"""w8a8: matrix products in whole numbers, weights of 8 bits with a scale per output, inputs with a scale per row.

A row is scaled by its own largest value alone, and whole numbers add up to the same sum in every order: the bits of a
row depend neither on its neighbours nor on how many there are. A kernel for whole numbers also reads the weights once
for several rows where MatMulNBits reads its scales anew for each, so a pass of eight rows costs little more than one.
Embeddings become groups of 8 bits with a scale each: they are looked up, which reads rows, and not the columns that a
product reads, so one that is tied to the output projection is stored beside it.

LLM.int8 (arXiv:2208.07339) section 2.1 and SmoothQuant (arXiv:2211.10438) section 3 describe scales per row and output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError
from edgespec.formats.onnx import MICROSOFT, WHOLE_PRODUCT

LARGEST = 127  # codes are symmetric, so that no row needs a sum of its own
MIDDLE = 128  # of the unsigned codes of inputs; the kernels of x86 processors take those with signed weights
COLUMNS = 4096  # quantised at once
GROUP_SIZES = (64, 32, 16)  # weights of an embedding that share a scale: the first that divides its width
_UINT8 = 2
CONSTANTS = {
    "w8a8.last_axis": np.array([-1], np.int64),
    "w8a8.step": np.array(1 / LARGEST, np.float32),
    "w8a8.least_scale": np.array(np.finfo(np.float32).tiny, np.float32),  # for rows of zeros
    "w8a8.middle": np.array(MIDDLE, np.float32),
    "w8a8.zero_point": np.array(MIDDLE, np.uint8),
    "w8a8.one": np.array(1, np.float32),
}


def quantise_rows(rows: NDArray[np.float32], size: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Codes [N, K], 128 for zero, and scales [N, K / size] of rows [N, K]."""
    codes = np.empty(rows.shape, np.uint8)
    scales = np.empty((rows.shape[0], rows.shape[1] // size), np.float32)
    for start in range(0, len(rows), COLUMNS):
        part = np.ascontiguousarray(rows[start : start + COLUMNS])
        groups = part.reshape(len(part), -1, size)
        scale = scales_of(np.abs(groups).max(axis=2))
        codes[start : start + COLUMNS] = (np.rint(groups / scale[..., None]) + MIDDLE).reshape(part.shape)
        scales[start : start + COLUMNS] = scale
    return codes, scales


def unsigned(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Codes plus 128."""
    found: NDArray[np.uint8] = codes.view(np.uint8) ^ np.uint8(MIDDLE)
    return found


def scales_of(largest: NDArray[np.float32], code: int = LARGEST) -> NDArray[np.float32]:
    """What a code of 1 stands for where `largest` becomes `code`; next to nothing where there are only zeros.

    ONNX Runtime's products of groups add `128 * scale * sum(activations)` and take it off again, each rounded: with a
    scale of 1 a group of zeros adds a thousandth, layer for layer. Raises ModelFileError for weights that are no finite
    numbers.
    """
    if not np.isfinite(largest).all():
        raise ModelFileError("the model is damaged: it has weights that are not finite numbers")
    found: NDArray[np.float32] = np.maximum(largest / np.float32(code), np.finfo(np.float32).tiny)
    return found


class Products:
    """The operators of products in whole numbers, appended to `nodes` in the order in which they are asked for.

    `has_axes_as_input`: whether the graph's operator set takes the axes of a reduction as an input (from 18 on).
    `is_unsigned`: the codes of weights are unsigned, 128 for zero.
    """

    def __init__(self, nodes: list[Any], *, has_axes_as_input: bool = True, is_unsigned: bool = False) -> None:
        self._nodes, self._has_axes_as_input, self._is_unsigned = nodes, has_axes_as_input, is_unsigned
        self._quantised: dict[str, tuple[str, str]] = {}

    def add(self, name: str, value: str, weights: tuple[str, str], outputs: Sequence[str]) -> None:
        """The product of `value` [..., K] with weights of these names: codes [K, N] and scales [N]."""
        from onnx import helper

        rows, row_scales = self._quantise(value)
        codes, scales = weights
        whole = f"{outputs[0]}/w8a8"
        inputs = [rows, codes, "w8a8.one", scales, "w8a8.zero_point"]
        inputs += ["w8a8.zero_point"] if self._is_unsigned else []
        self._nodes += [
            helper.make_node(WHOLE_PRODUCT, inputs, [whole], f"{name}/w8a8", domain=MICROSOFT),
            helper.make_node("Mul", [whole, row_scales], list(outputs), f"{name}/w8a8/Scale"),
        ]

    def _quantise(self, value: str) -> tuple[str, str]:
        """Names of the codes [..., K] and scales [..., 1] of a product's input, made once however many read them."""
        if value in self._quantised:
            return self._quantised[value]
        name = f"{value}/w8a8"
        if self._has_axes_as_input:
            largest = self._step(name, "ReduceMax", self._step(name, "Abs", value), "w8a8.last_axis", keepdims=1)
        else:
            largest = self._step(name, "ReduceMax", self._step(name, "Abs", value), axes=[-1], keepdims=1)
        scale = self._step(name, "Max", self._step(name, "Mul", largest, "w8a8.step"), "w8a8.least_scale")
        codes = self._step(name, "Add", self._step(name, "Round", self._step(name, "Div", value, scale)), "w8a8.middle")
        self._quantised[value] = self._step(name, "Cast", codes, to=_UINT8), scale
        return self._quantised[value]

    def _step(self, name: str, kind: str, *inputs: str, **attributes: int | list[int]) -> str:
        from onnx import helper

        made = f"{name}/{kind}"
        self._nodes.append(helper.make_node(kind, list(inputs), [made], made, **attributes))
        return made
