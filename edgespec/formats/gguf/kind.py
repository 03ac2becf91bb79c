"""What kind of model a GGUF holds: no language model, though it lies beside one, or one with a drafter of its own.

What this module does not know: a decoder that was trained for embeddings (its header reads like any other).
"""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import ModelFileError
from edgespec.formats.gguf.header import GgufHeader

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
_ENCODERS = ("t5", "t5encoder")  # that do not say so under attention.causal


def require_language_model(path: Path, header: GgufHeader) -> None:
    """Raises ModelFileError, naming what the file is and what to give instead, for one that writes no text."""
    kind, is_head = str(header.metadata.get("general.type", "")), header.architecture == "dflash"
    reason = _PROJECTOR if header.architecture == "clip" else _OF_TYPE.get(kind)
    # A DFlash head says so too: it reads a block of a text at once, and drafts.
    is_encoder = header.metadata.get(f"{header.architecture}.attention.causal") is False and not is_head
    if reason is None and (is_encoder or header.architecture in _ENCODERS):
        reason = (
            f"{header.architecture} models read a whole text at once, for embeddings or reranking: give one that "
            "writes token by token, such as a Llama or Qwen"
        )
    if reason is None and _has_only_mtp(header):
        reason = (
            "it has the multi-token prediction layer of a model and nothing else: give a file of the model that was "
            "converted with this layer in it (such files are mostly named MTP), which then drafts for itself"
        )
    if reason is not None:
        raise ModelFileError(f"{path} is not a text-generation model: {reason}")


def _has_only_mtp(header: GgufHeader) -> bool:
    has_first_layer = any(tensor.name.startswith("blk.0.") for tensor in header.tensors)
    return has_mtp(header) and bool(header.tensors) and not has_first_layer


def has_mtp(header: GgufHeader) -> bool:
    """Whether a model has a multi-token prediction layer that can draft for it."""
    count = header.metadata.get(f"{header.architecture}.nextn_predict_layers")
    return may_have_mtp(header) and isinstance(count, int) and count > 0


def may_have_mtp(header: GgufHeader) -> bool:
    """Whether models of this architecture are published with such a layer, which most files of them lack."""
    return header.architecture in _WITH_MTP
