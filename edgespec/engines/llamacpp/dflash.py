"""DFlash and DSpark heads in llama.cpp: a context of its own, which may share embeddings and head with the target's.

A pass over floats projects features of the target into the head's cache and computes nothing else. A pass over tokens
denoises a block: the last token of the text and mask tokens behind it, which attend to the cache and to one another.
Its graph computes logits of all rows, of which the library copies as many as were requested from the first one on.

A DSpark head moves the scores of each row by the token before it. In the graph this is the likeliest token of the row
before, so that the scores of a row are those of the greedy chain. Where a draft takes another token, the rows behind it
fit less well and fewer of their tokens are accepted; the text stays the target's.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.engines.head import BlockHead, Confidences, HeadFacts, States
from edgespec.engines.llamacpp.extensions import extension
from edgespec.engines.llamacpp.head_context import HeadContext, MakeContext, create_context, widest_step
from edgespec.engines.llamacpp.library import CancelFlag, library, open_model
from edgespec.engines.llamacpp.rows import PairRows
from edgespec.engines.llamacpp.settings import CELLS_MULTIPLE
from edgespec.engines.llamacpp.tokenizer import LlamaCppVocabulary
from edgespec.errors import BatchError, ContextFull, ModelFileError
from edgespec.formats.gguf.dflash import DFlashSizes, read_dflash
from edgespec.types import Logits
from edgespec.vocabulary import Vocabulary, check_same_vocabulary

DEFAULT_CONTEXT = 2048
_MARKOV_COPIES = 6


class DFlashHead(HeadContext, BlockHead):
    """Owns a llama.cpp model and a context; uses the target's context where the head shares weights with it."""

    def __init__(
        self, make_context: MakeContext, facts: HeadFacts, sizes: DFlashSizes, owned_model: Any = None
    ) -> None:
        super().__init__(make_context, facts, sizes.vocabulary_size, owned_model)
        self._sizes = sizes
        self.most_drafted = sizes.most_drafted
        self._step = widest_pass(sizes)
        self._rows = PairRows(self._step)
        self._block_ids = np.full(sizes.block_size, sizes.mask_id, np.int32)
        if sizes.has_confidence:
            extension("set_states")(self._context, True, True)  # the graph gives confidences in the place of states

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
    ) -> DFlashHead:
        """Load the head `path` for a loaded `target` (model, context), which must outlive it, with its `vocabulary`.

        `context_length`: most tokens it attends to, None for the trained number (at most DEFAULT_CONTEXT). Raises
        ModelNotFound, ModelFileError, VocabularyMismatch, and CapabilityError for a head of another target or of a
        variant that is not supported.
        """
        llama = library()
        sizes = read_dflash(path)
        sizes.check_fits(
            path.name, llama.llama_model_n_embd(target[0]), llama.llama_model_n_layer(target[0]), vocabulary.size
        )
        length = min(context_length or DEFAULT_CONTEXT, sizes.context_length)
        return cls._open(path, sizes, length, threads, gpu_layers, target[1], vocabulary)

    @classmethod
    def _open(
        cls,
        path: Path,
        sizes: DFlashSizes,
        length: int,
        threads: int,
        gpu_layers: int,
        target_context: Any,
        vocabulary: Vocabulary | None,
    ) -> DFlashHead:
        model = open_model(path, gpu_layers=gpu_layers, check_tensors=vocabulary is None)
        other = target_context if sizes.shares_weights else None
        make = partial(_create_context, model, path.name, sizes, length, threads, other)
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
            head = cls(make, facts, sizes, model)
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
        sizes = read_dflash(path)
        if sizes.shares_weights:
            library().llama_model_free(open_model(path, check_tensors=True))
        else:
            cls._open(path, sizes, min(16, sizes.context_length), 1, 0, None, None).close()

    def _try_out(self, path: Path) -> None:
        """Run one block behind arbitrary numbers to find damaged weights."""
        self.inject(np.ones((1, self.facts.feature_width), np.float32))
        logits, confidences = self.block(0)
        if not (np.isfinite(logits.max(axis=1)).all() and (confidences is None or np.isfinite(confidences).all())):
            raise ModelFileError(
                f"{path} is not a usable DFlash head: its results are not numbers. Download or export it again"
            )
        self.restart(0)

    def inject(self, features: States) -> None:
        self._require_open()
        if features.ndim != 2 or features.shape[1] != self.facts.feature_width:
            raise BatchError(f"features of the shape [n, {self.facts.feature_width}] are needed, got {features.shape}")
        room = self.facts.context_length - (self.end - self.start)
        if len(features) > room:
            raise ContextFull(f"the head's context of {self.facts.context_length} has room for {room} more tokens")
        self._trim()
        for start in range(0, len(features), self._step):
            part = np.ascontiguousarray(features[start : start + self._step], np.float32)
            self._rows.fill(self.end, None, part, outputs=False)
            self._run(library().llama_decode, self._rows.struct, len(part))
            self.end += len(part)

    def block(self, token_id: int) -> tuple[Logits, Confidences | None]:
        self._require_open()
        if not 0 <= token_id < self._vocabulary_size:
            raise BatchError(f"token {token_id} is outside the head's vocabulary 0..{self._vocabulary_size - 1}")
        self._trim()
        sizes, count = self._sizes, self._sizes.block_size
        self._block_ids[0] = token_id
        self._rows.fill_tokens(self.end, self._block_ids)
        try:
            self._run(library().llama_decode, self._rows.struct, count)
            logits = np.ctypeslib.as_array(library().llama_get_logits(self._context), (count, self._vocabulary_size))
        finally:
            self._trim()  # the rows of the block are guesses
        if not sizes.has_confidence:
            return logits[sizes.first_row :], None
        states = np.ctypeslib.as_array(extension("get_states")(self._context), (count, sizes.width))
        return logits[sizes.first_row :], states[sizes.first_row :, 0]

    def another(self) -> DFlashHead:
        self._require_open()
        found = DFlashHead(self._make_context, self.facts, self._sizes)
        self._others.append(found)
        return found


