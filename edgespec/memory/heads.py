"""What draft heads take: their weights, the target's states that are kept for them, and an EAGLE layer's cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.platform.files import expanded

# Bytes in memory for a weight of 8 bits in the file. Medusa's heads are float32; of EAGLE's layer there are 8 bits and
# scales; its vocabulary is there like that, too, and in half precision, from which inputs are looked up.
_FLOAT, _LAYER, _VOCABULARY = 4.0, 1.25, 3.25
_OPENING = 9.0  # the same while EAGLE's are opened: in float32, as they are kept, and copies; measured on SmolLM2's


def heads_bytes(paths: Sequence[Path], context_length: int, texts: int) -> tuple[int, int]:
    """Of the heads files in `paths`, for several `texts` at once of at most `context_length` tokens each; and of them
    while they are opened."""
    found = [_bytes_of(path, context_length, texts) for path in paths]
    return sum(kept for kept, _ in found), sum(opening for _, opening in found)


def _bytes_of(path: Path, context_length: int, texts: int) -> tuple[int, int]:
    from edgespec.engines.features import WINDOW  # imports numpy
    from edgespec.engines.onnx.eagle import FIRST_POSITIONS
    from edgespec.formats.head_file import read_head_manifest

    stored = file_bytes(path)
    try:
        sizes = read_head_manifest(path)
    except EdgespecError:  # reading the heads says best what is wrong
        return stored, 0
    opening = 0
    if sizes.kind == "medusa":
        weights = _FLOAT * stored
    elif sizes.generation == 3:  # its embedding stays as it is stored
        weights = _LAYER * stored
    else:
        layer = min(sum(map(math.prod, sizes.shapes().values())), stored)
        weights, opening = _LAYER * layer + _VOCABULARY * (stored - layer), int(_OPENING * stored)
    # Both keep two windows; the cache has room for a draft, too, and for the pairs that are read before it.
    rows = min(2 * WINDOW, context_length)
    pairs = 3 * WINDOW * 2 * sizes.kv_heads * sizes.head_dim
    kept = int(weights) + 4 * (texts * (rows * sizes.feature_size + pairs) + FIRST_POSITIONS * sizes.head_dim)
    return kept, opening


def file_bytes(path: Path) -> int:
    """The size of a file; 0 for one that cannot be read, as reading it says best what is wrong."""
    try:
        return expanded(path).stat().st_size
    except (OSError, ValueError):  # ValueError: a name with a zero byte
        return 0
