"""Let a model write texts to draft its later answers from: it makes up questions and answers them.

    python scripts/train/write_corpus.py MODEL --minutes 20

Nothing is trained, and no torch is needed. What is written goes into the model's corpus (edgespec corpus ls) after each
batch of answers; Ctrl-C ends it, and another run adds more. The user's turn of the chat template is left open, so that
the model fills it in (Magpie, arXiv 2406.08464). A model without a template, or one that never ends such a turn, writes
texts from nothing.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Iterator, Sequence
from itertools import count, takewhile
from pathlib import Path
from time import monotonic

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from edgespec.config.options import GenerateOptions, LoadOptions, Sampling
from edgespec.corpus.store import vocabulary_key
from edgespec.corpus.texts import MAX_NAME_LENGTH, Corpus, check_name
from edgespec.errors import EdgespecError, PromptError
from edgespec.generation.handle import Result
from edgespec.runtime import Model, load
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
        self._batch = _PER_PLACE * model.options.sequences
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


def write(model: str, minutes: float, name: str | None, parallel: int) -> str:
    """Write for so long, keeping every batch; what was kept, as text."""
    if name is not None:
        check_name(name)
    options = LoadOptions(
        model=model, context_length=2 * (ANSWER_TOKENS + QUESTION_TOKENS), reproducible=False, parallel=parallel
    )
    kept = "nothing was written: give it more --minutes"
    with load(options) as loaded:
        vocabulary = loaded.target.vocabulary
        corpus, source = Corpus(vocabulary_key(vocabulary), vocabulary.size), f"written by {loaded.pair.name}"
        name = name or source[:MAX_NAME_LENGTH]
        corpus.check_is_free(name, source)
        batches = OwnText(loaded, seed=secrets.randbits(30)).batches()  # other texts than before
        until_s = monotonic() + 60 * minutes
        try:
            while monotonic() < until_s:
                added = corpus.add(name, source, next(batches), is_more=True)
                kept = f"kept: {added.name}, {added.num_tokens} tokens of {added.num_documents} texts"
        except KeyboardInterrupt:
            pass
    return kept


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name, file or folder of a model")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long (default %(default)s)")
    parser.add_argument("--name", help="name of the text; more is added to it (default: written by MODEL)")
    parser.add_argument("--parallel", type=int, default=8, help="texts written at once (default %(default)s)")
    given = parser.parse_args(arguments)
    try:
        print(write(given.model, given.minutes, given.name, given.parallel))
    except EdgespecError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
