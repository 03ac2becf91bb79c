"""A suffix automaton of a growing token sequence (Blumer et al. 1985), with how often each of its substrings occurred.

Each state represents the substrings that end at the same places. `link` leads to the longest suffix that ends at more
places, so the longest suffix seen before is one step from the state of the whole text, however long the text is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import chain, islice

ROOT, NONE = 0, -1
_COUNTED_LINKS = 24  # suffixes of each new token that are counted: longer walks happen in repetitive text only
_LOOKED_AT = 32  # continuations of one state
_BYTES_PER_STATE, _BYTES_PER_BRANCH = 20, 260


class SuffixAutomaton:
    """Built token by token in amortised constant time; at most two states a token.

    Most states have one continuation, which is kept in two flat arrays; only branching states own a dictionary.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._length, self._link, self._count = array("i", [0]), array("i", [NONE]), array("i", [0])
        self._only_token, self._only_next = array("i", [NONE]), array("i", [NONE])
        self._branches: dict[int, dict[int, int]] = {}
        self._last = ROOT

    @property
    def bytes_used(self) -> int:
        return len(self._length) * _BYTES_PER_STATE + len(self._branches) * _BYTES_PER_BRANCH

    @property
    def match(self) -> tuple[int, int]:
        """(state, length) of the longest suffix of the text that also occurs earlier in it."""
        state = self._link[self._last] if self.num_tokens else ROOT
        return state, self._length[state]

    def shorter(self, state: int) -> tuple[int, int]:
        """(state, length) of the longest suffix of `state`'s strings that occurs in more places; the root ends it."""
        state = self._link[state]
        return state, self._length[state]

    def occurrences(self, state: int) -> int:
        """How often the strings of `state` occurred; fewer than that in very repetitive text."""
        return self._count[state]

    def extend(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self._append(token_id)

    def continuations(self, state: int) -> Iterator[tuple[int, int, int]]:
        """(token, state after it, how often it occurred) of what followed the strings of `state`.

        Of many, which only short strings have, the first and the latest ones: common tokens come early, and looking at
        all of them would take longer as the text grows.
        """
        branches = self._branches.get(state)
        if branches is not None:
            found: Iterable[tuple[int, int]] = branches.items()
            if len(branches) > _LOOKED_AT:
                latest = islice(reversed(branches.items()), _LOOKED_AT // 2)
                found = chain(islice(found, _LOOKED_AT // 2), latest)
            for token_id, following in found:
                yield token_id, following, self._count[following]
        elif self._only_token[state] != NONE:
            following = self._only_next[state]
            yield self._only_token[state], following, self._count[following]

    def _append(self, token_id: int) -> None:
        link, only_token, only_next, branches = self._link, self._only_token, self._only_next, self._branches
        new = self._new_state(self.num_tokens + 1)
        state = self._last
        while state != NONE:  # every suffix that lacks this continuation gets it; the loop is written out for speed
            if only_token[state] == NONE and state not in branches:
                only_token[state], only_next[state] = token_id, new
            else:
                following = self._next(state, token_id)
                if following != NONE:
                    break
                self._connect(state, token_id, new)
            state = link[state]
        if state == NONE:
            link[new] = ROOT
        elif self._length[following] == self._length[state] + 1:
            link[new] = following
        else:
            link[new] = self._split(state, token_id, following)
        self._last = new
        self.num_tokens += 1
        self._count_suffixes(new)

    def _count_suffixes(self, state: int) -> None:
        count, link = self._count, self._link
        for _ in range(_COUNTED_LINKS):
            count[state] += 1
            state = link[state]
            if state <= ROOT:
                break

    def _split(self, state: int, token_id: int, following: int) -> int:
        """A copy of `following` for its shorter strings only; `state` and its suffixes lead there from now on."""
        clone = self._new_state(self._length[state] + 1)
        self._link[clone], self._count[clone] = self._link[following], self._count[following]
        self._only_token[clone], self._only_next[clone] = self._only_token[following], self._only_next[following]
        if following in self._branches:
            self._branches[clone] = dict(self._branches[following])
        self._link[following] = clone
        while state != NONE and self._next(state, token_id) == following:
            self._connect(state, token_id, clone)
            state = self._link[state]
        return clone

    def _new_state(self, length: int) -> int:
        self._length.append(length)
        for part in (self._link, self._only_token, self._only_next):
            part.append(NONE)
        self._count.append(0)
        return len(self._length) - 1

    def _next(self, state: int, token_id: int) -> int:
        if self._only_token[state] == token_id:
            return self._only_next[state]
        branches = self._branches.get(state)
        return NONE if branches is None else branches.get(token_id, NONE)

    def _connect(self, state: int, token_id: int, following: int) -> None:
        only = self._only_token[state]
        branches = self._branches.get(state)
        if branches is not None:
            branches[token_id] = following
        elif only in (NONE, token_id):
            self._only_token[state], self._only_next[state] = token_id, following
        else:
            self._branches[state] = {only: self._only_next[state], token_id: following}
            self._only_token[state] = NONE
