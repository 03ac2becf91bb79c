"""The whole loop is lossless: laws by joint chi-square on the table engine, tokens bit for bit everywhere."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import edgespec
from demo import DEMO, TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.control.base import FixedLength
from edgespec.corpus.index import SuffixIndex, joined
from edgespec.drafters.base import Drafter
from edgespec.drafters.heads import DFlashDrafter, Eagle3Drafter
from edgespec.drafters.hierarchical import HierarchicalDrafter
from edgespec.drafters.lookahead import LookaheadDrafter
from edgespec.drafters.mapped import MappedSequence, map_vocabulary
from edgespec.drafters.model import EarlyExitDrafter, ModelDrafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.suffix import SuffixDrafter
from edgespec.drafters.tree import TreeDrafter
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import EngineError
from edgespec.formats.manifest import read_pair
from edgespec.generation.run_state import Run
from edgespec.reports import TokenEvent
from edgespec.sampling.acceptance import RULES, coupled
from edgespec.sampling.constraint.grammar import Grammar
from edgespec.sampling.constraint.state import Constraints
from edgespec.sampling.sampler import Sampler
from edgespec.sampling.stopping import StopRules
from edgespec.types import TokenIds
from lossless import (
    ALPHA_1E6,
    GREEDY,
    PLAIN,
    PROMPTS,
    VOCABULARY,
    assert_same_text,
    autoregressive,
    chi_square_score,
    run_of,
    run_once,
    speculative,
)
from table_engine import TableEngine, Words
from tiny_heads import LAYERS, OpenBlock, OpenHead, drafter_of, table_heads

PENALISED_GREEDY = Sampling(temperature=0.0, repeat_penalty=1.5, presence_penalty=0.5, logit_bias={3: -2})
SAMPLINGS = (
    GREEDY,
    PLAIN,
    Sampling(temperature=0.8, top_k=5, top_p=0.9, min_p=0.05, seed=9),
    Sampling(temperature=1.2, repeat_penalty=1.3, frequency_penalty=0.2, penalty_window=8, logit_bias={3: -2}, seed=4),
)
LETTERS = 5  # of the tables whose joint laws are tested
TEXT_LENGTH = 4000


def model(target: TableEngine, sigma: float = 1.0) -> ModelDrafter:
    return ModelDrafter(target.related(sigma))


def hierarchical(target: TableEngine) -> HierarchicalDrafter:
    return HierarchicalDrafter(model(target, sigma=1.5), target.related(0.7, seed=2))


def base_tree(target: TableEngine) -> TreeDrafter:
    """Of a draft that knows no end, as a base model beside an instruct one, and drafts on behind it."""
    draft = target.related(0.3)
    draft.vocabulary.end_ids = frozenset()
    return TreeDrafter(ModelDrafter(draft))


def heads(kind: str, target: TableEngine) -> Drafter:
    """Heads that know the target as far as a head of one token can."""
    return drafter_of(table_heads(kind, averaged(target)), target.vocabulary.size)


def opened(head: type[OpenHead | OpenBlock], target: TableEngine) -> Any:
    """It does not know the last token, which may be the only one that a grammar allows."""
    target.state_layers = LAYERS
    found = head(200, vocabulary=target.vocabulary.size)
    found.table[:, -1] = -np.inf
    return found


def texts_like(target: TableEngine) -> list[TokenIds]:
    """What the target might have written before, and as much that it never would."""
    rng, ids = np.random.default_rng(0), [0, 1]
    for _ in range(400):
        row = target.row(ids).astype(np.float64)
        weights = np.exp(row - row.max())
        ids.append(int(rng.choice(weights.size, p=weights / weights.sum())))
    never = rng.integers(0, target.vocabulary.size, 400)
    return [np.array(each, np.int32) for each in (ids[:200], ids[200:], never)]


def remembering(target: TableEngine) -> SuffixDrafter:
    first, second, never = texts_like(target)
    drafter = SuffixDrafter(corpora=[SuffixIndex.of(joined([first, never]))])
    drafter.learn(second)
    return drafter


def mapped(target: TableEngine) -> ModelDrafter:
    """A draft that knows nothing of the target, lacks its last token, and has the others in another order."""
    size = target.vocabulary.size - 1
    draft = TableEngine.random(size, order=1, seed=4, spread=1.0, context_length=target.facts.context_length + 100)
    draft.vocabulary = Words([target.vocabulary.token_bytes(token_id) for token_id in range(size)][::-1])  # type: ignore[assignment]
    return ModelDrafter(draft, MappedSequence(draft, map_vocabulary(target.vocabulary, draft)))


MAKERS: dict[str, Callable[[TableEngine], Drafter]] = {
    "model": model,
    "mapped": mapped,
    "tree": lambda target: TreeDrafter(model(target)),
    "base tree": base_tree,
    "hierarchical": hierarchical,
    "early-exit": lambda target: EarlyExitDrafter(target.related(1.0)),
    "medusa": lambda target: heads("medusa", target),
    "eagle": lambda target: heads("eagle", target),
    "eagle3": lambda target: Eagle3Drafter(opened(OpenHead, target), max_features=512),
    "dflash": lambda target: DFlashDrafter(opened(OpenBlock, target), max_features=512),
    "ngram": lambda target: NgramDrafter(min_ngram=1),
    "suffix": lambda target: SuffixDrafter(),
    "corpus": lambda target: SuffixDrafter(corpora=[SuffixIndex.of(joined(texts_like(target)))]),
    "kept answers": remembering,
    "lookahead": lambda target: LookaheadDrafter(ngram=3),
}


def averaged(target: TableEngine) -> TableEngine:
    """A table of order 1 that knows what the target, of order 2, does on average of the token further back."""
    ids = range(target.vocabulary.size)
    rows = np.stack([[target.row((first, last)) for first in ids] for last in ids])
    return TableEngine(rows.mean(axis=1), order=1)


def sequence_for(drafter: Drafter, target: TableEngine) -> CachedSequence:
    """The target's sequence with what the drafter reads of it."""
    cached = CachedSequence(target)
    cached.keep_features(drafter.wants_features)
    return cached


