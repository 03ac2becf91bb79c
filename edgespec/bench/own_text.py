"""Texts that a model writes by itself, to draft its later answers from: it makes up what a user asks, then answers.

The user's turn of the chat template is left open, so that the model fills it in (Magpie, arXiv 2406.08464). A model
without a template, or one that never ends such a turn, writes texts from nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, takewhile

import numpy as np

from edgespec.config.options import GenerateOptions, Sampling
from edgespec.errors import PromptError
from edgespec.generation.handle import Result
from edgespec.runtime import Model
from edgespec.types import TokenIds

QUESTION_TOKENS, ANSWER_TOKENS = 96, 256  # at most
LEAST_ANSWER = 8  # tokens; shorter ones teach nothing
_PER_PLACE = 4  # texts of a batch for each that the model writes at once: the last ones leave places empty
_WARM = 0.8
_LONGEST_PERIOD, _REPEATED = 24, 3  # of a loop, in tokens; how often it comes before the rest is dropped


class OwnText:
    """What `model` writes, as many texts at once as it was loaded for (`parallel`); others for every `seed`."""

    def __init__(self, model: Model, seed: int = 0) -> None:
        self._model = model
        self._batch = _PER_PLACE * model.options.parallel
        self._seeds = count(seed << 32)
        self._opening = self._users_turn()

    def batches(self) -> Iterator[list[TokenIds]]:
        """Answers, each [n], a batch at a time; none is longer than ANSWER_TOKENS."""
        while True:
            if self._opening:
                prompts = self._questions(self._opening)
                if not prompts:
                    self._opening = []  # it does not end the turn: the template has no token for that
                    continue
            else:
                prompts = [self._model.encode("") or self._model.encode("\n")] * self._batch
            heats = [0.0, _WARM] if self._opening else [1.0]  # from nothing, greedy texts would all be the same
            done = self._written(prompts, heats, ANSWER_TOKENS)
            answers = [without_loop(np.array(result.token_ids, np.int32)) for result in done]
            yield [ids for ids in answers if ids.size >= LEAST_ANSWER]

    def _users_turn(self) -> list[int]:
        """The prompt up to where a user's question begins; empty without a chat template."""
        try:
            first, second = (self._model.encode_chat([{"role": "user", "content": text}]) for text in ("0", "Why"))
        except PromptError:
            return []
        return [ours for ours, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]

    def _questions(self, opening: list[int]) -> list[list[int]]:
        """Prompts with the questions of a batch that came to an end."""
        done = self._written([opening] * self._batch, [1.0], QUESTION_TOKENS)
        texts = (result.text.strip() for result in done if result.finish_reason == "stop")
        return [self._model.encode_chat([{"role": "user", "content": text}]) for text in texts if text]

    def _written(self, prompts: Sequence[list[int]], heats: Sequence[float], most: int) -> list[Result]:
        options = GenerateOptions(max_tokens=most, drafter="none", logprobs=False)
        generations = [
            self._model.stream(prompt, Sampling(temperature=heats[place % len(heats)], seed=next(self._seeds)), options)
            for place, prompt in enumerate(prompts)
        ]
        with self._model.batch() as batch:
            return batch.results(generations)


def without_loop(token_ids: TokenIds) -> TokenIds:
    """`token_ids` [n] up to where a part of it is repeated for the second time without anything between."""
    for end in range(2, token_ids.size):
        for period in range(1, min(_LONGEST_PERIOD, end // _REPEATED) + 1):
            parts = token_ids[end - _REPEATED * period : end].reshape(_REPEATED, period)
            if period * _REPEATED >= _LONGEST_PERIOD // 2 and (parts == parts[0]).all():
                return token_ids[: end - (_REPEATED - 1) * period]
    return token_ids
