"""The file of heads that draft from a target's last hidden state: a .npz with a description and the matrices.

It holds everything that drafting needs, including the target's own head reduced to the tokens worth drafting, which a
loaded GGUF or graph does not give out. It also holds a probe, a few tokens with the states that the target gives them,
which exposes heads of another target whatever that target's file is called and however it is quantised.

What this module does not know: what a head computes, and which engine runs the target.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from edgespec.errors import ModelFileError, ModelNotFound
from edgespec.platform.files import is_file

Matrix = NDArray[np.float32]
MANIFEST, SCALE = "manifest", ".scale"
VOCABULARY, TOKEN_IDS, PROBE_IDS, PROBE_STATES = "vocabulary", "token_ids", "probe_ids", "probe_states"
FREQUENT = "frequent"
_LEAST_LIKENESS = 0.9  # mean cosine of the states of a quantised target to those of its original
FORMAT = 1
HeadKind = Literal["medusa", "eagle"]
PROJECT = "project"
_FORMER = ("generation", "norms_residual", "norms_features")  # which some files name, and nothing depends on
_Width = Annotated[int, Meta(ge=1, le=65_536)]
_Count = Annotated[int, Meta(ge=0, le=4096)]


@dataclass(frozen=True)
class HeadManifest:
    """Sizes and origin. `depth`: tokens per draft it was trained for; `scale` on scores; `blocks` of a Medusa head;
    `heads`, `kv_heads`, `head_dim`, `ffn`, `rope_theta` of EAGLE's layer; `figures`: measured by whoever trained it.
    `layers` of the target, from 0, whose inputs precede its last state in what the heads read. `feature_size` is that
    of all these states, 0 for `hidden_size` each: where it differs from `hidden_size`, the matrix `project` makes them
    as wide as the heads.
    """

    kind: HeadKind
    depth: Annotated[int, Meta(ge=1, le=64)]
    hidden_size: _Width
    vocabulary_size: Annotated[int, Meta(ge=1, le=1 << 24)]
    target: str
    target_sha256: str
    scale: float = 1.0
    blocks: Annotated[int, Meta(ge=0, le=64)] = 0
    heads: _Count = 0
    kv_heads: _Count = 0
    head_dim: _Count = 0
    ffn: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    figures: Mapping[str, float] = field(default_factory=dict)
    feature_size: Annotated[int, Meta(ge=0, le=65_536)] = 0
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.feature_size == 0:
            object.__setattr__(self, "feature_size", self.hidden_size * (len(self.layers) + 1))

    @property
    def is_projected(self) -> bool:
        return self.feature_size != self.hidden_size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every matrix but those of the vocabulary and the probe."""
        projected = {PROJECT: (self.hidden_size, self.feature_size)} if self.is_projected else {}
        return {**self._shapes_of_kind(), **projected}

    def _shapes_of_kind(self) -> dict[str, tuple[int, ...]]:
        width = self.hidden_size
        if self.kind == "medusa":
            places = [(head, block) for head in range(self.depth) for block in range(self.blocks)]
            weights = {f"weight.{h}.{b}": (width, 2 * width if b == 0 else width) for h, b in places}
            return {**weights, **{f"bias.{h}.{b}": (width,) for h, b in places}}
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "fc": (width, 2 * width),
            "attention_norm": (width,),
            "q_proj": (queries, width),
            "k_proj": (keys, width),
            "v_proj": (keys, width),
            "o_proj": (width, queries),
            "mlp_norm": (width,),
            "gate_proj": (self.ffn, width),
            "up_proj": (self.ffn, width),
            "down_proj": (width, self.ffn),
            "norm": (width,),
        }


@dataclass(frozen=True)
class HeadFile:
    """`arrays`: the matrices of `manifest.shapes()` in float32; `vocabulary` [m, hidden size], rows of the target's
    head for `token_ids` [m], ascending; `probe_ids` [n] and the states [n, feature size] that the target gives them.
    `frequent` [k]: places of the tokens that are always scored, ascending; the others are once they occur in the text.
    """

    manifest: HeadManifest
    arrays: Mapping[str, Matrix]
    vocabulary: Matrix
    token_ids: NDArray[np.int32]
    probe_ids: NDArray[np.int32]
    probe_states: Matrix
    frequent: NDArray[np.int32] | None = None

    @property
    def frequent_rows(self) -> Matrix:
        """The rows of the target's head [k, hidden size] that are always scored."""
        return self.vocabulary if self.frequent is None else self.vocabulary[self.frequent]

    def is_of(self, states: NDArray[np.float32]) -> bool:
        """Whether `states` [n, feature size], what a loaded target gives the probe, are those of the trained one."""
        if states.shape != self.probe_states.shape or not np.isfinite(states).all():
            return False
        lengths = np.linalg.norm(states, axis=1) * np.linalg.norm(self.probe_states, axis=1)
        cosines = (states * self.probe_states).sum(axis=1) / np.maximum(lengths, 1e-9)
        return float(cosines.mean()) >= _LEAST_LIKENESS


