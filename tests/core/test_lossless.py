"""The whole loop is lossless: laws by joint chi-square on the table engine, tokens bit for bit everywhere."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import edgespec
from demo import DEMO, TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.control.base import FixedLength
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import EngineError
from edgespec.formats.manifest import read_pair
from edgespec.generation.decode import autoregressive, speculative
from edgespec.generation.run_state import Run
from edgespec.reports import TokenEvent
from edgespec.sampling.acceptance import coupled
from edgespec.sampling.constraint.grammar import Grammar
from edgespec.sampling.constraint.state import Constraints
from edgespec.sampling.sampler import Sampler
from edgespec.sampling.stopping import StopRules
from lossless import (
    ALPHA_1E6,
    GREEDY,
    LETTERS,
    MAKERS,
    PENALISED_GREEDY,
    PROMPTS,
    SAMPLINGS,
    VOCABULARY,
    assert_same_text,
    law_score,
    run_once,
    sequence_for,
)
from table_engine import TableEngine


@pytest.mark.parametrize("settings", (*SAMPLINGS, PENALISED_GREEDY))
@pytest.mark.parametrize("name", MAKERS)
def test_coupled_text_is_plain_text_token_by_token(settings: Sampling, name: str) -> None:
    target = TableEngine.random(VOCABULARY, seed=1, context_length=400)
    plain, drafted = run_once(CachedSequence(target), None, "coupled", 0, settings, 150), 0
    for length in (1, 2, 3, 8, 12, 40):
        drafter = MAKERS[name](target)
        found = run_once(sequence_for(drafter, target), drafter, "coupled", length, settings, 150)
        assert [(event.token_id, event.logprob) for event in found] == [(e.token_id, e.logprob) for e in plain]
        assert [event.position for event in found] == list(range(2, 152))
        assert "".join(event.text for event in found) == "".join(event.text for event in plain)
        drafted += sum(event.from_draft for event in found)
    assert drafted > 30


@pytest.mark.parametrize("name", MAKERS)
def test_greedy_rejection_is_plain_greedy(name: str) -> None:
    target = TableEngine.random(VOCABULARY, seed=1, context_length=400)
    plain = [event.token_id for event in run_once(CachedSequence(target), None, "coupled", 0, GREEDY, 150)]
    drafter = MAKERS[name](target)
    found = run_once(sequence_for(drafter, target), drafter, "rejection", 9, GREEDY, 150)
    assert [event.token_id for event in found] == plain


LAWS = [
    ("coupled", "model"),  # with other drafters the tokens are the same, which is tested above
    *itertools.product(("rejection", "block"), ("model", "mapped", "ngram", "hierarchical", "medusa", "eagle")),
    *(("rejection", name) for name in ("eagle3", "dflash", "corpus")),
    *(("rejection", "lookahead"), ("block", "kept answers")),
]


@pytest.mark.parametrize("rule, name", LAWS)
def test_joint_law_of_sampled_text_is_the_targets(rule: str, name: str) -> None:
    """Counts of (two tokens before, token) against the table's own probabilities.

    16000 tokens of a law with 100 degrees of freedom show probabilities that are off by 7%, which is less than mistakes
    of the loop make of them; those of the rules are found exactly in test_verify, and draws that decide twice, which
    move little, one by one in test_sampling. With `num_tokens` 200,000 it is 2%.
    """
    assert law_score(rule, name, num_tokens=16_000) < ALPHA_1E6


HEADS = {kind: {"drafter": kind, "heads": heads.path} for kind, heads in read_pair(DEMO).heads.items()}
USUAL = [*itertools.product(("model", "ngram", "lookahead"), (1, 4, 12)), ("tree", 6), ("tree", 16), ("model", "auto")]
TWO_STAGES = [("hierarchical", 1), ("hierarchical", 5), ("hierarchical", "auto"), ("model", 4), ("tree", 8)]
LOADED: dict[str, tuple[dict[str, Any], list[tuple[Any, Any]]]] = {
    "usual": ({}, [*USUAL, ("auto", "auto")]),
    "hierarchical": ({"drafter": "hierarchical"}, TWO_STAGES),
    **{kind: (options, [(kind, 1), (kind, 4), (kind, "auto"), ("auto", "auto")]) for kind, options in HEADS.items()},
}


@pytest.mark.parametrize("engine", ["llamacpp", "onnx"])
@pytest.mark.parametrize("name", LOADED)
def test_demo_text_does_not_depend_on_the_draft(name: str, engine: str) -> None:
    options, asked = LOADED[name]
    with edgespec.load("demo", engine=engine, reproducible=True, threads=TEST_THREADS, **options) as model:
        stats = assert_same_text(model, asked)
        assert all(stats[each].accepted_tokens > 0 for each in asked if each[1] != "auto")


def test_demo_text_is_the_same_far_into_the_context() -> None:
    """From 512 cells on llama.cpp treats a lone row in its own way; a long text crosses that border."""
    with edgespec.load("demo", reproducible=True) as demo:
        ids = demo.encode_chat([{"role": "user", "content": " ".join(PROMPTS * 6)}])
        sampling = Sampling(temperature=0.8, seed=5)
        options = [GenerateOptions(max_tokens=400, drafter=name, ignore_eos=True) for name in ("none", "model", "auto")]
        plain, model, auto = (demo.generate(ids, sampling, chosen) for chosen in options)
    assert len(plain.token_ids) == 400
    assert plain.token_ids == model.token_ids == auto.token_ids


def test_a_full_draft_window_slides() -> None:
    target = TableEngine.random(VOCABULARY, seed=1, context_length=400)
    for name in ("model", "tree", "hierarchical"):
        drafter = MAKERS[name](TableEngine(target._table, context_length=32))
        for settings in SAMPLINGS:
            plain = run_once(CachedSequence(target), None, "coupled", 0, settings, 300)
            found = run_once(CachedSequence(target), drafter, "coupled", 8, settings, 300)
            assert [event.token_id for event in found] == [event.token_id for event in plain]


# -- random settings, texts and tables: under the coupled rule speculation gives the events of plain decoding


CASES = 25  # of each drafter
END = LETTERS - 1
GRAMMARS = ("[a-d]{3,9}", "(ab|ba|cc)*d{0,5}", "abcabc[a-d]+", "(aaa|bbb){1,4}c*")
Seen = tuple[list[tuple[object, ...]], str]
"""Of each event all but its drafter, and the type of the error that ended them."""


def seen(events: Iterable[TokenEvent]) -> Seen:
    found = list[tuple[object, ...]]()
    try:
        for event in events:
            found.append(
                (event.token_id, event.text, event.position, event.logprob, event.finish_reason, event.top_logprobs)
            )
    except EngineError as exc:
        return found, type(exc).__name__
    return found, ""


def made_table(rng: random.Random, *, is_finite: bool) -> TableEngine:
    found = TableEngine.random(
        LETTERS,
        seed=rng.randrange(1 << 20),
        spread=rng.choice([0.3, 2.0, 40.0]),
        context_length=rng.choice([12, 24, 64]),
        max_batch=rng.choice([8, 64]),
        max_sequences=2,
        end_id=END,
    )
    if rng.random() < 0.5:
        found._table = found._table.round()  # with ties
    if not is_finite and rng.random() < 0.3:
        found._table[np.random.default_rng(rng.randrange(99)).random(found._table.shape) < 0.4] = -math.inf
        found._table[:, 1] = 0.0
    return found


def made_sampling(rng: random.Random) -> Sampling:
    is_biased, is_penalised = rng.random() < 0.3, rng.random() < 0.4
    return Sampling(
        temperature=rng.choice([0, 0, 1e-12, 0.2, 0.8, 1.5]),
        top_k=rng.choice([0, 0, 1, 3]),
        top_p=rng.choice([1.0, 0.9, 1e-9]),
        min_p=rng.choice([0, 0.05, 1.0]),
        repeat_penalty=rng.choice([1.3, 0.5]) if is_penalised else 1.0,
        frequency_penalty=rng.choice([0, 0.3, -2.0]) if is_penalised else 0.0,
        penalty_window=rng.choice([-1, 1, 64]),
        logit_bias={rng.randrange(LETTERS): rng.choice([-math.inf, 5.0])} if is_biased else {},
        seed=rng.randrange(9),
    )


def made_run(rng: random.Random, prompt_ids: list[int], constraints: Constraints) -> Callable[[CachedSequence], Run]:
    """What makes the same run on any sequence."""
    sampling, ends = made_sampling(rng), frozenset({END}) if rng.random() < 0.8 else frozenset[int]()
    stop = StopRules(ends, tuple(rng.sample(["ab", "c", "dd"], rng.choice([0, 0, 1]))), rng.choice([1, 5, None]))
    grammar = Grammar("regex", rng.choice(GRAMMARS)) if ends and rng.random() < 0.4 else None
    top = rng.choice([0, 3])

    def make(sequence: CachedSequence) -> Run:
        vocabulary = sequence.engine.vocabulary
        constraint = None if grammar is None else constraints.of(grammar, vocabulary, len(prompt_ids))
        sampler = Sampler(sampling, LETTERS, constraint)
        return Run(sequence, np.array(prompt_ids, np.int32), sampler, stop, top_logprobs=top)

    return make


@pytest.mark.parametrize("name", MAKERS)
def test_speculation_changes_no_event(name: str) -> None:
    num_accepted = 0
    for case in range(CASES):
        rng = random.Random(f"{name} {case}")
        target = made_table(rng, is_finite=name in ("medusa", "eagle"))
        drafter, constraints = MAKERS[name](target), Constraints()
        cached, other = CachedSequence(target), CachedSequence(target, 1)
        cached.keep_features(drafter.wants_features)
        controller, text = FixedLength(drafter, rng.choice([1, 3, 20])), list[int]()
        for _ in range(3):  # turns, which may go on from any part of the text
            text = text[: rng.randrange(len(text) + 1)] + rng.choices(range(LETTERS), k=rng.choice([1, 2, 10]))
            text = text[: target.facts.context_length - 1]
            make = made_run(rng, text, constraints)
            other.rollback(0)
            plain, run = seen(autoregressive(make(other))), make(cached)
            assert seen(speculative(run, controller, coupled)) == plain, (case, run)
            assert run.stats.new_tokens == len(plain[0])
            assert run.stats.accepted_tokens <= run.stats.drafted_tokens
            text += [int(str(event[0])) for event in plain[0]]
            size = min(cached.length, len(text))
            assert cached.token_ids[:size].tolist() == text[:size]
            num_accepted += run.stats.accepted_tokens
    assert num_accepted > CASES
