"""The target writes answers, many at once, and what heads read of it is kept: a folder that grows until stopped.

`features.bin`: rows of float16, one for each token but a text's last; `texts.jsonl`: each text's ids, the token its
answer begins with, temperature, and the place of its rows. A place that a finished text leaves is filled again.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from head_training.llama import Llama
from head_training.prompts import ANSWER, END_OF_TURN, WARM, Asked, prompts

GROUP, SORTED = 16, 640  # texts begun together, which have similar lengths; prompts among which these are sorted
LIKELIEST = 200  # tokens that may be sampled
LONGEST_QUESTION, LEAST_ANSWER = 96, 4
LOOP_PERIOD, LOOKED_FOR = 24, 16  # a text that repeats up to so many tokens is ended; tokens between looks
FEATURES, TEXTS = "features.bin", "texts.jsonl"


@dataclass
class Text:
    """One that is being written; `start`: of the answer."""

    asked: Asked
    ids: list[int]
    start: int


class Writer:
    """Writes into `folder` with the tokenizer of `target`."""

    def __init__(self, target: Llama, places: int, tokenizer: Any, folder: Path, longest: int, seed: int) -> None:
        self._target, self._tokenizer, self._longest = target, tokenizer, longest
        self._rng, self._generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self._texts: list[Text | None] = [None] * places
        self._next, self._ends = torch.zeros(places, dtype=torch.long), torch.zeros(places, dtype=torch.long)
        self._heat = torch.zeros(places)
        self._features = torch.zeros(places, target.room, target.feature_size, dtype=torch.float16)
        self._stops = {tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")}
        self._between = self._encoded(f"{END_OF_TURN}{ANSWER}")
        self._waiting: list[Text] = []  # questions that it made up
        folder.mkdir(parents=True, exist_ok=True)
        self._rows, self._list = (folder / FEATURES).open("ab"), (folder / TEXTS).open("a", encoding="utf-8")
        self._place = self._rows.tell() // (2 * target.feature_size)
        self.num_written = 0

    def write(self, data: Path | None, seed: int, seconds: float, own_questions: int = 6000) -> None:
        """Until all prompts are answered or the time is over."""
        groups = self._grouped(prompts(data, seed, own_questions))
        end = time.monotonic() + seconds
        while time.monotonic() < end and (groups or self._waiting or any(self._texts)):
            free = [place for place, text in enumerate(self._texts) if text is None]
            if len(free) >= GROUP and (groups or self._waiting):
                self._begin(
                    free, self._from_waiting() if len(self._waiting) > 4 * GROUP or not groups else groups.pop()
                )
            features, states = self._target.step(self._next, self._ends)
            self._features[torch.arange(len(self._texts)), self._ends] = features
            self._advance(range(len(self._texts)), self._chosen(states, self._heat))
        self._rows.close()
        self._list.close()

    def _grouped(self, asked: Sequence[Asked]) -> list[list[Text]]:
        found = [Text(each, ids := self._encoded(each.text), len(ids)) for each in asked]
        found = [text for text in found if len(text.ids) + LONGEST_QUESTION < self._target.room]
        groups = []
        for first in range(0, len(found), SORTED):
            near = sorted(found[first : first + SORTED], key=lambda text: len(text.ids))
            groups += [near[place : place + GROUP] for place in range(0, len(near), GROUP)]
        self._rng.shuffle(groups)
        return groups

    def _from_waiting(self) -> list[Text]:
        self._waiting.sort(key=lambda text: len(text.ids))
        first = self._rng.randrange(max(1, len(self._waiting) - GROUP + 1))
        found = self._waiting[first : first + GROUP]
        del self._waiting[first : first + GROUP]
        return found

    def _begin(self, free: Sequence[int], texts: Sequence[Text]) -> None:
        longest, places = max(len(text.ids) for text in texts), torch.tensor(free[: len(texts)])
        padded = torch.tensor([text.ids + [0] * (longest - len(text.ids)) for text in texts])
        features, states = self._target.begin(padded, places)
        self._features[places, :longest] = features
        self._heat[places] = torch.tensor([text.asked.temperature for text in texts])
        last = states[torch.arange(len(texts)), torch.tensor([len(text.ids) - 1 for text in texts])]
        for place, text in zip(places.tolist(), texts, strict=True):
            self._texts[place], self._ends[place] = text, len(text.ids) - 1
        self._advance(places.tolist(), self._chosen(last, self._heat[places]))

    def _chosen(self, states: Tensor, heat: Tensor) -> list[int]:
        logits = self._target.logits(states)
        found, warm = logits.argmax(dim=-1), heat > 0
        if warm.any():
            values, ids = (logits[warm] / heat[warm, None]).topk(LIKELIEST, dim=-1)
            drawn = torch.multinomial(values.softmax(dim=-1), 1, generator=self._generator)
            found[warm] = ids.gather(1, drawn)[:, 0]
        chosen: list[int] = found.tolist()
        return chosen

    def _advance(self, places: Sequence[int], token_ids: Sequence[int]) -> None:
        """Append a token to the texts at `places`, and end those that are finished."""
        for place, token_id in zip(places, token_ids, strict=True):
            text = self._texts[place]
            if text is None:
                continue
            text.ids.append(token_id)
            new, most = len(text.ids) - text.start, LONGEST_QUESTION if text.asked.is_question else self._longest
            if (
                token_id in self._stops
                or len(text.ids) >= self._target.room
                or new >= most
                or (new % LOOKED_FOR == 0 and repeats(text.ids))
            ):
                self._finish(place, text)
                self._texts[place], self._next[place], self._ends[place] = None, 0, 0
            else:
                self._next[place], self._ends[place] = token_id, len(text.ids) - 1

    def _finish(self, place: int, text: Text) -> None:
        count = len(text.ids) - 1  # the last token was not read
        if text.asked.is_question:
            if text.ids[-1] in self._stops and count - text.start > LEAST_ANSWER:
                ids = text.ids[:-1] + self._between
                asked = Asked(text.asked.kind, "", self._rng.choice((0.0, WARM)))
                self._waiting.append(Text(asked, ids, len(ids)))
        elif count - text.start >= LEAST_ANSWER:
            self._features[place, :count].numpy().tofile(self._rows)
            about = {"place": self._place, "start": text.start, "kind": text.asked.kind}
            self._list.write(json.dumps({**about, "temperature": text.asked.temperature, "ids": text.ids}) + "\n")
            for file in (self._rows, self._list):
                file.flush()
            self._place += count
            self.num_written += count + 1 - text.start

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def repeats(ids: Sequence[int]) -> bool:
    """Whether the text ends with a part that is there several times in a row."""
    for period in range(1, LOOP_PERIOD + 1):
        count = max(3 * period, LOOP_PERIOD)
        if len(ids) > count + period and ids[-count:] == ids[-count - period : -period]:
            return True
    return False
