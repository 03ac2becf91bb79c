"""The draft model with branches: a tree of its likeliest continuations, grown where a further token pays most.

Best first by the probability that a whole path stands (EAGLE-2, arXiv 2406.16858, section 4): a node comes in while
that pays for its row. The draft model scores open nodes of several branches in one pass of its own. What a node's
children are and what they are worth is `candidates`; this file knows no probabilities.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.candidates import Candidate, Candidates, Raced, candidates_for
from edgespec.drafters.model import ModelDrafter
from edgespec.engines.base import Engine
from edgespec.errors import Cancelled
from edgespec.types import EMPTY_DRAFT, NO_PARENT, Distribution, Draft, Logits, TokenIds, Verdict

ROOT = NO_PARENT
_LOOKED_AT = 4  # most open nodes scored in one pass of the draft model


class TreeDrafter(Drafter):
    """Drafts with the engine and the cache of `model`, which owns them; a chain where trees are not possible.

    `most_children` of one node.
    """

    name = "tree"

    def __init__(self, model: ModelDrafter, most_children: int = 4) -> None:
        self._model = model
        self._most_children = most_children

    def begin(self, prompt_ids: TokenIds) -> None:
        self._model.begin(prompt_ids)

    def draft(self, request: DraftRequest) -> Draft:
        """A tree of at most `request.max_tokens` nodes, `request.max_branches` of them side branches' ends."""
        cache = self._model.cache
        branches = min(request.max_branches, cache.most_branches)
        if not branches:
            return self._model.draft(request)
        most = min(request.max_tokens, cache.engine.facts.context_length // 4)
        if most < 1:
            return EMPTY_DRAFT
        temperature = self._model.temperature
        temperature.learn(request.sampler, request.token_ids)
        candidates = candidates_for(request, temperature.sampler(request.sampler))
        try:
            growth = _Growth(candidates, most, branches, self._most_children, request.row_cost)
            growth.open(ROOT, self._model.catch_up(request.token_ids, most))
            while growth.grow(cache.end_ids):
                self._score(growth)
            if temperature.is_learning:
                temperature.drafted(request.token_ids.size, *growth.first_choices())
            return growth.draft()
        except Cancelled:
            cache.restore()
            raise

    def _score(self, growth: _Growth) -> None:
        """One pass of the draft model over the nodes that the growth waits for, their ancestors with them."""
        wanted = growth.waiting
        rows = sorted({node for leaf in wanted for node in growth.path(leaf)})
        index = {node: row for row, node in enumerate(rows)}
        nodes = [growth.nodes[node] for node in rows]
        logits = self._model.cache.look(
            np.array([node.candidate.token_id for node in nodes], np.int32),
            np.array([index.get(node.parent, NO_PARENT) for node in nodes], np.int32),
            np.isin(rows, wanted),
        )
        for node, row in zip(sorted(wanted), logits, strict=True):
            growth.open(node, row)

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        self._model.observe(draft, verdict)

    def lag(self, token_ids: TokenIds) -> int:
        return self._model.lag(token_ids)

    def emptied(self) -> Engine | None:
        return self._model.emptied()

    def cancel(self) -> None:
        self._model.cancel()

    def clear_cancel(self) -> None:
        self._model.clear_cancel()


@dataclass(slots=True)
class _Node:
    """A node of the growing tree; `value` is the probability that its whole path stands."""

    parent: int
    depth: int
    value: float
    candidate: Candidate
    candidates: Candidates | None = None  # its children, once the draft model has scored it
    num_children: int = 0


@dataclass(slots=True)
class _Growth:
    """The tree so far and the places where it may grow, the most valuable first.

    A place is the next child of a node, or the scoring of a node, worth what its first child may be worth at most.
    What is decided depends only on tokens that are in the tree already, never on the one that is about to come in:
    the rejection rule needs that (ALGORITHMS: a sampled token may not be admitted for what it is).
    """

    make: Callable[[Logits, int, int, TokenIds], Candidates]  # (row, depth, node, path's tokens)
    most: int
    branches: int
    most_children: int
    least_value: float
    nodes: list[_Node] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    _root: _Node = field(init=False)
    _places: list[tuple[float, int, int]] = field(default_factory=list)  # (-value, when added, node)
    _added: int = 0

    def __post_init__(self) -> None:
        self._root = _Node(ROOT, -1, 1.0, Candidate(0, 1.0))

    def at(self, node: int) -> _Node:
        return self._root if node == ROOT else self.nodes[node]

    def path(self, node: int) -> list[int]:
        found: list[int] = []
        while node != ROOT:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]

    def open(self, node: int, logits: Logits) -> None:
        """The draft model has scored `node`: its children are known."""
        here = self.at(node)
        ids = np.array([self.nodes[each].candidate.token_id for each in self.path(node)], np.int32)
        here.candidates = self.make(logits, here.depth + 1, node, ids)
        self._place(node, here.value * here.candidates.reach(0))

    def grow(self, end_ids: frozenset[int]) -> bool:
        """Take in nodes while the best place is a known one; False when the tree is finished, else `waiting` waits."""
        self.waiting = []
        while self._places and len(self.nodes) < self.most:
            value, _, node = self._places[0]
            if -value <= self.least_value:
                break
            heapq.heappop(self._places)
            if self.at(node).candidates is None:
                self.waiting = [node, *self._others_to_score()]
                return True
            self._take(node, end_ids)
        return False

    def _take(self, parent: int, end_ids: frozenset[int]) -> None:
        """The next child of `parent` comes in."""
        above = self.at(parent)
        assert above.candidates is not None
        if above.num_children:
            if not self.branches:
                return
            self.branches -= 1
        candidate = above.candidates.take(above.num_children)
        above.num_children += 1
        self.nodes.append(_Node(parent, above.depth + 1, above.value * candidate.probability, candidate))
        if candidate.token_id not in end_ids:
            self._place(len(self.nodes) - 1, self.nodes[-1].value)
        if above.num_children < min(self.most_children, above.candidates.count):
            self._place(parent, above.value * above.candidates.reach(above.num_children))

    def _others_to_score(self) -> list[int]:
        """Further nodes that may be needed soon, since a pass over a few costs little more than over one."""
        room = min(_LOOKED_AT, self.most - len(self.nodes)) - 1
        found: list[int] = []
        kept = []
        for place in sorted(self._places):
            if len(found) < room and self.at(place[2]).candidates is None and -place[0] > self.least_value:
                found.append(place[2])
            else:
                kept.append(place)
        self._places = kept
        return found

    def _place(self, node: int, value: float) -> None:
        self._added += 1
        heapq.heappush(self._places, (-value, self._added, node))

    def draft(self) -> Draft:
        """What has grown, main chain first; siblings stay in the order in which they came."""
        main, node = [], self._first_child(ROOT)
        while node is not None:
            main.append(node)
            node = self._first_child(node)
        order = [*main, *(node for node in range(len(self.nodes)) if node not in set(main))]
        new = {node: place for place, node in enumerate(order)} | {ROOT: NO_PARENT}
        candidates = [self.nodes[node].candidate for node in order]
        sampled = [each.distribution for each in candidates if each.distribution is not None]
        return Draft(
            np.array([each.token_id for each in candidates], np.int32),
            np.array([new[self.nodes[node].parent] for node in order], np.int32),
            np.array([each.probability for each in candidates], np.float32),
            tuple(sampled) if sampled else None,
            tuple(each.evidence for each in candidates),
        )

    def first_choices(self) -> tuple[list[int], list[Distribution]]:
        """(tokens, what they were raced over) of the likeliest path, as a chain would have drafted it.

        With the token that was too unlikely to come in: to leave it out would hide where the draft is unsure.
        """
        token_ids: list[int] = []
        distributions: list[Distribution] = []
        node: int | None = ROOT
        while node is not None and isinstance(known := self.at(node).candidates, Raced):
            if known.distribution is None:
                break
            token_ids.append(known.take(0).token_id)
            distributions.append(known.distribution)
            node = self._first_child(node)
        return token_ids, distributions

    def _first_child(self, parent: int) -> int | None:
        return next((node for node, each in enumerate(self.nodes) if each.parent == parent), None)
