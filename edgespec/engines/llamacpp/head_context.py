"""A llama.cpp context of a head's own: its cache of entries, its passes, and how both end."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from edgespec.engines.head import CachedHead, HeadFacts, States
from edgespec.engines.llamacpp.library import ABORTED, END, NO_ROOM, CancelFlag, complaints, forget_complaints, library
from edgespec.engines.llamacpp.settings import CACHE_TYPES, ON, new_context
from edgespec.errors import BatchError, Cancelled, CapabilityError, ContextFull, EngineError

LOGITS_BYTES = 16 << 20
WIDEST = 64  # rows per pass, where their logits fit LOGITS_BYTES
MTP_CONTEXT = 1  # LLAMA_CONTEXT_TYPE_MTP


@dataclass(frozen=True, slots=True)
class ContextRequest:
    """A context over `model` for the head called `name`: of `length` entries, whose widest pass has `rows` rows.

    `other`: a context that it shares weights or a cache with; `kind`: llama.cpp's number of what it computes;
    `sequences`, `is_unified`: as in a cache that it shares.
    """

    model: Any
    name: str
    length: int
    threads: int
    rows: int
    other: Any = None
    kind: int = 0
    sequences: int = 1
    is_unified: bool = True

    def create(self, cancel: CancelFlag) -> Any:
        """A llama_context, which `cancel` ends. Raises CapabilityError with the library's reason when it refuses."""
        params = library().llama_context_default_params()
        params.n_ctx = self.length
        params.n_batch = params.n_ubatch = params.n_outputs_max = self.rows
        params.n_seq_max = self.sequences
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k = params.type_v = CACHE_TYPES["f16"]
        params.flash_attn_type = ON
        params.kv_unified = self.is_unified
        params.swa_full = True  # as in the target's, where it shares that one's cache
        params.no_perf = True
        params.ctx_type = self.kind
        params.ctx_other = self.other
        context = new_context(self.model, params, cancel, requires_flash=False)
        if not context:
            raise CapabilityError(
                f"llama.cpp refused a context of {self.length} entries for head {self.name}: {complaints()}"
            )
        return context


class HeadContext(CachedHead):
    """Owns a context over a model, and the model where `owned_model` is one. `another` has a context of its own."""

    def __init__(
        self, request: ContextRequest, facts: HeadFacts, vocabulary_size: int, owned_model: Any = None
    ) -> None:
        self._cancel = CancelFlag()
        self._request, self._vocabulary_size, self._model = request, vocabulary_size, owned_model
        self._context = request.create(self._cancel)
        self._others: list[HeadContext] = []
        self._memory = library().llama_get_memory(self._context)
        self.start = self.end = 0
        self.facts = facts

    @abstractmethod
    def _is_sound(self) -> bool:
        """Run it on arbitrary numbers: whether its results are numbers, which those of damaged weights are not."""

    def _run(self, function: Any, batch: Any, width: int) -> None:
        """One pass over `batch`, a llama_batch of `width` rows."""
        if self._cancel.is_set:
            self._cancel.clear()
            raise Cancelled("the head's pass was cancelled before it began; its cache is as before")
        forget_complaints()
        result = function(self._context, batch)
        if result:
            self._raise_failed(result, width)

    def _raise_failed(self, result: int, width: int) -> NoReturn:
        if result == ABORTED:
            self._cancel.clear()
            raise Cancelled("the head's pass was cancelled; its cache is as before")
        if result == NO_ROOM:
            raise ContextFull(f"no room for {width} more rows in the head's cache")
        raise EngineError(f"llama.cpp failed on a head's pass of {width} rows (result {result}): {complaints()}")

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
            raise BatchError(f"the head's cache holds entries {self.start}..{self.end}, {position} is outside")

    def another(self) -> Self:
        self._require_open()
        found = type(self)(self._request, self.facts, self._vocabulary_size)
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
        if self._model is not None:
            library().llama_model_free(self._model)
        self._context = self._model = None

    def _check_features(self, features: States) -> None:
        if features.ndim != 2 or features.shape[1] != self.facts.feature_width:
            raise BatchError(f"features of the shape [n, {self.facts.feature_width}] are needed, got {features.shape}")

    def _check_tokens(self, *token_ids: int) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocabulary_size:
                raise BatchError(f"token id {token_id} is outside the head's vocabulary 0..{self._vocabulary_size - 1}")

    def _require_open(self) -> None:
        if self._context is None:
            raise EngineError("this head is closed; load the model again")


def widest_step(vocabulary_size: int) -> int:
    """Rows per pass: the library keeps logits of the whole vocabulary for all of them."""
    return min(max(LOGITS_BYTES // (4 * vocabulary_size), 1), WIDEST)
