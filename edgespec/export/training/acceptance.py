"""How often a student would be accepted, on text that the target itself wrote after held-out prompts.

A draft token is judged only while every earlier one was accepted, so the student is asked for its next token along
the target's own text: the chance that one more token is accepted given that all before it were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class OwnText:
    """What the target wrote: `token_ids`, prompt included, and `start`, where its own part begins (at least 1)."""

    token_ids: list[int]
    start: int


def batches(texts: Sequence[OwnText], max_tokens: int) -> Iterator[Sequence[OwnText]]:
    """Texts of similar length together, at most `max_tokens` a batch with padding, at least one text."""
    ordered = sorted(texts, key=lambda text: len(text.token_ids))
    start = 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or (end - start + 1) * len(ordered[end].token_ids) > max_tokens:
            yield ordered[start:end]
            start = end


def _scored(model: Any, ids: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Float32 logits [n, vocab] of `model` at the chosen places of right-padded `ids` [rows, length]."""
    return model(input_ids=ids, use_cache=False).logits[rows, columns].float()


@torch.no_grad()
def agreement(
    target: Any, student: Any, texts: Sequence[OwnText], max_tokens: int, *, with_target: bool
) -> tuple[float, float]:
    """(share of own tokens that the student's argmax hits, mean sum of min(p, q) at temperature 1).

    `max_tokens` bounds a batch, padding included. Without `with_target` the second figure is 0 and the target is not
    run: on greedy text its choices are the text.
    """
    hits = overlap = 0.0
    count = 0
    student.eval()
    for batch in batches(texts, max_tokens):
        longest = max(len(text.token_ids) for text in batch)
        ids = torch.tensor([t.token_ids + [0] * (longest - len(t.token_ids)) for t in batch], device=student.device)
        places = [(r, c) for r, t in enumerate(batch) for c in range(t.start - 1, len(t.token_ids) - 1)]
        rows, columns = torch.tensor(places, device=student.device).T
        logits = _scored(student, ids, rows, columns)
        hits += float((logits.argmax(dim=-1) == ids[rows, columns + 1]).sum())
        if with_target:
            wanted = _scored(target, ids, rows, columns).softmax(dim=-1)
            overlap += float(torch.minimum(wanted, logits.softmax(dim=-1)).sum())
        count += len(places)
    student.train()
    return hits / max(count, 1), overlap / max(count, 1)
