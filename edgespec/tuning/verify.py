"""Does speculation change the text? The same prompts with and without it, token by token, and what it gains.

Runs are interleaved and alternate in order, and the speed ratio is the median over pairs, so a machine that slows down
meanwhile does not favour one side. What it does not know: the speed of another engine, or of a mode other than the
one the model was loaded in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from edgespec.config import GenerateOptions
from edgespec.generation.totals import Totals
from edgespec.loading.sample_prompts import PROMPTS, BuiltInPrompt
from edgespec.runtime import Model
from edgespec.sampling import Sampling
from edgespec.types import Stats

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that differs, counted from 0 within the answer; a token is None where that answer had ended.

    `logit_margin`: how much the target preferred the plain run's token, in logits (natural log): close to 0 means a
    near-tie that rounding decided, large means a defect. None when one answer had ended.
    """

    position: int
    plain_token_id: int | None
    drafted_token_id: int | None
    logit_margin: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt at one temperature, decoded plainly and with speculation."""

    domain: str
    temperature: float
    plain: Stats
    drafted: Stats
    divergence: Divergence | None

    @property
    def speed_ratio(self) -> float:
        """Tokens per second with speculation over those without; 0 when nothing was decoded."""
        plain = self.plain.tokens_per_second
        return self.drafted.tokens_per_second / plain if plain else 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """All comparisons of one check; every figure is derived from them."""

    comparisons: tuple[Comparison, ...]

    @property
    def identical(self) -> bool:
        return all(comparison.divergence is None for comparison in self.comparisons)

    @property
    def totals(self) -> Totals:
        """The runs with speculation, added up."""
        totals = Totals()
        for comparison in self.comparisons:
            totals.add(comparison.drafted)
        return totals

    @property
    def speed_ratio(self) -> float:
        return median(comparison.speed_ratio for comparison in self.comparisons) if self.comparisons else 0.0


def comparisons(
    model: Model, sampling: Sampling, options: GenerateOptions, prompts: Sequence[BuiltInPrompt] = PROMPTS
) -> Iterator[Comparison]:
    """Compare every prompt greedily, then as `sampling` says (once only if that is greedy). Raises as `generate`."""
    plain = dataclasses.replace(options, drafter="none")
    warm_up = dataclasses.replace(options, max_tokens=_WARM_UP_TOKENS)
    for option in (warm_up, dataclasses.replace(warm_up, drafter="none")):
        model.generate(_encode(model, prompts[0]), sampling, option)
    pairs = [(prompt, temperature) for temperature in _temperatures(sampling) for prompt in prompts]
    for index, (prompt, temperature) in enumerate(pairs):
        prompt_ids, settings = _encode(model, prompt), dataclasses.replace(sampling, temperature=temperature)
        order = (plain, options) if index % 2 == 0 else (options, plain)
        first, second = (model.generate(prompt_ids, settings, option) for option in order)
        without, with_draft = (first, second) if index % 2 == 0 else (second, first)
        divergence = first_divergence(without, with_draft)
        yield Comparison(prompt.domain, temperature, without.stats, with_draft.stats, divergence)


class Answer(Protocol):
    """What is compared: token ids, and the log probability that the target gave each."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def logprobs(self) -> tuple[float, ...]: ...


def first_divergence(plain: Answer, drafted: Answer) -> Divergence | None:
    """Where two answers to one prompt part, or None when they are the same."""
    pairs = zip(plain.token_ids, drafted.token_ids, strict=False)
    at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if at is None:
        if len(plain.token_ids) == len(drafted.token_ids):
            return None
        at = min(len(plain.token_ids), len(drafted.token_ids))
        ours, theirs = ((*ids[at : at + 1], None)[0] for ids in (plain.token_ids, drafted.token_ids))
        return Divergence(at, ours, theirs, None)
    # Both rows follow the same text, so their normalisers agree and log probabilities differ as the logits do.
    margin = plain.logprobs[at] - drafted.logprobs[at]
    return Divergence(at, plain.token_ids[at], drafted.token_ids[at], margin)


def _temperatures(sampling: Sampling) -> tuple[float, ...]:
    return (0.0,) if sampling.temperature == 0 else (0.0, sampling.temperature)


def _encode(model: Model, prompt: BuiltInPrompt) -> list[int]:
    if model.target.vocabulary.chat_template is None:
        return model.encode(prompt.text)
    return model.encode_chat([{"role": "user", "content": prompt.text}])
