"""The options of head training and their limits. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from edgespec.errors import ConfigError
from edgespec.export.training.request import DistillRequest, flag
from edgespec.export.training.students import StudentShape
from edgespec.export.training.target import TargetFacts

HeadsKind = Literal["medusa", "eagle"]
KINDS: tuple[HeadsKind, ...] = ("medusa", "eagle")
STORAGE = ("int8", "f16")
MAX_DEPTH = 16
_NOT_HERE = ("hidden", "init")


@dataclass(frozen=True)
class HeadsRequest(DistillRequest):
    """Training of heads of `kind` that draft `depth` tokens; the other fields as in DistillRequest.

    `layers`: residual blocks per Medusa head. `heads`, `kv_heads`, `ffn`: sizes of EAGLE's layer, None: the target's.
    `draft_vocabulary`: maximum number of tokens that can be drafted, the most frequent ones. `storage`: type of the
    matrices in the file. `read_layers`: layers of the target, from 0, whose inputs the heads read beside its last
    state. `frequent`: how many tokens, the most frequent ones, are always scored, the others of the draft vocabulary
    once they occur in the text; None: all are.
    """

    kind: HeadsKind = "eagle"
    depth: int = 4
    draft_vocabulary: int = 16_384
    storage: str = "int8"
    read_layers: tuple[int, ...] = ()
    frequent: int | None = None
    window: int = 256
    batch_tokens: int = 2048

    def check(self) -> None:
        super().check()
        if self.kind not in KINDS:
            raise ConfigError(f"--kind {self.kind!r} is not known; allowed: {', '.join(KINDS)}")
        if self.storage not in STORAGE:
            raise ConfigError(f"--storage {self.storage!r} is not known; allowed: {', '.join(STORAGE)}")
        if not 1 <= self.depth <= MAX_DEPTH:
            raise ConfigError(f"--depth must be from 1 to {MAX_DEPTH}, got {self.depth}")
        if not 16 <= self.draft_vocabulary <= 2**20:
            raise ConfigError(f"--draft-vocabulary must be from 16 to {2**20}, got {self.draft_vocabulary}")
        if self.frequent is not None and not 16 <= self.frequent <= self.draft_vocabulary:
            raise ConfigError(
                f"--frequent must be from 16 to --draft-vocabulary {self.draft_vocabulary}, got {self.frequent}"
            )
        if list(self.read_layers) != sorted({layer for layer in self.read_layers if layer >= 0}):
            raise ConfigError(f"--read-layers must be ascending layer numbers from 0, got {list(self.read_layers)}")
        if self.window < self.depth + 4:
            raise ConfigError(f"--window {self.window} must be longer than --depth {self.depth} by 4 or more")
        meaningless = ("heads", "kv_heads", "ffn") if self.kind == "medusa" else ("layers",)
        for name in (*meaningless, *_NOT_HERE):
            if getattr(self, name):
                raise ConfigError(f"{flag(name)} has no effect for --kind {self.kind}: omit it")

    def identity(self, target_fingerprint: str) -> dict[str, Any]:
        return {**super().identity(target_fingerprint), "read_layers": list(self.read_layers)}


def parse_layers(text: str) -> tuple[int, ...]:
    """`3,14,24` as numbers; nothing: no layers. Raises ConfigError."""
    parts = text.split(",") if text else []
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"--read-layers {text!r} is not valid: give layer numbers such as 3,14,24")
    return tuple(int(part) for part in parts)


def heads_shape(request: HeadsRequest, target: TargetFacts) -> StudentShape:
    """Sizes of the heads: by default the target's width and attention heads, and a feed-forward part twice as wide.

    Raises ConfigError for inconsistent sizes.
    """
    hidden = target.size("hidden_size")
    if request.read_layers and request.read_layers[-1] >= (count := target.size("num_hidden_layers")):
        raise ConfigError(f"--read-layers {request.read_layers[-1]}: the target has layers 0..{count - 1}")
    heads = request.heads or target.size("num_attention_heads")
    kv_heads = request.kv_heads or (heads if request.heads else target.kv_heads)
    if heads % kv_heads:
        raise ConfigError(f"--heads {heads} is not divisible by --kv-heads {kv_heads}")
    head_dim = target.head_dim if request.heads is None else hidden // heads
    if head_dim < 2 or head_dim % 2:
        raise ConfigError(f"--heads {heads} leaves heads of width {head_dim} of {hidden}, which must be even")
    return StudentShape(request.layers or 1, hidden, heads, kv_heads, request.ffn or 2 * hidden, head_dim)
