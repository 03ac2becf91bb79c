"""The constraint of one answer: which tokens may follow any of its prefixes, and which ones the grammar forces.

Everything is a function of the answer's token ids, so that the row of a draft gets the same mask as the same row in
plain decoding. A matcher walks between the prefixes that are asked for; the masks of one round are kept, since drafter
and target ask for the same ones.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import cached_property
from time import thread_time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ConfigError
from edgespec.sampling.constraint.grammar import Checked, Grammar, compiled
from edgespec.sampling.constraint.library import Library, in_plain_words
from edgespec.types import Draft, Logits, TokenIds
from edgespec.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MOST_MASKS = 96  # kept at a time: more than the nodes of two rounds
_MOST_GRAMMARS = 16  # compiled ones kept per model
_MOST_STEP_S = 0.5  # of a processor, for one step of a grammar: those of other answers wait meanwhile
_MOST_SAID = 300  # characters of an error in the library
_FORBIDDEN = np.float32(-np.inf).view(np.int32)


class Mask:
    """The tokens that may come next. `allowed` [vocabulary]."""

    def __init__(self, allowed: NDArray[np.bool_]) -> None:
        self.allowed = allowed
        self.num_allowed = int(np.count_nonzero(allowed))

    def allows(self, token_id: int) -> bool:
        return token_id < self.allowed.size and bool(self.allowed[token_id])

    @cached_property
    def ids(self) -> NDArray[np.intp]:
        """The allowed token ids, ascending."""
        return np.flatnonzero(self.allowed)

    def applied(self, row: Logits) -> Logits:
        """A copy of a row of logits [n] with -inf for every token that is not allowed.

        A draft's row may be shorter than the vocabulary; where it is longer the rest is left out. 0 or -inf is added,
        made of the bits: choosing by a mask without a pattern takes up to ten times as long.
        """
        row = row[: self.allowed.size]
        bits = self.allowed[: row.size].astype(np.int32)
        bits -= 1
        bits &= _FORBIDDEN
        masked = bits.view(np.float32)
        masked += row
        return masked


class Constraint:
    """Follows one answer, which begins at position `begin` of the text. `end_ids` may come only where it is complete.

    Its methods take the whole text before a row [n], prompt included. Raises ConfigError where the grammar turns out to
    be too complex to follow.
    """

    def __init__(
        self, matcher: LLMatcher, vocabulary_size: int, end_ids: frozenset[int], begin: int, facts: Checked
    ) -> None:
        self._matcher, self._size, self._end_ids, self._begin = matcher, vocabulary_size, end_ids, begin
        self.facts = facts
        self._ends = np.array(sorted(end_ids), np.int32)
        self._read: TokenIds = np.empty(0, np.int32)  # what the matcher has consumed
        self._masks: dict[bytes, Mask] = {}
        self._forced: tuple[bytes, tuple[int, ...]] | None = None

    def mask(self, text_ids: TokenIds) -> Mask:
        """The mask of the row that follows `text_ids`."""
        answer = text_ids[self._begin :]
        key = answer.tobytes()
        found = self._masks.get(key)
        if found is None:
            if len(self._masks) >= _MOST_MASKS:
                self._masks.clear()
            found = self._masks[key] = Mask(self._allowed(answer))
        return found

    def _allowed(self, answer: TokenIds) -> NDArray[np.bool_]:
        if self._has_ended(answer):  # a rule may look behind an end token; nothing there is ever emitted
            return np.ones(self._size, np.bool_)
        self._go_to(answer)
        began_s = thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check(began_s)
        return np.unpackbits(bits, count=self._size, bitorder="little").view(np.bool_)

    def forced(self, text_ids: TokenIds) -> tuple[int, ...]:
        """The tokens that spell what the grammar forces next, as the model's tokenizer splits it; mostly none.

        Only their bytes are forced: the model may spell them differently, so they are a draft to verify.
        """
        answer = text_ids[self._begin :]
        key = answer.tobytes()
        if self._forced is None or self._forced[0] != key:
            self._forced = key, self._found_forced(text_ids, answer)
        return self._forced[1]

    def _found_forced(self, text_ids: TokenIds, answer: TokenIds) -> tuple[int, ...]:
        # Where bytes are forced, llguidance's mask allows their first token only. This row needs its mask anyway, and
        # asking for forced tokens takes several times as long: it walks on and has them tokenised.
        if self.mask(text_ids).num_allowed > max(len(self._end_ids), 1):
            return ()
        self._go_to(answer)
        began_s = thread_time()
        tokens = self._matcher.compute_ff_tokens()
        forced: list[int] = tokens[: self._matcher.validate_tokens(tokens)]
        self._check(began_s)
        mask = self.mask(np.concatenate((text_ids, np.array(forced, np.int32))))
        if mask.num_allowed <= len(self._end_ids) and self._end_ids.issuperset(mask.ids.tolist()):
            forced.append(int(mask.ids[-1]))  # of several the last: known vocabularies list the end of a turn late
        return tuple(forced)

    def permitted(self, draft: Draft, text_ids: TokenIds) -> Draft:
        """A chain without the tokens that the grammar forbids, those behind them, and those behind an end token.

        A tree is left as it is: no rule accepts a token whose probability is 0.
        """
        if not draft.num_tokens or not draft.is_chain:
            return draft
        token_ids = draft.token_ids.tolist()
        count = self._num_permitted(token_ids, text_ids)
        return draft if count == len(token_ids) else draft.first(count)

    def _num_permitted(self, token_ids: list[int], text_ids: TokenIds) -> int:
        """How many tokens of a chain may follow the text."""
        until_end = next((at for at, each in enumerate(token_ids) if each in self._end_ids), len(token_ids))
        self._go_to(text_ids[self._begin :])
        began_s = thread_time()
        count = int(self._matcher.validate_tokens(token_ids[:until_end]))
        self._check(began_s)
        if count == until_end < len(token_ids):
            behind = np.concatenate((text_ids, np.array(token_ids[:until_end], np.int32)))
            count += self.mask(behind).allows(token_ids[until_end])
        return count

    def _has_ended(self, answer: TokenIds) -> bool:
        # Not its last token alone: a draft model that lacks one of the target's end tokens drafts on behind it.
        return bool((answer[:, None] == self._ends).any())

    def _go_to(self, answer: TokenIds) -> None:
        """Roll the matcher back to what it shares with `answer` [m] and let it read the rest, in which nothing ends."""
        size = min(self._read.size, answer.size)
        differs = np.flatnonzero(self._read[:size] != answer[:size])
        shared = int(differs[0]) if differs.size else size
        began_s = thread_time()
        if shared < self._read.size:
            self._matcher.rollback(self._read.size - shared)
        if shared < answer.size:
            self._matcher.consume_tokens(answer[shared:].tolist())
        self._read = answer.copy()
        self._check(began_s)

    def _check(self, began_s: float) -> None:
        """Raise ConfigError for an error in the matcher, or a step that began then and took too long."""
        if thread_time() - began_s > _MOST_STEP_S:
            raise ConfigError("the grammar cannot be followed any further: it takes too long; use a simpler one")
        if self._matcher.is_error():
            problem = in_plain_words(self._matcher.get_error().strip().split("\n")[0])[:_MOST_SAID]
            raise ConfigError(f"the grammar cannot be followed any further: {problem}; use a simpler schema or grammar")


class Constraints:
    """Makes the constraints of one model's answers. Its tokenizer and the latest compiled grammars are kept."""

    def __init__(self) -> None:
        self._library: Library | None = None
        self._compiled: OrderedDict[Grammar, tuple[LLMatcher, Checked]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, grammar: Grammar, vocabulary: Vocabulary, begin: int) -> Constraint:
        """The constraint of an answer that begins at position `begin`.

        Raises ConfigError for a grammar that cannot be used, CapabilityError without llguidance or an end token.
        """
        with self._lock:
            if self._library is None:
                self._library = Library(vocabulary)
            library = self._library
            library.tokenizer  # noqa: B018 - made once, though several threads ask
            known = self._compiled.pop(grammar, None)
        known = known or compiled(grammar, library)  # others need not wait for it
        with self._lock:
            self._compiled[grammar] = known
            if len(self._compiled) > _MOST_GRAMMARS:
                self._compiled.popitem(last=False)
            matcher, facts = known
            return Constraint(matcher.deep_copy(), vocabulary.size, vocabulary.end_ids, begin, facts)
