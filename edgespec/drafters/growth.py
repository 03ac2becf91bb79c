"""A tree of drafted tokens that grows best first, for any model that scores its nodes.

Best first by the probability that a whole path is accepted (EAGLE-2, arXiv 2406.16858, section 4): a node is added
while that pays for its row. The children of a node and their probabilities come from `candidates`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from edgespec.drafters.candidates import Candidate, Candidates
from edgespec.sampling import NoTokenLeft
from edgespec.types import NO_PARENT, Draft, Logits, TokenIds

ROOT = NO_PARENT


@dataclass(slots=True)
class Node:
    """A node of the growing tree; `value` is the probability that its whole path is accepted."""

    parent: int
    depth: int
    value: float
    candidate: Candidate
    candidates: Candidates | None = None  # of its children, once it is scored
    children: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Growth:
    """The tree so far and the places where it may grow, the most probable first.

    A place is the next child of a node, or the scoring of a node, valued at the upper bound of its first child.
    Decisions depend only on tokens that are in the tree already, never on the one that is added next: the rejection
    rule needs that (ALGORITHMS: whether a sampled token is added must not depend on which token it is).
    """

    make: Callable[[Logits, int, int, TokenIds], Candidates]  # (row, depth, node, path's tokens)
    most: int
    branches: int
    most_children: int
    least_value: float
    looked_at: int = 4  # most nodes to wait for at a time
    deepest: int | None = None  # the longest path; None: only `most` limits it
    nodes: list[Node] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    _root: Node = field(init=False)
    _places: list[tuple[float, int, int]] = field(default_factory=list)  # (-value, when added, node)
    _added: int = 0

    def __post_init__(self) -> None:
        self._root = Node(ROOT, -1, 1.0, Candidate(0, 1.0))

    def at(self, node: int) -> Node:
        return self._root if node == ROOT else self.nodes[node]

    def path(self, node: int) -> list[int]:
        found: list[int] = []
        while node != ROOT:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]

    def open(self, node: int, logits: Logits) -> None:
        """`node` has been scored: its row of logits [vocabulary] gives its children."""
        here = self.at(node)
        ids = np.array([self.nodes[each].candidate.token_id for each in self.path(node)], np.int32)
        try:
            here.candidates = self.make(logits, here.depth + 1, node, ids)
        except NoTokenLeft:  # the drafter knows no token that a grammar allows there
            return
        self._place(node, here.value * here.candidates.reach(0))

    def grow(self, end_ids: frozenset[int]) -> bool:
        """Add nodes while the best place is known; True when `waiting` nodes must be scored first, False at the end."""
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
        above = self.at(parent)
        assert above.candidates is not None
        if above.children:
            if not self.branches:
                return
            self.branches -= 1
        candidate = above.candidates.take(len(above.children))
        above.children.append(len(self.nodes))
        self.nodes.append(Node(parent, above.depth + 1, above.value * candidate.probability, candidate))
        may_go_on = self.deepest is None or above.depth + 2 < self.deepest
        if may_go_on and candidate.token_id not in end_ids:
            self._place(len(self.nodes) - 1, self.nodes[-1].value)
        if len(above.children) < min(self.most_children, above.candidates.count):
            self._place(parent, above.value * above.candidates.reach(len(above.children)))

    def _others_to_score(self) -> list[int]:
        """Further nodes that may be needed soon: scoring a few at once costs little more than one."""
        room = min(self.looked_at, self.most - len(self.nodes)) - 1
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
        """The tree, main chain first; siblings in the order in which they were added."""
        main, here = list[int](), self._root
        while here.children:
            main.append(here.children[0])
            here = self.nodes[main[-1]]
        in_main = set(main)
        order = [*main, *(node for node in range(len(self.nodes)) if node not in in_main)]
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
