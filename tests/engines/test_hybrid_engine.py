"""Hybrids on our kernels: right, the same bits with any drafts, and every state that is dropped leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.engines.model_use import MOST_CHECKPOINTS, ModelUse
from edgespec.engines.onnx import OnnxEngine
from edgespec.engines.onnx.footprint import SESSION_BYTES, footprint
from edgespec.engines.onnx.kernel_engine import LOG, HybridEngine
from edgespec.engines.onnx.kernel_head import load_drafter
from edgespec.errors import BatchError, Cancelled, CapabilityError
from edgespec.types import Batch, Draft, Logits
from hybrid_gguf import HybridShape, tensors_of, write_granite, write_lfm2, write_qwen35
from lossless import assert_same_text
from needs import NEEDS_KERNELS
from tiny_gguf import write_model

pytestmark = NEEDS_KERNELS


@pytest.fixture(scope="module", params=["qwen35", "qwen35moe", "lfm2", "lfm2moe", "granitehybrid"])
def hybrid(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"{request.param}_path")
    return path


def opened(path: Path, **given: object) -> HybridEngine:
    found = OnnxEngine.load(path, context_length=400, threads=1, **given)
    assert isinstance(found, HybridEngine)
    return found


@pytest.fixture
def engine(hybrid: Path) -> Iterator[HybridEngine]:
    with opened(hybrid) as found:
        yield found


write_lfm2_moe = partial(write_lfm2, shape=HybridShape(experts=(6, 3, 32)))


def ids_of(count: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, 200, count).tolist()
    return found


def chained(engine: HybridEngine, ids: list[int]) -> Logits:
    return engine.forward(Batch.chain(ids)).copy()


@pytest.mark.parametrize("base", [0, 1, 2, 40])
def test_a_draft_of_which_any_part_is_accepted_was_never_there(engine: HybridEngine, base: int) -> None:
    text, wrong, length = ids_of(base + 60), ids_of(40, seed=1), 10

    def after(accepted: int, drafted: int) -> Logits:
        engine.rollback(0)
        if base:
            chained(engine, text[:base])
        kept = base + accepted
        if drafted:
            chained(engine, [*text[base:kept], *wrong[: drafted - accepted]])
            engine.rollback(kept)
        elif accepted:
            chained(engine, text[base:kept])
        first = chained(engine, text[kept : kept + 3])
        return np.concatenate([first, chained(engine, text[kept + 3 : kept + length])])

    for drafted in (1, 5, LOG):
        for accepted in {0, 1, drafted // 2, drafted - 1, drafted}:
            assert np.array_equal(after(accepted, drafted), after(accepted, 0)), (drafted, accepted)


def test_a_path_of_a_tree_is_kept_as_if_it_came_alone(engine: HybridEngine) -> None:
    rng, text = np.random.default_rng(2), ids_of(200)
    with_trees: list[int] = []
    for _ in range(12):
        count = int(rng.integers(2, LOG))
        parents = [-1, *(int(rng.integers(max(-1, i - 4), i)) for i in range(1, count - 1))]
        tokens = np.array(ids_of(count - 1, seed=count), np.int32)
        draft = Draft(tokens, np.array(parents, np.int32), np.ones(count - 1, np.float32))
        engine.forward(Batch.tree(text[len(with_trees)], draft))
        path = [int(rng.integers(count - 1))]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        engine.keep_path((0, *(node + 1 for node in path)))
        with_trees += [text[len(with_trees)], *tokens[path].tolist()]
        assert engine.length() == len(with_trees)
    found = chained(engine, text[:20])
    engine.rollback(0)
    chained(engine, with_trees)
    assert np.array_equal(found, chained(engine, text[:20]))


def test_a_tree_that_the_log_cannot_hold_is_refused(engine: HybridEngine) -> None:
    draft = Draft(np.zeros(LOG, np.int32), np.full(LOG, -1, np.int32), np.ones(LOG, np.float32))
    with pytest.raises(BatchError, match=f"a tree of {LOG + 1} rows was given, a .* takes {LOG}"):
        engine.forward(Batch.tree(1, draft))


@pytest.mark.parametrize("width", [3, LOG + 50])
def test_a_pass_that_fails_leaves_the_text_as_it_was(
    engine: HybridEngine, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here at its very end, when all states are those behind it."""
    text = ids_of(60)
    chained(engine, text)
    expected = chained(engine, ids_of(9, seed=5))
    engine.rollback(0)
    chained(engine, text)
    run = engine._run

    def cancelled(*given: Any) -> Logits:
        run(*given)
        raise Cancelled("the pass was cancelled")

    monkeypatch.setattr(engine, "_run", cancelled)
    with pytest.raises(Cancelled):
        engine.forward(Batch.chain(ids_of(width, seed=6), last_only=True))
    monkeypatch.undo()
    assert engine.length() == 60
    assert np.array_equal(chained(engine, ids_of(9, seed=5)), expected)


