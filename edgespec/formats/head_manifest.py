"""What a heads file says about its heads: kind, sizes and origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from edgespec.errors import ModelFileError

FORMAT = 1
HeadKind = Literal["medusa", "eagle"]
PROJECT = "project"
_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
_LIMITS = {
    "depth": (1, 64),
    "hidden_size": (1, 65_536),
    "vocabulary_size": (1, 2**24),
    "blocks": (0, 64),
    "heads": (0, 4096),
    "kv_heads": (0, 4096),
    "head_dim": (0, 4096),
    "ffn": (0, 2**20),
    "feature_size": (1, 65_536),
    "generation": (1, 3),
}


@dataclass(frozen=True)
class HeadManifest:
    """Sizes and origin. `depth`: tokens per draft it was trained for; `scale` on scores; `blocks` of a Medusa head;
    `heads`, `kv_heads`, `head_dim`, `ffn`, `rope_theta` of EAGLE's layer; `figures`: measured by whoever trained it.
    `layers` of the target, from 0, whose inputs precede its last state in what the heads read. `feature_size` is that
    of all these states, 0 for `hidden_size` each: where it differs from `hidden_size`, the matrix `project` makes them
    as wide as the heads.
    `generation` 3: an EAGLE-3 head as its authors publish it. It reads the inputs of `layers`, fused by the matrix
    `fc`, and not the last state, which still belongs to `feature_size`; `norms_features` before that, and
    `norms_residual` of its layer, too. It has an embedding of its own.
    """

    kind: HeadKind
    depth: int
    hidden_size: int
    vocabulary_size: int
    target: str
    target_sha256: str
    scale: float = 1.0
    blocks: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    figures: Mapping[str, float] = field(default_factory=dict)
    feature_size: int = 0
    layers: tuple[int, ...] = ()
    generation: int = 1
    norms_residual: bool = False
    norms_features: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.feature_size == 0:
            object.__setattr__(self, "feature_size", self.hidden_size * (len(self.layers) + 1))

    @property
    def is_projected(self) -> bool:
        return self.feature_size != self.hidden_size and self.generation != 3

    @property
    def fused_size(self) -> int:
        """The width of the inputs of all `layers` side by side."""
        return self.feature_size // (len(self.layers) + 1) * len(self.layers)

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
        first: dict[str, tuple[int, ...]] = {"fc": (width, 2 * width), "attention_norm": (width,)}
        pair = width
        if self.generation == 3:  # embedding and state are normed and go into attention side by side
            first = {"fc": (width, self.fused_size), "embedding_norm": (width,), "state_norm": (width,)}
            first |= {"feature_norm": (self.fused_size,)} if self.norms_features else {}
            first |= {"frequencies": (self.head_dim // 2,)}  # of the rotary positions
            pair = 2 * width
        return {
            **first,
            "q_proj": (queries, pair),
            "k_proj": (keys, pair),
            "v_proj": (keys, pair),
            "o_proj": (width, queries),
            "mlp_norm": (width,),
            "gate_proj": (self.ffn, width),
            "up_proj": (self.ffn, width),
            "down_proj": (width, self.ffn),
            "norm": (width,),
        }


def manifest_of(path: Path, described: Any) -> HeadManifest:
    """Of the heads file at `path`, which describes itself so. Raises ModelFileError."""
    if not isinstance(described, dict) or described.pop("format", None) != FORMAT:
        raise ModelFileError(f"{path} has another format; this edgespec reads {FORMAT}: train the heads again")
    kinds = {entry.name: entry.type for entry in fields(HeadManifest)}
    try:
        manifest = HeadManifest(**described)
    except TypeError as exc:
        raise ModelFileError(f"{path} describes its heads in an unknown way ({exc}): train them again") from exc
    for name, kind in kinds.items():
        allowed = _TYPES.get(str(kind))
        if allowed is not None and not isinstance(getattr(manifest, name), allowed):
            raise ModelFileError(
                f"{path}: {name} must be {kind}, got {getattr(manifest, name)!r}; train the heads again"
            )
    for name, (least, most) in _LIMITS.items():
        if not least <= getattr(manifest, name) <= most:
            raise ModelFileError(f"{path}: {name} {getattr(manifest, name)} is out of range; train the heads again")
    layers = manifest.layers
    if not all(type(layer) is int and layer >= 0 for layer in layers) or list(layers) != sorted(set(layers)):
        raise ModelFileError(f"{path}: layers must be ascending layer numbers, got {layers}; train the heads again")
    if manifest.feature_size % (count := len(layers) + 1):
        raise ModelFileError(
            f"{path}: feature_size {manifest.feature_size} is not that of {count} states; train it again"
        )
    sizes = (manifest.heads, manifest.kv_heads, manifest.head_dim, manifest.ffn)
    if manifest.kind not in ("medusa", "eagle"):
        raise ModelFileError(f"{path} holds heads of the kind {manifest.kind!r}; this edgespec runs medusa and eagle")
    if manifest.generation not in (1, 3) or (manifest.generation == 3 and (manifest.kind != "eagle" or not layers)):
        raise ModelFileError(
            f"{path} holds {manifest.kind} heads of generation {manifest.generation} for layers {layers}: such heads "
            "are not known; export or train them again"
        )
    if manifest.kind == "eagle" and (0 in sizes or manifest.heads % manifest.kv_heads or manifest.head_dim % 2):
        raise ModelFileError(f"{path} gives its layer sizes that do not fit together: {sizes}; train the heads again")
    return manifest
