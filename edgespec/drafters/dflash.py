"""DFlash (arXiv 2602.06036): a head drafts a whole block in one pass, from the inputs of some of the target's layers.

The head's cache holds what the target knows of each token of the text; the block is the last token and mask tokens
behind it, all of which are denoised at once. A row does not know what was drawn for the rows before it. DSpark
(arXiv 2607.05147) adds to a row's scores how well its tokens follow the likeliest token of the row before: exact for
the greedy chain, a guess where the draft drew another token. Either changes how many tokens are accepted, never the
text.

Every draft costs one pass over the whole block, whatever its length: the block is as wide as in training, since with
fewer masks the rows would see other neighbours and propose other tokens.
"""

from __future__ import annotations

from edgespec.drafters.base import DraftRequest
from edgespec.drafters.growth import DrawnChain
from edgespec.drafters.head_window import HeadDrafter
from edgespec.engines.head import BlockHead, States
from edgespec.types import Draft, TokenIds


class DFlashDrafter(HeadDrafter[BlockHead]):
    """Drafts a block at once. The head's cache has an entry for each token of the text but the last one.

    A DSpark head's own confidence in a token joins the evidence from its scores; how much it says is learnt.
    """

    name = "dflash"
    costs_once = True

    def _most(self, request: DraftRequest) -> int:
        return min(request.max_tokens, self._head.most_drafted)

    def _drafted(self, request: DraftRequest, features: States, most: int) -> Draft:
        self._catch_up(request.token_ids[:-1], features)
        logits, confidences = self._head.block(int(request.token_ids[-1]))
        chain = DrawnChain(request, most, self._head.facts.end_ids)
        while chain.is_open:
            row = len(chain.token_ids)
            chain.add(logits[row], None if confidences is None else float(confidences[row]))
        return chain.as_draft()

    def _catch_up(self, token_ids: TokenIds, features: States) -> None:
        """Read those of the text's `token_ids` [n], the pending one left out, that the cache lacks."""
        end = token_ids.size
        first_known = end - len(features)
        kept = self._keep(min(self._shared_tokens(token_ids), end), first_known, end, 0)
        self._head.inject(features[kept - first_known :])
        self._known = token_ids.copy()

    def num_uncached(self, token_ids: TokenIds) -> int:
        return min(token_ids.size - self._shared_tokens(token_ids), self._max_features)
