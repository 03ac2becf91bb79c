"""The layers of a checkpoint: sliding windows, rotary positions, layer numbers of tensors."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from edgespec.errors import ModelFileError
from edgespec.formats.architectures.rows import Architecture
from edgespec.formats.checkpoint import Checkpoint, Config, Weights

UNIFORM = ("llama", "gemma")  # architectures whose layers are all alike, whatever config.json says of their kinds


def check_unrotated_layers(checkpoint: Checkpoint, found: Architecture) -> None:
    """Raise ModelFileError unless every fourth layer of a SmolLM3 has no rotary positions, as llama.cpp hard-codes."""
    if found.name != "smollm3":
        return
    layers = checkpoint.count("num_hidden_layers")
    rotated = rotated_layers(checkpoint.config, layers)
    wrong = [index for index, flag in enumerate(rotated) if bool(flag) != bool((index + 1) % 4)]
    if wrong or len(rotated) != layers:
        raise ModelFileError(
            f"{checkpoint.folder}: llama.cpp's SmolLM3 has no rotary positions in layers 3, 7, 11, ... (from 0) and in "
            f"no others; this checkpoint differs at {wrong or 'its number of layers'}. Prune it by whole groups of four"
        )


def rotated_layers(config: Config, layers: int) -> Any:
    """Flags of the layers with rotary positions: SmolLM3's config.json lists them, or all but every n-th have them."""
    interval = config.get("no_rope_layer_interval") or 4
    return config.get("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(layers)]


def layer_kinds(checkpoint: Checkpoint, found: Architecture, layers: int) -> list[bool]:
    """Whether each layer has sliding attention, [layers]."""
    config = checkpoint.config
    if found.name not in UNIFORM and (kinds := config.get("layer_types")):
        known = {"sliding_attention": True, "full_attention": False}
        if len(kinds) != layers or not set(kinds) <= known.keys():
            raise ModelFileError(f"{checkpoint.folder}: layer_types must hold {layers} of {', '.join(known)}")
        return [known[kind] for kind in kinds]
    if found.has_window:
        every = int(config.get("sliding_window_pattern") or found.window_pattern)
        return [(index + 1) % every != 0 for index in range(layers)]
    if checkpoint.architecture == "MistralForCausalLM":
        return [window_of(checkpoint) is not None] * layers
    if config.get("use_sliding_window") and window_of(checkpoint):  # Qwen: the first layers have full attention
        return [index >= int(config.get("max_window_layers", layers)) for index in range(layers)]
    return [False] * layers


def window_of(checkpoint: Checkpoint) -> int | None:
    """Sliding window in tokens, or None. The default of Mistral and Gemma, 4096, is omitted in their config.json."""
    found = checkpoint.config.get("sliding_window", 4096)
    return int(found) if found else None


def layer_number(found: Architecture, name: str) -> tuple[int, str] | None:
    """(layer, rest) of a tensor's canonical name; None if it belongs to no layer."""
    match = re.fullmatch(re.escape(found.layer_prefix) + r"(\d+)\.(.+)", name)
    return (int(match[1]), match[2]) if match else None


def canonical_name(found: Architecture, name: str) -> str:
    """The tensor name with the optional prefix, which checkpoints saved from the bare model lack."""
    if name.startswith((found.optional_prefix, "lm_head.")):
        return name
    return found.optional_prefix + name


# rotary positions


def rotary_settings(config: Config) -> dict[str, Any]:
    """Rotary settings of transformers 5 (`rope_parameters`) or 4 (`rope_theta`, `rope_scaling`) as one dict.

    For a model with settings per kind of layer (Gemma 3), those of full attention. Raises ModelFileError, also where
    the two differ, since programs disagree on which of them counts.
    """
    new, old = (config.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    for found in (new, old):
        if not isinstance(found, dict):
            raise ModelFileError(f"config.json has rotary settings {str(found)[:60]!r}; they must be an object")
    settings = dict(new.get("full_attention") or new or old)
    settings.pop("sliding_attention", None)
    settings.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    settings.setdefault("rope_type", settings.get("type", "default"))
    if new:
        told = {"rope_type" if key == "type" else key: value for key, value in old.items()}
        if differing := [key for key, value in told.items() if settings.get(key) != value]:
            raise ModelFileError(
                f"config.json has both rope_parameters and rope_scaling, and they differ ({', '.join(differing)}): "
                "keep what is meant"
            )
    _check_rotary(settings)
    return settings


def _check_rotary(settings: dict[str, Any]) -> None:
    """Raise ModelFileError for numbers that no rotation can have."""
    needed = ["rope_theta", *(["factor"] if settings["rope_type"] == "linear" else [])]
    for name in needed:
        value = settings.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ModelFileError(f"config.json's rotary settings have {name} {value!r:.40}; a number above 0 is needed")


def window_frequency_base(config: Config) -> float | None:
    """The rotary base of layers with sliding attention if it differs (Gemma 3), else None."""
    found = config.get("rope_parameters")
    if isinstance(found, dict) and isinstance(found.get("sliding_attention"), dict):
        return float(found["sliding_attention"].get("rope_theta", 10000.0))
    base = config.get("rope_local_base_freq")
    return None if base is None else float(base)


def llama3_frequency_factors(settings: dict[str, Any], head_dim: int) -> Weights:
    """Divisors [head_dim / 2] of the rotary frequencies for Llama 3.1's context extension. Raises ModelFileError."""
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [key for key in keys if key not in settings]:
        raise ModelFileError(f"config.json's llama3 rotary scaling lacks {', '.join(missing)}")
    factor, low, high, original = (float(settings[key]) for key in keys)
    if not (factor > 0 and original > 0 and high > low):
        raise ModelFileError(
            f"config.json's llama3 rotary scaling is impossible: factor {factor:g} and "
            f"original_max_position_embeddings {original:g} must be above 0, and high_freq_factor {high:g} above "
            f"low_freq_factor {low:g}"
        )
    frequencies = float(settings["rope_theta"]) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    wavelengths = 2 * math.pi / frequencies
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)
