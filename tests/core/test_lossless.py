"""The whole loop is lossless: laws by joint chi-square on the table engine, tokens bit for bit everywhere."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import edgespec
from demo import DEMO, TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.engines.sequence import CachedSequence
from edgespec.formats.manifest import read_pair
from laws import ALPHA_1E6, MAKERS, law_score, sequence_for
from lossless import GREEDY, PENALISED_GREEDY, PROMPTS, SAMPLINGS, VOCABULARY, assert_same_text, run_once
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
    *itertools.product(("rejection", "block"), ("model", "ngram", "hierarchical", "medusa", "eagle")),
    *(("rejection", name) for name in ("eagle3", "dflash", "corpus")),
    *(("rejection", "lookahead"), ("block", "kept answers")),
]


@pytest.mark.parametrize("rule, name", LAWS)
def test_joint_law_of_sampled_text_is_the_targets(rule: str, name: str) -> None:
    """Counts of (two tokens before, token) against the table's own probabilities.

    16000 tokens of a law with 100 degrees of freedom show probabilities that are off by 7%, which is less than mistakes
    of the loop make of them; those of the rules are found exactly in test_verify, and draws that decide twice, which
    move little, one by one in test_fresh_draws. With `num_tokens` 200,000 it is 2%.
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
