"""What a model's files say of it before any engine opens them.

What is not known here: what a load measures, and whether it succeeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from edgespec.engines.base import Engine
from edgespec.formats.gguf.header import GgufHeader, read_header
from edgespec.formats.manifest import ModelPair
from edgespec.vocabulary import FimTokens

_FIM_KEYS = ("pre", "suf", "mid")
_POOLINGS = {1: "mean", 2: "cls", 3: "last", 4: "rank"}  # llama.cpp's llama_pooling_type; 0 is none


@dataclass(frozen=True, slots=True)
class FileFacts:
    """`engine` that runs the target, its `architecture` and `weight_bytes`. `pooling`: of a model that gives embeddings
    and writes no text, else empty; `fills_gaps`: whether its vocabulary has the tokens for that.
    """

    engine: str
    architecture: str
    weight_bytes: int
    chat_template: str
    fills_gaps: bool = False
    pooling: str = ""

    @classmethod
    def of(cls, target: Engine) -> Self:
        """Of a model that is open."""
        facts, vocabulary = target.facts, target.vocabulary
        template, fills_gaps = vocabulary.chat_template or "", vocabulary.fim is not None
        return cls(facts.name, facts.architecture, facts.weight_bytes, template, fills_gaps, facts.pooling)

    @classmethod
    def read(cls, pair: ModelPair) -> Self:
        """Of a pair's target. Raises ModelNotFound, ModelFileError, and CapabilityError for a graph without `onnx`."""
        target = pair.files["target"]
        if not target.is_gguf:
            from edgespec.engines.onnx.graph import read_graph
            from edgespec.engines.onnx.settings import ModelConfig
            from edgespec.engines.onnx.source import open_source
            from edgespec.engines.onnx.tokenizer import read_chat_template

            folder = target.path.parent
            architecture, graph = ModelConfig.read(folder).architecture, read_graph(open_source(target.path))
            return cls("onnx", architecture, graph.weight_bytes, read_chat_template(folder) or "")
        headers = [read_header(path) for path in pair.paths("target") if path.suffix == ".gguf"]
        first = headers[0]
        return cls(
            target.engine,
            first.architecture,
            sum(tensor.num_bytes for header in headers for tensor in header.tensors),
            str(first.metadata.get("tokenizer.chat_template", "")),
            _fills_gaps(first),
            _POOLINGS.get(_number(first, f"{first.architecture}.pooling_type"), ""),
        )


def _number(header: GgufHeader, key: str) -> int:
    found = header.metadata.get(key)
    return found if isinstance(found, int) else 0


def _fills_gaps(header: GgufHeader) -> bool:
    """Whether the header names the tokens, or the vocabulary has them under names that are known."""
    if all(f"tokenizer.ggml.fim_{key}_token_id" in header.metadata for key in _FIM_KEYS):
        return True
    ids = {bytes(token): index for index, token in enumerate(header.tokens)}
    return FimTokens.named(lambda name: ids.get(name.encode())) is not None
