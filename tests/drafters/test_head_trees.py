"""Trees grown by heads on the target's states: what they propose, and that the text stays the target's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from demo import TEST_THREADS
from edgespec.control.prices import path_products
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.growth import MAX_ROW_COST, evidence_of
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.sampling.sampler import Sampler
from edgespec.types import Logits
from lossless import PLAIN, paths, side_branches
from tiny_heads import KINDS, VOCABULARY, drafter_of, random_heads, request, table, table_heads

HIDDEN, TOKENS = 64, 299  # of the tiny model


@pytest.fixture(scope="module")
def tiny_engine(tiny_path: Any) -> Iterator[LlamaCppEngine]:
    with LlamaCppEngine.load(tiny_path, threads=TEST_THREADS, context_length=128, reproducible=False) as engine:
        yield engine


def texts(length: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Random states [n, hidden] and tokens [n + 1]."""
    rng = np.random.default_rng(5)
    states = rng.standard_normal((length, HIDDEN)).astype(np.float32)
    return rng.integers(0, TOKENS, length + 1).astype(np.int32), states


def tree_request(most: int = 16, temperature: float = 0.0, branches: int = 8, **more: Any) -> DraftRequest:
    return request(*texts(), most, temperature)._replace(max_branches=branches, **more)


# -- what they propose


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_keeps_to_its_limits(tiny_engine: LlamaCppEngine, kind: str, temperature: float) -> None:
    drafter = drafter_of(random_heads(kind, tiny_engine, HIDDEN), TOKENS)
    known = set(random_heads(kind, tiny_engine, HIDDEN).token_ids.tolist())
    seen = set()
    for most, branches in itertools.product((1, 2, 7, 16, 33), (1, 2, 8)):
        draft = drafter.draft(tree_request(most, temperature, branches))
        assert min(most, 3 + branches) <= draft.num_tokens <= most
        assert draft.num_tokens == most or kind == "medusa"
        assert side_branches(draft) <= branches
        assert set(draft.token_ids.tolist()) <= known
        assert kind == "eagle" or max(draft.depths()) < 3
        for node in range(-1, draft.num_tokens):
            children = draft.token_ids[draft.children_of(node)].tolist()
            assert len(set(children)) == len(children)
        seen.add(side_branches(draft))
    assert max(seen) > 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_main_chain_is_what_the_heads_would_draft_without_branches(
    tiny_engine: LlamaCppEngine, kind: str, temperature: float
) -> None:
    """The same tokens with the same evidence: what a controller learns of chains holds for trees."""
    drafter = drafter_of(random_heads(kind, tiny_engine, HIDDEN), TOKENS)
    draft = drafter.draft(tree_request(24, temperature))
    main = draft.main_chain
    alone = drafter.draft(tree_request(main.num_tokens, temperature, branches=0))
    assert alone.is_chain and not draft.is_chain
    assert main.token_ids.tolist() == alone.token_ids.tolist()
    assert main.evidence is not None and draft.evidence is not None
    np.testing.assert_allclose(main.evidence, alone.evidence, atol=1e-4)
    firsts = {draft.children_of(node)[0] for node in range(-1, draft.num_tokens) if draft.children_of(node)}
    assert {len(draft.evidence[node]) for node in firsts} == {3}
    later = [draft.evidence[node] for node in range(draft.num_tokens) if node not in firsts]
    assert later and all(found[:4] == (0.0, 0.0, 0.0, 1.0) for found in later)


def arrivals(sampler: Sampler, row: Logits, text: np.ndarray) -> list[int]:
    """The tokens in the order in which they win the race behind `text` that the target runs with `row`."""
    if sampler.sampling.temperature == 0:
        found: list[int] = sampler.likeliest(row, text, 24).token_ids.tolist()
    else:
        found = sampler.ranked(sampler.distribution(row, text), text.size)[0].token_ids.tolist()
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_eagle_looks_at_the_text_and_a_nodes_own_path(tiny_engine: LlamaCppEngine, temperature: float) -> None:
    """The reference reads each path by itself, as text with the states that it predicted."""
    heads = random_heads("eagle", tiny_engine, HIDDEN)
    sharp = {name: heads.arrays[name] * 10 for name in ("q_proj", "k_proj", "v_proj", "o_proj")}  # looks at few pairs
    heads = replace(heads, arrays={**heads.arrays, **sharp})
    text, states = texts()
    asked = tree_request(33, temperature)
    drafter = drafter_of(heads, TOKENS)
    drafter.draft(request(text[:21], states[:20])._replace(max_branches=8))  # and forgets what it predicted then
    draft = drafter.draft(asked)
    compared = 0
    for path, children in paths(draft):
        twin, told = drafter_of(heads, TOKENS)._head, text
        row, predicted = twin.decode(text[1:], states)
        for token_id in path:
            told = np.append(told, np.int32(token_id))
            row, predicted = twin.decode(told[-1:], predicted[None].copy())
        assert children == arrivals(asked.sampler, row, told)[: len(children)]
        law = asked.sampler.distribution(row, told)
        evidence = evidence_of(row, law.prob_of(children[0]), asked.sampler.race(law, told.size)[1])
        nodes = [node for node in range(draft.num_tokens) if draft.token_ids[node] == children[0]]
        assert draft.evidence is not None
        assert min(np.abs(np.subtract(draft.evidence[node][:3], evidence)).max() for node in nodes) < 1e-4
        compared += len(path) > 1
    assert compared > 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_is_drafted_where_trees_are_not_possible_or_rows_are_dear(kind: str) -> None:
    target = table()
    drafter = drafter_of(table_heads(kind, target.related(sigma=1.0)), VOCABULARY)
    asked = DraftRequest(
        np.array([0, 1, 2, 3], np.int32), 24, Sampler(PLAIN, VOCABULARY), max_branches=8, features=target._table[:3]
    )
    drafts = [drafter.draft(asked._replace(row_cost=cost)) for cost in (0.0, 0.02, 0.05, 0.09)]
    sizes = [draft.num_tokens for draft in drafts]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] > 0
    assert side_branches(drafts[1]) > 1
    for draft, cost in zip(drafts, (0.0, 0.02, 0.05, 0.09), strict=True):
        assert min(path_products(draft, draft.confidences.tolist())) > cost
    for dear in (asked._replace(row_cost=MAX_ROW_COST), asked._replace(max_branches=0)):
        assert drafter.draft(dear).is_chain


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_follows_an_end_token_and_nothing_comes_of_no_state(tiny_engine: LlamaCppEngine, kind: str) -> None:
    heads = random_heads(kind, tiny_engine, HIDDEN)
    asked = tree_request(24, 0.9)
    whole = drafter_of(heads, TOKENS).draft(asked)
    inner = int(whole.token_ids[0])
    draft = drafter_of(heads, TOKENS, end_ids=frozenset({inner})).draft(asked)
    ends = np.flatnonzero(draft.token_ids == inner)
    assert ends.size and draft.num_tokens > 1
    assert not set(ends.tolist()) & set(draft.parents.tolist())
    drafter = drafter_of(heads, TOKENS)
    assert drafter.draft(asked._replace(features=None)).num_tokens == 0
    assert drafter.draft(asked._replace(max_tokens=0)).num_tokens == 0
