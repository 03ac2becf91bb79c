"""Heads of a small target for the target that was expanded from it: they keep their own width, and read its copies.

The last normed state of an expanded model holds the small one's in `num_copies` places, each an equal share of it, so
their sum is what the heads were trained on. What fills a row up, and the constant that pads the vocabulary, is not
read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from edgespec.bench.expanded_tensors import Floats
from edgespec.bench.expansion import Expansion
from edgespec.errors import ModelFileError
from edgespec.formats.head_file import HeadFile, read_head_file, write_head_file
from edgespec.formats.head_manifest import PROJECT


def expand_heads(path: Path, expansion: Expansion, result: Path) -> None:
    """Write the heads of `path`, which draft for `expansion.small`, to `result` for the expanded target.

    Raises ModelFileError for a damaged file and for heads of another width than the small target.
    """
    heads = read_head_file(path)
    if heads.manifest.feature_size != (width := expansion.small_shape.hidden_size):
        raise ModelFileError(
            f"{path} holds heads on states of {heads.manifest.feature_size} numbers, those of {expansion.small.folder} "
            f"have {width}: train them for that model"
        )
    write_head_file(result, expanded(heads, expansion))


def expanded(heads: HeadFile, expansion: Expansion) -> HeadFile:
    """`heads` as they read the expanded target's states."""
    copies = copies_of(expansion)
    manifest = replace(heads.manifest, feature_size=expansion.shape.hidden_size)
    arrays = dict(heads.arrays)
    own = arrays.pop(PROJECT, np.eye(len(copies), dtype=np.float32))
    if manifest.is_projected:
        arrays[PROJECT] = own @ copies
    probe = heads.probe_states @ copies / np.float32(expansion.num_copies)
    return HeadFile(manifest, arrays, heads.vocabulary, heads.token_ids, heads.probe_ids, probe)


def copies_of(expansion: Expansion) -> Floats:
    """[small width, big width]: 1 where a dimension of the big stream is a copy of the small one's."""
    dims = expansion.dims
    found = np.zeros((expansion.small_shape.hidden_size, dims.size), np.float32)
    places = np.flatnonzero(dims >= 0)
    found[dims[places], places] = 1.0
    return found