def read_head_manifest(path: Path) -> HeadManifest:
    """Without reading the matrices. Raises as `read_head_file`."""
    return _read(path, everything=False)[0]


def _read(path: Path, *, everything: bool) -> tuple[HeadManifest, dict[str, NDArray[Any]]]:
    """What a file says about itself, and its arrays if `everything` is to be read."""
    if not is_file(path):
        raise ModelNotFound(f"no file {str(path)!r}: give the .npz that scripts/train/heads.py has written")
    try:
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in (stored.files if everything else [MANIFEST])}
        described = json.loads(arrays.pop(MANIFEST).tobytes())
    except Exception as exc:  # damaged bytes raise nearly everything, and numpy's message may advise to trust them
        raise ModelFileError(f"{path} is not a heads file, or it is damaged: train the heads again") from exc
    return manifest_of(path, described), arrays


def read_head_file(path: Path) -> HeadFile:
    """Raises ModelNotFound, and ModelFileError for a file of another kind, or one that is damaged or inconsistent."""
    manifest, arrays = _read(path, everything=True)
    shapes = manifest.shapes()
    found = {name: _matrix(path, arrays, name, shape) for name, shape in shapes.items()}
    token_ids, probe_ids = (_ids(path, arrays, name, manifest.vocabulary_size) for name in (TOKEN_IDS, PROBE_IDS))
    frequent = _ids(path, arrays, FREQUENT, token_ids.size) if FREQUENT in arrays else None
    for listed in (token_ids, token_ids[:0] if frequent is None else frequent):
        if np.any(np.diff(listed) <= 0):
            raise ModelFileError(
                f"{path} lists its draft vocabulary out of order: it is damaged, train the heads again"
            )
    return HeadFile(
        manifest,
        found,
        _matrix(path, arrays, VOCABULARY, (token_ids.size, manifest.hidden_size)),
        token_ids,
        probe_ids,
        _matrix(path, arrays, PROBE_STATES, (probe_ids.size, manifest.feature_size)),
        frequent,
    )


def _matrix(path: Path, arrays: Mapping[str, NDArray[Any]], name: str, shape: tuple[int, ...]) -> Matrix:
    """One matrix in float32, of whatever type it was kept in."""
    array = arrays.get(name)
    if array is None or array.shape != shape or array.dtype.kind not in "if":
        seen = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
        raise ModelFileError(f"{path}: {name} must be {list(shape)}, there is {seen}; train the heads again")
    found = array.astype(np.float32)
    if array.dtype == np.int8:
        found *= _matrix(path, arrays, name + SCALE, shape[:1])[:, None]
    if not np.isfinite(found).all():
        raise ModelFileError(f"{path}: {name} contains values that are not numbers; train the heads again")
    return found


def _ids(path: Path, arrays: Mapping[str, NDArray[Any]], name: str, size: int) -> NDArray[np.int32]:
    array = arrays.get(name)
    if array is None or array.ndim != 1 or array.dtype.kind != "i" or not array.size:
        raise ModelFileError(f"{path}: {name} must be a list of token ids; train the heads again")
    if array.min() < 0 or array.max() >= size:
        raise ModelFileError(f"{path}: {name} names tokens outside the vocabulary 0..{size - 1}; train the heads again")
    return array.astype(np.int32)


def manifest_of(path: Path, described: Any) -> HeadManifest:
    """Of the heads file at `path`, which describes itself so. Raises ModelFileError."""
    if not isinstance(described, dict) or described.pop("format", None) != FORMAT:
        raise ModelFileError(f"{path} has another format; this edgespec reads {FORMAT}: train the heads again")
    for name in _FORMER:
        described.pop(name, None)
    try:
        if unknown := described.keys() - {entry.name for entry in fields(HeadManifest)}:
            raise ValueError(f"{min(unknown)} is not known")
        manifest = msgspec.convert(described, HeadManifest)
    except ValueError as exc:
        raise ModelFileError(f"{path} describes its heads in an unknown way ({exc}): train them again") from exc
    layers, sizes = manifest.layers, (manifest.heads, manifest.kv_heads, manifest.head_dim, manifest.ffn)
    is_sound = min(layers, default=0) >= 0 and list(layers) == sorted(set(layers))
    is_sound &= manifest.feature_size % (len(layers) + 1) == 0
    if manifest.kind == "eagle":
        is_sound &= 0 not in sizes and manifest.heads % manifest.kv_heads == 0 and manifest.head_dim % 2 == 0
    if not is_sound:
        raise ModelFileError(
            f"{path} gives its {manifest.kind} heads sizes that do not fit together: layers {layers}, "
            f"feature_size {manifest.feature_size}, {sizes}; train them again"
        )
    return manifest
