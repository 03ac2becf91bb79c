"""What kind of model a GGUF holds: a language model, a head that drafts for one, or something that lies beside one.

What this module does not know: a decoder that was trained for embeddings (its header reads like any other).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from edgespec.errors import ModelFileError
from edgespec.formats.gguf.header import GgufHeader

HeadKind = Literal["eagle3", "dflash", "mtp"]
HEAD_NAMES: Mapping[HeadKind, str] = {
    "eagle3": "an EAGLE-3 head",
    "dflash": "a DFlash head",
    "mtp": "a multi-token prediction layer",
}
GEMMA4_DRAFTER = "gemma4-assistant"
_OF_FORKS = {
    "gemma4_assistant": "a fork of llama.cpp wrote it, in a way that llama.cpp does not know: give a drafter that "
    "llama.cpp's own converter wrote (mtp-*.gguf)"
}
_HEAD_ARCHITECTURES: Mapping[str, HeadKind] = {"eagle3": "eagle3", "dflash": "dflash", GEMMA4_DRAFTER: "mtp"}
# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: general.type
_PROJECTOR = (
    "it is a multimodal projector (mmproj), which encodes images or sound: give the model's own .gguf file; only text "
    "is supported"
)
_OF_TYPE = {
    "mmproj": _PROJECTOR,
    "adapter": "it is a LoRA adapter, which changes a model: merge the two with llama.cpp's llama-export-lora first",
    "imatrix": "it is an importance matrix, an input of llama-quantize: give the .gguf file of the model",
}
# Whose multi-token prediction layers read the hidden state behind the final norm. Tests run the first one.
_WITH_MTP = ("qwen35", "qwen35moe")
_POOLINGS = (1, 2, 3)  # llama.cpp's mean, cls and last
_NEVER_CAUSAL = ("gemma-embedding", "llama-embed")  # whose files need not say so: llama.cpp knows
_ENCODERS = ("t5", "t5encoder")  # that do not say so under attention.causal


def require_text_model(path: Path, header: GgufHeader) -> None:
    """Raises as `require_language_model`, but for an encoder whose embeddings can be given."""
    if not gives_only_embeddings(header):
        require_language_model(path, header)


def gives_only_embeddings(header: GgufHeader) -> bool:
    """Whether a model reads a whole text at once, and its file says which of the states are the text's embedding."""
    return _is_encoder(header) and header.metadata.get(f"{header.architecture}.pooling_type") in _POOLINGS


def _is_encoder(header: GgufHeader) -> bool:
    # A DFlash head says so too: it reads a block of a text at once, and drafts.
    says_so = header.metadata.get(f"{header.architecture}.attention.causal") is False
    return (says_so or header.architecture in _NEVER_CAUSAL) and head_kind(header) is None


def require_language_model(path: Path, header: GgufHeader) -> None:
    """Raises ModelFileError, naming what the file is and what to give instead, for one that writes and drafts none."""
    kind = str(header.metadata.get("general.type", ""))
    reason = _PROJECTOR if header.architecture == "clip" else _OF_TYPE.get(kind, _OF_FORKS.get(header.architecture))
    if reason is None and (_is_encoder(header) or header.architecture in _ENCODERS):
        reason = (
            f"{header.architecture} models read a whole text at once, for embeddings or reranking: give one that "
            "writes token by token, such as a Llama or Qwen"
        )
    if reason is not None:
        raise ModelFileError(f"{path} is not a text-generation model: {reason}")


def head_kind(header: GgufHeader) -> HeadKind | None:
    """The kind of head that a file holds, which drafts for another model; None for a model."""
    if header.architecture in _HEAD_ARCHITECTURES:
        return _HEAD_ARCHITECTURES[header.architecture]
    return "mtp" if _has_only_mtp(header) else None


def is_gemma4_drafter(header: GgufHeader) -> bool:
    """Whether it is a head of kind mtp that attends to the cache of a Gemma 4."""
    return header.architecture == GEMMA4_DRAFTER


def _has_only_mtp(header: GgufHeader) -> bool:
    has_first_layer = any(tensor.name.startswith("blk.0.") for tensor in header.tensors)
    return has_mtp(header) and bool(header.tensors) and not has_first_layer


def has_mtp(header: GgufHeader) -> bool:
    """Whether a model has a multi-token prediction layer that can draft for it."""
    count = header.metadata.get(f"{header.architecture}.nextn_predict_layers")
    return may_have_mtp(header) and isinstance(count, int) and count > 0


def main_layers(header: GgufHeader) -> int:
    """Layers of the model itself, without those that predict further tokens."""
    counts = (header.metadata.get(f"{header.architecture}.{key}", 0) for key in ("block_count", "nextn_predict_layers"))
    all_layers, further = (count if isinstance(count, int) else 0 for count in counts)
    return all_layers - further


def may_have_mtp(header: GgufHeader) -> bool:
    """Whether models of this architecture are published with such a layer, which most files of them lack."""
    return header.architecture in _WITH_MTP