def widest_pass(sizes: DFlashSizes) -> int:
    """Rows: a block cannot be divided, since each of its rows attends to all others."""
    return max(widest_step(sizes.vocabulary_size), sizes.block_size)


def _create_context(
    model: Any, name: str, sizes: DFlashSizes, length: int, threads: int, other: Any, cancel: CancelFlag
) -> Any:
    """A context for `length` tokens of text and a block. Raises CapabilityError."""
    context = create_context(model, name, length + sizes.block_size, threads, widest_pass(sizes), other, 0, cancel)
    library().llama_set_causal_attn(context, sizes.is_causal)
    return context


def num_bytes(sizes: DFlashSizes, context_length: int) -> int:
    """Weights, cache, and what passes work with."""
    return sizes.weight_bytes + cache_bytes(sizes, context_length) + pass_bytes(sizes)


def cache_bytes(sizes: DFlashSizes, context_length: int) -> int:
    """For `context_length` tokens of text and a block."""
    cells = -(-(context_length + sizes.block_size) // CELLS_MULTIPLE) * CELLS_MULTIPLE
    return cells * sizes.kv_bytes_per_token


def pass_bytes(sizes: DFlashSizes) -> int:
    """Logits in the graph and copies of a block's, and activations of a layer, for the widest pass.

    A Markov head works on copies of the block's logits: the number is what was measured.
    """
    rows, row_bytes = widest_pass(sizes), 4 * sizes.vocabulary_size
    in_graph = max(rows, _MARKOV_COPIES * sizes.block_size if sizes.has_markov else 0) * row_bytes
    activations = 4 * rows * (sizes.feature_width + 4 * sizes.width + 3 * sizes.inner_width)
    return in_graph + sizes.block_size * row_bytes + activations
