"""Draft heads: they draft a chain or a tree from the target's states of the text.

EAGLE (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840) read pairs of a state, made of the inputs of several of the
target's layers, and the token behind it. Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, 2.2) is the same with
the target's last hidden state alone, and a layer that was trained as part of the target. For the text the states come
from the target's passes; within a draft the head's own last state replaces what the target has not computed yet, and
the next draft removes those pairs. Trees are dynamic (EAGLE-2, arXiv 2406.16858): they grow best first.

DFlash (arXiv 2602.06036) drafts a whole block in one pass: the last token and mask tokens behind it, all of which are
denoised at once. A row does not know what was drawn for the rows before it; DSpark (arXiv 2607.05147) adds to its
scores how well its tokens follow the likeliest token of the row before. Either changes how many tokens are accepted,
never the text. A draft costs one pass over the whole block, whatever its length: with fewer masks the rows would see
other neighbours than in training.

Gemma 4's drafter goes on from the target's last hidden state and the target's own keys and values: it reads nothing of
the text itself, so that a draft costs its passes alone however the text has changed.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from typing import ClassVar

import numpy as np

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.growth import CHAIN_PRIOR, ROOT, DrawnChain, Growth, grown, takes_tree
from edgespec.engines.head import DraftHead, States
from edgespec.engines.model_use import BYTES_PER_FEATURE
from edgespec.types import EMPTY_DRAFT, NO_PARENT, Draft, Logits, TokenIds


class HeadDrafter(Drafter):
    """Drafts with `head`, which it closes if it owns it. A request has features of at most `max_features` tokens.

    When the head's window is full, the older half of the entries is dropped. The head skips text whose features are no
    longer available (the beginning of a long prompt, a part that was read for another drafter).
    """

    prior = CHAIN_PRIOR
    wants_features = True
    most_read: ClassVar[int] = sys.maxsize  # entries that a draft reads; with more new ones it begins behind them

    def __init__(self, head: DraftHead, max_features: int, *, owns_head: bool = True) -> None:
        self._head, self._max_features, self.models = head, max_features, (head,)
        self.owned = self.models if owns_head else ()
        self._known = np.empty(0, np.int32)  # the text whose entries are cached

    def begin(self, prompt_ids: TokenIds) -> None:
        # Entries that the prompt shares with the last text are kept; the others are read with the first draft.
        self._head.follow(prompt_ids[:0])

    def draft(self, request: DraftRequest) -> Draft:
        """A chain sampled with the target's settings and, unless the rule needs distributions, the target's noise."""
        features, most = request.features, self._most(request)
        if most < 1 or features is None or not len(features):
            return EMPTY_DRAFT
        self._head.follow(request.token_ids)
        try:
            return self._drafted(request.at_most(most), features)
        except BaseException:
            self._known = self._known[:0]  # its progress is unknown: the next draft reads its entries again
            raise

    @abstractmethod
    def _most(self, request: DraftRequest) -> int:
        """Tokens to draft at most."""

    @abstractmethod
    def _drafted(self, request: DraftRequest, features: States) -> Draft:
        """A draft behind the text, whose last `features` [n, feature width] are known."""

    def _keep(self, shared: int, first_known: int, end: int, room: int) -> int:
        """Drop what is not the text's or does not fit; up to where the cache then holds the entries before `end`.

        `shared`: up to where it holds the text's own; features are known from `first_known` on; `room`: entries that
        must remain free behind `end`.
        """
        head = self._head
        kept = min(shared, head.end)
        goes_on = kept > head.start and kept >= first_known and end - kept <= self.most_read
        start = head.start if goes_on else max(first_known, end - self.most_read)
        length = head.facts.context_length
        if end + room - start > length:
            start = end - length // 2
            if head.facts.keeps_oldest:
                goes_on, start = False, max(start, first_known)
        if goes_on and start < kept:
            head.rollback(kept)
            head.drop_before(start)
            return kept
        head.restart(start)
        return start

    def _shared_tokens(self, token_ids: TokenIds) -> int:
        """How many first tokens the text shares with the one in the cache."""
        limit = min(self._known.size, token_ids.size)
        differs = np.flatnonzero(self._known[:limit] != token_ids[:limit])
        return int(differs[0] if differs.size else limit)

    def another(self, sequence: int) -> Drafter | None:
        head = self._head.another(sequence)
        return None if head is None else type(self)(head, self._max_features)

    @property
    def bytes_used(self) -> int:
        facts = self._head.facts
        own = facts.num_bytes if self.owned else 0
        return own + self._max_features * facts.feature_width * BYTES_PER_FEATURE


class Eagle3Drafter(HeadDrafter):
    """Drafts token by token, chains or, where the head can, trees.

    An entry of the head's cache is a pair, so that the last token is in the last of them. The nodes of a tree that its
    growth waits for are read in one pass with those before them, each of which sees the text and its own path alone.
    """

    name = "eagle3"

    def _most(self, request: DraftRequest) -> int:
        return min(request.max_tokens, self._head.facts.context_length // 4)

    def _drafted(self, request: DraftRequest, features: States) -> Draft:
        """The pairs that the cache lacks are read first."""
        head, token_ids = self._head, request.token_ids
        end = token_ids.size - 1  # pairs there are
        first_known = end - len(features)
        kept = self._keep(min(self._shared_tokens(token_ids), end) - 1, first_known, end, request.max_tokens)
        logits, state = head.decode(token_ids[kept + 1 :], head.encode(features[kept - first_known :]))
        self._known = token_ids.copy()
        if head.facts.can_tree and takes_tree(request):
            return self._tree(request, logits, state)
        chain = DrawnChain(request, head.facts.end_ids)
        chain.add(logits)
        while chain.is_open:
            logits, state = head.decode(np.array(chain.token_ids[-1:], np.int32), state[np.newaxis].copy())
            chain.add(logits)
        return chain.as_draft()

    def _tree(self, request: DraftRequest, logits: Logits, state: States) -> Draft:
        """A tree behind the text; `logits` [vocabulary], `state` [width]: those at its end."""
        states = {ROOT: state.copy()}

        def rows_of(growth: Growth) -> list[Logits]:
            asked = sorted(growth.waiting)
            read = sorted({each for node in asked for each in growth.path(node)})
            rows = {node: row for row, node in enumerate(read)} | {ROOT: NO_PARENT}
            nodes = [growth.nodes[node] for node in read]
            token_ids = np.array([node.token_id for node in nodes], np.int32)
            above, parents = np.stack([states[node.parent] for node in nodes]), [rows[node.parent] for node in nodes]
            found, after = self._head.branch(token_ids, above, parents, [rows[node] for node in asked])
            states.update(zip(asked, after, strict=True))
            return [found[asked.index(node)] for node in growth.waiting]

        return grown(Growth(request, self._head.facts.end_ids), logits, rows_of)

    def num_uncached(self, token_ids: TokenIds) -> int:
        new = token_ids.size - max(self._shared_tokens(token_ids) - 1, 0)
        return min(new, self._max_features, self.most_read)


class MtpDrafter(Eagle3Drafter):
    """Drafts with the multi-token prediction layer of the target."""

    name = "mtp"


class EagleDrafter(Eagle3Drafter):
    """Drafts with an EAGLE head of either generation from a heads file, which reads the end of a long prompt only.

    Reading all of it would take as long as one of the target's passes. `scripts/train/heads.py` makes such heads.
    """

    name = "eagle"
    most_read = 256


class DFlashDrafter(HeadDrafter):
    """Drafts a block at once. The head's cache has an entry for each token of the text but the last one.

    A DSpark head's own confidence in a token joins the evidence from its scores; how much it says is learnt.
    """

    name = "dflash"
    costs_once = True

    def _most(self, request: DraftRequest) -> int:
        return min(request.max_tokens, self._head.facts.most_drafted)

    def _drafted(self, request: DraftRequest, features: States) -> Draft:
        head, token_ids = self._head, request.token_ids[:-1]
        end = token_ids.size
        first_known = end - len(features)
        kept = self._keep(self._shared_tokens(token_ids), first_known, end, 0)
        head.inject(features[kept - first_known :])
        self._known = token_ids.copy()
        logits, confidences = head.block(int(request.token_ids[-1]), request.max_tokens)
        chain = DrawnChain(request, head.facts.end_ids)
        while chain.is_open:
            row = len(chain.token_ids)
            chain.add(logits[row], None if confidences is None else float(confidences[row]))
        return chain.as_draft()

    def num_uncached(self, token_ids: TokenIds) -> int:
        return min(token_ids.size - self._shared_tokens(token_ids), self._max_features)


class MedusaDrafter(HeadDrafter):
    """Drafts chains of as many tokens as there are Medusa heads, and trees that are as deep.

    In a tree (section 2.1.2 of the paper) all nodes of a depth have the same candidates. The paper takes the same paths
    of that product for all texts; here each round takes the most probable ones.
    """

    name = "medusa"
    # Of logits: a head knows no token of its path, so the target differs from it by more than from a model that does.
    # Fitted to the demo's heads, greedy and at T=0.8: with a model's 0.6 trees were narrower, and first choices with an
    # expected acceptance of .76 were accepted at .54.
    disagreement = 1.2

    def _most(self, request: DraftRequest) -> int:
        is_tree = takes_tree(request)
        return request.max_tokens if is_tree else min(request.max_tokens, self._head.facts.most_drafted)

    def _drafted(self, request: DraftRequest, features: States) -> Draft:
        self._head.inject(features[-1:])
        logits, _ = self._head.block(int(request.token_ids[-1]))
        if takes_tree(request):

            def rows_of(growth: Growth) -> Logits:
                return logits[[growth.nodes[node].depth + 1 for node in growth.waiting]]

            end_ids = self._head.facts.end_ids
            growth = Growth(request, end_ids, disagreement=self.disagreement, deepest=len(logits))
            return grown(growth, logits[0], rows_of)
        chain = DrawnChain(request, self._head.facts.end_ids)
        while chain.is_open:
            chain.add(logits[len(chain.token_ids)])
        return chain.as_draft()


class Gemma4Drafter(HeadDrafter):
    """Drafts token by token for one `sequence` of the target; all sequences share the head."""

    name = "mtp"

    def __init__(self, head: DraftHead, max_features: int, *, sequence: int = 0, owns_head: bool = True) -> None:
        super().__init__(head, max_features, owns_head=owns_head)
        self._sequence = sequence

    def _most(self, request: DraftRequest) -> int:
        return request.max_tokens

    def _drafted(self, request: DraftRequest, features: States) -> Draft:
        state, token_id, position = features[-1], int(request.token_ids[-1]), request.token_ids.size - 1
        chain = DrawnChain(request, self._head.facts.end_ids)
        while chain.is_open:
            logits, state = self._head.step(token_id, state, position, self._sequence)
            chain.add(logits)
            token_id = chain.token_ids[-1] if chain.token_ids else token_id
        return chain.as_draft()

    def another(self, sequence: int) -> Drafter:
        return type(self)(self._head, self._max_features, sequence=sequence, owns_head=False)
