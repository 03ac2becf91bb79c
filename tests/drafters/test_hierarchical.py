"""Drafts of a small model before a medium one, and of the target's first layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgespec
from demo import DEMO, TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.hierarchical import HierarchicalDrafter
from edgespec.drafters.model import EarlyExitDrafter, ModelDrafter
from edgespec.engines.model_use import ModelUse
from edgespec.engines.onnx import OnnxEngine
from edgespec.engines.onnx.footprint import footprint
from edgespec.engines.onnx.kernel_engine import KernelEngine
from edgespec.errors import CapabilityError, ConfigError, ModelNotFound, VocabularyMismatch
from edgespec.sampling.sampler import Sampler
from edgespec.types import Batch, Draft, Logits, Verdict
from lossless import VOCABULARY, assert_same_text
from needs import NEEDS_KERNELS
from table_engine import TableEngine

SAMPLED = Sampling(temperature=0.8, top_k=5, top_p=0.9, min_p=0.05, seed=9)


class Watched(TableEngine):
    """Counts its passes and remembers how wide they were."""

    widths: list[int]

    def forward(self, batch: Batch) -> Logits:
        self.widths.append(batch.width)
        return super().forward(batch)


def pair_of(target: TableEngine, inner: int = 3, context_length: int = 400) -> HierarchicalDrafter:
    """A small and a medium model related to `target`; the small one drafts `inner` tokens for each of its passes."""
    engines = [target.related(sigma, seed) for sigma, seed in ((1.5, 1), (0.7, 2))]
    for engine in engines:
        engine.facts = replace(engine.facts, context_length=context_length)
    return HierarchicalDrafter(ModelDrafter(engines[0]), engines[1], inner)


@pytest.fixture
def target() -> TableEngine:
    return TableEngine.random(VOCABULARY, seed=1, context_length=400)


def assert_same(found: Draft, wanted: Draft) -> None:
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert found.evidence == wanted.evidence
    assert (found.distributions is None) == (wanted.distributions is None)
    for ours, theirs in zip(found.distributions or (), wanted.distributions or (), strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.probs.tolist() == theirs.probs.tolist()


@pytest.mark.parametrize("compares", [False, True])
@pytest.mark.parametrize("inner", [0, 1, 5])
@pytest.mark.parametrize("settings", [
    Sampling(temperature=0.0),
    SAMPLED,
    Sampling(temperature=1.2, repeat_penalty=1.3, frequency_penalty=0.2, penalty_window=8, seed=4),
])  # fmt: skip
def test_it_drafts_what_the_medium_alone_would(
    target: TableEngine, settings: Sampling, inner: int, compares: bool
) -> None:
    """Tokens, evidence and distributions, so whatever holds of a draft model's drafts holds of these."""
    drafter = pair_of(target, inner)
    alone = ModelDrafter(target.related(0.7, 2))
    rng = np.random.default_rng(0)
    text = rng.integers(0, VOCABULARY, 20).astype(np.int32)
    sampler = Sampler(settings, VOCABULARY)
    for most in (1, 2, 3, 7, 20, 20, 1, 20):
        request = DraftRequest(text, most, sampler, needs_distributions=compares)
        wanted = alone.draft(request)
        assert wanted.num_tokens == most
        assert_same(drafter.draft(request), wanted)
        kept = int(rng.integers(0, most + 1))  # some of the draft stands, then another token, and a few more
        drafter.observe(wanted, Verdict(tuple(range(kept)), 0))
        text = np.concatenate((text, wanted.token_ids[:kept], rng.integers(0, VOCABULARY, 1 + most % 6))).astype(
            np.int32
        )


def test_the_medium_is_asked_once_for_several_tokens(target: TableEngine) -> None:
    """With a small model that is the medium itself every token agrees, so each pass brings all it scored."""
    medium = target.related(0.7, 2)
    medium.__class__ = Watched
    assert isinstance(medium, Watched)
    medium.widths = []
    small = ModelDrafter(target.related(0.7, 2))
    drafter = HierarchicalDrafter(small, medium, ahead=5)
    text = np.array([0, 1, 2], np.int32)
    sampler = Sampler(SAMPLED, VOCABULARY)
    draft = drafter.draft(DraftRequest(text, 12, sampler))
    assert draft.num_tokens == 12
    assert medium.widths == [3 + 5, 1 + 5]
    # all stood and one more came: the medium lacks its own last token and that one
    text = np.concatenate((text, draft.token_ids, [7])).astype(np.int32)
    assert drafter.num_uncached(text) == 2
    medium.widths.clear()
    drafter.draft(DraftRequest(text, 4, sampler))
    assert medium.widths == [2 + 3]  # of 4 tokens the medium draws the last one itself


def test_it_stops_where_the_next_token_does_not_pay(target: TableEngine) -> None:
    """Asked after every token in order; what a pass has scored already is drafted all the same."""
    drafter = HierarchicalDrafter(ModelDrafter(target.related(0.7, 2)), target.related(0.7, 2), ahead=3)
    asked: list[int] = []

    def should_continue(count: int, evidence: tuple[float, ...]) -> bool:
        assert len(evidence) == 3
        asked.append(count)
        return count < 2 or count == 4

    text = np.array([0, 1, 2], np.int32)
    request = DraftRequest(text, 30, Sampler(SAMPLED, VOCABULARY), should_continue=should_continue)
    assert drafter.draft(request).num_tokens == 8  # 4 in the first pass, its last one paid; 4 in the second
    assert asked == list(range(1, 9))


