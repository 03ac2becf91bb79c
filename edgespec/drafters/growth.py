"""How a model's rows of logits become a draft: a chain drawn token by token, or a tree grown best first.

A tree grows by the probability that a whole path is accepted (EAGLE-2, arXiv 2406.16858, section 4): a node is added
while that pays for its row. The children of a node are the first of the race that the target will run with the same
noise (Kool et al. 2019, arXiv 1903.06059: Gumbel top-k). Rules that compare distributions take chains only.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.base import DraftRequest
from edgespec.sampling.noise import Stream
from edgespec.sampling.sampler import NoTokenLeft
from edgespec.types import NO_PARENT, Distribution, Draft, Evidence, Logits, TokenIds

# Log odds of acceptance by a token's evidence: half as steep as what fits the demo's draft and medium models on
# held-out dialogues, functions and problems (fitted biases .6, slopes .8, .3 and 2.3), since other pairs agree less.
CHAIN_PRIOR = 0.2, 0.8, 0.4, 1.8
_FOLD, _SHORT_ROW = 64, 8192  # logits of which the largest counts, in rows that are longer


@dataclass(slots=True)
class DrawnChain:
    """The tokens so far; `request.max_tokens` are wanted, and none behind one of `end_ids`.

    They are sampled with the request's settings and, unless the rule compares distributions, the target's noise.
    """

    request: DraftRequest
    end_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    distributions: list[Distribution] = field(default_factory=list)
    is_open: bool = True

    @property
    def text(self) -> TokenIds:
        """The request's tokens and those of the chain."""
        return np.concatenate((self.request.token_ids, np.array(self.token_ids, np.int32)))

    def add(self, logits: Logits, confidence: float | None = None) -> bool:
        """Draw the next token from a row [vocabulary]; whether it has one, and room for one more.

        It has none where the drafter knows no token that may come next: heads of a reduced vocabulary under a grammar.

        `confidence`: the drafter's own that the target accepts the row's likeliest token, as further evidence.
        `is_open` is whether one more is also expected to pay for a pass; a row that exists already costs nothing.
        """
        request, sampler, count = self.request, self.request.sampler, len(self.token_ids)
        history = self.text if sampler.uses_history else request.token_ids
        try:
            distribution = sampler.distribution(logits, history)
        except NoTokenLeft:
            self.is_open = False
            return False
        stream = Stream.DRAFT if request.needs_distributions else Stream.TARGET
        # Its own noise must not be used again in a later round, since what was accepted of this one depends on it.
        index = request.num_drafted + count if request.needs_distributions else 0
        token_id, lead = sampler.race(distribution, request.token_ids.size + count, stream, index)
        self.token_ids.append(token_id)
        self.distributions.append(distribution)
        evidence = evidence_of(logits, distribution.prob_of(token_id), lead)
        self.evidence.append(evidence if confidence is None else (*evidence, score_of(confidence)))
        has_room = count + 1 < request.max_tokens and token_id not in self.end_ids
        asked = request.should_continue
        self.is_open = has_room and (asked is None or asked(count + 1, self.evidence[-1]))
        return has_room

    def as_draft(self) -> Draft:
        given = self.distributions if self.request.needs_distributions else None
        return Draft.chain(self.token_ids, distributions=given, evidence=self.evidence)


