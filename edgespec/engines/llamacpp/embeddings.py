"""Embeddings of texts in llama.cpp: with any loaded model, and with encoders, which write no text.

The context is one of its own, so that what the engine has cached stays; it is made for the longest text so far. The
rows of a text that its embedding needs (all of them for the mean, else one) are run last, as llama.cpp computes the
head, too, for each row whose state it gives: only so many fit into a pass. The rows before them run without results, in
wide passes.

llama.cpp can pool by itself, but only what is in one pass; here a text may be as long as the context. Encoders, whose
tokens see those behind them, have all of a text in one pass.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.booked import BookedEngine, SequenceBook, check_text
from edgespec.engines.llamacpp.library import ABORTED, CancelFlag, check_pass, complaints, forget_complaints, library
from edgespec.engines.llamacpp.rows import PairRows
from edgespec.engines.llamacpp.settings import (
    CACHE_BYTES,
    CELLS_MULTIPLE,
    NO_POOLING,
    ContextSettings,
    new_context,
    open_model,
    read_facts,
)
from edgespec.engines.llamacpp.tokenizer import LlamaCppVocabulary
from edgespec.engines.model_files import HeldFiles
from edgespec.engines.model_use import ModelUse
from edgespec.errors import CapabilityError
from edgespec.formats.gguf.check import check_gguf, model_files
from edgespec.formats.gguf.header import GgufHeader
from edgespec.platform.memory import spare_memory
from edgespec.types import PoolingName, TokenIds


class EncoderEngine(BookedEngine):
    """An encoder whose file names a pooling. Make it with `load`. It has no cache: only `embed` runs a pass."""

    vocabulary: LlamaCppVocabulary

    def __init__(self, path: Path, header: GgufHeader, model: Any, settings: ContextSettings) -> None:
        self._model, self._cancel, self._book = model, CancelFlag(), SequenceBook(settings.max_sequences)
        self.vocabulary = LlamaCppVocabulary(model)
        self.facts = replace(
            read_facts(model, header, settings),
            can_rollback=False,
            max_branches=0,
            writes=False,
            why_no_speculation="this model writes no text",
        )
        self._embedder = Embedder(model, settings, self._cancel, 0, is_encoder=True)
        self._held = HeldFiles(model_files(path))

    @classmethod
    def load(cls, path: Path, use: ModelUse | None = None, **changes: Any) -> Self:
        """Load `path`; as `LlamaCppEngine.load`. Raises CapabilityError for what an encoder cannot do as well."""
        use = replace(use or ModelUse(), **changes)
        if use.reproducible:
            raise CapabilityError(f"{path.name} writes no text: leave out --reproducible")
        if use.endpoints:
            raise CapabilityError(
                f"{path.name} gives embeddings, which a model on RPC servers does not: leave out --rpc"
            )
        header = check_gguf(path)
        length = use.length_for(path.name, header.context_length)
        settings = ContextSettings.checked(use, length)
        model = open_model(path, settings)
        try:
            return cls(path, header, model, settings)
        except BaseException:
            library().llama_model_free(model)
            raise

    def embed(self, token_ids: TokenIds, pooling: PoolingName) -> NDArray[np.float32]:
        self._require_open()
        check_text(token_ids, self.facts.context_length, self.vocabulary.size)
        self._held.check()
        return self._embedder.embed(token_ids, pooling)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        self._require_open()
        raise CapabilityError(f"{self.facts.architecture} models give embeddings and keep no cache: they write no text")

    forward = keep_path = fork = save_state = load_state = _refuse
    _score = _copy = _state = _restore = _refuse

    def _free(self) -> None:
        self._held.close()
        self.vocabulary.close()
        self._embedder.close()
        library().llama_model_free(self._model)


LEAST_CELLS = 512
# Of the head's scores in a pass that gives states. With 32 MiB, which are 170 rows, means of a 135M model took 1.3
# times as long.
SCORES_BYTES = 128 << 20
_ROW_BYTES = 64  # of a pass, for each number of a hidden state


class Embedder:
    """Embeds texts with `model`, which outlives it. Its keys and values are f16 whatever those of `settings` are.

    `kv_bytes`: of a token, in the cache types of `settings`; `is_encoder`: whether a token sees those behind it.
    """

    def __init__(
        self, model: Any, settings: ContextSettings, cancel: CancelFlag, kv_bytes: int, *, is_encoder: bool = False
    ) -> None:
        llama = library()
        self._model, self._settings, self._cancel = model, settings, cancel
        own = CACHE_BYTES[settings.cache_type_k] + CACHE_BYTES[settings.cache_type_v]
        self._kv_bytes = int(kv_bytes * 2 * CACHE_BYTES["f16"] / own)
        self._is_encoder = is_encoder
        self._width = int(llama.llama_model_n_embd_out(model))
        self._vocabulary_size = int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)))
        self._wide = settings.max_rows
        self._narrow = min(max(SCORES_BYTES // (4 * self._vocabulary_size), 64), self._wide)
        self._rows = PairRows(self._wide)
        self._context: Any = None
        self._cells = 0

    def embed(self, token_ids: TokenIds, pooling: PoolingName) -> NDArray[np.float32]:
        llama = library()
        if pooling == "cls" and not self._is_encoder:  # a token does not see those behind it
            token_ids = token_ids[:1]
        size = len(token_ids)
        self._prepare(size)
        if memory := llama.llama_get_memory(self._context):
            llama.llama_memory_clear(memory, False)
        first = 0 if self._is_encoder or pooling == "mean" else size - 1
        if first:
            llama.llama_set_embeddings(self._context, False)
            for start in range(0, first, self._wide):
                self._run(token_ids[start : min(start + self._wide, first)], start, gives_states=False)
            llama.llama_set_embeddings(self._context, True)
        found = np.zeros(self._width, np.float32)
        for start in range(first, size, self._narrow):
            part = token_ids[start : start + self._narrow]
            self._run(part, start, gives_states=True)
            states = np.ctypeslib.as_array(llama.llama_get_embeddings(self._context), (len(part), self._width))
            if self._is_encoder and pooling != "mean":
                states = states[:1] if pooling == "cls" else states[-1:]
            found += states.sum(axis=0)
        return found / np.float32(size if pooling == "mean" else 1)

    def _run(self, token_ids: TokenIds, position: int, *, gives_states: bool) -> None:
        self._rows.fill_pairs(position, token_ids, None, outputs=gives_states)
        what = f"embedding {len(token_ids)} tokens"
        if self._cancel.is_set():
            check_pass(ABORTED, self._cancel, what)
        forget_complaints()
        check_pass(library().llama_decode(self._context, self._rows.struct), self._cancel, what)

    def _prepare(self, longest: int) -> None:
        """A context for texts of up to `longest` tokens. Raises CapabilityError where there is no memory for it."""
        if self._context and longest <= self._cells:
            return
        self.close()
        cells = max(LEAST_CELLS, min(2 * self._cells, self._settings.context_length), longest)
        cells = -(-cells // CELLS_MULTIPLE) * CELLS_MULTIPLE
        if self._is_encoder:
            self._wide = self._narrow = cells
            self._rows = PairRows(cells)
        self._require_memory(cells, longest)
        context = new_context(
            self._model,
            self._cancel,
            n_ctx=cells,
            n_batch=self._wide,
            n_outputs_max=self._narrow,
            n_threads=self._settings.threads,
            flash_attn_type=self._settings.flash_attention_type,
            kv_unified=True,
            embeddings=True,
            pooling_type=NO_POOLING,
        )
        if not context:
            raise CapabilityError(f"llama.cpp refused a context to embed texts of {longest} tokens: {complaints()}")
        self._context, self._cells = context, cells

    def _require_memory(self, cells: int, longest: int) -> None:
        """It was not planned when the model was loaded: most programs never need it."""
        scores = 0 if self._is_encoder else self._vocabulary_size
        states = 2 * self._narrow * (scores + self._width) * 4  # as computed and as handed over
        needed = cells * self._kv_bytes + states + self._wide * self._width * _ROW_BYTES
        free = spare_memory() if self._settings.place == "cpu" else None
        if free is not None and needed > free:
            raise CapabilityError(
                f"to embed a text of {longest} tokens needs about {needed >> 20} MiB more memory and {free >> 20} MiB "
                "are free: split the text, or load the model with a smaller --ctx-size or --parallel 1"
            )

    def close(self) -> None:
        """Free the context; the next call makes another one."""
        if self._context:
            library().llama_free(self._context)
        self._context = None
