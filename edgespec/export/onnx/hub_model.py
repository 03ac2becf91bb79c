"""What model a Hugging Face folder holds: its sizes and constants for a graph, its tensors. The unknown is refused.

Tensors, shapes and settings are those of the tables in `formats.architectures`, by which GGUF files are written, too;
what transformers would compute otherwise because of a setting in config.json is refused by name.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError
from edgespec.export.placement import HEAD, placed
from edgespec.formats.architectures import (
    ARCHITECTURES,
    Architecture,
    Sizes,
    Tensor,
    check_settings,
    layer_kinds,
    llama3_frequency_factors,
    read_sizes,
    rotary_settings,
    rotated_layers,
    window_frequency_base,
    window_of,
)
from edgespec.formats.checkpoint import Checkpoint, full_config, settings_of, unsupported
from edgespec.formats.hub_folder import CHAT_TEMPLATE, chat_template, read_json
from edgespec.formats.onnx.llama_config import LlamaConfig
from edgespec.vocabulary import retyped_names

ALTERNATIVE = "give --exporter optimum, which may know more and needs torch"
WRITABLE = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"),
    *("Qwen3ForCausalLM", "SmolLM3ForCausalLM", "Gemma3ForCausalLM"),
)
HEAD_MULTIPLE = 16
REQUIRED = ("tokenizer.json", "tokenizer_config.json")
COPIED = ("config.json", "generation_config.json", "special_tokens_map.json", CHAT_TEMPLATE, *REQUIRED)
OPTIONAL_WINDOWS = ("qwen2", "qwen3", "smollm3")  # without use_sliding_window there are none, whatever else is said


@dataclass(frozen=True)
class HubModel:
    """A folder whose model can be written as a graph. `tensors`: the tensors' names in the files, and their rows in
    the table, by the names that transformers gives them.
    """

    checkpoint: Checkpoint
    config: LlamaConfig
    tensors: dict[str, tuple[str, Tensor]]

    @property
    def is_tied(self) -> bool:
        return HEAD not in self.tensors

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(self.checkpoint.shape(stored)) for stored, _ in self.tensors.values())


def open_hub(folder: Path) -> HubModel:
    """The model in a folder. Raises ModelFileError for one that is damaged or cannot be written as a graph."""
    reader = _reader(Checkpoint.open(folder))
    with settings_of(folder):
        return reader.read()


def check_config(folder: Path) -> None:
    """Raise ModelFileError for a folder whose config.json tells that its model cannot be written as a graph."""
    with settings_of(folder):
        _reader(Checkpoint(folder, full_config(folder), {})).check_settings()


def _reader(checkpoint: Checkpoint) -> _Reader:
    kind = checkpoint.architecture
    if kind not in WRITABLE:
        raise unsupported(checkpoint.folder, kind, "ONNX by edgespec's own writer", WRITABLE)
    return _Reader(checkpoint, ARCHITECTURES[kind])


class _Reader:
    """Reads one checkpoint; every complaint names the folder."""

    def __init__(self, checkpoint: Checkpoint, table: Architecture) -> None:
        self._checkpoint, self._table, self._settings = checkpoint, table, checkpoint.config
        self._is_gemma = table.name == "gemma3"

    def read(self) -> HubModel:
        self.check_settings()
        sizes = read_sizes(self._checkpoint)
        if sizes.head_dim % HEAD_MULTIPLE or sizes.heads % sizes.kv_heads:
            raise self._wrong(
                f"it has {sizes.heads} attention heads of {sizes.head_dim} values and {sizes.kv_heads} for keys; ONNX "
                f"Runtime's rotary attention needs a multiple of {HEAD_MULTIPLE}, and of the latter"
            )
        tensors = placed(self._checkpoint, self._table, sizes)
        windowed = self._windowed(sizes.layers)
        config = LlamaConfig(
            hidden_size=sizes.width,
            intermediate_size=sizes.inner,
            num_layers=sizes.layers,
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            vocab_size=sizes.vocabulary,
            max_positions=sizes.context,
            norm_epsilon=self._number("rms_norm_eps"),
            rope_theta=float(rotary_settings(self._settings)["rope_theta"]),
            rope_divisors=self._divisors(sizes.head_dim),
            window=self._window() if windowed else -1,
            windowed_layers=windowed,
            unrotated_layers=self._unrotated(sizes.layers),
            biases=frozenset(name.split(".")[-2] for name in tensors if name.endswith(".bias")),
            has_head_norms="self_attn.q_norm.weight" in self._table.layer,
            **(self._gemma(sizes) if self._is_gemma else {}),
        )
        return HubModel(self._checkpoint, config, tensors)

    def _gemma(self, sizes: Sizes) -> dict[str, Any]:
        """What sets Gemma 3 off."""
        cap = self._settings.get("final_logit_softcapping")
        return {
            "window_rope_theta": window_frequency_base(self._settings) or 10000.0,
            "has_post_norms": True,
            "activation": "gelu",
            "attention_scale": float(self._settings.get("query_pre_attn_scalar") or sizes.head_dim) ** -0.5,
            "embedding_scale": float(sizes.width**0.5),
            "logit_cap": None if cap is None else float(cap),
        }

    # settings

    def check_settings(self) -> None:
        """Refuse what the graph would not compute."""
        check_settings(self._checkpoint, self._table, f". For others {ALTERNATIVE}")
        found = self._settings.get("rope_parameters")
        windowed = found.get("sliding_attention") if isinstance(found, dict) else None
        if isinstance(windowed, dict) and windowed.get("rope_type", "default") != "default":
            raise self._wrong(
                f"rotary positions of its sliding layers are scaled by {windowed['rope_type']!r:.40}; allowed: default"
            )

    def _divisors(self, head_dim: int) -> tuple[float, ...]:
        """Divisors of the rotary frequencies, of linear scaling or Llama 3's."""
        settings = rotary_settings(self._settings)
        if settings["rope_type"] == "llama3":
            return tuple(float(each) for each in llama3_frequency_factors(settings, head_dim))
        factor = float(settings["factor"]) if settings["rope_type"] == "linear" else 1.0
        return () if factor == 1 else (factor,) * (head_dim // 2)

    def _unrotated(self, layers: int) -> frozenset[int]:
        """Layers without rotary positions (SmolLM3)."""
        if self._table.name != "smollm3":
            return frozenset()
        rotated = rotated_layers(self._settings, layers)
        if not isinstance(rotated, list) or len(rotated) != layers:
            raise self._wrong(f"its no_rope_layers are not {layers} flags, one for each layer")
        return frozenset(layer for layer, flag in enumerate(rotated) if not flag)

    def _windowed(self, layers: int) -> frozenset[int]:
        if self._table.name in OPTIONAL_WINDOWS and not self._settings.get("use_sliding_window"):
            return frozenset()
        kinds = layer_kinds(self._checkpoint, self._table, layers)
        return frozenset(layer for layer, is_windowed in enumerate(kinds) if is_windowed)

    def _window(self) -> int:
        window = window_of(self._checkpoint)
        if window is None or window < 1:
            raise self._wrong("it has layers with a sliding window, and config.json has no sliding_window")
        return window

    def _number(self, key: str) -> float:
        found = self._checkpoint.require(key)
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            raise self._wrong(f"its {key} is {found!r:.40}, a number was expected")
        return float(found)

    def _wrong(self, reason: str) -> ModelFileError:
        return ModelFileError(f"{self._checkpoint.folder} cannot be converted to ONNX: {reason}")


# what goes beside a graph


def copy_companions(folder: Path, target: Path) -> None:
    """Copy tokenizer, config and chat template of a model. Raises ModelFileError for what is missing or damaged."""
    for name in REQUIRED:
        read_json(folder / name)
    for name in COPIED:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
    _retype(target / "tokenizer.json")
    template = chat_template(folder, read_json(folder / "tokenizer_config.json"))
    if template is not None and not (folder / CHAT_TEMPLATE).is_file():
        (target / CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def _retype(path: Path) -> None:
    """Make control tokens in a tokenizer.json of what llama.cpp makes such, so that both engines read texts alike."""
    tokenizer = read_json(path)
    model, added = tokenizer.get("model") or {}, tokenizer.get("added_tokens") or []
    words = model.get("vocab") if isinstance(model, dict) else None
    ids = dict(words) if isinstance(words, dict) else {}
    known = {token["content"]: token for token in added if isinstance(token, dict) and "content" in token}
    names = {*ids, *known}
    changed = [name for name in retyped_names(names.__contains__) if not known.get(name, {}).get("special")]
    for name in changed:
        flags = {"special": True, "normalized": False} | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        if name in known:
            known[name]["special"] = True
        else:
            added.append({"id": ids[name], "content": name} | flags)
    if changed:
        tokenizer["added_tokens"] = sorted(added, key=lambda token: token["id"])
        path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
