"""The options of head training and their limits. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    matrices in the file.
    """

    kind: HeadsKind = "eagle"
    depth: int = 4
    draft_vocabulary: int = 16_384
    storage: str = "int8"
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
        if self.window < self.depth + 4:
            raise ConfigError(f"--window {self.window} must be longer than --depth {self.depth} by 4 or more")
        meaningless = ("heads", "kv_heads", "ffn") if self.kind == "medusa" else ("layers",)
        for name in (*meaningless, *_NOT_HERE):
            if getattr(self, name):
                raise ConfigError(f"{flag(name)} has no effect for --kind {self.kind}: omit it")


def heads_shape(request: HeadsRequest, target: TargetFacts) -> StudentShape:
    """Sizes of the heads: by default the target's width and attention heads, and a feed-forward part twice as wide.

    Raises ConfigError for inconsistent sizes.
    """
    hidden = target.size("hidden_size")
    heads = request.heads or target.size("num_attention_heads")
    kv_heads = request.kv_heads or (heads if request.heads else target.kv_heads)
    if heads % kv_heads:
        raise ConfigError(f"--heads {heads} is not divisible by --kv-heads {kv_heads}")
    head_dim = target.head_dim if request.heads is None else hidden // heads
    if head_dim < 2 or head_dim % 2:
        raise ConfigError(f"--heads {heads} leaves heads of width {head_dim} of {hidden}, which must be even")
    return StudentShape(request.layers or 1, hidden, heads, kv_heads, request.ffn or 2 * hidden, head_dim)
