"""The draft model with branches and with a window: what it proposes, and that the text stays the target's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import edgespec
from edgespec import GenerateOptions, Sampling
from edgespec.config.values import RuleName
from edgespec.control.base import FixedLength
from edgespec.control.prices import path_products
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.hierarchical import HierarchicalDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.tree import TreeDrafter
from edgespec.engines.sequence import CachedSequence, Passes
from edgespec.reports import RoundRecord
from edgespec.sampling.acceptance import coupled
from edgespec.sampling.sampler import Sampler
from edgespec.types import Batch, Draft, Logits, TokenIds
from lossless import DEMO, PLAIN, PROMPTS, VOCABULARY, autoregressive, paths, run_of, run_once, speculative
from needs import NEEDS_KERNELS
from table_engine import TableEngine

TEXT = np.array([0, 1, 2, 3], np.int32)


@pytest.fixture
def target() -> TableEngine:
    return TableEngine.random(VOCABULARY, seed=1, context_length=400)


def tree_drafter(target: TableEngine, sigma: float = 1.0) -> TreeDrafter:
    return TreeDrafter(ModelDrafter(target.related(sigma=sigma)))


def request(most: int = 16, branches: int = 8, sampling: Sampling = PLAIN, **more: object) -> DraftRequest:
    return DraftRequest(TEXT, most, Sampler(sampling, VOCABULARY), max_branches=branches, **more)


def test_the_main_chain_is_what_the_draft_model_alone_would_draft(target: TableEngine) -> None:
    for sampling in (Sampling(temperature=0.0), replace(PLAIN, seed=3), replace(PLAIN, temperature=0.7, seed=5)):
        found = tree_drafter(target).draft(request(sampling=sampling)).main_chain
        alone = ModelDrafter(target.related(sigma=1.0)).draft(request(found.num_tokens, sampling=sampling))
        assert found.num_tokens > 1
        assert found.token_ids.tolist() == alone.token_ids.tolist()


def test_siblings_are_the_next_of_the_race_that_the_target_runs(target: TableEngine) -> None:
    sampling, small = replace(PLAIN, seed=2), target.related(sigma=1.0)
    draft = TreeDrafter(ModelDrafter(small)).draft(request(24, sampling=sampling))
    sampler = Sampler(sampling, VOCABULARY)
    for path, children in paths(draft):
        law = sampler.distribution(small.row([*TEXT, *path]), TEXT)
        assert children == sampler.ranked(law, TEXT.size + len(path))[0].token_ids[: len(children)].tolist()


def test_a_node_comes_in_only_if_its_path_pays_for_its_row(target: TableEngine) -> None:
    sizes = [tree_drafter(target).draft(request(40, row_cost=cost)).num_tokens for cost in (0.0, 0.05, 0.2, 0.5, 1.0)]
    assert sizes[0] == 40
    assert sizes[-1] == 0
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 3
    draft = tree_drafter(target).draft(request(40, row_cost=0.2))
    assert min(path_products(draft, draft.confidences.tolist())) > 0.2


@pytest.mark.parametrize("rule, most_branches", [("rejection", 8), ("coupled", 0)])
def test_without_trees_it_drafts_a_chain(target: TableEngine, rule: str, most_branches: int) -> None:
    """Under a rule that takes no trees, or with an engine that scores none."""

    class Watched(TreeDrafter):
        def drafting(self, request: DraftRequest) -> Passes[Draft]:
            draft = yield from super().drafting(request)
            assert draft.is_chain and draft.num_tokens <= 5
            return draft

    engine = TableEngine(target._table, context_length=400)
    engine.facts = replace(engine.facts, max_branches=most_branches)
    drafter = Watched(ModelDrafter(target.related(sigma=1.0)))
    assert len(run_once(CachedSequence(engine), drafter, rule, 5, PLAIN, 60)) == 60


def test_two_drafters_share_one_cache(target: TableEngine) -> None:
    """Rounds of the chain and of the tree in turn, as the automatic choice makes them."""

    class Alternating(FixedLength):
        def proposing(self, request: DraftRequest):
            self._drafter = both[request.token_ids.size % 2]
            return super().proposing(request)

    model = ModelDrafter(target.related(sigma=1.0))
    both = (model, TreeDrafter(model))
    cached = CachedSequence(target)
    runs = [run_of(cached, PLAIN, 200, TEXT) for _ in range(2)]
    plain = [event.token_id for event in autoregressive(runs[0])]
    assert [event.token_id for event in speculative(runs[1], Alternating(model, 9), coupled)] == plain


class Interrupted(TableEngine):
    """Ends one pass over a tree with an interrupt right after it was made."""

    passes_left = 1 << 30

    def forward(self, batch: Batch) -> Logits:
        logits = super().forward(batch)
        if batch.parents.tolist() != list(range(-1, batch.width - 1)):
            self.passes_left -= 1
            if not self.passes_left:
                raise KeyboardInterrupt
        return logits


@pytest.mark.parametrize("passes_left", [1, 4])
def test_an_interrupt_inside_a_tree_leaves_both_caches_usable(target: TableEngine, passes_left: int) -> None:
    engine = Interrupted(target._table, context_length=400)
    cached, drafter = CachedSequence(engine), tree_drafter(target)
    plain = [event.token_id for event in autoregressive(run_of(cached, PLAIN, 50, TEXT))]
    engine.passes_left = passes_left
    with pytest.raises(KeyboardInterrupt):
        list(speculative(run_of(cached, PLAIN, 50, TEXT), FixedLength(drafter, 8), coupled))
    found = speculative(run_of(cached, PLAIN, 50, TEXT), FixedLength(drafter, 8), coupled)
    assert [event.token_id for event in found] == plain


@NEEDS_KERNELS
@pytest.mark.parametrize("rule", ["coupled", "typical"])
def test_our_kernels_score_trees(rule: RuleName) -> None:
    records: list[RoundRecord] = []
    target, draft = (DEMO.parent / f"demo-{role}-q8_0.gguf" for role in ("target", "draft"))
    with edgespec.load(target, draft=draft, engine="onnx", threads=1) as model:
        assert model.target.facts.max_branches
        ids, sampling = model.encode_chat([{"role": "user", "content": PROMPTS[0]}]), Sampling(temperature=0.8, seed=1)
        options = GenerateOptions(max_tokens=40, drafter="tree", draft_length=9, verify=rule, ignore_eos=True)
        result = model.generate(ids, sampling, options, records.append)
        plain = model.generate(ids, sampling, GenerateOptions(max_tokens=40, drafter="none", ignore_eos=True))
    assert len(result.token_ids) == 40
    assert rule != "coupled" or (result.token_ids, result.logprobs) == (plain.token_ids, plain.logprobs)
    assert max(record.accepted_tokens for record in records) > 3
    assert any(record.drafted_tokens == 9 for record in records)


# -- the part of a text that a draft model reads: all of it, or the latest tokens behind the first


LONG_TEXT = np.random.default_rng(5).integers(0, VOCABULARY, 2000).astype(np.int32)


def engine(context: int = 4096) -> TableEngine:
    return TableEngine.random(VOCABULARY, seed=2, context_length=context)


def draft(drafter: ModelDrafter | TreeDrafter, token_ids: TokenIds) -> None:
    drafter.draft(DraftRequest(token_ids, 4, Sampler(Sampling(temperature=0.0), VOCABULARY)))


def cached(drafter: ModelDrafter) -> list[int]:
    return drafter.cache.token_ids.tolist()


def test_of_a_long_text_the_latest_part_is_read_and_the_rest_when_it_can_be_paid() -> None:
    drafter = ModelDrafter(engine())
    assert drafter.reading(LONG_TEXT[:1000], 999, 300) == 301
    assert not drafter.reads_part  # it was chosen, not read
    draft(drafter, LONG_TEXT[:1000])
    assert drafter.reads_part
    assert cached(drafter)[:301] == [int(LONG_TEXT[0]), *LONG_TEXT[700:1000].tolist()]
    assert drafter.reading(LONG_TEXT[:1008], 999, 300) <= 8  # the window in use grows with the text
    draft(drafter, LONG_TEXT[:1008])
    assert drafter.reading(LONG_TEXT[:1008], 1007, 300) == 1007  # all but the first token
    draft(drafter, LONG_TEXT[:1008])
    assert cached(drafter)[:1008] == LONG_TEXT[:1008].tolist() and not drafter.reads_part


def test_a_small_part_is_not_worth_trying() -> None:
    drafter = ModelDrafter(engine())
    assert drafter.reading(LONG_TEXT[:1000], 500, 20) == 1000
    assert drafter.num_uncached(LONG_TEXT[:1000]) == 1000


def test_the_next_prompt_of_a_conversation_goes_on_with_the_part_that_was_read() -> None:
    drafter = ModelDrafter(engine())
    drafter.begin(LONG_TEXT[:1000])
    drafter.reading(LONG_TEXT[:1000], 0, 200)
    draft(drafter, LONG_TEXT[:1000])
    for _ in range(2):  # also by the tree that shares it
        drafter.begin(LONG_TEXT[:1100])
    assert (
        drafter.num_uncached(LONG_TEXT[:1100]) == 1099
    )  # of the whole text, which is what it reads if nobody limits it
    assert drafter.reading(LONG_TEXT[:1100], 500, 150) in range(95, 101)
    drafter.begin(LONG_TEXT[500:1500])
    assert drafter.reading(LONG_TEXT[500:1500], 500, 150) == 151  # another conversation


@pytest.mark.parametrize("context", [64, 512])
def test_a_text_beyond_the_context_counts_as_what_is_read_of_it(context: int) -> None:
    """However long it is, a window reads half of a context at most."""
    drafter = ModelDrafter(engine(context))
    half = context // 2
    assert drafter.reading(LONG_TEXT, half - 1, 0) == half
    assert drafter.reading(LONG_TEXT, half, 0) == half + 1
    draft(drafter, LONG_TEXT)
    assert cached(drafter)[: half + 1] == [int(LONG_TEXT[0]), *LONG_TEXT[-half:].tolist()]


@pytest.mark.parametrize("kind", ["model", "tree", "hierarchical"])
@pytest.mark.parametrize("settings", [PLAIN, Sampling(temperature=0.0)])
def test_the_text_does_not_depend_on_the_part(kind: str, settings: Sampling) -> None:
    """Windows come, grow and go in the middle of an answer."""
    target = TableEngine.random(VOCABULARY, seed=1, context_length=4096)
    small, medium = (ModelDrafter(target.related(sigma=sigma)) for sigma in (1.0, 0.5))

    class Limiting(FixedLength):
        def proposing(self, request: DraftRequest):
            drafter.reading(request.token_ids, 60 * (request.token_ids.size % 7), 128 + request.token_ids.size % 3)
            return super().proposing(request)

    makers = {
        "model": lambda: medium,
        "tree": lambda: TreeDrafter(medium),
        "hierarchical": lambda: HierarchicalDrafter(small, target.related(sigma=0.5)),
    }
    drafter = makers[kind]()
    runs = [run_of(CachedSequence(target), settings, 300, LONG_TEXT[:200]) for _ in range(2)]
    plain = [event.token_id for event in autoregressive(runs[0])]
    assert [event.token_id for event in speculative(runs[1], Limiting(drafter, 6), coupled)] == plain
