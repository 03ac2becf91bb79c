"""What the files of a model say of it before any engine opens them."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgespec.chat.marks import reasoning_marks
from edgespec.chat.tool_forms import call_form
from edgespec.formats.gguf.check import pooling_of
from edgespec.formats.gguf.header import GgufHeader, TensorInfo, read_header
from edgespec.formats.manifest import ModelPair
from edgespec.vocabulary import FimTokens

# https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h: llama_ftype
_FILE_TYPES = (
    "F32 F16 Q4_0 Q4_1 - - - Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K IQ2_XXS IQ2_XS "
    "Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16 - - - TQ1_0 TQ2_0 MXFP4_MOE"
)
QUANTIZATIONS = {number: name for number, name in enumerate(_FILE_TYPES.split()) if name != "-"}
_FIM_KEYS = ("pre", "suf", "mid")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the files of a target say of it; empty or 0 where they do not.

    `engine` that runs it; `pooling`: of a model that gives embeddings and writes no text, else empty; `fills_gaps`:
    whether its vocabulary has the tokens for that; `metadata`: single values of the GGUF header.
    """

    engine: str
    architecture: str
    weight_bytes: int
    chat_template: str
    fills_gaps: bool = False
    pooling: str = ""
    digest: str = ""
    quantization: str = ""
    num_parameters: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def capabilities(self) -> list[str]:
        """What a model that writes can do besides, in Ollama's words."""
        found = {
            "tools": call_form(self.chat_template),
            "thinking": reasoning_marks(self.chat_template),
            "insert": self.fills_gaps,
        }
        return [name for name, has_it in found.items() if has_it]

    @staticmethod
    def read(pair: ModelPair) -> ModelFacts:
        """Of a pair's target. Raises ModelNotFound, ModelFileError, and CapabilityError for a graph without `onnx`."""
        target = pair.files["target"]
        found = _of_gguf(pair.paths("target")) if target.is_gguf else _of_graph(target.path)
        return replace(found, engine=target.engine, digest=target.sha256 or found.digest)


def _of_graph(path: Path) -> ModelFacts:
    from edgespec.engines.onnx.graph import read_graph
    from edgespec.engines.onnx.settings import ModelConfig
    from edgespec.engines.onnx.source import open_source
    from edgespec.engines.onnx.tokenizer import read_chat_template

    architecture, size = ModelConfig.read(path.parent).architecture, read_graph(open_source(path)).weight_bytes
    return ModelFacts("onnx", architecture, size, read_chat_template(path.parent) or "")


def _of_gguf(paths: Sequence[Path]) -> ModelFacts:
    """Facts of a GGUF in one or several files. Its digest is that of its header: hashing all takes minutes."""
    headers = [read_header(path) for path in paths]
    first, tensors = headers[0], [tensor for header in headers for tensor in header.tensors]
    with paths[0].open("rb") as file:
        digest = hashlib.sha256(file.read(first.data_start)).hexdigest()
    return ModelFacts(
        engine="",
        architecture=first.architecture,
        weight_bytes=sum(tensor.num_bytes for tensor in tensors),
        chat_template=str(first.metadata.get("tokenizer.chat_template", "")),
        fills_gaps=_fills_gaps(first),
        pooling=pooling_of(first),
        digest=digest,
        quantization=_quantization(first, tensors),
        num_parameters=sum(math.prod(tensor.shape) for tensor in tensors),
        metadata={key: value for key, value in first.metadata.items() if _is_shown(key, value)},
    )


def _fills_gaps(header: GgufHeader) -> bool:
    """Whether the header names the tokens, or the vocabulary has them under names that are known."""
    if all(f"tokenizer.ggml.fim_{key}_token_id" in header.metadata for key in _FIM_KEYS):
        return True
    ids = {bytes(token): index for index, token in enumerate(header.tokens)}
    return FimTokens.named(lambda name: ids.get(name.encode())) is not None


def _is_shown(key: str, value: object) -> bool:
    is_short = isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) < 128)
    return is_short and not key.startswith(("tokenizer.", "split.")) and "://" not in str(value)


def _quantization(header: GgufHeader, tensors: Sequence[TensorInfo]) -> str:
    """As the header says, else the type of most bytes."""
    said = header.metadata.get("general.file_type")
    if isinstance(said, int) and said in QUANTIZATIONS:
        return QUANTIZATIONS[said]
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.kind] += tensor.num_bytes
    return max(sizes, key=lambda kind: sizes[kind], default="")


def size_label(count: int) -> str:
    """A number of parameters as Ollama writes it: 7.6B, 494.03M."""
    if not count:
        return ""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"
