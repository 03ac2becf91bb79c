"""The draft model with branches: what it proposes, and that the text stays the target's own."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import edgespec
from edgespec import GenerateOptions, Sampling
from edgespec.config.values import RuleName
from edgespec.control.base import FixedLength
from edgespec.control.prices import path_products
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.tree import TreeDrafter
from edgespec.engines.booked import is_chain
from edgespec.engines.sequence import CachedSequence, Passes
from edgespec.errors import CapabilityError
from edgespec.generation.decode import autoregressive, speculative
from edgespec.generation.run_state import Run
from edgespec.reports import RoundRecord
from edgespec.sampling.acceptance import coupled
from edgespec.sampling.sampler import Sampler
from edgespec.sampling.stopping import StopRules
from edgespec.types import Batch, Draft, Logits
from lossless import DEMO, PLAIN, PROMPTS, VOCABULARY, paths, run_once, side_branches
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_keeps_to_its_limits(target: TableEngine, temperature: float) -> None:
    drafter, sampling = tree_drafter(target), replace(PLAIN, temperature=temperature)
    seen = set()
    for most, branches in itertools.product((1, 2, 7, 16, 33), (1, 2, 8)):
        draft = drafter.draft(request(most, branches, sampling))
        assert draft.num_tokens == most
        assert side_branches(draft) <= branches
        assert draft.main_chain.num_tokens >= max(1, most // (branches + 1) // 2)
        for node in range(-1, most):
            children = draft.token_ids[draft.children_of(node)].tolist()
            assert len(set(children)) == len(children) <= 4
        seen.add(side_branches(draft))
    assert max(seen) > 2


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


def test_nothing_follows_an_end_token() -> None:
    target = TableEngine.random(VOCABULARY, seed=1, context_length=400, end_id=4)
    draft = tree_drafter(target).draft(request(60))
    ends = np.flatnonzero(draft.token_ids == 4)
    assert ends.size
    assert not set(ends.tolist()) & set(draft.parents.tolist())


@pytest.mark.parametrize("rule, most_branches", [("rejection", 8), ("coupled", 0)])
def test_without_trees_it_drafts_a_chain(target: TableEngine, rule: str, most_branches: int) -> None:
    """Under a rule that takes no trees, or with an engine that scores none."""

    class Chains(TableEngine):
        @property
        def most_branches(self) -> int:
            return most_branches

    class Watched(TreeDrafter):
        def drafting(self, request: DraftRequest) -> Passes[Draft]:
            draft = yield from super().drafting(request)
            assert draft.is_chain and draft.num_tokens <= 5
            return draft

    engine = Chains(target._table, context_length=400)
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
    cached, sampler = CachedSequence(target), Sampler(PLAIN, VOCABULARY)
    runs = [Run(cached, TEXT, sampler, StopRules(frozenset(), (), 200)) for _ in range(2)]
    plain = [event.token_id for event in autoregressive(runs[0])]
    assert [event.token_id for event in speculative(runs[1], Alternating(model, 9), coupled)] == plain


class Interrupted(TableEngine):
    """Ends one pass over a tree with an interrupt right after it was made."""

    passes_left = 1 << 30

    def forward(self, batch: Batch) -> Logits:
        logits = super().forward(batch)
        if not is_chain(batch.parents.tolist()):
            self.passes_left -= 1
            if not self.passes_left:
                raise KeyboardInterrupt
        return logits


@pytest.mark.parametrize("passes_left", [1, 4])
def test_an_interrupt_inside_a_tree_leaves_both_caches_usable(target: TableEngine, passes_left: int) -> None:
    engine = Interrupted(target._table, context_length=400)
    cached, drafter = CachedSequence(engine), tree_drafter(target)
    sampler, stop = Sampler(PLAIN, VOCABULARY), StopRules(frozenset(), (), 50)
    plain = [event.token_id for event in autoregressive(Run(cached, TEXT, sampler, stop))]
    engine.passes_left = passes_left
    with pytest.raises(KeyboardInterrupt):
        list(speculative(Run(cached, TEXT, sampler, stop), FixedLength(drafter, 8), coupled))
    found = speculative(Run(cached, TEXT, sampler, stop), FixedLength(drafter, 8), coupled)
    assert [event.token_id for event in found] == plain


def test_a_cancelled_draft_ends_quietly_and_the_next_is_whole(target: TableEngine) -> None:
    small = target.related(sigma=1.0)
    drafter, cached = TreeDrafter(ModelDrafter(small)), CachedSequence(target)
    expected = run_once(cached, None, "coupled", 0, PLAIN, 40)
    run = Run(cached, np.array([0, 1], np.int32), Sampler(PLAIN, VOCABULARY), StopRules(frozenset(), (), 40))
    events = speculative(run, FixedLength(drafter, 8), coupled)
    begun = [next(events).token_id for _ in range(3)]
    small.cancel()
    begun += [event.token_id for event in events]
    assert run.stats.finish_reason == "cancelled"
    assert begun == [event.token_id for event in expected][: len(begun)]
    again = run_once(cached, drafter, "coupled", 8, PLAIN, 40)
    assert [event.token_id for event in again] == [event.token_id for event in expected]


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


def test_a_pair_without_a_draft_has_no_tree() -> None:
    with (
        edgespec.load(str(DEMO.parent / "demo-target-q8_0.gguf"), drafter="ngram", threads=1) as model,
        pytest.raises(CapabilityError, match="drafter 'tree' needs a draft model"),
    ):
        model.generate([1, 2, 3], options=GenerateOptions(max_tokens=2, drafter="tree"))
