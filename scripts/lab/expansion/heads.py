"""An EAGLE head of a small Llama, expanded like its target: the same drafts at the cost of a head for a bigger model.

As in `expansion.model`, streams hold copies, readers give each copy a share, and norms make up for the mean
over other dimensions. States behind the target's last norm are an exception: its copies share the small one's out.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError
from edgespec.formats.head_file import PROJECT, HeadFile, HeadManifest, Matrix
from expansion.model import Expansion, shares_of

Indices = NDArray[np.intp]


def expanded_heads(heads: HeadFile, expansion: Expansion) -> HeadFile:
    """`heads` of the kind eagle for `expansion`'s model. Raises ModelFileError for heads that cannot be expanded."""
    small, big = heads.manifest, expansion.shape
    if small.kind != "eagle" or small.generation == 3 or expansion.is_padded:
        raise ModelFileError(
            f"{small.kind} heads of generation {small.generation} cannot be expanded: only those of the kind eagle, "
            "generation 1, for a model that keeps its vocabulary"
        )
    if small.hidden_size != expansion.small_shape.hidden_size:
        raise ModelFileError(f"heads of width {small.hidden_size} are of another model than the one that is expanded")
    places, target = expansion.places(), expansion.small_shape
    kv_heads = small.kv_heads * big.num_kv_heads // target.num_kv_heads
    manifest = replace(
        small,
        hidden_size=big.hidden_size,
        heads=kv_heads * (small.heads // small.kv_heads),
        kv_heads=kv_heads,
        ffn=small.ffn * big.intermediate_size // target.intermediate_size,
        feature_size=big.hidden_size * (len(small.layers) + 1),
        layers=tuple(places[layer] for layer in small.layers),
        norm_eps=small.norm_eps * _shrinking(expansion) ** 2,
        figures={},
    )
    return replace(
        heads,
        manifest=manifest,
        arrays=_arrays(heads, manifest, expansion),
        vocabulary=spread(heads.vocabulary, expansion, 1.0),
        probe_states=np.concatenate(
            [spread(part, expansion, 1.0) for part in _parts(heads.probe_states, small.hidden_size)[:-1]]
            + [spread(heads.probe_states[:, -small.hidden_size :], expansion, 1 / expansion.num_copies)],
            axis=1,
        ),
    )


def _arrays(heads: HeadFile, big: HeadManifest, expansion: Expansion) -> dict[str, Matrix]:
    small, old, copies, shrinking = heads.manifest, heads.arrays, expansion.num_copies, _shrinking(expansion)

    def read(matrix: Matrix, share: float = 1 / copies) -> Matrix:
        return spread(matrix, expansion, share)

    def written(matrix: Matrix, share: float = 1.0) -> Matrix:
        return spread(matrix.T, expansion, share).T

    def norm(name: str, share: float = 1.0) -> Matrix:
        found: Matrix = spread(old[name][None], expansion, shrinking * share)[0]
        return found

    keys = np.arange(big.kv_heads) % small.kv_heads
    group = small.heads // small.kv_heads
    queries = (keys[:, None] * group + np.arange(group)).reshape(-1)
    neurons = np.arange(big.ffn) % small.ffn
    states, embedded = _parts(old["fc"], small.hidden_size)
    projected = {}
    # Inputs of layers are scaled to unit size over all dimensions, and so are embedded tokens.
    if PROJECT in old:
        *inputs, last = _parts(old[PROJECT], small.hidden_size)
        scaled = [read(part, shrinking / copies) for part in inputs]
        projected[PROJECT] = written(np.concatenate([*scaled, read(last, 1.0)], axis=1), 1 / copies)
    return {
        **projected,
        "fc": written(np.concatenate((read(states, 1.0), read(embedded, shrinking / copies)), axis=1)),
        "attention_norm": norm("attention_norm"),
        "q_proj": read(_of_heads(old["q_proj"], queries, small.head_dim)),
        "k_proj": read(_of_heads(old["k_proj"], keys, small.head_dim)),
        "v_proj": read(_of_heads(old["v_proj"], keys, small.head_dim)),
        "o_proj": written(_shared(_of_heads(old["o_proj"].T, queries, small.head_dim), queries, small.head_dim).T),
        "mlp_norm": norm("mlp_norm"),
        "gate_proj": read(old["gate_proj"][neurons]),
        "up_proj": read(old["up_proj"][neurons]),
        "down_proj": written(_shared(old["down_proj"].T[neurons], neurons, 1).T),
        "norm": norm("norm", 1 / copies),
    }


def _shrinking(expansion: Expansion) -> float:
    """The root mean square of copies in the big stream over the small one's."""
    return float(np.sqrt(expansion.num_copies * expansion.small_shape.hidden_size / expansion.shape.hidden_size))


def spread(matrix: Matrix, expansion: Expansion, share: float) -> Matrix:
    """Columns [n, small width] as all their copies [n, big width], each with a `share` of the value."""
    dims = expansion.dims
    found = matrix[:, np.maximum(dims, 0)] * np.float32(share)
    found[:, dims < 0] = 0.0
    return found


def _parts(matrix: Matrix, width: int) -> list[Matrix]:
    """Columns in parts of `width`."""
    return np.split(matrix, matrix.shape[1] // width, axis=1)


def _of_heads(matrix: Matrix, heads: Indices, size: int) -> Matrix:
    """Rows of the attention heads `heads`."""
    return matrix.reshape(-1, size, matrix.shape[1])[heads].reshape(-1, matrix.shape[1])


def _shared(rows: Matrix, sources: Indices, size: int) -> Matrix:
    """Rows of copies of `sources`, `size` rows each, with a share of the whole each."""
    found: Matrix = rows * np.repeat(shares_of(sources), size)[:, None]
    return found
