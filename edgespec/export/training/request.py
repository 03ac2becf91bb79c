"""What is asked of a distillation: every choice, its limits, and the libraries it needs. Needs no torch."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from edgespec.errors import CapabilityError, ConfigError
from edgespec.installation import install_command

Loss = Literal["tv", "kl"]
LOSSES: tuple[Loss, ...] = ("tv", "kl")
PRECISIONS = ("f32", "bf16")
DEVICES = ("auto", "cpu", "cuda", "mps")
WEIGHT_TYPES = ("f16", "f32")
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors")
_LIMITS: dict[str, tuple[float, float]] = {
    "layers": (1, 512),
    "hidden": (8, 65_536),
    "heads": (1, 1024),
    "kv_heads": (1, 1024),
    "ffn": (8, 1_048_576),
    "rounds": (1, 100_000),
    "round_tokens": (1, 2**40),
    "round_prompts": (1, 2**20),
    "reply_tokens": (1, 65_536),
    "window": (8, 65_536),
    "batch_tokens": (8, 2**24),
    "held_out_prompts": (1, 4096),
    "patience": (1, 100_000),
    "min_rise": (0, 1),
    "share": (0, 1),
    "generated_share": (0, 1),
    "rate": (1e-6, 1000),
    "seed": (0, 2**32 - 1),
}


@dataclass(frozen=True)
class DistillRequest:
    """One distillation; sizes in tokens where no other unit is named, None where the target decides.

    `init`: layers of the target that the student starts from, empty for a fresh student. `share`: of cross-entropy in
    the loss. `generated_share`: of text by the target in a batch. `rate`: factor on the learning rates.
    """

    target: Path
    output: Path
    data: tuple[Path, ...] = ()
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    init: tuple[int, ...] = ()
    loss: Loss = "tv"
    share: float = 0.1
    rounds: int = 20
    round_tokens: int = 65_536
    round_prompts: int = 128
    reply_tokens: int = 128
    window: int = 512
    batch_tokens: int = 4096
    generated_share: float = 0.5
    held_out_prompts: int = 64
    patience: int = 3
    min_rise: float = 0.002
    rate: float = 1.0
    seed: int = 0
    precision: str = "f32"
    device: str = "auto"
    weights: str = "f16"

    def check(self) -> None:
        """Raises ConfigError for the first value that is out of its limits or contradicts another."""
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{flag(name)} must be from {least} to {most}, got {value}")
        for name, allowed in (
            ("loss", LOSSES),
            ("precision", PRECISIONS),
            ("device", DEVICES),
            ("weights", WEIGHT_TYPES),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{flag(name)} {getattr(self, name)!r} is not known; allowed: {', '.join(allowed)}")
        if self.window <= self.reply_tokens:
            raise ConfigError(
                f"--window {self.window} must be longer than --reply-tokens {self.reply_tokens}: a prompt stands before"
            )
        if self.batch_tokens < self.window:
            raise ConfigError(f"--batch-tokens {self.batch_tokens} must hold at least one --window of {self.window}")
        if self.data and len(set(self.data)) < len(self.data):
            raise ConfigError("--data names a file twice: name each once")

    @property
    def rows(self) -> int:
        """Windows per batch."""
        return self.batch_tokens // self.window

    @property
    def steps_per_round(self) -> int:
        return max(1, round(self.round_tokens / (self.rows * self.window)))

    @property
    def tokens_per_round(self) -> int:
        """`round_tokens` in whole batches."""
        return self.steps_per_round * self.rows * self.window

    @property
    def total_tokens(self) -> int:
        return self.rounds * self.tokens_per_round

    def identity(self, target_fingerprint: str) -> dict[str, Any]:
        """What must be equal for one run to go on where another stopped, as JSON values; files by their contents."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "output"}
        values["target"] = target_fingerprint
        values["data"] = [[path.name, file_hash(path)] for path in self.data]
        return {**values, "init": list(self.init)}


def flag(name: str) -> str:
    """The command line's spelling of a field."""
    return "--" + name.replace("_", "-")


def file_hash(path: Path) -> str:
    """Hexadecimal SHA-256. Raises ConfigError for a file that cannot be read."""
    try:
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as exc:
        raise ConfigError(f"--data {path} cannot be read: {exc.strerror}") from exc


def parse_init(text: str) -> tuple[int, ...]:
    """`layers:0,8` as (0, 8). Raises ConfigError."""
    kind, _, numbers = text.partition(":")
    parts = numbers.split(",")
    if kind != "layers" or not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"--init {text!r} is not understood: write layers:0,8 with the layers to start from")
    return tuple(int(part) for part in parts)


def require_libraries() -> None:
    """Raises CapabilityError naming what to install when a library is missing."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise CapabilityError(f"distilling needs {', '.join(missing)}, not installed here: {install_command('train')}")
