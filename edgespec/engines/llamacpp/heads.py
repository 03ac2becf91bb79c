"""Draft heads in llama.cpp: each has a context of its own, which may share weights or a cache with its target's.

| form | reads of the target | a pass | its cache holds |
|---|---|---|---|
| eagle3 | inputs of three layers, fused by `llama_encode` | pairs of a state and the token behind it | pairs |
| mtp | hidden states, as they are (arXiv 2412.19437, 2.2) | the same | pairs |
| dflash | inputs of layers, projected into the cache | the last token and mask tokens behind it | tokens |
| gemma4 | the last token's hidden state | a token and a state, at the last token's position | nothing |

An mtp layer lies in a file of its own or in the target's, over whose model the context then is. A DSpark head moves the
scores of each row of a block by the likeliest token of the row before, so that they are those of the greedy chain;
where a draft takes another token, fewer of the tokens behind it are accepted, and the text stays the target's.

Two properties of llama-cpp-python 0.3.36 matter here. The graphs of eagle3 and dflash compute logits of all rows, of
which the library copies as many as were requested from the first one on, so either all rows are requested or none. And
a pass that encodes needs positions as if it decoded.
"""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.engines.base import StatesOf
from edgespec.engines.head import Confidences, DraftHead, HeadFacts, States
from edgespec.engines.llamacpp.footprint import cache_bytes, layers_sizes, pass_bytes, widest_pass
from edgespec.engines.llamacpp.library import (
    ABORTED,
    END,
    CancelFlag,
    check_pass,
    complaints,
    forget_complaints,
    library,
)
from edgespec.engines.llamacpp.rows import PairRows
from edgespec.engines.llamacpp.settings import ON, new_context, open_model
from edgespec.engines.llamacpp.states import extension
from edgespec.engines.llamacpp.tokenizer import LlamaCppVocabulary
from edgespec.engines.model_use import ModelUse
from edgespec.errors import BatchError, CapabilityError, EngineError
from edgespec.formats.gguf.heads import HeadForm, HeadSizes, read_head
from edgespec.types import Logits, TokenIds
from edgespec.vocabulary import Vocabulary, check_same_vocabulary

_MTP_CONTEXT = 1  # LLAMA_CONTEXT_TYPE_MTP
_TRIED_CONTEXT = 16


# Forms whose context has the type of multi-token prediction, over a model with such layers, where the library computes
# logits of the last row of a pass alone; and of which rows the target gives hidden states for them.
MTP_STATES: dict[HeadForm, StatesOf] = {"mtp": "all rows", "gemma4": "rows with logits"}


