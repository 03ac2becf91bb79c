"""Settings that an ONNX model is opened with, checked, and the configuration files in its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from edgespec.engines.model_use import DEFAULT_CONTEXT, ModelUse
from edgespec.engines.onnx.graph import Graph
from edgespec.errors import ConfigError, ModelFileError
from edgespec.formats.checkpoint import read_json
from edgespec.platform.machine import is_x86

CACHE_TYPES = ("f32",)
KERNEL_CACHE_TYPES = ("f16", "q8_0")
# ONNX Runtime multiplies queries and keys 128 values of a head at a time, but all of them at once where a text has at
# most 64 cells, which rounds otherwise: with wider heads, as Gemma's, a row's bits depend on where its pass ends.
VALUES_AT_ONCE = 128
CONFIGS = ("config.json", "genai_config.json")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the files beside a graph say; lengths in tokens, None where they say nothing."""

    architecture: str
    trained_length: int | None
    head_size: int | None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """From config.json (Hugging Face) or genai_config.json (onnxruntime-genai). Raises ModelFileError."""
        for name in CONFIGS:
            path = folder / name
            if path.is_file():
                found = read_json(path, fix="export the model again")
                return cls._from_hub(found) if name == CONFIGS[0] else cls._from_genai(found)
        raise ModelFileError(f"{folder} has neither {' nor '.join(CONFIGS)}: copy the one of the export there")

    @classmethod
    def _from_hub(cls, config: dict[str, Any]) -> Self:
        heads, width = _size(config, "num_attention_heads", "n_head"), _size(config, "hidden_size", "n_embd")
        size = _size(config, "head_dim") or (width // heads if heads and width else None)
        length = _size(config, "max_position_embeddings", "n_positions")
        return cls(str(config.get("model_type", "unknown")), length, size)

    @classmethod
    def _from_genai(cls, config: dict[str, Any]) -> Self:
        model = _part(config, "model")
        head_size = _size(_part(model, "decoder"), "head_size")
        return cls(str(model.get("type", "unknown")), _size(model, "context_length"), head_size)


def _part(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name, {})
    if not isinstance(found, dict):
        raise ModelFileError(
            f"the model's configuration has no object {name!r} but {str(found)[:40]!r}. Export it again"
        )
    return found


def _size(config: dict[str, Any], *names: str) -> int | None:
    """The value of the first of `names` that exists, a whole number, or None. Raises ModelFileError."""
    found = next((config[name] for name in names if config.get(name) is not None), None)
    if found is not None and (not isinstance(found, int) or isinstance(found, bool) or not 0 < found < 1 << 31):
        raise ModelFileError(f"the model's configuration says {names[0]} {str(found)[:40]!r}, a size is needed")
    return found


@dataclass(frozen=True, slots=True)
class OnnxSettings(ModelUse):
    """The options of a load, checked; `head_size`: values of an attention head; `architecture`: of the model."""

    context_length: int = DEFAULT_CONTEXT
    threads: int = 1
    cache_type_k: str = "f32"
    head_size: int = 0
    architecture: str = ""

    @classmethod
    def checked(cls, graph: Graph, config: ModelConfig, use: ModelUse) -> Self:
        """Raises ConfigError for a value out of range, or a context longer than the model was trained for."""
        longest = min((n for n in (config.trained_length, graph.max_positions) if n), default=DEFAULT_CONTEXT)
        own = graph.head_sizes
        head_size = own[0] if own else graph.cache[0].head_size or config.head_size
        types = KERNEL_CACHE_TYPES if own else CACHE_TYPES
        if head_size is None:
            raise ModelFileError("neither the graph nor the files beside it contain the size of an attention head")
        given = use.settled(
            context_length=use.length_for(f"this {config.architecture} model", longest),
            cache_type_k=use.cache_type_k or types[0],
        )
        settings = cls(**given, head_size=head_size, architecture=config.architecture)
        if settings.cache_type_k not in types:
            raise ConfigError(
                f"a cache of type {settings.cache_type_k!r} is not supported here: use {' or '.join(types)}"
            )
        return settings

    @property
    def has_classes(self) -> bool:
        """Whether attention of ONNX Runtime's own gives rows the same bits in passes of several widths.

        Elsewhere than on x86 it has other kernels for a pass of one row, of two or three, and of more.
        """
        return self.head_size <= VALUES_AT_ONCE and is_x86()
