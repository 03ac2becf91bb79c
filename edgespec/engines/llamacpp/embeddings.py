"""Embeddings of texts in llama.cpp: with any loaded model, and with encoders, which write no text.

The context is one of its own, so that what the engine has cached stays; it is made for the longest text so far. The
rows of a text that its embedding needs (all of them for the mean, else one) are run last, as llama.cpp computes the
head, too, for each row whose state it gives: only so many fit into a pass. The rows before them run without results, in
wide passes. Short texts share passes.

llama.cpp can pool by itself, but only what is in one pass; here a text may be as long as the context. Encoders, whose
tokens see those behind them, have all of a text in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import Engine, EngineFacts
from edgespec.engines.llamacpp.facts import metadata, pooling_of
from edgespec.engines.llamacpp.library import ABORTED, CancelFlag, complaints, forget_complaints, library
from edgespec.engines.llamacpp.rows import RowBuffer
from edgespec.engines.llamacpp.settings import (
    CACHE_BYTES,
    CACHE_TYPES,
    CELLS_MULTIPLE,
    NO_POOLING,
    ContextSettings,
    choose_context_length,
    new_context,
    open_for,
)
from edgespec.engines.llamacpp.tokenizer import LlamaCppVocabulary
from edgespec.engines.model_files import HeldFiles
from edgespec.engines.model_use import ModelUse
from edgespec.engines.rows import check_texts
from edgespec.errors import Cancelled, CapabilityError, EngineError
from edgespec.formats.gguf.check import check_gguf, model_files
from edgespec.platform.memory import spare_memory
from edgespec.types import PoolingName, TokenIds


class EncoderEngine(Engine):
    """An encoder whose file names a pooling. Make it with `load`. It has no cache: only `embed` runs a pass."""

    vocabulary: LlamaCppVocabulary

    def __init__(self, path: Path, model: Any, settings: ContextSettings) -> None:
        self._model, self._cancel, self._is_open = model, CancelFlag(), True
        self.vocabulary = LlamaCppVocabulary(model)
        self.facts = _facts(model, settings)
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
        length = choose_context_length(path, check_gguf(path).context_length, use.context_length, use.default_context)
        settings = ContextSettings.checked(use, length)
        model = open_for(path, settings)
        try:
            return cls(path, model, settings)
        except BaseException:
            library().llama_model_free(model)
            raise

    def embed(self, texts: Sequence[TokenIds], pooling: PoolingName) -> NDArray[np.float32]:
        self._require_open()
        check_texts(texts, self.facts.context_length, self.vocabulary.size)
        self._held.check()
        return self._embedder.embed(texts, pooling)

    def length(self, sequence: int = 0) -> int:
        self._require_open()
        return 0

    def rollback(self, to_length: int, sequence: int = 0) -> None:
        self._require_open()
        if to_length:
            self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        self._require_open()
        raise CapabilityError(f"{self.facts.architecture} models give embeddings and keep no cache: they write no text")

    forward = keep_path = fork = save_state = load_state = _refuse

    def cancel(self) -> None:
        self._require_open()
        self._cancel.set()

    def clear_cancel(self) -> None:
        self._require_open()
        self._cancel.clear()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._held.close()
            self.vocabulary.close()
            self._embedder.close()
            library().llama_model_free(self._model)

    def _require_open(self) -> None:
        if not self._is_open:
            raise EngineError("this engine is closed; load the model again")


def _facts(model: Any, settings: ContextSettings) -> EngineFacts:
    return EngineFacts(
        name="llamacpp",
        architecture=metadata(model, "general.architecture"),
        context_length=settings.context_length,
        max_sequences=settings.max_sequences,
        max_batch=settings.max_batch,
        can_rollback=False,
        can_tree=False,
        weight_bytes=int(library().llama_model_size(model)),
        kv_bytes_per_token=0,
        width_classes=(),
        pinned_class=None,
        device=settings.place,
        threads=settings.threads,
        why_no_speculation="this model writes no text",
        pooling=pooling_of(model),
        writes=False,
    )


LEAST_CELLS = 512  # texts of a context share as many, or what the longest of them needs
MOST_TEXTS = 64  # that share passes
# Of the head's scores in a pass that gives states. With 32 MiB, which are 170 rows, means of a 135M model took 1.3
# times as long.
SCORES_BYTES = 128 << 20
_ROW_BYTES = 64  # of a pass, for each number of a hidden state


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of the text number `text` of a group, which begin at `position`."""

    text: int
    position: int
    token_ids: TokenIds


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
        self._most_texts = 1 if settings.keeps_state else MOST_TEXTS
        self._wide = settings.batch_capacity
        self._narrow = min(max(SCORES_BYTES // (4 * self._vocabulary_size), MOST_TEXTS), self._wide)
        self._rows = RowBuffer(self._wide, 1)
        self._context: Any = None
        self._cells = 0

    def embed(self, texts: Sequence[TokenIds], pooling: PoolingName) -> NDArray[np.float32]:
        """As `Engine.embed`."""
        if pooling == "cls" and not self._is_encoder:  # a token does not see those behind it
            texts = [text[:1] for text in texts]
        self._prepare(max(map(len, texts), default=1))
        found = np.zeros((len(texts), self._width), np.float32)
        for begin, end in self._groups(texts):
            self._embed_group(texts[begin:end], found[begin:end], pooling)
        return found

    def _groups(self, texts: Sequence[TokenIds]) -> Iterator[tuple[int, int]]:
        """(begin, end) of the texts that the context holds at once."""
        most = max(LEAST_CELLS, *map(len, texts)) if texts else 0  # further cells would only slow attention down
        begin = total = 0
        for index, text in enumerate(texts):
            if index > begin and (total + len(text) > most or index - begin == self._most_texts):
                yield begin, index
                begin, total = index, 0
            total += len(text)
        if texts:
            yield begin, len(texts)

    def _embed_group(self, texts: Sequence[TokenIds], found: NDArray[np.float32], pooling: PoolingName) -> None:
        llama = library()
        if memory := llama.llama_get_memory(self._context):
            llama.llama_memory_clear(memory, False)
        needs_all = self._is_encoder or pooling == "mean"
        firsts = [0 if needs_all else len(text) - 1 for text in texts]
        before = [_Part(index, 0, text[:first]) for index, (text, first) in enumerate(zip(texts, firsts, strict=True))]
        needed = [_Part(i, first, text[first:]) for i, (text, first) in enumerate(zip(texts, firsts, strict=True))]
        llama.llama_set_embeddings(self._context, False)
        for parts in _passes(before, self._wide):
            self._run(parts, gives_states=False)
        llama.llama_set_embeddings(self._context, True)
        for parts in _passes(needed, self._narrow):
            states, row = self._run(parts, gives_states=True), 0
            for part in parts:
                own = states[row : row + len(part.token_ids)]
                row += len(part.token_ids)
                if self._is_encoder and pooling != "mean":
                    own = own[:1] if pooling == "cls" else own[-1:]
                found[part.text] += own.sum(axis=0)
        if pooling == "mean":
            found /= np.array([[len(text)] for text in texts], np.float32)

    def _run(self, parts: Sequence[_Part], *, gives_states: bool) -> NDArray[np.float32]:
        """One pass; its hidden states [rows, width], a view, or none."""
        rows, width = self._rows, 0
        for part in parts:
            place = slice(width, width + len(part.token_ids))
            rows.token_ids[place] = part.token_ids
            rows.positions[place] = np.arange(part.position, part.position + len(part.token_ids))
            rows.ids[place, 0] = part.text
            width = place.stop
        rows.num_ids[:width], rows.outputs[:width] = 1, gives_states
        rows.struct.n_tokens = width
        if self._cancel.is_set:
            self._raise_cancelled()
        forget_complaints()
        result = library().llama_decode(self._context, rows.struct)
        if result == ABORTED:
            self._raise_cancelled()
        if result:
            raise EngineError(f"llama.cpp failed to embed {width} tokens (result {result}): {complaints()}")
        if not gives_states:
            return np.zeros((0, self._width), np.float32)
        return np.ctypeslib.as_array(library().llama_get_embeddings(self._context), (width, self._width))

    def _raise_cancelled(self) -> None:
        self._cancel.clear()
        raise Cancelled("embedding was cancelled; no text is embedded")

    def _prepare(self, longest: int) -> None:
        """A context for texts of up to `longest` tokens. Raises CapabilityError where there is no memory for it."""
        if self._context and longest <= self._cells:
            return
        self.close()
        cells = max(LEAST_CELLS, min(2 * self._cells, self._settings.context_length), longest)
        cells = -(-cells // CELLS_MULTIPLE) * CELLS_MULTIPLE
        if self._is_encoder:
            self._wide = self._narrow = cells
            self._rows = RowBuffer(cells, 1)
        self._require_memory(cells, longest)
        params = library().llama_context_default_params()
        params.n_ctx = cells
        params.n_batch = params.n_ubatch = self._wide
        params.n_outputs_max = self._narrow
        params.n_seq_max = self._most_texts
        params.n_threads = params.n_threads_batch = self._settings.threads
        params.offload_kqv = self._settings.kv_offload
        params.type_k = params.type_v = CACHE_TYPES["f16"]
        params.flash_attn_type = self._settings.flash_attention_type
        params.kv_unified = params.swa_full = params.no_perf = params.embeddings = True
        params.pooling_type = NO_POOLING
        context = new_context(self._model, params, self._cancel, requires_flash=False)
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


def _passes(parts: Sequence[_Part], most: int) -> Iterator[list[_Part]]:
    """The tokens of `parts`, in order, in passes of at most `most` rows."""
    taken: list[_Part] = []
    room = most
    for part in parts:
        done = 0
        while done < len(part.token_ids):
            tokens = part.token_ids[done : done + room]
            taken.append(_Part(part.text, part.position + done, tokens))
            done, room = done + len(tokens), room - len(tokens)
            if not room:
                yield taken
                taken, room = [], most
    if taken:
        yield taken
