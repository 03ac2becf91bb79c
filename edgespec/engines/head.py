"""Small models that draft from a target's states: their base class, and the states kept of a sequence's latest tokens.

Of these at most WINDOW are kept. They may begin anywhere in the text: earlier passes may have given none, and of a long
prompt only the end may be computed.
Where a head reads pairs, pair P is the state of the text up to token P, and token P + 1. `encode` turns features from
the target's passes into states; beyond those, the head's own last state is used as the next one. One that drafts a
block caches the target's features of each token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from edgespec.closing import Closing
from edgespec.engines.base import StatesOf
from edgespec.engines.model_use import WINDOW
from edgespec.errors import BatchError, CapabilityError, ContextFull
from edgespec.types import Logits, TokenIds

Features = NDArray[np.float32]
PROMPT_FEATURES = 64  # last tokens of a prompt whose hidden states are computed where that takes their logits, too
# How many of the last tokens of a prompt have states; the very last one has logits anyway.
PROMPT_STATES: dict[StatesOf, int] = {"rows with logits": 1, "scored rows": PROMPT_FEATURES, "all rows": WINDOW}


class KeptFeatures:
    """Hidden states, kept for the latest tokens.

    They are of the tokens from `start` up to `end`, at most WINDOW. `read` returns a copy [rows, size] of those of the
    engine's last pass.
    """

    def __init__(self, read: Callable[[], Features]) -> None:
        self._read = read
        self._scored: Features | None = None  # the rows that `keep` chooses from
        self.given: Features | None = None  # this sequence's rows of a shared pass; None: the whole pass is its own
        self.switch(False)

    def switch(self, on: bool) -> None:
        """Keep rows from the next pass on, or drop them and stop."""
        self.are_kept = on
        self._rows: Features = np.zeros((0, 0), np.float32)  # [2 * WINDOW, size]: they move when it is full
        self._count = self.end = 0  # rows in the array, the last of which is that of the token before `end`

    @property
    def start(self) -> int:
        return self.end - min(self._count, WINDOW)

    def latest(self, length: int) -> Features | None:
        """Rows [n, size] of the last n of `length` tokens, a view; None unless they are kept."""
        if not self.are_kept:
            return None
        count = self._count if self.end == length else 0
        return self._rows[max(count - WINDOW, 0) : count]

    def _of_pass(self) -> Features:
        return self._read() if self.given is None else self.given

    def append(self, length: int, last: int | None = None) -> None:
        """The last pass read the tokens from position `length` on; the rows of the `last` of them are kept."""
        if self.are_kept:
            rows = self._of_pass()
            skipped = 0 if last is None else max(len(rows) - last, 0)
            self._put(length + skipped, rows[skipped:])

    def score(self) -> None:
        """The last pass scored draft rows; `keep` will say which of them became tokens."""
        self._scored = self._of_pass() if self.are_kept else None

    def keep(self, length: int, rows: list[int]) -> None:
        """These of the scored rows are the tokens from position `length` on."""
        if self.are_kept and self._scored is not None:
            self._put(length, self._scored[rows])

    def truncate(self, length: int) -> None:
        """Drop the tokens from position `length` on."""
        if length < self.end:
            self._count = max(self._count - (self.end - length), 0)
            self.end = length

    def _put(self, length: int, states: Features) -> None:
        """`states` [n, size] of the tokens from `length` on; older ones that are not contiguous are dropped."""
        if len(states) > WINDOW:
            length, states = length + len(states) - WINDOW, states[-WINDOW:]
        self.truncate(length)
        if not len(self._rows):
            self._rows = np.zeros((2 * WINDOW, states.shape[1]), np.float32)
        if self.end != length:
            self._count = 0
        if self._count + len(states) > len(self._rows):
            self._rows[:WINDOW] = self._rows[self._count - WINDOW : self._count].copy()
            self._count = WINDOW
        self._rows[self._count : self._count + len(states)] = states
        self._count += len(states)
        self.end = length + len(states)


States = NDArray[np.float32]
Confidences = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """What a loaded head reads and takes."""

    context_length: int  # most pairs or tokens in its cache
    layers: tuple[int, ...]  # of the target whose inputs it reads; none: it reads the last hidden state
    feature_width: int  # of these together, for one token
    width: int  # of its states
    end_ids: frozenset[int]  # tokens after which nothing is drafted
    num_bytes: int
    most_drafted: int = 0  # tokens of a block that it proposes
    can_tree: bool = False  # it has the pass `branch`
    keeps_oldest: bool = False  # its oldest entries can only be dropped with all others


class DraftHead(Closing):
    """One head with a cache of entries `start`..`end`, one generation at a time. Not thread safe, `cancel` excepted.

    Each form has passes of its own: `encode`, `decode` and, where it can, `branch` of one that reads pairs, `inject`
    and `block` of one that drafts a block, `step` of one that attends to the target's cache and has none, so that it
    serves all sequences. All raise BatchError, ContextFull, Cancelled and EngineError; results are views that the next
    call overwrites. Logits of tokens that cannot be proposed are -inf, or missing at the end of a row. One without a
    cache, whose passes take less than a millisecond, has nothing to drop or to cancel.
    """

    facts: HeadFacts
    start: int
    end: int

    def follow(self, token_ids: TokenIds) -> None:
        """The text [n] that is drafted for, of which a head may score more tokens than usual; empty: another text."""

    def encode(self, features: States) -> States:
        """States [n, width] of target features [n, feature_width]."""
        raise self._lacks("encode")

    def decode(self, token_ids: TokenIds, states: States) -> tuple[Logits, States]:
        """Append pairs of `states` [n, width] and the tokens after them [n]; (logits [vocabulary], state [width]).

        Both are of the last pair. After an error the cache is as before the call.
        """
        raise self._lacks("decode")

    def branch(
        self, token_ids: TokenIds, states: States, parents: list[int], wanted: list[int]
    ) -> tuple[Logits, States]:
        """Score what follows guessed pairs: of `states` [n, width], which follow others, and the tokens after them [n].

        `parents` [n]: the pair before each, -1: the last one in the cache. Gives logits [m, vocabulary] and states
        [m, width] of those `wanted`, in ascending order. The cache is as before the call.
        """
        raise self._lacks("branch")

    def inject(self, features: States) -> None:
        """Append the target's features [n, feature_width] of the next n tokens; of some of them after an error."""
        raise self._lacks("inject")

    def block(self, token_id: int, most: int | None = None) -> tuple[Logits, Confidences | None]:
        """Score what follows `token_id`, the token behind the cached ones: logits [facts.most_drafted, vocabulary].

        Only the first `most` rows are needed, where that is given.

        With them, for a head that gives any, the probabilities [most_drafted] that the target accepts the likeliest
        tokens. The cache is as before the call, also after an error.
        """
        raise self._lacks("block")

    def step(self, token_id: int, state: States, position: int, sequence: int = 0) -> tuple[Logits, States]:
        """Score what follows `token_id`: (logits [vocabulary], the next state [width]), given a `state` [width].

        `position`: of the last token of the target's `sequence`, which the target has not read yet; every step of a
        draft has it.
        """
        raise self._lacks("step")

    def _check_features(self, features: States) -> None:
        if features.ndim != 2 or features.shape[1] != self.facts.feature_width:
            raise BatchError(f"features of the shape [n, {self.facts.feature_width}] are needed, got {features.shape}")

    def _check_state(self, state: States) -> None:
        if state.shape != (self.facts.width,):
            raise BatchError(f"a state of width {self.facts.width} is needed, got {state.shape}")

    def _check_pairs(self, token_ids: TokenIds, states: States) -> None:
        if token_ids.size == 0 or states.shape != (token_ids.size, self.facts.width):
            raise BatchError(
                f"one state of width {self.facts.width} per token and at least one token are needed, got "
                f"{token_ids.size} tokens and states {states.shape}"
            )
        self._check_room(token_ids.size, "pairs")

    def _check_room(self, count: int, of_what: str) -> None:
        room = self.facts.context_length - (self.end - self.start)
        if count > room:
            raise ContextFull(f"the head's context of {self.facts.context_length} has room for {room} more {of_what}")

    def _check_position(self, position: int) -> None:
        if not self.start <= position <= self.end:
            raise BatchError(f"the head's cache holds entries {self.start}..{self.end}, {position} is outside")

    def _lacks(self, what: str) -> CapabilityError:
        return CapabilityError(f"a head of the kind {type(self).__name__} has no pass {what!r}: use its own drafter")

    def rollback(self, to_end: int) -> None:
        """Drop the entries from `to_end` on. Raises BatchError outside start..end."""

    def drop_before(self, start: int) -> None:
        """Drop the oldest entries, those before `start`. Raises BatchError outside start..end."""

    def restart(self, position: int) -> None:
        """Drop everything; the next entry is at `position`."""

    def set_threads(self, threads: int) -> None:
        """Use `threads` threads, at least 1, from the next pass on, where that can be changed."""

    def cancel(self) -> None:
        """End the running pass, or the next one, with Cancelled. May be called from any thread."""

    def clear_cancel(self) -> None:
        """Drop a `cancel` that has not ended a pass yet."""

    def another(self, sequence: int) -> Self | None:
        """The same head with a cache of its own, for another `sequence` of the target, which lives as long as this one.

        None where that is not possible.
        """
        return None

    def close(self) -> None:
        """Free everything; closing twice is allowed."""
