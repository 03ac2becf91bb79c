"""Generates text with a Hugging Face model: batched sampling with a KV cache, for prompts of different lengths.

Finished rows are removed from the batch once half of it is finished, so that a few long texts do not need the full
width.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

GREEDY_BELOW = 1e-3  # lower temperatures mean argmax


def sample(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """Sample token ids [rows] from `logits` [rows, vocab] at `temperatures` [rows]; argmax below GREEDY_BELOW."""
    noise = torch.empty_like(logits).exponential_(generator=generator)
    scaled = logits / temperatures.clamp(min=GREEDY_BELOW)[:, None]
    # argmax of log p - log e is argmin of e / p, the exponential race
    sampled = (scaled - noise.log()).argmax(dim=-1)
    return torch.where(temperatures < GREEDY_BELOW, logits.argmax(dim=-1), sampled)


class _Rows:
    """The unfinished rows of one batch: KV cache, attention mask [rows, length], index of each row's text."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, prompts))
        self.model, self.device = model, model.device
        # Left padding, so that the next token of every row has the same column.
        self._new = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=self.device)
        self._mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        self.texts = torch.arange(len(prompts), device=self.device)
        self._cache: Any = None
        takes = inspect.signature(model.forward).parameters
        only_last = "logits_to_keep" in takes
        self._cache_name = "cache" if "cache" in takes else "past_key_values"  # its name in transformers before 5.24
        self._options = {"use_cache": True, **({"logits_to_keep": 1} if only_last else {})}

    def logits(self) -> Tensor:
        """Run the new tokens; returns float32 logits [rows, vocab] of the next token of each row."""
        positions = (self._mask.cumsum(dim=1) - 1).clamp(min=0)[:, -self._new.shape[1] :]
        output = self.model(
            input_ids=self._new,
            attention_mask=self._mask,
            position_ids=positions,
            **{self._cache_name: self._cache},
            **self._options,
        )
        self._cache = getattr(output, self._cache_name)
        return output.logits[:, -1].float()

    def push(self, token_ids: Tensor) -> None:
        self._new = token_ids[:, None]
        self._mask = torch.cat((self._mask, torch.ones_like(self._new)), dim=1)

    def keep(self, rows: Tensor) -> None:
        self.texts, self._new, self._mask = self.texts[rows], self._new[rows], self._mask[rows]
        self._cache.batch_select_indices(rows)


@torch.no_grad()
def write(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperatures: Sequence[float],
    stop_ids: Collection[int],
    seed: int,
    *,
    opening: int = 0,
) -> list[list[int]]:
    """Each prompt with its continuation of 1..`max_new_tokens` tokens, up to and including the first of `stop_ids`.

    Row i is sampled at `temperatures[i]`, but its first `opening` tokens at temperature 1, so that greedy rows from the
    same prompt differ. The text depends on `seed`, the prompts of the batch and the machine.
    """
    texts = [list(prompt) for prompt in prompts]
    generator = torch.Generator(device=model.device).manual_seed(seed)
    wanted = torch.tensor(list(temperatures), device=model.device)
    stops = torch.tensor(sorted(stop_ids), device=model.device)
    rows = _Rows(model, prompts)
    ended = torch.zeros(len(texts), dtype=torch.bool, device=model.device)
    for index in range(max_new_tokens):
        heat = wanted[rows.texts]
        token_ids = sample(rows.logits(), torch.ones_like(heat) if index < opening else heat, generator)
        alive = ~ended[rows.texts]
        for text, token_id in zip(rows.texts[alive].tolist(), token_ids[alive].tolist(), strict=True):
            texts[text].append(token_id)
        ended[rows.texts] |= torch.isin(token_ids, stops)
        rows.push(token_ids)
        alive = ~ended[rows.texts]
        if not bool(alive.any()):
            break
        if int(alive.sum()) * 2 <= alive.numel():
            rows.keep(alive.nonzero().flatten())
    return texts
