"""A draft model with another vocabulary, mapped to the target's: tokens that print the same bytes are the same.

Token-level intersection (TLI, arXiv 2502.05202, algorithm 4): the draft's distribution is renormalised over the tokens
that both have, so every proposal is a token of the target, and every acceptance rule stays lossless. Tokens that the
draft lacks are spelled in tokens of its own; where its tokenizer would split the text differently, it drafts a little
worse, and the output is still right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import Engine
from edgespec.engines.sequence import CachedSequence, Passes
from edgespec.errors import EdgespecError, PromptError
from edgespec.types import Logits, TokenIds
from edgespec.vocabulary import Vocabulary

LACKS = np.float32(-1e30)  # logit of a token that the draft lacks: it underflows in every softmax, and is finite
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_MOST_PER_TOKEN = 8  # draft tokens that one target token is spelled in at most, its last ones; fewer in a tiny context


class VocabularyMap:
    """Maps tokens of a target to tokens of a draft. Both must stay open while it is used.

    `most_per_token`: draft tokens that a target token may be spelled in.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary, most_per_token: int = _MOST_PER_TOKEN) -> None:
        self._target, self._draft = target, draft
        self.most_per_token = most_per_token
        ours, self._theirs = _by_what_they_print(target), _by_what_they_print(draft)
        self.draft_ids = np.full(target.size, -1, np.int32)
        for printed, token_id in ours.items():
            self.draft_ids[token_id] = self._theirs.get(printed, -1)
        self._pair_roles()
        self._longest = max((len(printed) for printed in self._theirs if isinstance(printed, bytes)), default=0)
        newline = self._theirs.get(b"\n", draft.bos_id)
        self._filler = 0 if newline is None else newline
        self._spelled: dict[int, list[int]] = {}
        self._sizes = (self.draft_ids >= 0).astype(np.intp)  # draft tokens of a target token; 0: not spelled yet
        # One slot more than the draft's logits, for the target tokens that it lacks.
        self._slots = np.where(self.draft_ids < 0, draft.size, self.draft_ids).astype(np.intp)
        self._padded, self._row = np.full(draft.size + 1, LACKS), np.empty(target.size, np.float32)
        self.begins_with = [draft.bos_id] if draft.adds_bos and not target.adds_bos else []

    def _pair_roles(self) -> None:
        """Begin-of-text and end-of-text tokens are paired by role, whatever their names."""
        target, draft = self._target, self._draft
        if target.bos_id is not None and draft.bos_id is not None and self.draft_ids[target.bos_id] < 0:
            self.draft_ids[target.bos_id] = draft.bos_id
        if target.end_ids and draft.end_ids and not self.end_ids:
            self.draft_ids[min(target.end_ids)] = min(draft.end_ids)

    @property
    def end_ids(self) -> frozenset[int]:
        """The target's end tokens that the draft can propose."""
        return frozenset(i for i in self._target.end_ids if int(self.draft_ids[i]) in self._draft.end_ids)

    def share(self, token_ids: Sequence[int]) -> float:
        """The share of these target tokens [n] that the draft has, from 0 to 1; 0 for none."""
        return float((self.draft_ids[token_ids] >= 0).mean()) if token_ids else 0.0

    def sizes(self, token_ids: TokenIds) -> NDArray[np.intp]:
        """The number of draft tokens [n] for each of the target tokens [n], at least one."""
        found = self._sizes[token_ids]
        for token_id in set(token_ids[found == 0].tolist()):
            self._sizes[token_id] = len(self._spell(token_id))
        return self._sizes[token_ids]

    def read(self, token_ids: TokenIds) -> TokenIds:
        """Target tokens [n] as draft tokens [sum of `sizes`]."""
        direct = self.draft_ids[token_ids]
        if (direct >= 0).all():
            return direct
        both = zip(direct.tolist(), token_ids.tolist(), strict=True)
        parts = [[mapped] if mapped >= 0 else self._spell(token_id) for mapped, token_id in both]
        return np.array([token_id for part in parts for token_id in part], np.int32)

    def gathered(self, logits: Logits) -> Logits:
        """A draft's logits [its vocabulary] as a row of the target's [target vocabulary]; the next call reuses it."""
        self._padded[:-1] = logits
        np.take(self._padded, self._slots, out=self._row, mode="clip")
        return self._row

    def _spell(self, token_id: int) -> list[int]:
        """The draft's tokens for a target token that it lacks; at least one, so that every token has a position."""
        if token_id not in self._spelled:
            printed = self._target.pieces[token_id]
            self._spelled[token_id] = (self._encoded(printed) or [self._filler])[-self.most_per_token :]
        return self._spelled[token_id]

    def _encoded(self, printed: bytes) -> list[int]:
        try:
            ids = self._draft.encode(printed.decode("utf-8"))
            if b"".join(self._draft.pieces[token_id] for token_id in ids) == printed:
                return ids  # a tokenizer that puts a space in front of every text gives others
        except (UnicodeDecodeError, PromptError):
            pass  # part of a character, or one that the draft cannot write: spelled in pieces below
        found, at = [], 0
        while at < len(printed):
            longest = min(self._longest, len(printed) - at)
            size = next((n for n in range(longest, 0, -1) if printed[at : at + n] in self._theirs), 0)
            found += [self._theirs[printed[at : at + size]]] if size else []
            at += max(size, 1)
        return found


