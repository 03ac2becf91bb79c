"""The texts that a target wrote, and batches of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgespec.platform.files import atomic_file

HELD_OUT = 0.01
SPREAD = 12.0  # tokens by which lengths are blurred, so that the batches of two epochs differ


@dataclass(frozen=True)
class Texts:
    """Text i is `ids[begins[i] : begins[i + 1]]`; its answer begins at token `starts[i]` of it."""

    ids: NDArray[np.int32]
    begins: NDArray[np.int64]
    starts: NDArray[np.int32]
    temperatures: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.begins)

    def part(self, chosen: NDArray[np.bool_]) -> Texts:
        begins = np.concatenate(([0], np.cumsum(self.lengths[chosen])))
        ids = self.ids[np.repeat(chosen, self.lengths)]
        return Texts(ids, begins, self.starts[chosen], self.temperatures[chosen])

    def answers(self) -> Iterator[NDArray[np.int32]]:
        for begin, start, end in zip(self.begins, self.starts, self.begins[1:], strict=False):
            yield self.ids[begin + start : end]

    def counts(self, vocabulary: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """How often each token occurs, and how often in answers."""
        answers = np.concatenate(list(self.answers()))
        return np.bincount(self.ids, minlength=vocabulary), np.bincount(answers, minlength=vocabulary)

    @property
    def figures(self) -> dict[str, Any]:
        return {"texts": len(self), "tokens": self.ids.size, "of_answers": int((self.lengths - self.starts).sum())}


def save(path: Path, texts: Texts) -> None:
    with atomic_file(path, RuntimeError) as temporary, temporary.open("wb") as file:
        ids = texts.ids.astype(np.uint16) if texts.ids.max(initial=0) < 1 << 16 else texts.ids
        np.savez(file, ids=ids, begins=texts.begins, starts=texts.starts, temperatures=texts.temperatures)


def read(paths: Sequence[Path]) -> Texts:
    """All texts of some files."""
    found = []
    for path in paths:
        with np.load(path) as file:
            found.append(Texts(file["ids"].astype(np.int32), file["begins"], file["starts"], file["temperatures"]))
    lengths = np.concatenate([texts.lengths for texts in found])
    return Texts(
        np.concatenate([texts.ids for texts in found]),
        np.concatenate(([0], np.cumsum(lengths))),
        np.concatenate([texts.starts for texts in found]),
        np.concatenate([texts.temperatures for texts in found]),
    )


def divided(texts: Texts) -> tuple[Texts, Texts]:
    """Texts to learn from, and held-out ones, always the same."""
    is_held_out = np.random.default_rng(0).random(len(texts)) < HELD_OUT
    return texts.part(~is_held_out), texts.part(is_held_out)


@dataclass(frozen=True)
class Batch:
    """`ids` [texts, longest], padded at their ends; `lengths` and `starts` [texts]."""

    ids: Tensor
    lengths: Tensor
    starts: Tensor


class Batches:
    """Of `texts`, which lie on `device`."""

    def __init__(self, texts: Texts, device: torch.device) -> None:
        self._lengths, self._device = texts.lengths, device
        self._ids = torch.from_numpy(texts.ids).to(device)
        self._begins = torch.from_numpy(texts.begins[:-1]).to(device)
        self._ends = torch.from_numpy(texts.begins[1:]).to(device)
        self._starts = torch.from_numpy(texts.starts).to(device).long()

    def of(self, chosen: Sequence[int]) -> Batch:
        places = torch.tensor(chosen, device=self._device)
        lengths = (self._ends - self._begins)[places]
        longest = int(self._lengths[list(chosen)].max())
        columns = torch.arange(longest, device=self._device)[None, :]
        found = self._ids[(self._begins[places, None] + columns).clamp(max=len(self._ids) - 1)].long()
        return Batch(found * (columns < lengths[:, None]), lengths, self._starts[places])

    def epoch(self, tokens: int, rng: random.Random) -> Iterator[Batch]:
        """All texts once, in batches of similar lengths with about so many tokens, padding included."""
        found: list[list[int]] = [[]]
        spread = np.random.default_rng(rng.randrange(1 << 30)).uniform(-SPREAD, SPREAD, len(self._lengths))
        longest = 0
        for place in np.argsort(self._lengths + spread).tolist():
            longest = max(longest, int(self._lengths[place]))
            if found[-1] and (len(found[-1]) + 1) * longest > tokens:
                found.append([])
                longest = int(self._lengths[place])
            found[-1].append(place)
        rng.shuffle(found)
        return map(self.of, found)
