"""What tells an EAGLE-3 head's folder from a model's, and its settings under one name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError

PREFIXES = ("midlayer.", "layers.0.")
NESTED = "transformer_layer_config"  # where speculators keep the settings of the layer


def is_head_config(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes an EAGLE-3 head: one layer and a vocabulary of its own to draft in."""
    return "draft_vocab_size" in config and _flat(config).get("num_hidden_layers") == 1


def head_config(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """All settings on one level. Raises ModelFileError for a folder that holds something else."""
    if not is_head_config(config):
        raise ModelFileError(
            f"{folder} is no EAGLE-3 head: its config.json has no draft_vocab_size, or more layers than one"
        )
    return _flat(config)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    nested = config.get(NESTED)
    return {**config, **nested} if isinstance(nested, dict) else dict(config)