def _by_what_they_print(vocabulary: Vocabulary) -> dict[bytes | str, int]:
    """The token for each printed text, control tokens by name; of several the lowest, byte tokens last."""
    found: dict[bytes | str, int] = {}
    byte_tokens: dict[bytes | str, int] = {}
    for token_id, piece in enumerate(vocabulary.pieces):
        name = vocabulary.token_name(token_id) if len(piece) <= 1 else ""
        of_kind = byte_tokens if piece and _BYTE_TOKEN.fullmatch(name) else found
        of_kind.setdefault(piece or name, token_id)
    return byte_tokens | found


def map_vocabulary(target: Vocabulary, draft: Engine) -> VocabularyMap:
    """The map for a draft model, whose context limits how many tokens one may be spelled in."""
    return VocabularyMap(target, draft.vocabulary, min(_MOST_PER_TOKEN, draft.facts.context_length // 4))


class MappedSequence(CachedSequence):
    """A draft model's cache as a list of target tokens; logits come in the target's ids.

    It supports what a draft model of chains needs: feeding and rollback.
    """

    @property
    def most_branches(self) -> int:
        return 0

    def __init__(self, engine: Engine, mapping: VocabularyMap, sequence: int = 0) -> None:
        self._map = mapping
        self._inner = CachedSequence(engine, sequence)  # empties it, which this one cannot yet
        super().__init__(engine, sequence)
        self._ends = np.zeros(engine.facts.context_length + 1, np.intp)  # draft tokens up to each target token
        self.most_per_token = mapping.most_per_token + len(mapping.begins_with)

    def another(self, sequence: int) -> CachedSequence:
        return MappedSequence(self.engine, self._map, sequence)

    @property
    def end_ids(self) -> frozenset[int]:
        return self._map.end_ids

    @property
    def room(self) -> int:
        return self._inner.room

    def latest_fitting(self, token_ids: TokenIds, capacity: int) -> int:
        latest = token_ids[token_ids.size - max(min(token_ids.size, capacity), 0) :]
        return int(self._map.sizes(latest)[::-1].cumsum().searchsorted(capacity, side="right"))

    def feeding(self, token_ids: TokenIds, on_pass: Callable[[], object] | None = None) -> Passes[Logits]:
        read, ends = self._map.read(token_ids), self._map.sizes(token_ids).cumsum()
        if not self.length and self._map.begins_with:
            read = np.concatenate((np.array(self._map.begins_with, np.int32), read))
        self._ends[0] = 0
        logits = yield from self._inner.feeding(read, on_pass)
        self._ends[self.length + 1 : self.length + 1 + token_ids.size] = self._inner.length - int(ends[-1]) + ends
        self._append(token_ids)
        return self._map.gathered(logits)

    def reusable_length(self, wanted_ids: TokenIds) -> int:
        ends = self._ends[: self.shared_length(wanted_ids) + 1]
        reached = self.engine.reachable(int(ends[-1]), self.sequence)
        found = int(ends.searchsorted(reached))
        return found if ends[found] == reached else 0

    def rollback(self, to_length: int) -> None:
        self._shorten(to_length)
        self._inner.rollback(int(self._ends[to_length]))

    def reconcile(self) -> None:
        self._inner.reconcile()
        if self._inner.length != int(self._ends[self.length]):
            self.restore()

    def restore(self) -> None:
        self._inner.restore()
        try:
            self._inner.rollback(int(self._ends[self.length]))
        except EdgespecError:  # a length that the model cannot go back to
            self.rollback(0)
