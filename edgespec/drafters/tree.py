"""The draft model with branches: a tree of its likeliest continuations, grown where a further token pays most.

`growth` decides where the tree grows. The draft model scores open nodes of several branches in one pass.
"""

from __future__ import annotations

import numpy as np

from edgespec.drafters.base import DraftRequest
from edgespec.drafters.growth import ROOT, Growth
from edgespec.drafters.model import ModelDrafter
from edgespec.engines.sequence import Passes, restored_on_failure
from edgespec.types import EMPTY_DRAFT, NO_PARENT, Draft

_MOST_CHILDREN = 4  # of one node


class TreeDrafter(ModelDrafter):
    """Drafts with the engine and the cache of `model`, which owns them; a chain where trees are not possible."""

    name = "tree"
    engine = None  # what passes of `model` cost says little about those of trees
    bytes_used = 0

    def __init__(self, model: ModelDrafter) -> None:
        super().__init__(model.cache.engine, model.cache, owns_engine=False)

    def another(self, sequence: int) -> None:
        """One for another sequence is made of the draft model's."""

    def drafting(self, request: DraftRequest) -> Passes[Draft]:
        """A tree of at most `request.max_tokens` nodes, `request.max_branches` of them side branches' ends."""
        cache = self.cache
        branches = min(request.max_branches, cache.most_branches)
        if not branches:
            return (yield from super().drafting(request))
        most = min(request.max_tokens, cache.engine.facts.context_length // 4)
        if most < 1:
            return EMPTY_DRAFT
        request = request._replace(max_tokens=most, max_branches=branches)
        with restored_on_failure(cache):
            growth = Growth(request, cache.end_ids, _MOST_CHILDREN)
            growth.open(ROOT, (yield from self.catching_up(request.token_ids, most)))
            while growth.grow():
                yield from self._scoring(growth)
            return growth.draft()

    def _scoring(self, growth: Growth) -> Passes[None]:
        """One pass of the draft model over the nodes that the growth waits for, with their ancestors."""
        wanted = growth.waiting
        rows = sorted({node for leaf in wanted for node in growth.path(leaf)})
        index = {node: row for row, node in enumerate(rows)}
        nodes = [growth.nodes[node] for node in rows]
        logits = yield from self.cache.looking(
            np.array([node.token_id for node in nodes], np.int32),
            np.array([index.get(node.parent, NO_PARENT) for node in nodes], np.int32),
            np.isin(rows, wanted),
        )
        for node, row in zip(sorted(wanted), logits, strict=True):
            growth.open(node, row)
