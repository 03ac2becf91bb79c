"""The target writes answers, many at once: a place that a finished text leaves is filled again.

All that a step needs is on the device, where it can be a CUDA graph, since the step of a small model is hundreds of
small operators. The host looks for finished texts once in several steps.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgespec.vocabulary import Vocabulary
from trainlib.head_prompts import ABOUT_TEXTS, FOLLOW_UPS, WARM, Asked, Turns
from trainlib.head_texts import Texts
from trainlib.llama import Llama

BETWEEN_LOOKS = 16  # steps
SORTED = 16  # groups of texts begun together, among which prompts are sorted by length
LEAST_SHARE = 0.02  # of the likeliest token's probability: tokens below are not sampled
LONGEST_QUESTION, LEAST_ANSWER = 96, 8
LOOP_PERIOD = 24  # a text that repeats up to so many tokens is ended
FOLLOWED, REUSED = 0.3, 0.15  # shares of answers that a question follows, and that are the matter of another prompt
ASKED_AGAIN = 0.625  # of the room, the most that a prompt with an earlier answer in it takes
Say = Callable[[str], None]


@dataclass
class Text:
    """`ids` up to where the target goes on."""

    asked: Asked
    ids: list[int]

    @property
    def start(self) -> int:
        return len(self.ids)


class Writer:
    """Texts in the places of `target`; answers of up to `longest` tokens to `asked`, an endless list."""

    def __init__(
        self, target: Llama, places: int, vocabulary: Vocabulary, asked: Iterator[Asked], longest: int, seed: int
    ) -> None:
        self._target, self._vocabulary, self._asked, self._longest = target, vocabulary, asked, longest
        self._turns = Turns(vocabulary)
        self._rng, self._places, self._group = random.Random(seed), places, max(8, places // 16)
        self._texts: list[Text | None] = [None] * places
        self._most_asked_again = round(ASKED_AGAIN * target.room)
        device = target.device
        self._ids = torch.zeros(places, target.room, dtype=torch.long, device=device)
        self._ends, self._limits = (torch.zeros(places, dtype=torch.long, device=device) for _ in range(2))
        self._heat = torch.zeros(places, device=device)
        self._is_open = torch.zeros(places, dtype=torch.bool, device=device)
        self._stops = vocabulary.end_ids
        self._stop_ids = torch.tensor(sorted(self._stops), device=device)
        self._between = self._encoded(self._turns.answer)
        self._waiting: list[Text] = []  # that its own texts led to
        self._ready: list[list[Text]] = []
        self._found: list[tuple[list[int], int, float]] = []
        self._graph: Any = None

    def write(self, seconds: float, say: Say) -> Texts:
        begun = said = time.monotonic()
        steps = num_tokens = 0
        while time.monotonic() - begun < seconds:
            self._fill()
            for _ in range(BETWEEN_LOOKS):
                self._advance()
            steps += BETWEEN_LOOKS
            num_tokens += self._harvest()
            if time.monotonic() - said > 20:
                said = time.monotonic()
                passed = said - begun
                rates = f"{num_tokens / passed:.0f} a second, {passed / steps * 1000:.1f} ms a step"
                say(f"{passed:.0f} s: {len(self._found)} texts, {num_tokens} tokens of answers, {rates}")
        return self._texts_found()

    def _advance(self) -> None:
        if self._target.device.type != "cuda":
            self._step()
        elif self._graph is None:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step()
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._step()
        else:
            self._graph.replay()

    @torch.no_grad()
    def _step(self) -> None:
        """The next token of every open text."""
        tokens = self._ids.gather(1, self._ends[:, None])[:, 0]
        chosen = self._chosen(self._target.step(tokens, self._ends), self._heat)
        self._append(torch.arange(self._places, device=self._ids.device), chosen)

    def _append(self, places: Tensor, chosen: Tensor) -> None:
        is_open, ends = self._is_open[places], self._ends[places]
        ends = torch.where(is_open, ends + 1, ends)
        self._ids[places, ends] = torch.where(is_open, chosen, self._ids[places, ends])
        is_last = (chosen[:, None] == self._stop_ids).any(dim=1) | (ends + 1 >= self._limits[places])
        self._ends[places], self._is_open[places] = ends, is_open & ~is_last

    def _chosen(self, states: Tensor, heat: Tensor) -> Tensor:
        logits = self._target.logits(states)
        logits -= logits.amax(dim=-1, keepdim=True)
        warm = logits / heat.clamp(min=1e-3)[:, None]
        noise = torch.empty_like(warm).exponential_().log_().neg_()
        warm = torch.where(warm < np.log(LEAST_SHARE), float("-inf"), warm + noise)
        return torch.where(heat > 0, warm.argmax(dim=-1), logits.argmax(dim=-1))

    @torch.no_grad()
    def _fill(self) -> None:
        free = [place for place, text in enumerate(self._texts) if text is None]
        while len(free) >= self._group:
            texts = self._next_group()
            longest = max(len(text.ids) for text in texts)
            longest += -longest % 16
            places = torch.tensor(free[: len(texts)], device=self._ids.device)
            padded = torch.tensor([text.ids + [0] * (longest - len(text.ids)) for text in texts]).to(self._ids.device)
            last = torch.tensor([len(text.ids) - 1 for text in texts], device=self._ids.device)
            _, states = self._target.read(padded, places)
            self._ids[places, :longest] = padded
            self._heat[places] = torch.tensor([text.asked.temperature for text in texts], device=self._ids.device)
            most = [LONGEST_QUESTION if text.asked.is_question else self._longest for text in texts]
            limits = [min(len(text.ids) + count, self._target.room) for text, count in zip(texts, most, strict=True)]
            self._limits[places] = torch.tensor(limits, device=self._ids.device)
            self._ends[places], self._is_open[places] = last, True
            rows = torch.arange(len(texts), device=self._ids.device)
            self._append(places, self._chosen(states[rows, last], self._heat[places]))
            for place, text in zip(free, texts, strict=False):
                self._texts[place] = text
            del free[: len(texts)]

    def _next_group(self) -> list[Text]:
        if not self._ready:
            texts, self._waiting = self._waiting, []
            while len(texts) < self._group * SORTED:
                asked = islice(self._asked, self._group * SORTED - len(texts))
                new = [Text(each, self._encoded(each.text)) for each in asked]
                texts += [text for text in new if len(text.ids) + self._longest // 2 < self._target.room]
            texts.sort(key=lambda text: len(text.ids))
            self._ready = [texts[place : place + self._group] for place in range(0, len(texts), self._group)]
            self._rng.shuffle(self._ready)
        return self._ready.pop()

    def _harvest(self) -> int:
        """Take finished texts; the number of tokens of their answers."""
        self._is_open &= ~self._loops()
        is_open, ends = self._is_open.cpu().numpy(), self._ends.cpu().numpy()
        done = [place for place, text in enumerate(self._texts) if text is not None and not is_open[place]]
        if not done:
            return 0
        rows, count = self._ids[torch.tensor(done, device=self._ids.device)].cpu().numpy(), 0
        for place, row in zip(done, rows, strict=True):
            text, ids = self._texts[place], row[: ends[place] + 1].tolist()
            assert text is not None
            self._texts[place] = None
            count += self._finish(text, ids)
        return count

    def _loops(self) -> Tensor:
        """Which texts end with a part that is there several times in a row."""
        reach = 4 * LOOP_PERIOD
        behind = (self._ends[:, None] - torch.arange(reach, device=self._ids.device)).clamp(min=0)
        tail = self._ids.gather(1, behind)
        found = torch.zeros_like(self._is_open)
        for period in range(1, LOOP_PERIOD + 1):
            count = max(3 * period, LOOP_PERIOD)
            found |= (tail[:, :count] == tail[:, period : period + count]).all(dim=1)
        return found & (self._ends > reach)

    def _finish(self, text: Text, ids: list[int]) -> int:
        new, has_ended = len(ids) - text.start, ids[-1] in self._stops
        if new < LEAST_ANSWER:
            return 0
        if text.asked.is_question:
            if has_ended:
                self._waiting.append(Text(self._answered(), ids[:-1] + self._between))
            return 0
        self._found.append((ids, text.start, text.asked.temperature))
        if has_ended and self._rng.random() < FOLLOWED:
            self._follow(ids[:-1])
        if self._rng.random() < REUSED:
            self._reuse(ids[text.start :])
        return new

    def _follow(self, ids: list[int]) -> None:
        """A second question in the same conversation: the target's own, or one of a list."""
        if len(ids) > self._most_asked_again:
            return
        if self._rng.random() < 0.5:
            asked = Asked("", 1.0, is_question=True)
            self._waiting.append(Text(asked, ids + self._encoded(self._turns.again)))
        else:
            said = f"{self._turns.again}{self._rng.choice(FOLLOW_UPS)}"
            self._waiting.append(Text(self._answered(), ids + self._encoded(said) + self._between))

    def _reuse(self, answer: list[int]) -> None:
        """A prompt about an answer that was given elsewhere."""
        matter = self._vocabulary.decode(answer[: self._most_asked_again])
        form = self._rng.choice(ABOUT_TEXTS)
        ids = self._encoded(f"{self._turns.opening}{form.format(matter.strip())}") + self._between
        self._waiting.append(Text(self._answered(), ids))

    def _answered(self) -> Asked:
        return Asked("", self._rng.choice((0.0, 0.0, WARM)))

    def _encoded(self, text: str) -> list[int]:
        return self._vocabulary.encode(text, parse_special=True)

    def _texts_found(self) -> Texts:
        lengths = [len(ids) for ids, _, _ in self._found]
        ids: NDArray[np.int32] = np.fromiter((each for found, _, _ in self._found for each in found), np.int32)
        starts = np.array([start for _, start, _ in self._found], np.int32)
        heat = np.array([heat for _, _, heat in self._found], np.float32)
        return Texts(ids, np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))), starts, heat)
