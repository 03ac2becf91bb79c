"""Heads learning from one frozen target on text that it wrote: what differs from distilling a draft model.

A root of a text counts as one draft: its k-th token is judged while all before it stood, so later ones weigh less,
and what is measured is the share of a draft of `depth` tokens that would stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from edgespec.errors import CapabilityError
from edgespec.export.training.acceptance import OwnText, batches
from edgespec.export.training.documents import Corpus
from edgespec.export.training.heads_loss import DraftLoss, wanted_of
from edgespec.export.training.heads_network import DraftVocabulary, EagleHead, Heads, MedusaHeads
from edgespec.export.training.heads_request import HeadsRequest
from edgespec.export.training.journal import RoundResult
from edgespec.export.training.students import StudentShape
from edgespec.export.training.target import TargetFacts
from edgespec.export.training.trainer import Trainer

LATER_WEIGHT = 0.8  # of each further token of a draft, as in Medusa
STATE_WEIGHT = 0.1  # of the distance between predicted and true states in EAGLE's loss
LEAST_LIKENESS = 0.999  # of the target's scores and those of its head on its last state
COUNTED_TOKENS = 200_000


def last_states(target: Any, ids: Tensor) -> Tensor:
    """The states [rows, length, hidden] that the target's head reads, float32, for `ids` [rows, length]."""
    return target.base_model(input_ids=ids, use_cache=False).last_hidden_state.float()


@torch.no_grad()
def head_scale(target: Any, vocab_size: int) -> float:
    """What the target multiplies its head's scores by. Raises CapabilityError when they are no such product."""
    ids = torch.arange(vocab_size, device=target.device)[:: max(1, vocab_size // 16)][None, :16]
    head = target.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise CapabilityError("this target's head has a bias or is none: heads can be trained for plain ones only")
    scored = F.linear(last_states(target, ids), head.weight.float()).flatten()
    wanted = target(input_ids=ids, use_cache=False).logits.float().flatten()
    if float(torch.cosine_similarity(scored, wanted, dim=0)) < LEAST_LIKENESS:
        raise CapabilityError("this target's scores are not its head times its last state: heads cannot be trained")
    return float((scored @ wanted) / (scored @ scored))


def frequent_tokens(corpus: Corpus | None, request: HeadsRequest, vocab_size: int) -> Tensor:
    """Ids [m] worth drafting, ascending: all, or the most frequent of the data, then the lowest ids."""
    most = min(request.draft_vocabulary, vocab_size)
    counts = np.zeros(vocab_size)
    if corpus is not None and most < vocab_size:
        rng = np.random.default_rng([request.seed, 5])
        for _ in range(-(-COUNTED_TOKENS // request.window)):
            counts += np.bincount(corpus.window(rng, request.window), minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:most]))


def new_heads(
    request: HeadsRequest, facts: TargetFacts, shape: StudentShape, target: Any, corpus: Corpus | None
) -> Heads:
    """Untrained heads on the target's device, the same for the same seed."""
    torch.manual_seed(request.seed)
    head = target.get_output_embeddings()
    scale = head_scale(target, facts.size("vocab_size"))
    ids = frequent_tokens(corpus, request, facts.size("vocab_size")).to(target.device)
    vocabulary = DraftVocabulary(head.weight.detach(), ids, scale)
    if request.kind == "medusa":
        return MedusaHeads(vocabulary, request.depth, shape.layers).to(target.device)
    rope = facts.config.get("rope_parameters") or {}
    theta = facts.config.get("rope_theta", rope.get("rope_theta", 10_000.0))
    return EagleHead(vocabulary, request.depth, shape, float(theta)).to(target.device)


class HeadsTrainer(Trainer):
    """A `Trainer` whose student reads the target's states; `agreement` is the share of a draft that stands."""

    request: HeadsRequest

    def distance(self, ids: Tensor, weights: Tensor, cooling: float) -> tuple[Tensor, Tensor]:
        """(loss, total variation) of all drafts to the target, both summed over roots by weight and by LATER_WEIGHT."""
        request, vocabulary, target = self.request, self.student.vocabulary, self.target
        share, factor = (request.share if request.loss == "tv" else 1.0), vocabulary.scale / cooling
        with torch.no_grad():
            states = last_states(target, ids)
            head = target.get_output_embeddings().weight.detach()
            wanted = wanted_of(states, head, vocabulary.token_ids, factor)
        loss = variation = torch.zeros((), device=ids.device)
        total = 0.0
        for index, found in enumerate(self._drafts(states, ids)):
            following = weights[:, 2 + index :] * LATER_WEIGHT**index
            told = wanted.at(slice(1 + index, -1))
            part, apart = DraftLoss.apply(found, head[vocabulary.token_ids], told, following, factor, share)
            loss, variation = loss + part, variation + apart
            if isinstance(self.student, EagleHead):
                far = F.smooth_l1_loss(found, states[:, 1 + index : -1], reduction="none").mean(dim=-1)
                loss = loss + STATE_WEIGHT * (far * following).sum()
            total += LATER_WEIGHT**index
        return loss / total, variation / total

    def _drafts(self, states: Tensor, ids: Tensor) -> list[Tensor]:
        with self.autocast():
            return [found.float() for found in self.student.drafts(states, ids)]

    def measure(self, own_tokens: int, variation: float, started: float) -> RoundResult:
        at_once = self.rows_at_once * self.request.window
        greedy = self.standing_share(self.held_out["greedy"], at_once, is_greedy=True)
        sampled = self.standing_share(self.held_out["sampled"], at_once, is_greedy=False)
        return self.add_result(own_tokens, variation, started, greedy, sampled)

    @torch.no_grad()
    def standing_share(self, texts: Sequence[OwnText], max_tokens: int, *, is_greedy: bool) -> float:
        """Mean share of a draft of `depth` tokens that would stand along the target's own texts.

        On greedy text a token stands when the first choice is the text's; on sampled text with the probability
        sum of min(p, q) at temperature 1, given that all before it stood.
        """
        total, count = 0.0, 0
        vocabulary, depth = self.student.vocabulary, self.student.depth
        self.student.eval()
        for batch in batches(texts, max_tokens):
            longest = max(len(text.token_ids) for text in batch)
            padded = [t.token_ids + [0] * (longest - len(t.token_ids)) for t in batch]
            ids = torch.tensor(padded, device=self.student.device)
            roots = [(r, c) for r, t in enumerate(batch) for c in range(t.start - 1, len(t.token_ids) - 1 - depth)]
            if not roots:
                continue
            rows, columns = torch.tensor(roots, device=ids.device).T
            states = last_states(self.target, ids)
            reach = torch.ones(len(roots), device=ids.device)
            for index, found in enumerate(self._drafts(states, ids)):
                logits = vocabulary.logits(found[rows, columns]).float()
                if is_greedy:
                    chosen = vocabulary.token_ids[logits.argmax(dim=-1)]
                    reach = reach * (chosen == ids[rows, columns + 2 + index])
                else:
                    head = self.target.get_output_embeddings()
                    scores = head(states[rows, columns + 1 + index].to(self.target.dtype)).float() * vocabulary.scale
                    wanted = scores.softmax(dim=-1)[:, vocabulary.token_ids]
                    reach = reach * torch.minimum(wanted, logits.softmax(dim=-1)).sum(dim=-1)
                total += float(reach.sum()) / depth
            count += len(roots)
        self.student.train()
        return total / max(count, 1)