def test_a_text_returns_to_its_checkpoints(engine: HybridEngine) -> None:
    text = ids_of(300)
    expected: dict[int, Logits] = {}
    for start in (0, 50, 100, 150):
        chained(engine, text[start : start + 50])
        if start < 150:
            engine.checkpoint()
            expected[start + 50] = chained(engine, ids_of(LOG, seed=3))
            engine.rollback(start + 50)
    for at in range(200, 250):
        chained(engine, text[at : at + 1])
    assert [engine.reachable(length) for length in (250, 249, 160, 140, 60, 3)] == [250, 249, 150, 100, 0, 0]
    with pytest.raises(CapabilityError, match="cannot be rolled back to 160 of 250 tokens"):
        engine.rollback(160)
    for length in (150, 100):
        engine.rollback(length)
        assert np.array_equal(chained(engine, ids_of(LOG, seed=3)), expected[length])
    engine.rollback(0)
    assert engine.reachable(100) == 100 and engine.length() == 0


def test_drafts_change_no_bit(hybrid: Path, tmp_path: Path) -> None:
    """Of token ids and of log probabilities."""
    draft = write_model(tmp_path / "draft.gguf")
    drafters, lengths = ("ngram", "suffix", "model", "tree", "lookahead"), (1, 5, 31)
    with edgespec.load(hybrid, draft=draft, threads=1) as model:
        assert model.target.facts.name == "onnx" and model.target.facts.pinned_class
        found = assert_same_text(model, [*product(drafters, lengths), ("auto", "auto")], num_tokens=32)
    assert sum(stats.drafted_tokens - stats.accepted_tokens for stats in found.values()) > 1000


def test_the_states_have_the_planned_size(hybrid: Path, engine: HybridEngine) -> None:
    planned = footprint(hybrid, ModelUse(400)).cache
    copied = engine._states.state_bytes
    held = engine._cache._chunks.nbytes + engine._states._slots.nbytes
    assert planned == held + (1 + MOST_CHECKPOINTS) * copied
    chained(engine, ids_of(30))
    assert len(engine.save_state()) >= copied + 30 * engine.facts.kv_bytes_per_token


def test_a_layer_that_predicts_further_tokens_changes_no_bit(tmp_path: Path) -> None:
    """And drafts by default."""
    plain = write_qwen35(tmp_path / "plain.gguf")
    both = write_qwen35(tmp_path / "both.gguf", has_mtp=True, tensors=tensors_of(plain))
    planned, without = (footprint(both, ModelUse(400, threads=1, has_mtp=each)) for each in (True, False))
    with opened(both) as engine, load_drafter(engine) as head:
        assert planned.cache - without.cache == head._engine._cache._chunks.nbytes
        layer, whole = (list(each.source.arrays().values()) for each in (head._engine, engine))
        own = sum(each.nbytes for each in layer if not any(np.shares_memory(each, other) for other in whole))
        assert 0 <= planned.packed - without.packed - SESSION_BYTES - own < 4000  # small vectors lie in the graph
    with opened(plain) as one, opened(both) as other:
        assert np.array_equal(chained(one, ids_of(20)), chained(other, ids_of(20)))
    with edgespec.load(both, threads=1) as model:
        assert model.target.facts.name == "onnx" and "mtp" in model.drafters.names
    odd = {"blk.4.nextn.other.weight": np.ones(3, np.float32)}
    unknown = write_qwen35(tmp_path / "unknown.gguf", has_mtp=True, tensors=odd)
    with edgespec.load(unknown, threads=1) as model:
        assert model.target.facts.name == "onnx" and "mtp" not in model.drafters.names


@pytest.mark.parametrize(
    ("write", "change", "reason"),
    [
        (write_qwen35, {"qwen35.ssm.inner_size": 80}, "are not 80 wide"),
        (write_qwen35, {"qwen35.ssm.group_count": 3}, "4 heads of 16 values for 3 of keys"),
        (write_qwen35, {"qwen35.ssm.conv_kernel": 5}, "needs the tensor 'blk.0.ssm_conv1d.weight' of (5, 192)"),
        (write_qwen35, {"qwen35.full_attention_interval": 5}, "its layers are all of one kind"),
        (write_qwen35, {"qwen35.rope.dimension_count": 18}, "rope.dimension_count 18 is odd, or above"),
        (write_qwen35, {"qwen35.attn_logit_softcapping": 5.0}, "attn_logit_softcapping = 5.0 is not known"),
        (write_granite, {"granitehybrid.ssm.group_count": 2}, "16 numbers of a key in 2 groups; the kernels have"),
        (write_granite, {"granitehybrid.ssm.inner_size": 96}, "4 heads, 96 values and"),
        (write_granite, {"granitehybrid.ssm.inner_size": 64}, "needs the tensor 'blk.0.ssm_in.weight' of (64, 164)"),
        (write_lfm2, {"lfm2.attention.head_count_kv": [0, 0, 0]}, "(0, 0, 0) heads of keys"),
        (write_lfm2, {"lfm2.attention.head_count_kv": [0, 2, 0, 1]}, "(0, 2, 0, 1) heads of keys"),
        (write_lfm2_moe, {"lfm2moe.expert_gating_func": 1}, "expert_gating_func is not 2, a sigmoid"),
        (write_lfm2_moe, {"lfm2moe.leading_dense_block_count": 2}, "needs the tensor 'blk.1.ffn_gate.weight'"),
    ],
)
def test_what_the_kernels_lack_is_told(
    tmp_path: Path, write: Callable[..., Path], change: dict[str, object], reason: str
) -> None:
    with pytest.raises(CapabilityError) as told:
        opened(write(tmp_path / "model.gguf", metadata=change))
    assert reason in str(told.value)
