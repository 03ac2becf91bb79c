"""Hugging Face folder -> GGUF, through the `gguf` package alone: no torch, one tensor in memory at a time.

An architecture is one entry of ARCHITECTURES. What the converter does not know: quantisation other than the types of
OUTPUT_TYPES (llama.cpp's own quantiser makes the rest from an F16 file), SentencePiece tokenizers, vision towers.

Two traps that load silently when got wrong, and are therefore explicit here: the q/k rows of a Llama must be reordered
from Hugging Face's half-split rotary layout to llama.cpp's interleaved one, and the name of the pre-tokenizer decides
how text is split, so an unknown one is refused rather than guessed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from gguf.quants import quantize

from edgespec.errors import ModelFileError
from edgespec.export.checkpoint import Checkpoint, Weights, read_json

OutputType = Literal["f32", "f16", "bf16", "q8_0"]
OUTPUT_TYPES: dict[OutputType, tuple[gguf.GGMLQuantizationType, gguf.LlamaFileType]] = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}

# The split pattern of tokenizer.json -> llama.cpp's name of the same splitter.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS, _REST = r"|[^\r\n\p{L}\p{N}]?\p{L}+", r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {
    _CONTRACTIONS + _WORDS + r"|\p{N}" + _REST: "qwen2",
    _CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST: "llama-bpe",
}


def _permute_rotary(weights: Weights, num_heads: int) -> Weights:
    """Rows [heads * head_dim, width] from Hugging Face's (first half, second half) to interleaved pairs."""
    rows, width = weights.shape
    halves = weights.reshape(num_heads, 2, rows // num_heads // 2, width)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, width))


def _rope_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Rotary settings under one name: transformers 5 says `rope_parameters`, 4 `rope_theta` and `rope_scaling`."""
    config = checkpoint.config
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    settings.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    settings.setdefault("rope_type", settings.get("type", "default"))
    return settings


def _llama3_frequency_factors(settings: dict[str, Any], head_dim: int) -> Weights:
    """Divisors [head_dim / 2] of the rotary frequencies, as Llama 3.1 stretches its context."""
    factor, low, high = (float(settings[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(settings["original_max_position_embeddings"])
    frequencies = float(settings["rope_theta"]) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    wavelengths = 2 * math.pi / frequencies
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)


@dataclass(frozen=True)
class Architecture:
    """How one kind of model is written.

    `model`: gguf's name of it; `transform(checkpoint, name, weights)`: a tensor as llama.cpp wants it;
    `extra(checkpoint)`: tensors that the checkpoint does not have, by GGUF name.
    """

    model: gguf.MODEL_ARCH
    transform: Callable[[Checkpoint, str, Weights], Weights]
    extra: Callable[[Checkpoint], dict[str, Weights]]


def _head_dim(checkpoint: Checkpoint) -> int:
    return int(
        checkpoint.config.get("head_dim")
        or checkpoint.require("hidden_size") // checkpoint.require("num_attention_heads")
    )


def _llama_transform(checkpoint: Checkpoint, name: str, weights: Weights) -> Weights:
    if name.endswith("q_proj.weight"):
        return _permute_rotary(weights, checkpoint.require("num_attention_heads"))
    if name.endswith("k_proj.weight"):
        return _permute_rotary(weights, checkpoint.require("num_key_value_heads"))
    return weights


def _llama_extra(checkpoint: Checkpoint) -> dict[str, Weights]:
    settings = _rope_settings(checkpoint)
    kind = settings["rope_type"]
    if kind == "llama3":
        return {"rope_freqs.weight": _llama3_frequency_factors(settings, _head_dim(checkpoint))}
    if kind != "default":
        raise ModelFileError(f"rotary scaling {kind!r} cannot be converted; allowed: default, llama3")
    return {}


ARCHITECTURES = {"LlamaForCausalLM": Architecture(gguf.MODEL_ARCH.LLAMA, _llama_transform, _llama_extra)}


@dataclass(frozen=True)
class Conversion:
    """What was written. `types` counts tensors by stored type: rows that no block fits fall back to F16."""

    path: Path
    architecture: str
    types: dict[str, int] = field(default_factory=dict)


def _write_hyperparameters(writer: gguf.GGUFWriter, checkpoint: Checkpoint) -> None:
    require, config = checkpoint.require, checkpoint.config
    writer.add_block_count(require("num_hidden_layers"))
    writer.add_context_length(require("max_position_embeddings"))
    writer.add_embedding_length(require("hidden_size"))
    writer.add_feed_forward_length(require("intermediate_size"))
    writer.add_head_count(require("num_attention_heads"))
    writer.add_head_count_kv(config.get("num_key_value_heads") or require("num_attention_heads"))
    head_dim = _head_dim(checkpoint)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(_rope_settings(checkpoint)["rope_theta"]))
    writer.add_layer_norm_rms_eps(require("rms_norm_eps"))
    writer.add_vocab_size(require("vocab_size"))


def _split_pattern(node: Any) -> str | None:
    """The one regular expression of tokenizer.json's pre-tokenizer, wherever it is nested."""
    if isinstance(node, dict):
        if "Regex" in node:
            return str(node["Regex"])
        node = list(node.values())
    if isinstance(node, list):
        return next((found for item in node if (found := _split_pattern(item)) is not None), None)
    return None


def pre_tokenizer_name(tokenizer: dict[str, Any]) -> str:
    """llama.cpp's name of a tokenizer.json's splitter. Raises ModelFileError when llama.cpp may not have it."""
    pattern = _split_pattern(tokenizer.get("pre_tokenizer"))
    if pattern not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS.values())
        raise ModelFileError(f"tokenizer.json splits text by {pattern!r}, which is none of: {known}")
    return PRE_TOKENIZERS[pattern]


