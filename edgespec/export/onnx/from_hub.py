"""A Hugging Face folder -> a folder with an ONNX graph, without torch: safetensors in, the folder's own tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from edgespec.errors import ModelFileError
from edgespec.export.onnx.convert import GROUPED
from edgespec.export.onnx.draft_vocabulary import DraftVocabulary
from edgespec.export.onnx.hub_model import HubModel
from edgespec.export.onnx.source import open_source
from edgespec.export.onnx.writer import check_form, write_graph
from edgespec.formats.architectures import ADD_ONE, SCALE_Q_NORM
from edgespec.formats.checkpoint import Weights
from edgespec.formats.hub_folder import read_json
from edgespec.formats.onnx.forms import EMBEDDING, HEAD
from edgespec.types import Progress, no_progress

WEIGHTS_AT_ONCE = 1 << 20  # 4 MB as float32
ONE_MORE = (ADD_ONE, SCALE_Q_NORM)  # rows of Gemma's norms, which multiply by 1 + weight


class HubWeights:
    """`RowWeights` of a folder: tensors as float32, some rows at a time. Raises ModelFileError for damaged ones."""

    def __init__(self, model: HubModel) -> None:
        self._tensors, self._checkpoint = model.tensors, model.checkpoint
        self.is_tied = model.is_tied

    def vector(self, name: str) -> Weights:
        stored, row = self._tensors[name]
        found = self._checked(self._checkpoint.weights(stored), stored)
        return found + np.float32(1) if row.change in ONE_MORE else found

    def shape(self, name: str) -> tuple[int, int]:
        outputs, inputs = self._checkpoint.shape(self._stored(name))
        return outputs, inputs

    def rows(self, name: str) -> Iterator[Weights]:
        stored = self._stored(name)
        outputs, inputs = self._checkpoint.shape(stored)
        step = max(WEIGHTS_AT_ONCE // inputs, 1)
        for start in range(0, outputs, step):
            yield self._checked(self._checkpoint.rows_of(stored, start, min(start + step, outputs)), stored)

    def _stored(self, name: str) -> str:
        return self._tensors[EMBEDDING if name == HEAD and self.is_tied else name][0]

    def _checked(self, values: Weights, name: str) -> Weights:
        if not np.isfinite(values).all():
            file = self._checkpoint.tensors[name].file
            raise ModelFileError(f"{file}: tensor {name} contains infinity or NaN. Download it again")
        return values


def _check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Raise ModelFileError where tokenizer.json has words that the model does not; added tokens may lie beyond it."""
    words = read_json(folder / "tokenizer.json").get("model", {}).get("vocab") or ()
    most = max(words.values(), default=0) if isinstance(words, dict) else len(words) - 1
    if most >= vocab_size:
        raise ModelFileError(
            f"{folder} cannot be converted to ONNX: tokenizer.json has a token with the id {most}, config.json has "
            f"{vocab_size} ids. Take the tokenizer that belongs to the weights"
        )


def convert_hub(
    model: HubModel,
    folder: Path,
    quant: str,
    group_size: int | None = None,
    progress: Progress = no_progress,
    *,
    grouped: Collection[str] = GROUPED,
    vocabulary: DraftVocabulary | None = None,
) -> Path:
    """Write graph and weights into the empty `folder`, with copies of tokenizer, chat template and settings.

    `vocabulary`: the tokens of a draft. Returns the path of model.onnx. Raises ModelFileError for damaged weights or a
    folder without tokenizer.json, and what `write_graph` raises.
    """
    check_form(quant)
    source = open_source(model.checkpoint.folder)
    _check_tokenizer(source.folder, model.config.vocab_size)
    source.copy_companions(folder)
    config = vocabulary.applied(model.config, folder) if vocabulary else model.config
    return write_graph(folder, config, HubWeights(model), quant, group_size, progress, grouped=grouped)
