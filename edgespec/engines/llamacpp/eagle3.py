"""EAGLE-3 heads in llama.cpp: a context of its own, which may share embeddings and head with the target's.

Two properties of llama-cpp-python 0.3.36 matter here. The head's graph computes logits of all rows, of which the
library copies as many as were requested from the first one on, so either all rows are requested or none. And a pass
that encodes needs positions as if it decoded.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.engines.head import HeadFacts, States
from edgespec.engines.llamacpp.head_context import create_context, widest_step
from edgespec.engines.llamacpp.library import library, open_model
from edgespec.engines.llamacpp.pair_head import PairHead
from edgespec.engines.llamacpp.tokenizer import LlamaCppVocabulary
from edgespec.errors import BatchError, ModelFileError
from edgespec.formats.gguf.eagle3 import Eagle3Sizes, read_eagle3
from edgespec.vocabulary import Vocabulary, check_same_vocabulary

DEFAULT_CONTEXT = 2048


class Eagle3Head(PairHead):
    """Owns a llama.cpp model and a context; uses the target's context where the head shares weights with it."""

    @classmethod
    def load(
        cls,
        path: Path,
        target: tuple[Any, Any],
        vocabulary: Vocabulary,
        *,
        threads: int,
        context_length: int | None = None,
        gpu_layers: int = 0,
    ) -> Eagle3Head:
        """Load the head `path` for a loaded `target` (model, context), which must outlive it, with its `vocabulary`.

        `context_length`: most pairs it attends to, None for the trained number (at most DEFAULT_CONTEXT). Raises
        ModelNotFound, ModelFileError, VocabularyMismatch, and CapabilityError for a head of another target.
        """
        llama = library()
        sizes = read_eagle3(path)
        sizes.check_fits(
            path.name, llama.llama_model_n_embd(target[0]), llama.llama_model_n_layer(target[0]), vocabulary.size
        )
        length = min(context_length or DEFAULT_CONTEXT, sizes.context_length)
        return cls._open(path, sizes, length, threads, gpu_layers, target[1], vocabulary)

    @classmethod
    def _open(
        cls,
        path: Path,
        sizes: Eagle3Sizes,
        length: int,
        threads: int,
        gpu_layers: int,
        target_context: Any,
        vocabulary: Vocabulary | None,
    ) -> Eagle3Head:
        model = open_model(path, gpu_layers=gpu_layers, check_tensors=vocabulary is None)
        other = target_context if sizes.shares_embeddings or sizes.shares_output else None
        make = partial(create_context, model, path.name, length, threads, widest_step(sizes.vocabulary_size), other, 0)
        facts = HeadFacts(
            context_length=length,
            layers=sizes.layers,
            feature_width=sizes.feature_width,
            width=sizes.width,
            end_ids=vocabulary.end_ids if vocabulary else frozenset(),
            num_bytes=num_bytes(sizes, length),
        )
        try:
            if vocabulary is not None:
                check_same_vocabulary(vocabulary, LlamaCppVocabulary(model))
            head = cls(make, facts, sizes.vocabulary_size, model)
        except BaseException:
            library().llama_model_free(model)
            raise
        try:
            head._try_out(path)
        except BaseException:
            head.close()
            raise
        return head

    @classmethod
    def try_alone(cls, path: Path) -> None:
        """Load what needs no target, and run it if that is the whole head. Raises as `load`."""
        sizes = read_eagle3(path)
        if sizes.shares_embeddings or sizes.shares_output:
            library().llama_model_free(open_model(path, check_tensors=True))
        else:
            cls._open(path, sizes, min(16, sizes.context_length), 1, 0, None, None).close()

    def _try_out(self, path: Path) -> None:
        """Run one pair of arbitrary numbers to find damaged weights."""
        states = self.encode(np.ones((1, self.facts.feature_width), np.float32))
        logits, state = self.decode(np.zeros(1, np.int32), states)
        if not (np.isfinite(state).all() and np.isfinite(logits.max())):
            raise ModelFileError(
                f"{path} is not a usable EAGLE-3 head: its results are not numbers. Download or export it again"
            )
        self.restart(0)

    def encode(self, features: States) -> States:
        self._require_open()
        if features.ndim != 2 or features.shape[1] != self.facts.feature_width:
            raise BatchError(f"features of the shape [n, {self.facts.feature_width}] are needed, got {features.shape}")
        self._trim()
        states = np.empty((len(features), self.facts.width), np.float32)
        for start in range(0, len(features), self._step):
            part = np.ascontiguousarray(features[start : start + self._step], np.float32)
            self._rows.fill(self.end, None, part, outputs=True)
            self._run(library().llama_encode, self._rows.struct, len(part))
            states[start : start + len(part)] = self._states(len(part))
        return states


def num_bytes(sizes: Eagle3Sizes, context_length: int) -> int:
    """Weights, cache, and for the widest pass two copies of the logits and the layer's activations."""
    row_bytes = 4 * (2 * sizes.vocabulary_size + sizes.num_drafted + sizes.feature_width + 8 * sizes.width)
    return (
        sizes.weight_bytes + context_length * sizes.kv_bytes_per_token + widest_step(sizes.vocabulary_size) * row_bytes
    )
