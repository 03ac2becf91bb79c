"""The draft model with branches: a tree of its likeliest continuations, grown where a further token pays most.

`growth` decides where the tree grows. The draft model scores open nodes of several branches in one pass.
"""

from __future__ import annotations

import numpy as np

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.growth import CHAIN_PRIOR, ROOT, Growth
from edgespec.drafters.model import ModelDrafter
from edgespec.engines.base import Engine
from edgespec.engines.sequence import Passes, at_once, restored_on_failure
from edgespec.types import EMPTY_DRAFT, NO_PARENT, Draft, TokenIds, Verdict

_MOST_CHILDREN = 4  # of one node


class TreeDrafter(Drafter):
    """Drafts with the engine and the cache of `model`, which owns them; a chain where trees are not possible."""

    name = "tree"
    prior = CHAIN_PRIOR

    def __init__(self, model: ModelDrafter) -> None:
        self._model = model

    def begin(self, prompt_ids: TokenIds) -> None:
        self._model.begin(prompt_ids)

    def draft(self, request: DraftRequest) -> Draft:
        """A tree of at most `request.max_tokens` nodes, `request.max_branches` of them side branches' ends."""
        return at_once(self.drafting(request))

    def drafting(self, request: DraftRequest) -> Passes[Draft]:
        cache = self._model.cache
        branches = min(request.max_branches, cache.most_branches)
        if not branches:
            return (yield from self._model.drafting(request))
        most = min(request.max_tokens, cache.engine.facts.context_length // 4)
        if most < 1:
            return EMPTY_DRAFT
        request = request._replace(max_tokens=most, max_branches=branches)
        with restored_on_failure(cache):
            growth = Growth(request, cache.end_ids, _MOST_CHILDREN)
            growth.open(ROOT, (yield from self._model.catching_up(request.token_ids, most)))
            while growth.grow():
                yield from self._scoring(growth)
            return growth.draft()

    def _scoring(self, growth: Growth) -> Passes[None]:
        """One pass of the draft model over the nodes that the growth waits for, with their ancestors."""
        wanted = growth.waiting
        rows = sorted({node for leaf in wanted for node in growth.path(leaf)})
        index = {node: row for row, node in enumerate(rows)}
        nodes = [growth.nodes[node] for node in rows]
        logits = yield from self._model.cache.looking(
            np.array([node.token_id for node in nodes], np.int32),
            np.array([index.get(node.parent, NO_PARENT) for node in nodes], np.int32),
            np.isin(rows, wanted),
        )
        for node, row in zip(sorted(wanted), logits, strict=True):
            growth.open(node, row)

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        self._model.observe(draft, verdict)

    def num_uncached(self, token_ids: TokenIds) -> int:
        return self._model.num_uncached(token_ids)

    def reading(self, token_ids: TokenIds, whole: int, part: int) -> int:
        return self._model.reading(token_ids, whole, part)

    @property
    def reads_part(self) -> bool:
        return self._model.reads_part

    def reset_engine(self) -> Engine | None:
        return self._model.reset_engine()

    def cancel(self) -> None:
        self._model.cancel()

    def clear_cancel(self) -> None:
        self._model.clear_cancel()