def _token_list(tokenizer: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Texts and llama.cpp types of ids 0..vocab_size-1; ids that the tokenizer lacks become unused padding."""
    texts = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [int(gguf.TokenType.UNUSED)] * vocab_size
    for text, index in tokenizer["model"]["vocab"].items():
        if not 0 <= index < vocab_size:
            raise ModelFileError(f"tokenizer.json gives {text!r} the id {index}, config.json has {vocab_size} ids")
        texts[index], types[index] = text, int(gguf.TokenType.NORMAL)
    for added in tokenizer.get("added_tokens", []):
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        texts[added["id"]], types[added["id"]] = added["content"], int(kind)
    return texts, types


def _write_tokenizer(writer: gguf.GGUFWriter, checkpoint: Checkpoint) -> None:
    tokenizer = read_json(checkpoint.folder / "tokenizer.json")
    settings = read_json(checkpoint.folder / "tokenizer_config.json")
    if tokenizer.get("model", {}).get("type") != "BPE":
        raise ModelFileError(f"{checkpoint.folder / 'tokenizer.json'} is not a byte-level BPE tokenizer")
    texts, types = _token_list(tokenizer, checkpoint.require("vocab_size"))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(tokenizer))
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    ids = {text: index for index, text in enumerate(texts)}
    for key, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        name = settings.get(key)
        text = name.get("content") if isinstance(name, dict) else name
        if text is not None and text not in ids:
            raise ModelFileError(f"tokenizer_config.json names {key} {text!r}, which tokenizer.json lacks")
        if text is not None:
            add(ids[text])
    writer.add_add_bos_token(bool(settings.get("add_bos_token", False)))
    writer.add_add_eos_token(False)
    if template := settings.get("chat_template"):
        writer.add_chat_template(template)


def _stored_type(shape: tuple[int, ...], wanted: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    if len(shape) < 2:
        return gguf.GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    return wanted if shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16


def _plan_tensors(checkpoint: Checkpoint, architecture: Architecture) -> dict[str, str]:
    """GGUF tensor name -> checkpoint tensor name."""
    names = gguf.get_tensor_name_map(architecture.model, checkpoint.require("num_hidden_layers"))
    tied = bool(checkpoint.config.get("tie_word_embeddings", False))
    plan: dict[str, str] = {}
    for name in checkpoint.names():
        if (tied and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq"):
            continue
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if new_name is None:
            raise ModelFileError(f"tensor {name} has no place in a {gguf.MODEL_ARCH_NAMES[architecture.model]} GGUF")
        plan[new_name] = name
    return plan


def _write_tensors(
    writer: gguf.GGUFWriter, checkpoint: Checkpoint, architecture: Architecture, wanted: gguf.GGMLQuantizationType
) -> dict[str, int]:
    """Describe all tensors, write the header, then stream the data. Returns the number of tensors by stored type."""
    plan = _plan_tensors(checkpoint, architecture)
    extra = architecture.extra(checkpoint)
    shapes = {new: checkpoint.shape(old) for new, old in plan.items()} | {n: w.shape for n, w in extra.items()}
    stored = {name: _stored_type(shape, wanted) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        block, block_bytes = gguf.GGML_QUANT_SIZES[stored[name]]
        writer.add_tensor_info(name, shape, np.dtype(np.float32), math.prod(shape) // block * block_bytes, stored[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in shapes:
        if name in extra:
            weights = extra[name]
        else:
            weights = architecture.transform(checkpoint, plan[name], checkpoint.weights(plan[name]))
        writer.write_tensor_data(quantize(weights, stored[name]))
    return dict(Counter(kind.name for kind in stored.values()))


def convert(
    folder: Path, output: Path, output_type: OutputType = "q8_0", *, name: str | None = None, licence: str | None = None
) -> Conversion:
    """Write the model of `folder` to `output` as GGUF; norms stay F32.

    Raises ModelFileError when the folder is incomplete or holds something this converter does not know. The output
    appears only when it is whole.
    """
    checkpoint = Checkpoint.open(folder)
    kind = next(iter(checkpoint.config.get("architectures") or ["none"]))
    if kind not in ARCHITECTURES:
        raise ModelFileError(f"{folder} is a {kind}; this converter knows: {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[kind]
    quantisation, file_type = OUTPUT_TYPES[output_type]
    temporary = output.with_name(output.name + ".tmp")
    writer = gguf.GGUFWriter(temporary, gguf.MODEL_ARCH_NAMES[architecture.model])
    try:
        writer.add_name(name or folder.name)
        if licence is not None:
            writer.add_license(licence)
        writer.add_file_type(file_type)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _write_hyperparameters(writer, checkpoint)
        _write_tokenizer(writer, checkpoint)
        types = _write_tensors(writer, checkpoint, architecture, quantisation)
        writer.close()
        temporary.replace(output)
    finally:
        writer.close()
        temporary.unlink(missing_ok=True)
    return Conversion(output, gguf.MODEL_ARCH_NAMES[architecture.model], types)
