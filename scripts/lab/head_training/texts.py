"""The texts that `writing` keeps, and batches of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from head_training.writing import FEATURES, TEXTS

HELD_OUT = 0.02
SPREAD = 12.0  # tokens by which lengths are blurred, so that the batches of two epochs differ


@dataclass(frozen=True)
class Kept:
    """A text: `rows` [n, feature size] of all tokens but the last one; its answer begins at `start`."""

    rows: NDArray[np.float16]
    ids: Sequence[int]
    start: int
    temperature: float


@dataclass(frozen=True)
class Batch:
    """`features` [texts, longest, feature size], `ids` [texts, longest + 1], `lengths` and `starts` [texts]."""

    features: Tensor
    ids: Tensor
    lengths: Tensor
    starts: Tensor


def read(folders: Sequence[Path], feature_size: int) -> tuple[list[Kept], list[Kept]]:
    """Texts to learn from, and held-out ones, always the same."""
    found: list[Kept] = []
    for folder in folders:
        if not (folder / FEATURES).stat().st_size:
            continue
        rows = np.memmap(folder / FEATURES, np.float16, "r").reshape(-1, feature_size)
        with (folder / TEXTS).open(encoding="utf-8") as lines:
            for text in map(json.loads, lines):
                end = text["place"] + len(text["ids"]) - 1
                if end <= len(rows):
                    found.append(Kept(rows[text["place"] : end], text["ids"], text["start"], text["temperature"]))
    is_held_out = np.random.default_rng(0).random(len(found)) < HELD_OUT
    chosen: tuple[list[Kept], list[Kept]] = ([], [])
    for text, held_out in zip(found, is_held_out, strict=True):
        chosen[int(held_out)].append(text)
    return chosen


def batch_of(texts: Sequence[Kept]) -> Batch:
    longest = max(len(text.rows) for text in texts)
    features = torch.zeros(len(texts), longest, texts[0].rows.shape[1])
    ids = torch.zeros(len(texts), longest + 1, dtype=torch.long)
    for place, text in enumerate(texts):
        features[place, : len(text.rows)] = torch.from_numpy(np.array(text.rows)).float()
        ids[place, : len(text.ids)] = torch.tensor(text.ids)
    lengths, starts = ([len(text.rows) for text in texts], [text.start for text in texts])
    return Batch(features, ids, torch.tensor(lengths), torch.tensor(starts))


def batches(texts: Sequence[Kept], tokens: int, rng: random.Random) -> Iterator[Batch]:
    """All texts once, in batches of similar lengths with about so many tokens, padding included."""
    found: list[list[Kept]] = [[]]
    for text in sorted(texts, key=lambda text: len(text.rows) + rng.uniform(-SPREAD, SPREAD)):
        longest = max(len(each.rows) for each in (*found[-1], text))
        if found[-1] and (len(found[-1]) + 1) * longest > tokens:
            found.append([])
        found[-1].append(text)
    rng.shuffle(found)
    return map(batch_of, found)


def counts_of(texts: Sequence[Kept], vocabulary: int) -> NDArray[np.int64]:
    """How often each token occurs."""
    found = np.zeros(vocabulary, np.int64)
    for text in texts:
        found += np.bincount(text.ids, minlength=vocabulary)
    return found


def figures_of(texts: Sequence[Kept]) -> dict[str, Any]:
    return {"texts": len(texts), "answer_tokens": sum(len(text.ids) - text.start for text in texts)}
