"""A context of "auto" or 0 as a number of tokens: the largest that fits with nothing given up, or the model's own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from edgespec.config import LoadOptions
from edgespec.engines.model_use import ModelUse
from edgespec.formats.gguf.header import read_header
from edgespec.formats.manifest import ModelFile, ModelPair

STEP = 512  # tokens between the contexts that "auto" chooses from, of which the first is the smallest
_MOST_CELLS = 1 << 24  # of all answers at once, llama.cpp's limit
_USUAL = 4096  # of a model that does not say what it was trained for


def in_context(options: LoadOptions, pair: ModelPair, fits: Callable[[LoadOptions], bool]) -> LoadOptions:
    """`options` with a number in place of 0 and "auto"; `fits`: whether options do, with nothing given up.

    Where no context fits with nothing given up, "auto" is the default, which may be reduced. Raises as `planned`.
    """
    if options.context_length not in (0, "auto"):
        return options
    most = min(own_context(pair.files["target"]), _MOST_CELLS // options.parallel)
    if options.context_length == 0:
        return replace(options, context_length=most)
    sizes = [*range(STEP, most, STEP), most]
    too_large = bisect_left(sizes, True, key=lambda size: not fits(replace(options, context_length=size)))
    return replace(options, context_length=sizes[too_large - 1] if too_large else None)


def own_context(file: ModelFile) -> int:
    """Tokens that a model was trained for. Raises as `planned`."""
    if file.is_gguf:
        return read_header(file.path).context_length or _USUAL
    from edgespec.engines.onnx.footprint import footprint

    return footprint(file.path, ModelUse(default_context=_MOST_CELLS)).context_length