class Head(DraftHead):
    """A context over `model`, which outlives it. Make it with `load_head`.

    It attends to `length` tokens of text. `other`: the context of its target, where it shares weights or a cache with
    that one. `another` has a context of its own.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        sizes: HeadSizes,
        length: int,
        threads: int,
        vocabulary: Vocabulary | None = None,
        other: Any = None,
    ) -> None:
        """Raises as `_new_context`."""
        self._model, self._name, self._sizes, self._threads, self._other = model, name, sizes, threads, other
        self._is_mtp = sizes.form in MTP_STATES
        self._step = widest_pass(sizes)
        self.owns_model = False  # which is freed with it
        self.facts = HeadFacts(
            context_length=length,
            layers=sizes.layers,
            feature_width=sizes.feature_width,
            width=sizes.width,
            end_ids=vocabulary.end_ids if vocabulary else frozenset(),
            num_bytes=sizes.weight_bytes + cache_bytes(sizes, length) + pass_bytes(sizes),
            most_drafted=sizes.most_drafted,
        )
        self._begin()

    def _begin(self) -> None:
        """Make what it does not share with others."""
        sizes = self._sizes
        self._cancel, self._others = CancelFlag(), list[Head]()
        self._context = self._new_context()
        self._memory = library().llama_get_memory(self._context)
        self.start = self.end = 0
        self._rows = PairRows(self._step)
        self._block_ids = np.full(sizes.block_size, sizes.mask_id, np.int32)
        if sizes.block_size:
            library().llama_set_causal_attn(self._context, sizes.is_causal)
        if not sizes.block_size or sizes.has_confidence:  # a block's graph gives confidences in the place of states
            # Masked: states of the rows with logits. Otherwise a pass without any would still copy its states.
            extension("set_states")(self._context, True, sizes.form != "mtp")

    def _new_context(self) -> Any:
        """A llama_context that a flag cancels.

        Raises CapabilityError with the library's reason when it refuses, and EngineError where the cache that it would
        share holds a text: all of it would be dropped.
        """
        llama, other, sizes = library(), self._other, self._sizes
        length, rows, sequences, is_unified = self.facts.context_length + sizes.block_size, self._step, 1, True
        if sizes.form == "gemma4":  # one over the target's cache: for as many entries and sequences
            sequences, length = int(llama.llama_n_seq_max(other)), int(llama.llama_n_ctx(other))
            memory = llama.llama_get_memory(other)
            if any(llama.llama_memory_seq_pos_max(memory, each) >= 0 for each in range(sequences)):
                raise EngineError(f"{self._name} must be loaded before its target has read a text")
            is_unified = sequences == 1 or int(llama.llama_n_ctx_seq(other)) == length
            rows = sequences  # one is needed, but llama.cpp reserves one for each sequence and else ends the process
        context = new_context(
            self._model,
            self._cancel,
            n_ctx=length,
            n_batch=rows,
            n_outputs_max=rows,
            n_seq_max=sequences,
            n_threads=self._threads,
            flash_attn_type=ON,
            kv_unified=is_unified,
            ctx_type=_MTP_CONTEXT if self._is_mtp else 0,
            ctx_other=other,
        )
        if not context:
            raise CapabilityError(
                f"llama.cpp refused a context of {length} entries for head {self._name}: {complaints()}"
            )
        return context

    @property
    def form(self) -> HeadForm:
        return self._sizes.form

    # -- passes

    def encode(self, features: States) -> States:
        self._require_open()
        self._check_features(features)
        if self._is_mtp:  # the target's hidden states are the head's own
            return features
        self._trim()
        states = np.empty((len(features), self.facts.width), np.float32)
        for start in range(0, len(features), self._step):
            part = np.ascontiguousarray(features[start : start + self._step], np.float32)
            self._rows.fill_pairs(self.end, None, part)
            self._run(library().llama_encode, len(part))
            states[start : start + len(part)] = self._states(len(part))
        return states

    def decode(self, token_ids: TokenIds, states: States) -> tuple[Logits, States]:
        self._require_open()
        self._check_pairs(token_ids, states)
        self._check_tokens(int(token_ids.min()), int(token_ids.max()))
        self._trim()
        count, last_only = int(token_ids.size), self._is_mtp
        for start in range(0, count, self._step):
            stop = min(start + self._step, count)
            part = np.ascontiguousarray(states[start:stop], np.float32)
            is_last = stop == count
            self._rows.fill_pairs(self.end + start, token_ids[start:stop], part, outputs=is_last, last_only=last_only)
            self._run(library().llama_decode, stop - start)
        self.end += count
        last = (count - 1) % self._step
        row = 0 if last_only else last
        return self._logits(row + 1)[row], self._states(last + 1)[last]

    def inject(self, features: States) -> None:
        self._require_open()
        self._check_features(features)
        self._check_room(len(features), "tokens")
        self._trim()
        for start in range(0, len(features), self._step):
            part = np.ascontiguousarray(features[start : start + self._step], np.float32)
            self._rows.fill_pairs(self.end, None, part, outputs=False)
            self._run(library().llama_decode, len(part))
            self.end += len(part)

    def block(self, token_id: int, most: int | None = None) -> tuple[Logits, Confidences | None]:
        self._require_open()
        self._check_tokens(token_id)
        self._trim()
        sizes = self._sizes
        self._block_ids[0] = token_id
        self._rows.fill_pairs(self.end, self._block_ids, None)
        try:
            self._run(library().llama_decode, sizes.block_size)
            logits = self._logits(sizes.block_size)[sizes.first_row :]
        finally:
            self._trim()  # the rows of the block are guesses
        return logits, self._states(sizes.block_size)[sizes.first_row :, 0] if sizes.has_confidence else None

    def step(self, token_id: int, state: States, position: int, sequence: int = 0) -> tuple[Logits, States]:
        self._require_open()
        self._check_state(state)
        self._check_tokens(token_id)
        llama = library()
        memory = llama.llama_get_memory(self._other)
        # A padded pass left rows behind the target's text, and llama.cpp takes the next position alone.
        if llama.llama_memory_seq_pos_max(memory, sequence) >= position:
            llama.llama_memory_seq_rm(memory, sequence, position, END)
        row, ids = np.ascontiguousarray(state[np.newaxis], np.float32), np.array([token_id], np.int32)
        self._rows.fill_pairs(position, ids, row, last_only=True, sequence=sequence)
        self._run(llama.llama_decode, 1)
        return self._logits(1)[0], self._states(1)[0]

    def _run(self, function: Any, width: int) -> None:
        if self._cancel.is_set():
            check_pass(ABORTED, self._cancel, "the head's pass")
        forget_complaints()
        check_pass(function(self._context, self._rows.struct), self._cancel, f"a head's pass of {width} rows")

    def _logits(self, count: int) -> Logits:
        pointer = library().llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, (count, self._sizes.vocabulary_size))

    def _states(self, count: int) -> States:
        return np.ctypeslib.as_array(extension("get_states")(self._context), (count, self.facts.width))

    def _check_tokens(self, *token_ids: int) -> None:
        size = self._sizes.vocabulary_size
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise BatchError(f"token id {token_id} is outside the head's vocabulary 0..{size - 1}")

    # -- the cache

    def _trim(self) -> None:
        """Remove what an unfinished call left behind."""
        if library().llama_memory_seq_pos_max(self._memory, 0) >= self.end:
            library().llama_memory_seq_rm(self._memory, 0, self.end, END)

    def rollback(self, to_end: int) -> None:
        self._require_open()
        self._check_position(to_end)
        self.end = to_end
        self._trim()

    def drop_before(self, start: int) -> None:
        self._require_open()
        self._check_position(start)
        if start > self.start:
            self._trim()
            library().llama_memory_seq_rm(self._memory, 0, 0, start)
            self.start = start

    def restart(self, position: int) -> None:
        self._require_open()
        self.start = self.end = position
        library().llama_memory_seq_rm(self._memory, 0, -1, END)

    # -- its life

    def another(self, sequence: int) -> Head:
        self._require_open()
        found = copy(self)
        found.owns_model = False
        found._begin()
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
        if self.owns_model:
            library().llama_model_free(self._model)
        self._context = None

    def _require_open(self) -> None:
        if self._context is None:
            raise EngineError("this head is closed; load the model again")


def load_head(
    path: Path | None, target: tuple[Any, Any], vocabulary: Vocabulary, threads: int, length: int, gpu_layers: int
) -> Head:
    """The head `path` for a loaded `target` (model, context), which must outlive it, with its `vocabulary`.

    `path` None: the multi-token prediction layer that the target was loaded with. `length`: most tokens it attends to,
    where it was trained for so many. Raises ModelNotFound, ModelFileError, VocabularyMismatch, and CapabilityError for
    a target without such a layer, or a head of another target or of a variant that is not supported.
    """
    llama, width = library(), int(library().llama_model_n_embd(target[0]))
    if path is None:
        sizes = layers_sizes(width, vocabulary.size, length)
        return Head(target[0], "of its own layers", sizes, length, threads, vocabulary)
    sizes = _sizes_of(path)
    sizes.check_fits(path.name, width, llama.llama_model_n_layer(target[0]), vocabulary.size)
    length = min(length, sizes.context_length)
    model = open_model(path, ModelUse(gpu_layers=gpu_layers, has_mtp=sizes.form in MTP_STATES))
    try:
        check_same_vocabulary(vocabulary, LlamaCppVocabulary(model))
        other = target[1] if sizes.shares_weights else None
        found = Head(model, path.name, sizes, length, threads, vocabulary, other)
    except BaseException:
        llama.llama_model_free(model)
        raise
    found.owns_model = True
    return found


def _sizes_of(path: Path) -> HeadSizes:
    found = read_head(path)
    if found.only_kernels:
        raise CapabilityError(
            f"head {path.name} has {found.only_kernels}, which only edgespec's own kernels run: use --engine onnx"
        )
    return found


def try_head(path: Path) -> None:
    """Read all weights of a head, and load what needs no target. Raises as `load_head`."""
    sizes = _sizes_of(path)
    model = open_model(path, ModelUse(check_tensors=True, has_mtp=sizes.form in MTP_STATES))
    try:
        if not sizes.shares_weights:
            Head(model, path.name, sizes, min(_TRIED_CONTEXT, sizes.context_length), threads=1).close()
    finally:
        library().llama_model_free(model)
