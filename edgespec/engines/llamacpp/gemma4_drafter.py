"""Gemma 4's drafter: a few layers that attend to the keys and values of the target's own last layers.

It keeps no cache. Each pass takes the last token and a state of the target's width, and gives scores and the next
state; all passes of a draft are at the position of the text's last token, as the drafter was trained (Gemma 4 model
card; `gemma4_assistant` in transformers).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from edgespec.engines.head import HeadFacts, States, StepHead
from edgespec.engines.llamacpp.extensions import extension
from edgespec.engines.llamacpp.head_context import ContextRequest
from edgespec.engines.llamacpp.head_file import HeadOfFile
from edgespec.engines.llamacpp.hidden_states import OutputStates
from edgespec.engines.llamacpp.library import END, library
from edgespec.engines.llamacpp.rows import PairRows
from edgespec.engines.model_use import MAX_BRANCHES
from edgespec.errors import BatchError, EngineError
from edgespec.formats.gguf.gemma4_drafter import DrafterSizes, check_cache, read_gemma4_drafter
from edgespec.formats.gguf.header import read_header
from edgespec.types import Logits
from edgespec.vocabulary import Vocabulary


class Gemma4Drafter(HeadOfFile[DrafterSizes], StepHead):
    """The drafter beside its target, for all sequences of it."""

    what = "Gemma 4 drafter"
    is_mtp = True
    states = OutputStates

    def __init__(
        self, request: ContextRequest, facts: HeadFacts, vocabulary_size: int, owned_model: Any = None
    ) -> None:
        """Raises EngineError where the target's cache holds a text: sharing it would drop all of it."""
        llama, memory = library(), library().llama_get_memory(request.other)
        if any(llama.llama_memory_seq_pos_max(memory, each) >= 0 for each in range(request.sequences)):
            raise EngineError(f"{request.name} must be loaded before its target has read a text")
        super().__init__(request, facts, vocabulary_size, owned_model)
        self._rows = PairRows(1)
        self._target_memory: Any = None
        extension("set_states")(self._context, True, True)

    @classmethod
    def load(cls, path: Path, target: tuple[Any, Any], vocabulary: Vocabulary, **others: Any) -> Self:
        found = super().load(path, target, vocabulary, **others)
        found._target_memory = library().llama_get_memory(target[1])
        return found

    @classmethod
    def read(cls, path: Path) -> DrafterSizes:
        return read_gemma4_drafter(path)

    @classmethod
    def check_target(cls, path: Path, target: Path) -> None:
        check_cache(path.name, read_header(path), read_header(target))

    @classmethod
    def _refined(cls, request: ContextRequest, sizes: DrafterSizes) -> ContextRequest:
        """One over the target's cache: for as many entries and sequences."""
        llama, other = library(), request.other
        sequences, cells = int(llama.llama_n_seq_max(other)), int(llama.llama_n_ctx(other))
        is_unified = sequences == 1 or int(llama.llama_n_ctx_seq(other)) == cells
        # One row is needed, but llama.cpp reserves one for each sequence and ends the process if there are fewer.
        return replace(request, length=cells, rows=sequences, sequences=sequences, is_unified=is_unified)

    @classmethod
    def cache_bytes(cls, sizes: DrafterSizes, context_length: int) -> int:
        return 0

    @classmethod
    def pass_bytes(cls, sizes: DrafterSizes) -> int:
        """Logits of a row for each sequence id of the target, as llama.cpp reserves them, and a copy of one."""
        return (MAX_BRANCHES + 3) * 4 * sizes.vocabulary_size

    def step(self, token_id: int, state: States, position: int, sequence: int = 0) -> tuple[Logits, States]:
        self._require_open()
        if state.shape != (self.facts.width,):
            raise BatchError(f"a state of width {self.facts.width} is needed, got {state.shape}")
        self._check_tokens(token_id)
        self._drop_padding(position, sequence)
        row, ids = np.ascontiguousarray(state[np.newaxis], np.float32), np.array([token_id], np.int32)
        self._rows.fill(position, ids, row, outputs=True, last_only=True, sequence=sequence)
        self._run(library().llama_decode, self._rows.struct, 1)
        logits = np.ctypeslib.as_array(library().llama_get_logits(self._context), (self._vocabulary_size,))
        return logits, np.ctypeslib.as_array(extension("get_states")(self._context), (self.facts.width,))

    def _drop_padding(self, position: int, sequence: int) -> None:
        """Remove what a padded pass left behind the target's text: llama.cpp takes the next position alone."""
        llama = library()
        if llama.llama_memory_seq_pos_max(self._target_memory, sequence) >= position:
            llama.llama_memory_seq_rm(self._target_memory, sequence, position, END)

    def _is_sound(self) -> bool:
        """Not tried: without a text in the target's cache there is nothing to attend to. Trials read all weights."""
        return True
