"""Random settings, texts and tables: under the coupled rule speculation gives the events of plain decoding.

Errors are compared too: tables may have rows from which nothing can be sampled, above all under a grammar.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from edgespec import Sampling
from edgespec.control.base import FixedLength
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import EngineError
from edgespec.generation.decode import autoregressive, speculative
from edgespec.generation.run_state import Run
from edgespec.reports import TokenEvent
from edgespec.sampling.acceptance import coupled
from edgespec.sampling.constraint.grammar import Grammar
from edgespec.sampling.constraint.state import Constraints
from edgespec.sampling.sampler import Sampler
from edgespec.sampling.stopping import StopRules
from laws import MAKERS, VOCABULARY
from table_engine import TableEngine

CASES = 25  # of each drafter
END = VOCABULARY - 1
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
        VOCABULARY,
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
        logit_bias={rng.randrange(VOCABULARY): rng.choice([-math.inf, 5.0])} if is_biased else {},
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
        sampler = Sampler(sampling, VOCABULARY, constraint)
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
            text = text[: rng.randrange(len(text) + 1)] + rng.choices(range(VOCABULARY), k=rng.choice([1, 2, 10]))
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