def law_score(rule: str, drafter_name: str, num_tokens: int, draft_length: int = 6) -> float:
    """How far the counts are from the law, as a standard normal score (Wilson-Hilferty)."""
    target = TableEngine.random(LETTERS, order=2, seed=3, spread=1.0, context_length=TEXT_LENGTH + 2)
    drafter = MAKERS[drafter_name](target)
    cached = sequence_for(drafter, target)
    counts = np.zeros((LETTERS,) * 3)
    num_accepted = 0
    for seed in range(math.ceil(num_tokens / TEXT_LENGTH)):
        run = run_of(cached, replace(PLAIN, seed=seed), TEXT_LENGTH, logprobs=False)
        events = speculative(run, FixedLength(drafter, draft_length), RULES[rule])
        ids = [0, 1, *(event.token_id for event in events)]
        num_accepted += run.stats.accepted_tokens
        np.add.at(counts, (ids[:-2], ids[1:-1], ids[2:]), 1)
    assert num_accepted > num_tokens / 20, "so few drafts stood that nothing was tested"
    expected = np.zeros_like(counts)
    for before in product(range(LETTERS), repeat=2):
        row = target.row(before).astype(np.float64)
        expected[before] = counts[before].sum() * np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    tested = expected.min(axis=2) >= 5  # contexts too rare for the chi-square law are left out
    assert tested.sum() > LETTERS
    return chi_square_score(counts[tested], expected[tested], int(tested.sum()) * (LETTERS - 1))


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
    *product(("rejection", "block"), ("model", "mapped", "ngram", "hierarchical", "medusa", "eagle")),
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


HEADS = {kind: {"heads": heads.path} for kind, heads in read_pair(DEMO).heads.items()}  # beside the draft model
USUAL = [*product(("model", "ngram", "lookahead"), (1, 4, 12)), ("tree", 6), ("tree", 16), ("model", "auto")]
TWO_STAGES = [("hierarchical", 1), ("hierarchical", 5), ("hierarchical", "auto"), ("model", 4), ("tree", 8)]
LOADED: dict[str, tuple[dict[str, Any], list[tuple[Any, Any]]]] = {
    "usual": ({}, [*USUAL, ("auto", "auto")]),
    "hierarchical": ({"drafter": "hierarchical"}, TWO_STAGES),
    **{kind: (given, [*product((kind,), (1, 6, 16, "auto")), ("auto", "auto")]) for kind, given in HEADS.items()},
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
            assert run.stats.new_tokens == len(plain[0]) and not run.stats.notes
            assert run.stats.accepted_tokens <= run.stats.drafted_tokens
            text += [int(str(event[0])) for event in plain[0]]
            size = min(cached.length, len(text))
            assert cached.token_ids[:size].tolist() == text[:size]
            num_accepted += run.stats.accepted_tokens
    assert num_accepted > CASES