# -- on the demo family


def test_auto_takes_a_medium_that_was_named() -> None:
    medium = DEMO / "demo-medium-q8_0.gguf"
    with edgespec.load("demo", medium=medium) as model:
        parts = {name: drafter.bytes_used for name, drafter in model.drafters.drafters.items()}
        assert parts["hierarchical"] > parts["model"] > 0
        plain = model.generate("def f(", Sampling(seed=1), GenerateOptions(max_tokens=64, drafter="none"))
        assert model.generate("def f(", Sampling(seed=1), GenerateOptions(max_tokens=64)).token_ids == plain.token_ids


def test_what_is_missing_is_named(tiny_path: Path, tmp_path: Path) -> None:
    target = DEMO / "demo-target-q8_0.gguf"
    draft = DEMO / "demo-draft-q8_0.gguf"
    with pytest.raises(ModelNotFound, match="no medium "):
        edgespec.load(str(target), draft=draft, medium=tmp_path / "none.gguf", drafter="hierarchical")
    with pytest.raises(VocabularyMismatch):
        edgespec.load(str(target), draft=draft, medium=tiny_path, drafter="hierarchical")


# -- the early exit: first layers and head of a GGUF on the kernels as its draft model, over the same tiles


TARGET, LAYERS = DEMO / "demo-target-q8_0.gguf", 4


@pytest.fixture(scope="module")
def exiting() -> Iterator[KernelEngine]:
    with OnnxEngine.load(TARGET, context_length=200, threads=TEST_THREADS, hidden_states=True, state_layers=(4,)) as it:
        assert isinstance(it, KernelEngine)
        yield it


@NEEDS_KERNELS
def test_it_is_the_state_before_a_layer_through_norm_and_head(exiting: KernelEngine) -> None:
    """The same tiles, which are neither packed nor counted again; its cache is its own."""
    ids = np.random.default_rng(0).integers(0, exiting.vocabulary.size, 30).astype(np.int32)
    exiting.forward(Batch.chain(ids))
    states = exiting.hidden_states()[:, : exiting.hidden_states().shape[1] // 2].astype(np.float64)
    with exiting.first_layers(LAYERS) as engine:
        assert engine.source._tiles is exiting.source._tiles  # type: ignore[attr-defined]
        found = engine.forward(Batch.chain(ids)).copy()
        assert engine.length() == 30 and exiting.length() == 30
        assert 9 * engine.facts.kv_bytes_per_token == LAYERS * exiting.facts.kv_bytes_per_token
        assert engine.facts.weight_bytes < exiting.facts.weight_bytes
    tensors = edgespec_tensors()
    normed = states / np.sqrt((states**2).mean(axis=1, keepdims=True) + 1e-5) * tensors["output_norm.weight"]
    wanted = normed @ tensors["token_embd.weight"].T
    assert np.abs(found - wanted).max() < 0.05 * wanted.std()
    planned = [footprint(TARGET, ModelUse(200, exit_layer=layers)) for layers in (None, LAYERS)]
    assert planned[0].packed < planned[1].packed < 1.02 * planned[0].packed + (8 << 20)
    assert planned[1].cache > 1.3 * planned[0].cache


def edgespec_tensors() -> dict[str, np.ndarray]:
    import gguf

    found = {tensor.name: tensor for tensor in gguf.GGUFReader(TARGET).tensors}
    return {
        name: gguf.quants.dequantize(found[name].data, found[name].tensor_type).astype(np.float64)
        for name in ("output_norm.weight", "token_embd.weight")
    }


@NEEDS_KERNELS
def test_text_is_that_of_the_target_alone() -> None:
    with edgespec.load("demo", exit_layer=LAYERS, threads=TEST_THREADS) as model:
        drafter = model.drafters.drafters["early-exit"]
        assert isinstance(drafter, EarlyExitDrafter)
        assert 0 < drafter.bytes_used < model.target.facts.kv_bytes_per_token * model.target.facts.context_length
        found = assert_same_text(model, [("early-exit", 1), ("early-exit", 6), ("auto", "auto")], num_tokens=32)
    assert found["early-exit", 1].accepted_tokens > 0 < found["early-exit", 6].accepted_tokens


@NEEDS_KERNELS
def test_an_exit_is_the_small_model_of_a_hierarchy() -> None:
    medium = DEMO / "demo-medium-q8_0.gguf"
    with edgespec.load(TARGET, medium=medium, exit_layer=LAYERS, threads=TEST_THREADS) as model:
        drafter = model.drafters.drafters["hierarchical"]
        assert isinstance(drafter, HierarchicalDrafter) and drafter._small is model.drafters.drafters["early-exit"]
        found = assert_same_text(model, [("hierarchical", 5)], num_tokens=24)
    assert found["hierarchical", 5].accepted_tokens > 0


@NEEDS_KERNELS
def test_an_exit_that_is_not_there_is_refused(onnx_path: Path) -> None:
    with pytest.raises(CapabilityError, match=r"needs an early exit of a GGUF target.*give exit_layer="):
        edgespec.load("demo", drafter="early-exit")
    for given in ({"model": "demo", "engine": "llamacpp"}, {"model": str(onnx_path)}):
        with pytest.raises(CapabilityError, match="needs an early exit of a GGUF target for a target on onnx"):
            edgespec.load(**given, exit_layer=3)
    for layers, said in ((0, "of at least 1"), (9, r"allows 1\.\.8")):
        with pytest.raises(ConfigError, match=said):
            edgespec.load("demo", exit_layer=layers)
