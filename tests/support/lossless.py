"""What tests of losslessness share: drafters, one run of the loop, prompts, joint laws of sampled text."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np

import edgespec
from demo import ROOT, TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.control.base import Controller, FixedLength
from edgespec.drafters.base import Drafter
from edgespec.engines.sequence import CachedSequence, PassRequest
from edgespec.generation.decode import steps
from edgespec.generation.run_state import Run
from edgespec.reports import TokenEvent
from edgespec.sampling.acceptance import RULES, Rule
from edgespec.sampling.sampler import Sampler
from edgespec.sampling.stopping import StopRules
from edgespec.types import Draft, TokenIds

VOCABULARY = 10
DEMO = ROOT / "models" / "demo" / "manifest.toml"
GREEDY = Sampling(temperature=0.0)
PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
PROMPTS = (
    "Find me a cheap Italian restaurant in San Jose for tonight.",
    "Write a Python function `clamp(value, low, high)`: Limit a value to a range.",
    "Tom has 12 apples and gives away a third of them. How many are left?",
)


TEMPERATURES = 0.0, 0.8, 1.2, 1.2, 0.0, 0.8  # of the prompts, each twice


def answered(steps: Generator[Any, Any, None]) -> Generator[TokenEvent, None, None]:
    """The events of `steps`, each pass of which is run as soon as it is asked for."""
    try:
        step = next(steps)
        while True:
            if isinstance(step, PassRequest):
                try:
                    logits = step.run()
                except BaseException as exc:
                    step = steps.throw(exc)
                else:
                    step = steps.send(logits)
            else:
                yield step
                step = next(steps)
    except StopIteration:
        return
    finally:
        steps.close()


def autoregressive(run: Run) -> Generator[TokenEvent, None, None]:
    """Plain decoding: one token per target pass."""
    return answered(steps(run))


def speculative(run: Run, controller: Controller, rule: Rule) -> Generator[TokenEvent, None, None]:
    """Rounds of draft, verify, accept."""
    return answered(steps(run, controller, rule))


def run_of(
    target: CachedSequence,
    sampling: Sampling,
    num_tokens: int,
    prompt: Sequence[int] | TokenIds = (0, 1),
    *,
    logprobs: bool = True,
) -> Run:
    """An answer of so many tokens, which nothing else ends."""
    sampler = Sampler(sampling, target.engine.vocabulary.size)
    return Run(target, np.array(prompt, np.int32), sampler, StopRules(frozenset(), (), num_tokens), logprobs)


def run_once(
    target: CachedSequence,
    drafter: Drafter | None,
    rule: str,
    length: int,
    sampling: Sampling,
    num_tokens: int,
    *,
    logprobs: bool = True,
) -> list[TokenEvent]:
    run = run_of(target, sampling, num_tokens, logprobs=logprobs)
    if drafter is None:
        return list(autoregressive(run))
    return list(speculative(run, FixedLength(drafter, length), RULES[rule]))


def assert_same_text(
    model: edgespec.Model, asked: Sequence[tuple[Any, Any]], num_tokens: int = 48
) -> dict[tuple[Any, Any], edgespec.Stats]:
    """Of (drafter, draft length) pairs: tokens and log probabilities are plain decoding's. Counters of each, summed."""
    found: dict[tuple[Any, Any], edgespec.Stats] = {}
    for seed, (prompt, temperature) in enumerate(zip(PROMPTS * 2, TEMPERATURES, strict=True)):
        has_template = model.target.vocabulary.chat_template is not None
        ids = model.encode_chat([{"role": "user", "content": prompt}]) if has_template else model.encode(prompt)
        sampling = Sampling(temperature=temperature, seed=seed)
        options = GenerateOptions(max_tokens=num_tokens, ignore_eos=True, drafter="none")
        plain = model.generate(ids, sampling, options)
        for drafter, length in asked:
            drafted = model.generate(ids, sampling, replace(options, drafter=drafter, draft_length=length))
            assert drafted.token_ids == plain.token_ids, (drafter, length, prompt, temperature)
            assert drafted.logprobs == plain.logprobs, (drafter, length, prompt, temperature)
            assert drafted.reproducible and not drafted.stats.notes
            sums = found.setdefault((drafter, length), edgespec.Stats())
            sums.drafted_tokens += drafted.stats.drafted_tokens
            sums.accepted_tokens += drafted.stats.accepted_tokens
    return found


def assert_several_draft_apart(target: str, texts: Sequence[str], drafter: Any, **options: Any) -> None:
    """Texts that are decoded together are those that they are alone, and as many of their drafts are accepted.

    Whether all of them draft, or every second one.
    """
    drafting = GenerateOptions(max_tokens=24, drafter=drafter, draft_length=4, ignore_eos=True)
    options |= {"drafter": drafter, "reproducible": True, "parallel": 3, "threads": TEST_THREADS}
    with edgespec.load(target, **options) as model:
        for sampling in (Sampling(temperature=0.0, seed=2), Sampling(temperature=0.9, seed=2)):
            plain, alone = [], []
            for text in texts:
                plain.append(model.generate(text, sampling, replace(drafting, drafter="none")))
                model.forget()
                alone.append(model.generate(text, sampling, drafting))
                model.forget()
            assert sum(result.stats.drafted_tokens for result in alone) > len(texts)
            for wanted in ([drafter] * len(texts), [drafter, "none"] * len(texts)):
                asked = [replace(drafting, drafter=name) for _, name in zip(texts, wanted, strict=False)]
                with model.batch() as batch:
                    found = batch.results([model.stream(*each) for each in zip(texts, repeat(sampling), asked)])
                model.forget()
                for one, other, own, together in zip(plain, alone, asked, found, strict=True):
                    assert (together.token_ids, together.logprobs) == (one.token_ids, one.logprobs)
                    accepted = 0 if own.drafter == "none" else other.stats.accepted_tokens
                    assert together.stats.accepted_tokens == accepted


def assert_window_changes_no_text(target: str, drafter: Any, **options: Any) -> None:
    """A text longer than what the head can see."""
    options |= {"draft_context_length": 40, "drafter": drafter, "threads": TEST_THREADS, "reproducible": True}
    with edgespec.load(target, **options) as model:
        ids = model.encode("A text that is longer than what the head can see. " * 6)
        usual, sampling = GenerateOptions(max_tokens=80, ignore_eos=True), Sampling(temperature=0.8, seed=4)
        plain = model.generate(ids, sampling, replace(usual, drafter="none"))
        found = model.generate(ids, sampling, replace(usual, draft_length=5))
        assert found.token_ids == plain.token_ids and found.stats.drafted_tokens > 300
        model.forget()
        assert model.generate(ids, sampling, usual).token_ids == plain.token_ids


def side_branches(draft: Draft) -> int:
    return sum(node not in draft.parents for node in range(draft.num_tokens)) - 1


def paths(draft: Draft) -> Iterator[tuple[list[int], list[int]]]:
    """(tokens of the path to a node, tokens of its children in order) of all nodes with children."""
    for node in range(-1, draft.num_tokens):
        path, at = list[int](), node
        while at >= 0:
            path, at = [int(draft.token_ids[at]), *path], int(draft.parents[at])
        children = draft.token_ids[draft.children_of(node)].tolist()
        if children:
            yield path, children


ALPHA_1E6 = 4.75  # standard normal score


def chi_square_score(counts: np.ndarray, expected: np.ndarray, freedom: int) -> float:
    """Wilson-Hilferty: the statistic as a standard normal score."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    root = math.cbrt(statistic / freedom)
    return (root - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
