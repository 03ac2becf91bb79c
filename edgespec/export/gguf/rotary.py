"""Rotary positions: the settings of a config under one name, and what llama.cpp needs of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from edgespec.errors import ModelFileError
from edgespec.export.checkpoint import Config, Weights


def rotary_settings(config: Config) -> dict[str, Any]:
    """Rotary settings under one name: transformers 5 says `rope_parameters`, 4 `rope_theta` and `rope_scaling`.

    Where each kind of layer has its own (Gemma 3), those of the layers that see everything.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise ModelFileError(f"config.json has rotary settings {str(found)[:60]!r}, an object was expected")
    settings = dict(found.get("full_attention") or found)
    settings.pop("sliding_attention", None)
    settings.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    settings.setdefault("rope_type", settings.get("type", "default"))
    return settings


def window_frequency_base(config: Config) -> float | None:
    """The rotary base of the layers with a sliding window, where it differs (Gemma 3)."""
    found = config.get("rope_parameters")
    if isinstance(found, dict) and isinstance(found.get("sliding_attention"), dict):
        return float(found["sliding_attention"].get("rope_theta", 10000.0))
    base = config.get("rope_local_base_freq")
    return None if base is None else float(base)


def llama3_frequency_factors(settings: dict[str, Any], head_dim: int) -> Weights:
    """Divisors [head_dim / 2] of the rotary frequencies, as Llama 3.1 stretches its context."""
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [key for key in keys if key not in settings]:
        raise ModelFileError(f"config.json's llama3 rotary scaling lacks {', '.join(missing)}")
    factor, low, high, original = (float(settings[key]) for key in keys)
    frequencies = float(settings["rope_theta"]) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    wavelengths = 2 * math.pi / frequencies
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)
