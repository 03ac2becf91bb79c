"""Lookahead decoding (arXiv 2402.02057): the target's own guesses of later tokens are collected as n-grams to draft.

Besides the n-grams to verify, a pass has a window: rows (level, column), of which (0, j) follows (0, j - 1) and (l, j)
follows (l - 1, j). The levels are the guesses of the last few passes (Jacobi iteration: every position guesses its next
token from older guesses before it), so a column read downwards, with the target's choice after it, is an n-gram that
the target itself would write. All rows form a tree, and any of them may be accepted like any other draft. It needs no
model and no training; where trees are not possible it drafts only from the n-grams of the text.
"""

from __future__ import annotations

import math
from itertools import islice

import numpy as np

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.types import EMPTY_DRAFT, NO_PARENT, Draft, TokenIds, Verdict

NgramTail = tuple[int, ...]
_IN_WINDOW, _POOLED, _BEST = 0.1, 0.2, 0.5  # confidence in proposals
_MOST_READ = 4096  # latest tokens of a prompt that come into the pool
_BYTES_PER_NGRAM = 800  # tuples and their shares of the tables, measured on CPython 3.11 with 150,000 ids


class LookaheadDrafter(Drafter):
    """`ngram`: tokens of an n-gram; `window`: most columns; `most_kept`: the latest n-grams, kept in the pool."""

    name = "lookahead"
    prior = 0.0, 1.0

    def __init__(self, ngram: int = 4, window: int = 8, most_kept: int = 1 << 15) -> None:
        self._tail, self._window = ngram - 1, window
        self._pool = NgramPool(most_kept)
        self._levels: list[dict[int, int]] = [{} for _ in range(self._tail)]  # position -> guessed token
        self._num_read = 0
        self._columns: list[tuple[int, list[int]]] = []  # position and nodes of each column of the last draft

    def begin(self, prompt_ids: TokenIds) -> None:
        # The pool is kept: the target may write again what it wrote before.
        self._levels = [{} for _ in range(self._tail)]
        self._num_read = max(prompt_ids.size - _MOST_READ, 0)
        self._columns, self._drafted = [], EMPTY_DRAFT

    def draft(self, request: DraftRequest) -> Draft:
        """The pool's n-grams that begin with the pending token, the latest first, then the window."""
        self._read(request.token_ids)
        columns, ngrams = self._shares(request.max_tokens, request.max_branches)
        tree = _Tree()
        for rank, tail in enumerate(islice(self._pool.tails(int(request.token_ids[-1])), ngrams)):
            tree.add(NO_PARENT, tail[: request.max_tokens], _POOLED if rank else _BEST)
        self._columns = []
        parent = NO_PARENT
        for position in range(request.token_ids.size, request.token_ids.size + columns):
            guesses = [self._guess(level, position + level, request.token_ids) for level in range(self._tail)]
            (parent,) = tree.add(parent, guesses[:1], _IN_WINDOW)
            below = tree.add(parent, guesses[1:], _IN_WINDOW)
            self._columns.append((position, [parent, *below]))
        self._drafted = tree.draft(wants_rows=columns > 0)
        return self._drafted

    def _shares(self, most: int, branches: int) -> tuple[int, int]:
        """(columns of the window, n-grams to verify): about half of the rows each; no window without branches."""
        if not branches:
            return 0, 1
        columns = min(most // 2 // self._tail, self._window, (branches + 1) // 2)
        return columns, max(min((most - columns * self._tail) // self._tail, branches + 1 - columns), 1)

    def _guess(self, level: int, position: int, token_ids: TokenIds) -> int:
        """The level's token at a position; where there is none yet, that of an earlier level, or of the text."""
        for known in self._levels[level::-1]:
            if position in known:
                return known[position]
        return int(token_ids[position % token_ids.size])

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        """The window moves by one level; each column and the target's choice after it is an n-gram."""
        choices, drafted = verdict.row_choices, self._drafted.first(draft.num_tokens)
        is_begin = np.array_equal(draft.token_ids, drafted.token_ids) and np.array_equal(draft.parents, drafted.parents)
        if choices is None or not is_begin:  # a grammar took nodes out, so that the others have other numbers
            return
        ahead: dict[int, int] = {}
        for position, nodes in self._columns:
            if nodes[-1] < draft.num_tokens:
                ahead[position + self._tail] = choices[nodes[-1] + 1]
                tokens = draft.token_ids[nodes].tolist()
                self._pool.add(tokens[0], (*tokens[1:], choices[nodes[-1] + 1]))
        self._levels = [*self._levels[1:], ahead]

    def _read(self, token_ids: TokenIds) -> None:
        """The n-grams of the text are the target's own as well."""
        start = max(self._num_read - self._tail, 0)
        text = token_ids[start:].tolist()
        for place in range(len(text) - self._tail):
            self._pool.add(text[place], tuple(text[place + 1 : place + 1 + self._tail]))
        self._num_read = token_ids.size

    @property
    def bytes_used(self) -> int:
        return self._pool.size * _BYTES_PER_NGRAM


class NgramPool:
    """For each token its continuations, the latest first; of all n-grams at least the latest half of `most_kept`."""

    def __init__(self, most_kept: int) -> None:
        self._most = most_kept // 2
        self._young: dict[int, dict[NgramTail, None]] = {}
        self._old: dict[int, dict[NgramTail, None]] = {}
        self._num_young = self._num_old = 0

    @property
    def size(self) -> int:
        return self._num_young + self._num_old

    def add(self, token_id: int, tail: NgramTail) -> None:
        tails = self._young.setdefault(token_id, {})
        self._num_young += tail not in tails
        tails.pop(tail, None)
        tails[tail] = None
        if self._num_young >= self._most:
            self._young, self._old, self._num_young, self._num_old = {}, self._young, 0, self._num_young

    def tails(self, token_id: int) -> list[NgramTail]:
        young, old = self._young.get(token_id, {}), self._old.get(token_id, {})
        return [*reversed(young), *(tail for tail in reversed(old) if tail not in young)]


class _Tree:
    """A tree of proposals under construction: equal tokens below one node are one row."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node, in order
        self._confidences: list[float] = []

    def add(self, parent: int, token_ids: list[int] | NgramTail, confidence: float) -> list[int]:
        """Tokens one below the other, from `parent` on; their nodes."""
        found = []
        for token_id in token_ids:
            if (parent, token_id) not in self._nodes:
                self._confidences.append(confidence)
            parent = self._nodes.setdefault((parent, token_id), len(self._nodes))
            found.append(parent)
        return found

    def draft(self, *, wants_rows: bool) -> Draft:
        if not self._nodes:
            return EMPTY_DRAFT
        parents, token_ids = np.array(list(self._nodes), np.int32).T
        evidence = tuple((math.log(each / (1.0 - each)),) for each in self._confidences)
        confidences = np.array(self._confidences, np.float32)
        return Draft(token_ids.copy(), parents.copy(), confidences, None, evidence, wants_rows)
