"""GGUF -> a folder with an ONNX graph, without torch: header, weights, tokenizer, configuration.

Weights are decoded with the package gguf.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from edgespec.errors import ModelFileError
from edgespec.export.onnx.convert import GROUPED
from edgespec.export.onnx.draft_vocabulary import DraftVocabulary
from edgespec.export.onnx.gguf_weights import GgufWeights
from edgespec.export.onnx.writer import check_form, write_graph
from edgespec.formats.gguf.check import check_gguf, model_files
from edgespec.formats.gguf.model import GgufModel, read_model
from edgespec.formats.gguf.tokenizer import splitter_of, write_tokenizer_files
from edgespec.types import Progress, no_progress


def open_gguf(path: Path) -> GgufModel:
    """The model in a file. Raises ModelNotFound, and ModelFileError for one that cannot be converted, or only later."""
    header = check_gguf(path)
    if len(model_files(path)) > 1:
        raise ModelFileError(f"{path} is one of several files of a model: join them first (llama-gguf-split --merge)")
    model = read_model(path, header)
    GgufWeights(model)  # raises for a type that cannot be decoded
    splitter_of(header)
    return model


def convert_gguf(
    model: GgufModel,
    folder: Path,
    quant: str,
    group_size: int | None = None,
    progress: Progress = no_progress,
    *,
    grouped: Collection[str] = GROUPED,
    vocabulary: DraftVocabulary | None = None,
) -> Path:
    """Write graph, weights, tokenizer and configuration into the empty `folder`; the path of model.onnx.

    `vocabulary`: the tokens of a draft. Raises ModelFileError for damaged weights or a vocabulary that cannot be
    written, and what `write_graph` raises.
    """
    check_form(quant)
    write_tokenizer_files(model.header, folder)
    (folder / "config.json").write_text(json.dumps(model.hub_config(), indent=2) + "\n", encoding="utf-8")
    config = vocabulary.applied(model.config, folder) if vocabulary else model.config
    return write_graph(folder, config, GgufWeights(model), quant, group_size, progress, grouped=grouped)
