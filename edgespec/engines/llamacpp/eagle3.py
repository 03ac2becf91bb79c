"""EAGLE-3 heads in llama.cpp: a context of its own, which may share embeddings and head with the target's.

Two properties of llama-cpp-python 0.3.36 matter here. The head's graph computes logits of all rows, of which the
library copies as many as were requested from the first one on, so either all rows are requested or none. And a pass
that encodes needs positions as if it decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from edgespec.engines.head import FeatureHead, HeadFacts, States
from edgespec.engines.llamacpp.extensions import extension
from edgespec.engines.llamacpp.library import (
    ABORTED,
    END,
    NO_ROOM,
    CancelFlag,
    complaints,
    forget_complaints,
    library,
    open_model,
)
from edgespec.engines.llamacpp.rows import PairRows
from edgespec.engines.llamacpp.settings import CACHE_TYPES, ON, new_context
from edgespec.engines.llamacpp.tokenizer import LlamaCppVocabulary
from edgespec.errors import BatchError, Cancelled, CapabilityError, ContextFull, EngineError, ModelFileError
from edgespec.formats.gguf.eagle3 import Eagle3Sizes, read_eagle3
from edgespec.types import Logits, TokenIds
from edgespec.vocabulary import Vocabulary, check_same_vocabulary

LOGITS_BYTES = 16 << 20
WIDEST = 64  # pairs per pass, where their logits fit LOGITS_BYTES
DEFAULT_CONTEXT = 2048


class Eagle3Head(FeatureHead):
    """Owns a llama.cpp model and a context; uses the target's context where the head shares weights with it.

    `another` has a context of its own over the same model.
    """

    def __init__(
        self,
        model: Any,
        context: Any,
        sizes: Eagle3Sizes,
        cancel: CancelFlag,
        context_length: int,
        end_ids: frozenset[int],
        make_context: Callable[[CancelFlag], Any],
    ) -> None:
        """`make_context`: makes another context like `context`, which a cancel flag ends."""
        llama = library()
        self._model, self._context, self._cancel, self._sizes = model, context, cancel, sizes
        self._make_context, self._owns_model = make_context, True
        self._others: list[Eagle3Head] = []
        self._memory = llama.llama_get_memory(context)
        self._step = _step(sizes)
        self._rows = PairRows(self._step)
        self.start = self.end = 0
        self.facts = HeadFacts(
            context_length=context_length,
            layers=sizes.layers,
            feature_width=sizes.feature_width,
            width=sizes.width,
            end_ids=end_ids,
            num_bytes=num_bytes(sizes, context_length),
        )
        # Of rows with logits only: otherwise a pass without any would still copy its states.
        extension("set_states")(context, True, True)

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
        cancel = CancelFlag()
        make = partial(_create_context, model, path, sizes, length, threads, target_context)
        try:
            if vocabulary is not None:
                check_same_vocabulary(vocabulary, LlamaCppVocabulary(model))
            context = make(cancel)
        except BaseException:
            library().llama_model_free(model)
            raise
        head = cls(model, context, sizes, cancel, length, vocabulary.end_ids if vocabulary else frozenset(), make)
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
        states = self.encode(np.ones((1, self._sizes.feature_width), np.float32))
        logits, state = self.decode(np.zeros(1, np.int32), states)
        if not (np.isfinite(state).all() and np.isfinite(logits.max())):
            raise ModelFileError(
                f"{path} is not a usable EAGLE-3 head: its results are not numbers. Download or export it again"
            )
        self.restart(0)

    def encode(self, features: States) -> States:
        self._require_open()
        if features.ndim != 2 or features.shape[1] != self._sizes.feature_width:
            raise BatchError(f"features of the shape [n, {self._sizes.feature_width}] are needed, got {features.shape}")
        self._trim()
        states = np.empty((len(features), self._sizes.width), np.float32)
        for start in range(0, len(features), self._step):
            part = np.ascontiguousarray(features[start : start + self._step], np.float32)
            self._rows.fill(self.end, None, part, outputs=True)
            self._run(library().llama_encode, len(part))
            states[start : start + len(part)] = self._states(len(part))
        return states

    def decode(self, token_ids: TokenIds, states: States) -> tuple[Logits, States]:
        self._require_open()
        self._check_pairs(token_ids, states)
        self._trim()
        count = int(token_ids.size)
        for start in range(0, count, self._step):
            stop = min(start + self._step, count)
            part = np.ascontiguousarray(states[start:stop], np.float32)
            self._rows.fill(self.end + start, token_ids[start:stop], part, outputs=stop == count)
            self._run(library().llama_decode, stop - start)
        self.end += count
        last = (count - 1) % self._step
        shape = (last + 1, self._sizes.vocabulary_size)
        logits = np.ctypeslib.as_array(library().llama_get_logits(self._context), shape)
        return logits[last], self._states(last + 1)[last]

    def _check_pairs(self, token_ids: TokenIds, states: States) -> None:
        if token_ids.size == 0 or states.shape != (token_ids.size, self._sizes.width):
            raise BatchError(
                f"one state of width {self._sizes.width} per token and at least one token are needed, got "
                f"{token_ids.size} tokens and states {states.shape}"
            )
        if token_ids.min() < 0 or token_ids.max() >= self._sizes.vocabulary_size:
            raise BatchError(f"a token id is outside the head's vocabulary 0..{self._sizes.vocabulary_size - 1}")
        room = self.facts.context_length - (self.end - self.start)
        if token_ids.size > room:
            raise ContextFull(f"the head's context of {self.facts.context_length} has room for {room} more pairs")

    def _run(self, function: Any, width: int) -> None:
        if self._cancel.is_set:
            self._cancel.clear()
            raise Cancelled("the head's pass was cancelled before it began; its cache is as before")
        forget_complaints()
        result = function(self._context, self._rows.struct)
        if result:
            self._raise_failed(result, width)

    def _raise_failed(self, result: int, width: int) -> NoReturn:
        if result == ABORTED:
            self._cancel.clear()
            raise Cancelled("the head's pass was cancelled; its cache is as before")
        if result == NO_ROOM:
            raise ContextFull(f"no room for {width} more pairs in the head's cache")
        raise EngineError(f"llama.cpp failed on a head's pass of {width} rows (result {result}): {complaints()}")

    def _states(self, count: int) -> States:
        return np.ctypeslib.as_array(extension("get_states")(self._context), (count, self._sizes.width))

    def _trim(self) -> None:
        """Remove what an unfinished call left behind."""
        if library().llama_memory_seq_pos_max(self._memory, 0) >= self.end:
            library().llama_memory_seq_rm(self._memory, 0, self.end, END)

    def rollback(self, to_end: int) -> None:
        self._check_position(to_end)
        self.end = to_end
        self._trim()

    def drop_before(self, start: int) -> None:
        self._check_position(start)
        if start > self.start:
            self._trim()
            library().llama_memory_seq_rm(self._memory, 0, 0, start)
            self.start = start

    def restart(self, position: int) -> None:
        self._require_open()
        self.start = self.end = position
        library().llama_memory_seq_rm(self._memory, 0, -1, END)

    def _check_position(self, position: int) -> None:
        self._require_open()
        if not self.start <= position <= self.end:
            raise BatchError(f"the head's cache holds pairs {self.start}..{self.end}, {position} is outside")

    def another(self) -> Eagle3Head:
        self._require_open()
        cancel = CancelFlag()
        context = self._make_context(cancel)
        length, end_ids = self.facts.context_length, self.facts.end_ids
        found = Eagle3Head(self._model, context, self._sizes, cancel, length, end_ids, self._make_context)
        found._owns_model = False
        self._others.append(found)
        return found

    def set_threads(self, threads: int) -> None:
        self._require_open()
        for head in (self, *(other for other in self._others if other._context is not None)):
            library().llama_set_n_threads(head._context, threads, threads)

    def cancel(self) -> None:
        self._cancel.set()

    def clear_cancel(self) -> None:
        self._cancel.clear()

    def close(self) -> None:
        if self._context is None:
            return
        for other in self._others:
            other.close()
        library().llama_free(self._context)
        if self._owns_model:
            library().llama_model_free(self._model)
        self._context = self._model = None

    def _require_open(self) -> None:
        if self._context is None:
            raise EngineError("this head is closed; load the model again")


def _step(sizes: Eagle3Sizes) -> int:
    """Rows per pass: the library keeps logits of the whole vocabulary for all of them."""
    return min(max(LOGITS_BYTES // (4 * sizes.vocabulary_size), 1), WIDEST)


def num_bytes(sizes: Eagle3Sizes, context_length: int) -> int:
    """Weights, cache, and for the widest pass two copies of the logits and the layer's activations."""
    row_bytes = 4 * (2 * sizes.vocabulary_size + sizes.num_drafted + sizes.feature_width + 8 * sizes.width)
    return sizes.weight_bytes + context_length * sizes.kv_bytes_per_token + _step(sizes) * row_bytes


def _create_context(
    model: Any, path: Path, sizes: Eagle3Sizes, length: int, threads: int, target_context: Any, cancel: CancelFlag
) -> Any:
    params = library().llama_context_default_params()
    params.n_ctx = length
    params.n_batch = params.n_ubatch = params.n_outputs_max = _step(sizes)
    params.n_seq_max = 1
    params.n_threads = params.n_threads_batch = threads
    params.type_k = params.type_v = CACHE_TYPES["f16"]
    params.flash_attn_type = ON
    params.kv_unified = True
    params.no_perf = True
    params.ctx_other = target_context if sizes.shares_embeddings or sizes.shares_output else None
    context = new_context(model, params, cancel, requires_flash=False)
    if not context:
        raise CapabilityError(f"llama.cpp refused a context of {length} pairs for head {path.name}: {complaints()}")
    return context
