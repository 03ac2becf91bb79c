"""What to build as a benchmark pair, and what that takes of disk, memory and time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from edgespec.bench.expansion import Shape
from edgespec.errors import CapabilityError, ConfigError
from expansion.shapes import shape_of

Engine = Literal["llamacpp", "onnx"]

# Format -> (engine, bits per weight, seconds per 10^9 weights on one core of a two-core x86 machine)
FORMATS: dict[str, tuple[Engine, float, float]] = {
    "f32": ("llamacpp", 32, 12),
    "f16": ("llamacpp", 16, 12),
    "q8_0": ("llamacpp", 8.5, 15),
    "q4_0": ("llamacpp", 4.7, 60),
    "q4_k_m": ("llamacpp", 5.2, 150),
    "int8": ("onnx", 9, 130),
    "w8a8": ("onnx", 8.1, 60),
    "int4": ("onnx", 5, 120),
}
DRAFT_FORMATS: dict[Engine, str] = {"llamacpp": "q8_0", "onnx": "int8"}
DRAFT_ROLES = {"demo": "draft", "medium": "medium"}
EXPAND_SECONDS = 16  # per 10^9 weights
CHECKPOINT_BITS = 16
# Measured: the peak of a conversion to GGUF by its largest tensor (1.24 * 10^9 weights), to ONNX by all (0.3 * 10^9).
GGUF_BYTES_PER_TABLE_WEIGHT = 12
ONNX_BYTES_PER_WEIGHT = {"int8": 1.5, "int4": 1.5, "w8a8": 2.5}


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What to build. Raises ConfigError for names that are not known.

    `vocab_size` replaces the shape's own, for target and expanded draft alike; `draft_size` expands the draft too;
    `target` is a checkpoint that is expanded in the place of the source's, whose heads are then left out.
    """

    size: str
    formats: tuple[str, ...] = ("q8_0", "q4_k_m")
    draft: str = "demo"
    draft_size: str | None = None
    vocab_size: int | None = None
    sigma: float = 0.0
    seed: int = 0
    keep_checkpoints: bool = False
    target: Path | None = None

    def __post_init__(self) -> None:
        for size in (self.size, self.draft_size or self.size):
            shape_of(size)
        for name in self.formats:
            if name not in FORMATS:
                raise ConfigError(f"no format {name!r}; allowed: {', '.join(FORMATS)}")
        if not self.formats:
            raise ConfigError(f"no format is given; allowed: {', '.join(FORMATS)}")
        if self.draft not in DRAFT_ROLES:
            raise ConfigError(f"no draft {self.draft!r}; allowed: {', '.join(DRAFT_ROLES)}")
        if not 0 <= self.sigma <= 10:
            raise ConfigError(f"sigma must be within 0..10 deviations of the head's weights, got {self.sigma}")

    @property
    def name(self) -> str:
        """Tells this pair from others in one folder."""
        parts = [f"bench-{self.size}"]
        parts += [self.draft] if self.draft != "demo" else []
        parts += ["of", *self.target.resolve().parts[-2:]] if self.target else []
        parts += [f"draft-{self.draft_size}"] if self.draft_size else []
        parts += [f"vocab-{self.vocab_size}"] if self.vocab_size else []
        parts += [f"sigma-{self.sigma:g}"] if self.sigma else []
        return "-".join([*parts, f"seed-{self.seed}"] if self.seed else parts)

    def shape(self, size: str) -> Shape:
        shape = shape_of(size)
        return replace(shape, vocab_size=self.vocab_size) if self.vocab_size else shape

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(dict.fromkeys(FORMATS[name][0] for name in self.formats))


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of disk in all, bytes of memory at one time, and seconds on one core; estimates on the safe side."""

    disk_bytes: int
    memory_bytes: int
    seconds: float


def needs_of(request: BenchRequest) -> Needs:
    """What a build takes when nothing is there yet."""
    shape = request.shape(request.size)
    weights = shape.parameters(tied=not request.sigma)
    extra = request.shape(request.draft_size).parameters() if request.draft_size else 0
    table = shape.vocab_size * shape.hidden_size
    disk, seconds, memory = (weights + extra) * CHECKPOINT_BITS / 8, EXPAND_SECONDS * (weights + extra) / 1e9, 0
    for name in request.formats:
        engine, bits, pace = FORMATS[name]
        # A graph looks tokens up in a plain table; w8a8 goes through a float32 graph, a K-quant through a 16-bit file.
        through = weights * 4 + table if name == "w8a8" else table * 4
        wide = through if engine == "onnx" else weights * 2 if name.startswith("q4") else 0
        disk += weights * bits / 8 + extra * 9 / 8 + wide
        seconds += pace * weights / 1e9
        needed = weights * ONNX_BYTES_PER_WEIGHT[name] if engine == "onnx" else table * GGUF_BYTES_PER_TABLE_WEIGHT
        memory = max(memory, int(needed))
    return Needs(int(disk), memory + 400 * 2**20, seconds)


def check_needs(needs: Needs, output: Path) -> None:
    """Raise CapabilityError when disk or memory do not suffice."""
    from edgespec.export.resources import free_bytes, human
    from edgespec.platform.memory import free_memory

    place = next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.exists())
    if needs.disk_bytes > (free := free_bytes(place)):
        raise CapabilityError(
            f"not enough disk: up to {human(needs.disk_bytes)} are needed in {place}, {human(free)} are free. Make "
            "room, choose another disk with --output, fewer --formats or a smaller --size"
        )
    available = free_memory()
    if available is not None and needs.memory_bytes > available:
        raise CapabilityError(
            f"not enough memory: {human(needs.memory_bytes)} are needed, {human(available)} are available. Close other "
            "programs, leave int8, w8a8 and int4 out of --formats, or choose a smaller --size"
        )