def evidence_of(logits: Logits, prob: float, lead: float) -> Evidence:
    """Three scores of a drafted token: log odds of the likeliest one, the token's log probability, and its lead.

    `logits` [vocabulary]; the odds are of the plain softmax, since a greedy distribution gives everything 1. `lead`: of
    the race that drew the token (Sampler.race), which the target runs with its own probabilities; where no other token
    ran, the margin of the logits is used. A full softmax would take too long: only the largest of every few logits
    count, and the weight of the others is learnt with the slopes.
    """
    fold = _FOLD if logits.size > _SHORT_ROW else 1
    largest = logits[: logits.size // fold * fold].reshape(fold, -1).max(axis=0)
    place = largest.argmax()
    best, largest[place] = float(largest[place]), -math.inf
    others = float(np.exp(largest - best).sum())
    odds = -math.log(max(others, 1e-6))
    ahead = best - float(largest.max()) if math.isinf(lead) else lead
    return max(-3.0, min(odds, 6.0)) / 2.0, max(math.log(max(prob, 1e-9)), -4.0), min(ahead, 8.0) / 4.0


def score_of(confidence: float) -> float:
    """A probability as evidence: its log odds, halved as those of `evidence_of`."""
    prob = min(max(confidence, 1e-3), 1.0 - 1e-3)
    return math.log(prob / (1.0 - prob)) / 2.0


# Fitted to the demo pair, in dialogues; the controller calibrates probabilities while it runs.
DISAGREEMENT, _AGREED = 0.6, 0.98  # typical difference of the target's logits; largest probability of acceptance
_KNOWN = 24  # likeliest tokens that are ranked when the sampler itself would look at one only


class Candidates(NamedTuple):
    """The children of a node, in the order in which they are tried.

    `token_ids` [n]; `probs` [n] of acceptance where the node is accepted; `first`: the evidence of the first one, which
    is that of a chain's token.
    """

    token_ids: TokenIds
    probs: NDArray[np.float64]
    first: Evidence

    def evidence(self, attempt: int) -> Evidence:
        """That of child `attempt`: of a later one in columns of its own."""
        if not attempt:
            return self.first
        prob = float(self.probs[attempt])
        odds = max(math.log(prob / (1.0 - prob)), -6.0) / 2.0
        return (0.0,) * len(self.first) + (1.0, odds, -min(attempt, 2.0))


def candidates_of(
    request: DraftRequest, logits: Logits, path_ids: TokenIds, disagreement: float = DISAGREEMENT
) -> Candidates:
    """The children of a node: the first tokens of the race that the target will run there.

    `logits` [vocabulary]: the node's row; `path_ids` [m]: its path behind the text; `disagreement`: how far the
    target's logits mostly differ from the draft's.
    """
    text_ids, sampler = request.token_ids, request.sampler
    uses_history = sampler.uses_history and path_ids.size > 0
    history = np.concatenate((text_ids, path_ids)) if uses_history else text_ids
    temperature = sampler.sampling.temperature
    if temperature == 0:
        known = sampler.likeliest(logits, history, _KNOWN)
        possible = known.probs > 0  # a draft with another vocabulary lacks some
        token_ids, scores = known.token_ids[possible], np.log(known.probs[possible])
        first = evidence_of(logits, 1.0, math.inf)
    else:
        ranked, times = sampler.ranked(sampler.distribution(logits, history), text_ids.size + path_ids.size)
        token_ids, scores = ranked.token_ids, -temperature * np.log(times)
        lead = math.log(times[1] / times[0]) if times.size > 1 else math.inf
        first = evidence_of(logits, float(ranked.probs[0]), lead)
    weights = np.exp((scores - scores[0]) / disagreement)  # scores differ by what the target's must overcome
    return Candidates(token_ids, _AGREED * weights / weights.sum(), first)


ROOT = NO_PARENT
MAX_ROW_COST = 0.1  # tokens; second choices rarely pay for more expensive rows, so no tree is grown
_MOST_CHILDREN, _LOOKED_AT = 8, 8
_NEARLY = 0.7  # with 0.5 a tenth of the passes less, and 3% fewer tokens accepted


@dataclass(slots=True)
class Node:
    """A node of the growing tree: a child with `prob` of acceptance given its parent, and the `evidence` of that.

    `value`: the probability that its whole path is accepted.
    """

    parent: int
    depth: int
    value: float
    token_id: int = 0
    prob: float = 1.0
    evidence: Evidence = ()
    candidates: Candidates | None = None  # of its children, once it is scored
    children: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Growth:
    """The tree of a request so far and the places where it may grow, the most probable first.

    A place is the next child of a node, or the scoring of a node, valued at the upper bound of its first child. Nothing
    follows one of `end_ids`; no path is longer than `deepest`.
    """

    request: DraftRequest
    end_ids: frozenset[int]
    most_children: int = _MOST_CHILDREN
    disagreement: float = DISAGREEMENT
    deepest: int = sys.maxsize
    nodes: list[Node] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    _branches: int = 0  # so far
    _root: Node = field(default_factory=lambda: Node(ROOT, -1, 1.0))
    _places: list[tuple[float, int, int]] = field(default_factory=list)  # (-value, when added, node)
    _added: int = 0

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
        ids = np.array([self.nodes[each].token_id for each in self.path(node)], np.int32)
        try:
            here.candidates = candidates_of(self.request, logits, ids, self.disagreement)
        except NoTokenLeft:  # the drafter knows no token that a grammar allows there
            return
        self._place(node, here.value * float(here.candidates.probs[0]))

    def grow(self) -> bool:
        """Add nodes, the most probable first; True when `waiting` nodes must be scored before others, False at the end.

        Scoring several at once costs little more than one. So nodes that are nearly as probable as the first that waits
        are added before it is known whether its children are more so.
        """
        self.waiting, least, most = [], self.request.row_cost, self.request.max_tokens
        while self._places and len(self.nodes) < most and len(self.waiting) < _LOOKED_AT:
            value, _, node = self._places[0]
            if -value <= least:
                break
            heapq.heappop(self._places)
            if self.at(node).candidates is not None:
                self._take(node)
                continue
            self.waiting.append(node)
            least = max(least, -value * _NEARLY)
        return bool(self.waiting) and len(self.nodes) < most

    def _take(self, parent: int) -> None:
        above = self.at(parent)
        found, attempt = above.candidates, len(above.children)
        assert found is not None
        if attempt and self._branches == self.request.max_branches:
            return
        self._branches += attempt > 0
        prob, token_id = float(found.probs[attempt]), int(found.token_ids[attempt])
        above.children.append(len(self.nodes))
        new = Node(parent, above.depth + 1, above.value * prob, token_id, prob, found.evidence(attempt))
        self.nodes.append(new)
        if new.depth + 1 < self.deepest and token_id not in self.end_ids:
            self._place(len(self.nodes) - 1, new.value)
        if attempt + 1 < min(self.most_children, found.token_ids.size):
            self._place(parent, above.value * float(found.probs[attempt + 1]))

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
        nodes = [self.nodes[node] for node in order]
        return Draft(
            np.array([node.token_id for node in nodes], np.int32),
            np.array([new[node.parent] for node in nodes], np.int32),
            np.array([node.prob for node in nodes], np.float32),
            None,
            tuple(node.evidence for node in nodes),
        )


def takes_tree(request: DraftRequest) -> bool:
    """Whether to draft a tree rather than a chain: where the rule and the target take one, and rows are cheap.

    A fixed draft length sets no cost of a row: it means a tree of that many nodes, or a chain of that many tokens
    where trees are not possible. The automatic length sets the measured cost.
    """
    return request.max_branches > 0 and request.row_cost < MAX_ROW_COST


def grown(growth: Growth, root: Logits, rows_of: Callable[[Growth], Iterable[Logits]]) -> Draft:
    """The whole tree of a growth.

    `root`: the row of logits [vocabulary] of what follows the text, `rows_of` those of each node that a growth waits
    for, which are looked at one by one.
    """
    growth.open(ROOT, root)
    while growth.grow():
        for node, row in zip(growth.waiting, rows_of(growth), strict=True):
            growth.open(node, row)
    return growth.draft()
