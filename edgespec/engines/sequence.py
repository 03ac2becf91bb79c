"""One sequence of an engine together with the token ids in its cache, which only this class knows.

A prompt is cut into passes that are mostly as wide as they may be (`borders`). In reproducible mode the width of its
pass gives a token's keys and values their bits. In a wide class all widths give the same. Where the class ends at three
rows, as with llama.cpp's Q4_K kernels, a prompt that was read in wide passes has other bits than one that was decoded,
but the same ones each time if it is cut in the same places. So there its length alone decides (`block_marks`): it is
read in blocks from its beginning, and its last token by itself. What was decoded is read again as a part of the next
prompt.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import EVERY_WIDTH_TO, Engine
from edgespec.engines.head import PROMPT_FEATURES, PROMPT_STATES, Features, KeptFeatures
from edgespec.errors import EdgespecError
from edgespec.types import Batch, Draft, Logits, TokenIds

# Tokens at the end of a prompt, among them what opens an answer: the next prompt of a conversation may lack those.
PROMPT_END = 16
Returned = TypeVar("Returned")


class PassRequest(NamedTuple):
    """Rows of one sequence, of a target or of a draft model, that wait for a pass of its engine.

    The reply is their logits, a view until the next pass. `hidden`: with hidden states or without them; None: as the
    engine does now. Other sequences of the same pass may want them and these rows not.
    """

    cache: CachedSequence
    batch: Batch
    hidden: bool | None = None

    def run(self) -> Logits:
        """The logits of a pass of its own. Raises as `Engine.forward`."""
        self.cache.took_part(0)
        if self.hidden is not None:
            self.cache.engine.give_hidden_states(self.hidden)
        return self.cache.engine.forward(self.batch)


Passes = Generator[PassRequest, Logits, Returned]
"""Asks for passes one after another, is given the logits of each, and returns what it makes of them."""


def at_once(passes: Passes[Returned]) -> Returned:
    """Run each pass as soon as it is asked for, and return the result of `passes`. Raises as `Engine.forward`.

    Whoever asked is told of a failed pass, restores its cache, and may go on.
    """
    try:
        request = next(passes)
        while True:
            try:
                logits = request.run()
            except BaseException as exc:
                request = passes.throw(exc)
            else:
                request = passes.send(logits)
    except StopIteration as end:
        made: Returned = end.value
        return made


class CachedText(NamedTuple):
    """Cached tokens [n], of which the first `whole` were read in whole blocks, those up to `read` in a shorter one.

    `read` is larger than any length where a block is held in part. Without blocks both are 0.
    """

    token_ids: TokenIds
    whole: int = 0
    read: int = 0

    def shared_length(self, wanted_ids: TokenIds, block: int) -> int:
        """How many tokens, at most n - 1, of a prompt [n] are cached, and were read in the passes that it wants.

        `block`: as `EngineFacts.prompt_block`; 0: in any passes.
        """
        limit = min(self.token_ids.size, wanted_ids.size - 1)
        differs = np.flatnonzero(self.token_ids[:limit] != wanted_ids[:limit])
        shared = int(differs[0]) if differs.size else limit
        if not block or (shared >= self.read and (self.whole, self.read) == block_marks(wanted_ids.size, block)):
            return shared
        return min(shared, self.whole) // block * block

    def begins_with(self, other: CachedText) -> bool:
        return np.array_equal(self.token_ids[: other.token_ids.size], other.token_ids) and self[1:] == other[1:]


def block_marks(num_tokens: int, block: int) -> tuple[int, int]:
    """Up to where a prompt is read in whole blocks, and in a shorter one behind them; the rest is of the class."""
    whole = (num_tokens - 1) // block * block
    return whole, whole if num_tokens - 1 - whole < 2 else num_tokens - 1


def borders(engine: Engine, num_tokens: int, most_with_states: int) -> list[int]:
    """Where passes over `num_tokens` tokens begin and end that are as wide as they may be.

    `most_with_states`: most rows of those that give hidden states of the last PROMPT_FEATURES tokens.
    """
    step = engine.widest_pass
    ends = [*range(0, num_tokens, step), num_tokens]
    last = ends[-1] - ends[-2] if num_tokens else 0
    if engine.facts.class_key and EVERY_WIDTH_TO < last < step:
        ends.insert(-1, ends[-2] + EVERY_WIDTH_TO)  # the widths between were not all tested
    late = num_tokens - PROMPT_FEATURES
    if step > most_with_states and late > 0:
        ends = [*(end for end in ends if end < late), late, num_tokens]
    if engine.facts.has_checkpoints and num_tokens > PROMPT_END:
        ends = sorted({*ends, num_tokens - PROMPT_END})
    return ends


class CachedSequence:
    """The KV cache of one sequence as a list of tokens that grows, is rolled back and is reused.

    `most_rows`: limit for a pass that reads a prompt while other sequences wait. `num_fed`: how many passes the latest
    `feed` took.
    """

    most_per_token = 1  # most cells that one token takes in the cache
    most_rows = sys.maxsize

    def __init__(self, engine: Engine, sequence: int = 0) -> None:
        self.engine = engine
        self.sequence = sequence
        # one more than the cache holds: the pending token comes after the cached ones
        self._ids = np.zeros(engine.facts.context_length + 1, np.int32)
        self._length = self._whole = self._read = 0
        self.num_fed = 0
        self._first_row = 0  # its first row in the last pass, which others may precede
        self._states = KeptFeatures(lambda: engine.hidden_states().copy())
        if engine.length(sequence):
            self.rollback(0)

    def another(self, sequence: int) -> CachedSequence:
        """The same kind of cache for another sequence of the engine, which is emptied."""
        return CachedSequence(self.engine, sequence)

    @property
    def length(self) -> int:
        return self._length

    @property
    def token_ids(self) -> TokenIds:
        """The cached tokens [length], a view."""
        return self._ids[: self._length]

    @property
    def text(self) -> CachedText:
        return CachedText(self.token_ids, self._whole, self._read)

    def with_pending(self, token_id: int) -> TokenIds:
        """The cached tokens and `token_id` after them [length + 1], a view that the next call may change."""
        self._ids[self._length] = token_id
        return self._ids[: self._length + 1]

    def _append(self, token_ids: TokenIds) -> None:
        self._ids[self._length : self._length + token_ids.size] = token_ids
        self._length += int(token_ids.size)

    def _shorten(self, to_length: int) -> None:
        if to_length < self._read:
            is_cut = to_length > self._whole
            self._whole = min(self._whole, to_length)
            if block := self.engine.facts.prompt_block:
                is_cut |= self._whole % block > 0
                self._whole -= self._whole % block
            self._read = sys.maxsize if is_cut else self._whole
        self._length = to_length

    def keep_features(self, wanted: bool) -> None:
        """Keep the hidden states of the latest tokens from the next pass on, or stop doing so.

        Of a prompt its last tokens have them. Raises CapabilityError when the engine gives none.
        """
        if wanted != self._states.are_kept:
            self.engine.give_hidden_states(wanted)
            self._states.switch(wanted)

    @property
    def keeps_features(self) -> bool:
        return self._states.are_kept

    @property
    def features(self) -> Features | None:
        """Hidden states [n, feature size] of the last n cached tokens, a view; None unless they are kept.

        n is from 1 after a pass to WINDOW.
        """
        return self._states.latest(self.length)

    @property
    def room(self) -> int:
        return self.engine.facts.context_length - self.length

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a text, as ids of this sequence."""
        return self.engine.vocabulary.end_ids

    @property
    def most_branches(self) -> int:
        """Most side branches of a tree for `looking`; 0: chains only."""
        return self.engine.facts.max_branches

    def latest_fitting(self, token_ids: TokenIds, capacity: int) -> int:
        """How many of the last `token_ids` [n] fit into `capacity` places of the cache."""
        return max(min(token_ids.size, capacity), 0)

    def reuse(self, wanted_ids: TokenIds) -> int:
        """Roll back to the longest cached prefix of `wanted_ids` [n], at most n - 1 tokens; its length.

        A model that cannot roll back so far keeps what is before a checkpoint, or nothing.
        """
        self.reconcile()
        if (kept := self.reusable_length(wanted_ids)) < self.length:
            self.rollback(kept)
        return self.length

    def reusable_length(self, wanted_ids: TokenIds) -> int:
        """How many tokens `reuse` would keep."""
        return self.engine.reachable(self.shared_length(wanted_ids), self.sequence)

    def mark(self) -> None:
        """Make the present length one that can be rolled back to, where the engine needs to be told."""
        self.engine.checkpoint(self.sequence)

    def shared_length(self, wanted_ids: TokenIds) -> int:
        """Length of the common prefix of the cache and `wanted_ids` [n], at most n - 1."""
        return self.text.shared_length(wanted_ids, self.engine.facts.prompt_block)

    def adopt(self, state: bytes | memoryview, text: CachedText) -> None:
        """Load `state`, which the engine saved after `text`; the sequence is empty when that fails.

        Raises StateError, EngineError.
        """
        self._replace(lambda: self.engine.load_state(state, self.sequence), text, text.token_ids.size)

    def _replace(self, load: Callable[[], None], text: CachedText, length: int) -> None:
        """Hold the first `length` tokens of `text` once `load` has been called; nothing where that fails."""
        try:
            self._shorten(0)
            self._states.truncate(0)
            load()
            self._append(text.token_ids)
            self._whole, self._read = text.whole, text.read
            if length < self.length:
                self.rollback(length)
        except BaseException:
            self._shorten(0)
            self.engine.rollback(0, self.sequence)
            raise

    def adopt_prefix(self, other: CachedSequence, length: int) -> None:
        """Hold the first `length` tokens of another sequence of the engine. Raises as `Engine.fork`."""
        other.reconcile()
        self._replace(lambda: self.engine.fork(other.sequence, self.sequence), other.text, length)

    def took_part(self, first_row: int, states: Features | None = None) -> None:
        """Its rows are those from `first_row` on of the last pass; where others share it, with these `states`."""
        self._first_row, self._states.given = first_row, states

    def feed(self, token_ids: TokenIds) -> Logits:
        """Append tokens [n] in as few passes as possible; the logits row [vocabulary] after the last one."""
        return at_once(self.feeding(token_ids))

    def feeding(self, token_ids: TokenIds, on_pass: Callable[[], object] | None = None) -> Passes[Logits]:
        """The passes of `feed`; `on_pass` is called after each.

        Where a class was proved, the tokens alone decide how they are cut, so that the cache has the same bits whether
        they came as one prompt, in parts, or were decoded.
        """
        self.reconcile()
        self.num_fed, block = 0, self.engine.facts.prompt_block
        for start, end, is_block in self._cuts(token_ids.size):
            is_whole = is_block or bool(self.engine.facts.class_key)
            while start < end:
                part = token_ids[start : end if is_whole else min(end, start + self.most_rows)]
                start += part.size
                batch = Batch.chain(part, sequence=self.sequence, last_only=True)
                known = PROMPT_STATES[self.engine.states_of]  # last tokens of a prompt whose states are kept
                is_late = start + known > token_ids.size
                wanted = self.keeps_features and is_late and part.size <= self._most_with_states
                hidden = wanted if self.keeps_features else None
                logits = yield PassRequest(self, batch, hidden)
                if wanted:
                    self._states.append(self.length, known)
                self._append(part)
                if is_block:
                    self._whole, self._read = self._whole + part.size // block * block, self._length
                self.num_fed += 1
                if on_pass is not None:
                    on_pass()
            if end == token_ids.size - PROMPT_END:
                self.mark()
        last: Logits = logits[-1]
        return last

    def _cuts(self, num_tokens: int) -> Iterator[tuple[int, int, bool]]:
        """Where the passes of `feed` begin and end, and whether each is a block; others are of the width class."""
        block, start = self.engine.facts.prompt_block, 0
        if block and self._length == self._whole == self._read:  # else what is cached ends with other tokens
            whole, read = (mark - self._length for mark in block_marks(self._length + num_tokens, block))
            for start, end in itertools.pairwise([*range(0, whole, block), whole, *({read} - {whole})]):
                yield start, end, True
            start = read
        most = self._most_with_states if self.keeps_features else sys.maxsize
        for begin, end in itertools.pairwise(borders(self.engine, num_tokens - start, most)):
            yield start + begin, start + end, False

    @property
    def _most_with_states(self) -> int:
        """Most rows of a prompt's pass that gives hidden states: it may need logits of all of them."""
        return PROMPT_FEATURES if self.engine.states_of == "scored rows" else sys.maxsize

    def scoring(self, pending_token_id: int, draft: Draft) -> Passes[Logits]:
        """Logits [1 + draft tokens, vocabulary] of the pending token and every draft node; `keep` must follow."""
        if draft.is_chain:
            batch = Batch.chain([pending_token_id, *draft.token_ids.tolist()], sequence=self.sequence)
        else:
            batch = Batch.tree(pending_token_id, draft, sequence=self.sequence)
        logits = yield PassRequest(self, batch, True if self.keeps_features else None)
        self._states.score()
        return logits

    def looking(self, token_ids: TokenIds, parents: TokenIds, outputs: NDArray[np.bool_]) -> Passes[Logits]:
        """Logits of a tree of tokens [n] after the cached ones, for the rows of `outputs`; it is not kept.

        `parents` [n]: rows, or -1 after the last cached token. Raises as `Engine.forward`.
        """
        sequences = np.full(token_ids.size, self.sequence, np.int32)
        logits = yield PassRequest(self, Batch(token_ids, parents, sequences, outputs))
        self.engine.rollback(self.length, self.sequence)
        return logits

    def latest_in_class(self, most: int) -> int:
        """How many of the last tokens, at most `most`, were read in passes of the width class."""
        return min(most, max(self._length - self._read, 0))

    def score_again(self, num_tokens: int) -> Logits:
        """Logits [num_tokens, vocabulary] of the last cached tokens, from another pass over them; they stay cached.

        Raises as `Engine.forward`; the sequence then ends before these tokens.
        """
        start = self.length - num_tokens
        part = self.token_ids[start:]
        self.engine.rollback(start, self.sequence)
        try:
            return self.engine.forward(Batch.chain(part, sequence=self.sequence))
        except BaseException:
            self.rollback(start)
            raise

    def keep(self, pending_token_id: int, draft: Draft, accepted_nodes: tuple[int, ...]) -> None:
        """Commit the pending token and the accepted path of the draft just scored, drop the rest."""
        start, rows = self._length, [0, *(node + 1 for node in accepted_nodes)]
        end = start + len(rows)
        self._states.keep(start, rows)
        if not draft.is_chain:
            self.engine.keep_path(tuple(self._first_row + row for row in rows), self.sequence)
        elif len(accepted_nodes) < draft.num_tokens:
            self.engine.rollback(end, self.sequence)
        self._ids[start] = pending_token_id
        if accepted_nodes:
            self._ids[start + 1 : end] = draft.token_ids[list(accepted_nodes)]
        self._length = end

    def rollback(self, to_length: int) -> None:
        # The length first: after an interrupt the engine then holds too many tokens, which `reconcile` removes.
        self._shorten(to_length)
        self._states.truncate(to_length)
        self.engine.rollback(to_length, self.sequence)

    def reconcile(self) -> None:
        """Drop what the engine holds beyond the known tokens: an interrupt may have come between the two.

        Whoever runs passes restores the cache where they fail. This is for all else that changes it, and what uses it
        next calls this.
        """
        if self.engine.length(self.sequence) != self.length:
            self.restore()

    def restore(self) -> None:
        """After an interrupt: drop what a half-finished call left after the known tokens.

        Where the model cannot roll that back, all tokens are dropped, and the next text is read from its beginning.
        """
        try:
            # even if the length is right: a tree that was scored but not settled does not count in it
            self.engine.rollback(self.length, self.sequence)
        except EdgespecError:
            self.rollback(0)


@contextmanager
def restored_on_failure(cache: CachedSequence) -> Iterator[None]:
    """If the block ends with any exception, KeyboardInterrupt included, restore the cache to its known tokens."""
    try:
        yield
    except BaseException:
        with suppress(EdgespecError):  # the first failure is the one to report
            cache.restore()
        raise
