"""Checks that speculation does not change the output: decodes the same prompts with and without it, and times both.

Runs are interleaved and alternate in order, and the speed ratio is the median over pairs, so that a machine that slows
down meanwhile does not favour one side. The baseline is the mode in which the model was loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from edgespec.config.options import GenerateOptions, Sampling
from edgespec.generation.handle import Result
from edgespec.loading.sample_prompts import PROMPTS, BuiltInPrompt
from edgespec.reports import Stats, Totals
from edgespec.runtime import Model

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that differs. `position` counts from 0 in the answer; a token id is None if that answer ended.

    `logit_margin`: difference of the target's log probabilities of the two tokens (natural log). Close to 0 means a
    near-tie that rounding decided; large means a defect. None if one answer ended. The token ids are the same where
    only their log probabilities differ.
    """

    position: int
    plain_token_id: int | None
    drafted_token_id: int | None
    logit_margin: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt at one temperature, decoded with and without speculation."""

    domain: str
    temperature: float
    plain: Stats
    drafted: Stats
    divergence: Divergence | None

    @property
    def speed_ratio(self) -> float:
        """Tokens per second with speculation / without; 0 if nothing was decoded."""
        plain = self.plain.tokens_per_second
        return self.drafted.tokens_per_second / plain if plain else 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """All comparisons of one check."""

    comparisons: tuple[Comparison, ...]

    @property
    def identical(self) -> bool:
        """Whether all pairs of answers have the same tokens, in reproducible mode log probabilities too."""
        return all(comparison.divergence is None for comparison in self.comparisons)

    @property
    def totals(self) -> Totals:
        """Sums over the runs with speculation."""
        totals = Totals()
        for comparison in self.comparisons:
            totals.add(comparison.drafted)
        return totals

    @property
    def speed_ratio(self) -> float:
        """Median of the comparisons' speed ratios; 0 without comparisons."""
        return median(comparison.speed_ratio for comparison in self.comparisons) if self.comparisons else 0.0


def comparisons(model: Model, sampling: Sampling, options: GenerateOptions) -> Iterator[Comparison]:
    """Compare every built-in prompt with greedy decoding, then with `sampling` if that is not greedy.

    Raises the errors of `Model.generate`.
    """
    plain = dataclasses.replace(options, drafter="none")
    warm_up = dataclasses.replace(options, max_tokens=_WARM_UP_TOKENS)
    for option in (warm_up, dataclasses.replace(warm_up, drafter="none")):
        model.generate(_encode(model, PROMPTS[0]), sampling, option)
    pairs = [(prompt, heat) for heat in sorted({0.0, sampling.temperature}) for prompt in PROMPTS]
    for index, (prompt, temperature) in enumerate(pairs):
        prompt_ids, settings = _encode(model, prompt), dataclasses.replace(sampling, temperature=temperature)
        order = (plain, options) if index % 2 == 0 else (options, plain)
        first, second = (model.generate(prompt_ids, settings, option) for option in order)
        without, with_draft = (first, second) if index % 2 == 0 else (second, first)
        divergence = first_divergence(without, with_draft)
        yield Comparison(prompt.domain, temperature, without.stats, with_draft.stats, divergence)


def first_divergence(plain: Result, drafted: Result) -> Divergence | None:
    """The first difference of two answers to one prompt; None if they are equal.

    Log probabilities are compared where both answers are reproducible: rounding changes them elsewhere.
    """
    compares_logprobs = plain.reproducible and drafted.reproducible and bool(plain.logprobs and drafted.logprobs)
    ours, theirs = (
        list(zip(each.token_ids, each.logprobs if compares_logprobs else each.token_ids, strict=True))
        for each in (plain, drafted)
    )
    position = next((i for i, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), None)
    if position is None:
        if len(plain.token_ids) == len(drafted.token_ids):
            return None
        position = min(len(plain.token_ids), len(drafted.token_ids))
        ends = ((*ids[position : position + 1], None)[0] for ids in (plain.token_ids, drafted.token_ids))
        return Divergence(position, *ends, None)
    # Both rows follow the same text, so their normalisers are equal and log probabilities differ as the logits do.
    margin = plain.logprobs[position] - drafted.logprobs[position]
    return Divergence(position, plain.token_ids[position], drafted.token_ids[position], margin)


def _encode(model: Model, prompt: BuiltInPrompt) -> list[int]:
    if model.target.vocabulary.chat_template is None:
        return model.encode(prompt.text)
    return model.encode_chat([{"role": "user", "content": prompt.text}])
