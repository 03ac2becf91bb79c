"""A deterministic engine without weights: logits are a fixed function of the last few tokens, read from a table.

It implements the whole interface (trees, sequences, fork, state, cancel) in microseconds, so that everything above an
engine can be tested exactly and timed alone. `row` gives its distributions.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import EngineFacts
from edgespec.engines.booked import BookedEngine, SequenceBook, SequenceRows
from edgespec.engines.model_files import StateStamp
from edgespec.errors import CapabilityError, PromptError
from edgespec.types import NO_PARENT, Batch, Logits
from edgespec.vocabulary import Vocabulary

MAX_ROWS = 4096
MAX_TABLE_BYTES = 16 << 20
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKEN = re.compile(r"\[(\d+)\]|([a-z])")


class LetterVocabulary(Vocabulary):
    """Ids 0..25 are letters, further ones `[26]`, `[27]`, ...; one of them may end a generation."""

    def __init__(self, size: int, end_id: int | None = None) -> None:
        self.size = size
        self.bos_id = None
        self.adds_bos = False
        self.end_ids = frozenset() if end_id is None else frozenset({end_id})
        self.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = False) -> list[int]:
        found = list(TOKEN.finditer(text))
        ids = [int(number) if number else LETTERS.index(letter) for number, letter in (m.groups() for m in found)]
        if "".join(match.group() for match in found) != text or any(i >= self.size for i in ids):
            raise PromptError(f"{text!r} has characters outside the {self.size} tokens of this vocabulary")
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self.end_ids else self.token_name(token_id).encode()

    def token_name(self, token_id: int) -> str:
        self.check_id(token_id)
        return LETTERS[token_id] if token_id < len(LETTERS) else f"[{token_id}]"


class Words(Vocabulary):
    """Given tokens by their bytes; empty ones are control tokens called `<name>`. A text is cut at the longest."""

    def __init__(
        self, pieces: list[bytes], *, bos: int | None = None, ends: tuple[int, ...] = (), **names: int
    ) -> None:
        self.size, self.bos_id, self.adds_bos, self.end_ids = len(pieces), bos, bos is not None, frozenset(ends)
        self.chat_template = None
        self._given, self._names = pieces, {token_id: f"<{name}>" for name, token_id in names.items()}

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = False) -> list[int]:
        ids, data = [], text.encode()
        while data:
            fitting = [i for i, piece in enumerate(self._given) if piece and data.startswith(piece)]
            if not fitting:
                raise PromptError("this cannot be written")
            ids.append(max(fitting, key=lambda i: len(self._given[i])))
            data = data[len(self._given[ids[-1]]) :]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return self._given[token_id]

    def token_name(self, token_id: int) -> str:
        return self._names.get(token_id, repr(self._given[token_id]))


class Switch:
    """An event without a lock, which an interrupt could leave held."""

    _is_on = False

    def is_set(self) -> bool:
        return self._is_on

    def set(self) -> None:
        self._is_on = True

    def clear(self) -> None:
        self._is_on = False


class TableEngine(BookedEngine):
    """`table` [rows, vocabulary size], float32 logits; a context of up to `order` tokens picks one of its rows."""

    vocabulary: LetterVocabulary

    def __init__(
        self,
        table: Logits,
        *,
        order: int = 2,
        context_length: int = 256,
        max_sequences: int = 4,
        max_batch: int = 64,
        end_id: int | None = None,
        can_rollback: bool = True,
    ) -> None:
        self.vocabulary = LetterVocabulary(table.shape[1], end_id)
        self._cancel = Switch()
        self.facts = EngineFacts(
            name="table",
            architecture=f"table of order {order}",
            context_length=context_length,
            max_sequences=max_sequences,
            max_batch=max_batch,
            can_rollback=can_rollback,
            max_branches=max_batch,
            weight_bytes=table.nbytes,
            kv_bytes_per_token=4,
            pinned_class=(1, max_batch),
            device="cpu",
            threads=1,
            can_pack=True,
        )
        self._table, self._order = table, order
        self._logits = np.zeros((0, table.shape[1]), np.float32)
        self._book = SequenceBook(max_sequences)
        self._cached: list[list[int]] = [[] for _ in range(max_sequences)]
        self._gives_hidden = False
        self._hidden: Logits | None = None

    @classmethod
    def random(
        cls, vocabulary_size: int = 10, *, order: int = 2, seed: int = 0, spread: float = 2.0, **facts: Any
    ) -> Self:
        """Normal logits of standard deviation `spread`: one row per context while that is few, shared rows beyond."""
        affordable = max(MAX_TABLE_BYTES // (4 * vocabulary_size), 16)
        rows = min((vocabulary_size + 1) ** order, MAX_ROWS, affordable)
        draws = np.random.default_rng(seed).standard_normal((rows, vocabulary_size), np.float32)
        return cls(draws * np.float32(spread), order=order, **facts)

    def related(self, sigma: float, seed: int = 1) -> Self:
        """A draft: an engine like this one whose logits differ by normal noise of standard deviation `sigma`."""
        # A seed of two numbers, for another stream than `random` has: noise equal to the table would change nothing.
        noise = np.random.default_rng((seed, 1)).standard_normal(self._table.shape, np.float32)
        return type(self)(
            self._table + noise * np.float32(sigma),
            order=self._order,
            context_length=self.facts.context_length,
            max_sequences=self.facts.max_sequences,
            max_batch=self.facts.max_batch,
            end_id=next(iter(self.vocabulary.end_ids), None),
            can_rollback=self.facts.can_rollback,
        )

    def row(self, token_ids: Sequence[int]) -> Logits:
        """The logits [vocabulary size] that follow `token_ids`, whatever is cached."""
        found: Logits = self._table[self._row_index(token_ids)]
        return found

    def _row_index(self, token_ids: Sequence[int]) -> int:
        index = 0
        for token_id in token_ids[-self._order :]:
            index = index * (self.vocabulary.size + 1) + token_id + 1
        return index % len(self._table)

    def _score(self, batch: Batch, placed: dict[int, SequenceRows]) -> Logits:
        rows = self._contexts_to_rows(batch)
        logits = self._buffer(int(batch.outputs.sum()))
        np.take(self._table, rows[batch.outputs], axis=0, out=logits)
        self._hidden = np.tile(self._table[rows], len(self.state_layers) or 1) if self._gives_hidden else None
        for sequence, part in placed.items():
            if not part.is_tree:
                self._cached[sequence] += part.token_ids.tolist()
        return logits

    def _contexts_to_rows(self, batch: Batch) -> NDArray[np.intp]:
        """The table row of every batch row, from its ancestors in the batch and its sequence's cached tokens."""
        parents, ids, sequences = batch.parents.tolist(), batch.token_ids.tolist(), batch.sequences.tolist()
        contexts: list[list[int]] = []
        for token_id, parent, sequence in zip(ids, parents, sequences, strict=True):
            before = contexts[parent] if parent != NO_PARENT else self._cached[sequence][-self._order :]
            contexts.append([*before, token_id][-self._order :])
        return np.array([self._row_index(context) for context in contexts], np.intp)

    def _buffer(self, rows: int) -> Logits:
        if rows > len(self._logits):
            self._logits = np.zeros((rows, self.vocabulary.size), np.float32)
        return self._logits[:rows]

    def give_hidden_states(self, wanted: bool) -> None:
        self._require_open()
        self._gives_hidden = wanted

    def hidden_states(self) -> NDArray[np.float32]:
        """The rows of the table, as if the head were the identity; once for each of `state_layers`, if any."""
        self._require_open()
        if self._hidden is None:
            raise CapabilityError("the last pass gave no hidden states: call give_hidden_states(True) before it")
        return self._hidden

    def _truncate(self, to_length: int, sequence: int) -> None:
        if 0 < to_length < self._book.lengths[sequence] and not self.facts.can_rollback:
            raise CapabilityError("this engine was made without rollback; use --drafter none")
        del self._cached[sequence][to_length:]

    def _keep(self, part: SequenceRows, path: list[int], sequence: int) -> None:
        self._cached[sequence][part.base :] = part.token_ids[path].tolist()

    def _copy(self, source: int, destination: int) -> None:
        self._cached[destination] = list(self._cached[source])

    def _state(self, sequence: int) -> bytes:
        return np.array(self._cached[sequence], np.int32).tobytes()

    def _restore(self, state: memoryview, length: int, sequence: int) -> None:
        self._cached[sequence] = np.frombuffer(state, np.int32).tolist()

    @cached_property
    def _stamp(self) -> StateStamp:  # type: ignore[override]  # the table is only hashed where a state is wanted
        return StateStamp.of("table", (), hashlib.sha256(self._table.tobytes()).hexdigest())

    def _free(self) -> None:
        """Nothing to free."""


class Struck(TableEngine):
    """Its pass number `strikes_at` raises when its rows are in the cache already: the worst moment."""

    strikes_at = 0
    passes = 0
    error: type[BaseException] = KeyboardInterrupt

    def forward(self, batch: Batch) -> Logits:
        logits = super().forward(batch)
        self.passes += 1
        if self.passes == self.strikes_at:
            raise self.error("struck")
        return logits

    def strike(self, at: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        """Count passes anew; 0: none raises."""
        self.passes, self.strikes_at, self.error = 0, at, error
