"""Which tokens a draft's head keeps: those that a text has most of, then those with the lowest ids.

Byte pair vocabularies are numbered in the order in which their tokens were merged, the commonest first, so that a short
text is enough to find what that order misses, such as the single letters that some keep last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgespec.engines.onnx.calibration import TEXT
from edgespec.engines.onnx.tokenizer import TokenizerFile
from edgespec.errors import ConfigError
from edgespec.formats.onnx.llama_config import LlamaConfig


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Keep `size` tokens, the likeliest by `text`."""

    size: int
    text: str = TEXT

    def check(self, vocabulary_size: int) -> None:
        """Raise ConfigError where these are not fewer tokens than a draft has."""
        if self.size >= vocabulary_size:
            raise ConfigError(
                f"--draft-vocab {self.size}: the draft has {vocabulary_size} tokens; give fewer, or omit it"
            )

    def applied(self, config: LlamaConfig, folder: Path) -> LlamaConfig:
        """The same with `drafted` tokens; `folder` holds the tokenizer. Raises ConfigError where there are no more."""
        self.check(config.vocab_size)
        vocabulary = TokenizerFile(folder, config.vocab_size)
        counts = np.zeros(config.vocab_size, np.int64)
        token_ids = np.array(vocabulary.encode(self.text))
        np.add.at(counts, token_ids[token_ids < config.vocab_size], 1)
        ends = [token_id for token_id in vocabulary.end_ids if token_id < config.vocab_size]
        counts[ends] = np.iinfo(np.int64).max  # a draft that cannot end goes on behind every answer
        likeliest = np.argsort(-counts, kind="stable")[: self.size]
        return replace(config, drafted=tuple(np.sort(likeliest).tolist()))
