"""Heads that read states of a target's layers, as models for a graph: EAGLE-3, DFlash, DFlash2 and DSpark.

Tables that a head shares with its target have no place in its file until that one lends them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.formats.architectures import Sizes
from edgespec.formats.gguf.header import GgufHeader, TensorInfo
from edgespec.formats.gguf.heads import read_head
from edgespec.formats.gguf.model import Reader, Tensors
from edgespec.formats.gguf.tables import DFLASH2_LAYER, DFLASH2_OUTER, DFLASH_OUTER, HEAD_OUTER
from edgespec.formats.onnx.dflash import CONFIDENCE_BIAS, FOLLOWERS, MARKOV, BlockConfig
from edgespec.formats.onnx.eagle import EagleConfig
from edgespec.formats.onnx.forms import EMBEDDING, HEAD
from edgespec.formats.onnx.llama_config import LlamaConfig

OF_TARGET = {EMBEDDING: -1, HEAD: -2}  # the offsets of tables that a file lacks


class _HeadReader(Reader):
    """Raises CapabilityError for a variant that nobody runs."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        super().__init__(path, header)
        self._head = read_head(path)

    def _sizes(self) -> Sizes:
        return replace(super()._sizes(), others={"n": self._head.num_drafted, "t": self._head.feature_width})

    def _tensors(self, sizes: Sizes) -> Tensors:
        found = super()._tensors(sizes)
        for name, offset in OF_TARGET.items():
            outputs, width = sizes.shape(HEAD_OUTER[name].shape)
            missing = TensorInfo(HEAD_OUTER[name].name, (width, outputs), "F16", offset, 2 * outputs * width)
            found.setdefault(name, (missing, HEAD_OUTER[name]))
        return found

    def _settings(self, sizes: Sizes, tensors: Tensors) -> dict[str, Any]:
        own = {"vocab_size": self._head.num_drafted, "feature_size": self._head.feature_width}
        return super()._settings(sizes, tensors) | own


class EagleReader(_HeadReader):
    def _config(self, sizes: Sizes, tensors: Tensors) -> LlamaConfig:
        is_normed = self._flag("norm_before_residual", default=False)
        return EagleConfig(**self._settings(sizes, tensors), norms_residual=is_normed)


class BlockReader(_HeadReader):
    def _sizes(self) -> Sizes:
        head, found = self._head, super()._sizes()
        others = {**found.others, "2": 2, "taps": head.kernel_size}
        if head.num_candidates:
            taps, most = head.kernel_size, head.num_candidates
            if found.width % head.group_size or taps > head.block_size or most > head.num_drafted:
                told = f"{taps} taps, groups of {head.group_size} channels, and {most} candidates"
                raise self._wrong(
                    f"it has {told}; of {found.width} channels, {head.block_size} rows, {head.num_drafted}"
                )
            self._kind = replace(self._kind, outer=DFLASH2_OUTER, layer=DFLASH2_LAYER)
            others["kernels"] = 2 * head.kernel_size * found.width // head.group_size
        markov = self._infos.get(self._kind.outer[MARKOV].name)
        rank = markov.shape[0] if markov else 0
        return replace(found, others={**others, "r": rank, "d+r": found.width + rank})

    def _config(self, sizes: Sizes, tensors: Tensors) -> LlamaConfig:
        if MARKOV in tensors and FOLLOWERS not in tensors:
            raise self._wrong(f"it lacks the tensor {DFLASH_OUTER[FOLLOWERS].name!r}")
        settings = self._settings(sizes, tensors)
        settings["has_sinks"] = "model.layers.0.self_attn.sinks" in tensors
        settings["biases"] |= {"confidence"} if CONFIDENCE_BIAS in tensors else set()
        names = ("block_size", "has_confidence", "num_candidates", "kernel_size", "group_size")
        return BlockConfig(**settings, **{name: getattr(self._head, name) for name in names})
