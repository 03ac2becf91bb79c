"""Multi-token prediction: the layer against numpy, and drafts that change no text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import edgespec
from demo import DEMO
from edgespec import GenerateOptions, Sampling
from edgespec.config.values import EngineName
from edgespec.engines.base import Engine
from edgespec.engines.head import DraftHead
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.llamacpp.footprint import footprint, head_footprint
from edgespec.engines.llamacpp.heads import try_head
from edgespec.engines.model_use import ModelUse
from edgespec.engines.onnx import OnnxEngine
from edgespec.engines.onnx.kernel_engine import KernelEngine
from edgespec.engines.onnx.kernel_head import load_drafter
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.formats.gguf.check import has_mtp
from edgespec.formats.gguf.header import read_header
from hybrid_gguf import HybridShape, cycle_tensors, tensors_of, write_lfm2, write_qwen35
from needs import NEEDS_KERNELS
from numpy_layers import attended, fed_forward, normed, rotated

Floats = NDArray[np.float32]
SHAPE = HybridShape(hidden=1024)
PROMPT = "the cat sat on the mat, the cat"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen35(tmp_path_factory.mktemp("mtp") / "mtp.gguf", SHAPE, has_mtp=True)


@pytest.fixture(scope="module")
def alone_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layer of the same model in a file of its own."""
    return write_qwen35(tmp_path_factory.mktemp("mtp") / "mtp-alone.gguf", SHAPE, has_mtp=True, only_mtp=True)


def opened(engine: Engine, path: Path | None) -> DraftHead:
    if isinstance(engine, KernelEngine):
        return load_drafter(engine, path, context_length=40)
    assert isinstance(engine, LlamaCppEngine)
    return engine.load_head(path, context_length=40)


@pytest.fixture(params=["in the model's file", "in a file of its own"])
def head(request: pytest.FixtureRequest, engine_name: str, model_path: Path, alone_path: Path) -> Iterator[DraftHead]:
    is_own = request.param == "in the model's file"
    load = OnnxEngine.load if engine_name == "onnx" else LlamaCppEngine.load
    engine = load(model_path, context_length=64, threads=1, has_mtp=is_own)
    with engine, opened(engine, None if is_own else alone_path) as found:
        yield found


def twin(path: Path, token_ids: list[int], states: Floats) -> tuple[Floats, Floats]:
    """(logits [n, vocabulary], states [n, width]) behind each pair, as the layer's definition says."""
    found = {name.removeprefix(f"blk.{SHAPE.layers}."): values for name, values in tensors_of(path).items()}
    weight = {name.removesuffix(".weight"): values for name, values in found.items()}
    count, size = len(token_ids), SHAPE.head_size
    frequencies = 10000.0 ** (-np.arange(size // 2) / (size // 2))  # all three positions are the same in a text
    joined = np.concatenate((normed(weight["token_embd"][token_ids]), normed(states)), axis=1)
    x = joined @ weight["nextn.eh_proj"].T
    inner = normed(x)
    queries, gates = np.moveaxis((inner @ weight["attn_q"].T).reshape(count, SHAPE.heads, 2, size), 2, 0)
    keys, values = ((inner @ weight[f"attn_{kind}"].T).reshape(count, SHAPE.kv_heads, size) for kind in "kv")
    queries, keys = (rotated(normed(each), np.arange(count), frequencies) for each in (queries, keys))
    read = attended(queries, keys, values, np.tri(count, dtype=bool), size**-0.5)
    x = x + read / (1 + np.exp(-gates.reshape(count, -1))) @ weight["attn_output"].T
    x = x + fed_forward(normed(x), weight["ffn_gate"], weight["ffn_up"], weight["ffn_down"])
    state = normed(x)
    return state @ weight["token_embd"].T, state


def pairs(count: int) -> tuple[list[int], Floats]:
    rng = np.random.default_rng(3)
    return rng.integers(0, 200, count).tolist(), rng.standard_normal((count, SHAPE.width)).astype(np.float32)


def close(ours: Floats, theirs: Floats) -> bool:
    """But for keys and values that are cached in half precision."""
    return bool(np.abs(ours - theirs).max() < 0.01 * theirs.std())


def test_the_layer_is_its_definition(head: DraftHead, model_path: Path) -> None:
    token_ids, states = pairs(12)
    logits, after = twin(model_path, token_ids, states)
    found, state = head.decode(np.array(token_ids, np.int32), head.encode(states))
    assert close(found, logits[-1]) and close(state, after[-1])
    head.restart(0)
    for place in range(12):
        found, state = head.decode(np.array(token_ids[place : place + 1], np.int32), states[place : place + 1])
        assert close(found, logits[place]) and close(state, after[place])


def test_pairs_that_are_dropped_leave_no_trace(head: DraftHead, model_path: Path) -> None:
    token_ids, states = pairs(8)
    logits, _ = twin(model_path, token_ids, states)
    head.decode(np.array([*token_ids[:5], 9, 9], np.int32), np.concatenate((states[:5], states[:2])))
    head.rollback(5)
    found, _ = head.decode(np.array(token_ids[5:], np.int32), states[5:])
    assert close(found, logits[-1])


@pytest.mark.parametrize("engine_name", ["onnx"], indirect=True)
def test_a_tree_of_guesses_has_the_bits_of_its_paths(head: DraftHead) -> None:
    token_ids, states = pairs(12)
    ids = np.array(token_ids, np.int32)
    head.decode(ids[:5], states[:5])
    parents = [-1, 0, 0, -1, 2, 1, 3]
    logits, after = (each.copy() for each in head.branch(ids[5:], states[5:], parents, [0, 2, 4, 5, 6]))
    for row, path in enumerate(([0], [0, 2], [0, 2, 4], [0, 1, 5], [3, 6])):
        places = 5 + np.array(path)
        found, state = head.decode(ids[places], states[places])
        assert np.array_equal(found, logits[row]) and np.array_equal(state, after[row])
        head.rollback(5)


@NEEDS_KERNELS
def test_a_text_of_other_tokens_gets_all_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the target's own tiles; the logits are those of a layer that scores all tokens."""
    first = 128
    token_ids, states = pairs(12)
    ids, few, many = np.array(token_ids, np.int32), np.full(40, first - 1, np.int32), np.full(40, first, np.int32)
    found = []
    for most in (first, 1 << 16):
        monkeypatch.setattr("edgespec.formats.gguf.hybrid.MOST_PREDICTED", most)
        path = write_qwen35(tmp_path / f"{most}.gguf", SHAPE, has_mtp=True)
        with OnnxEngine.load(path, context_length=64, threads=1) as engine, opened(engine, None) as head:
            for text in (few, many, np.array([], np.int32)):
                head.follow(text)
                found.append([head.decode(ids[:5], states[:5])[0].copy()])
                found[-1].append(head.branch(ids[5:], states[5:], [-1, 0, 0, -1, 2, 1, 3], [0, 2, 6])[0].copy())
                head.restart(0)
            if made := engine.source.drafter().rest_of_head():
                (rest,) = made[1].values()
                assert any(np.shares_memory(rest, each) for each in engine.source._tiles.values())
    narrow, wide, again, *whole = found
    for each in (*whole, wide):
        assert all(np.array_equal(a, b) for a, b in zip(each, whole[0], strict=True))
    for each in (narrow, again):
        assert all(np.array_equal(a, b[..., :first]) for a, b in zip(each, whole[0], strict=True))


@NEEDS_KERNELS
def test_both_engines_compute_a_layer_with_experts(qwen35moe_path: Path) -> None:
    token_ids, states = pairs(12)
    found = []
    for load, settings in ((OnnxEngine.load, {}), (LlamaCppEngine.load, {"has_mtp": True})):
        with load(qwen35moe_path, context_length=64, threads=1, **settings) as engine, opened(engine, None) as head:
            logits, state = head.decode(np.array(token_ids, np.int32), states)
            found.append((logits.copy(), state.copy()))
    assert close(found[0][0], found[1][0]) and close(found[0][1], found[1][1])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_no_text(engine_name: EngineName, model_path: Path, temperature: float) -> None:
    options = GenerateOptions(max_tokens=40, ignore_eos=True, logprobs=True)
    with edgespec.load(model_path, threads=1, engine=engine_name) as model:
        assert "mtp" in model.drafters.names and model.target.facts.name == engine_name
        for seed in range(3):
            sampling = Sampling(temperature=temperature, seed=seed)
            plain = model.generate(PROMPT, sampling, replace(options, drafter="none"))
            for length in (1, 3, 20):
                found = model.generate(PROMPT, sampling, replace(options, drafter="mtp", draft_length=length))
                assert found.token_ids == plain.token_ids and found.stats.drafted_tokens > 0 and not found.stats.notes
                assert engine_name == "llamacpp" or found.logprobs == plain.logprobs
            assert model.generate(PROMPT, sampling, replace(options, drafter="auto")).token_ids == plain.token_ids


@pytest.mark.parametrize("share", [1.0, 0.7, 0.0])
def test_rounds_become_fewer_as_often_as_the_layer_is_right(
    engine_name: EngineName, tmp_path: Path, share: float
) -> None:
    """A target that writes its vocabulary in order, and a layer that knows the token behind `share` of its tokens."""
    tensors, known = cycle_tensors(SHAPE, share)
    path = write_qwen35(tmp_path / "cycle.gguf", SHAPE, has_mtp=True, tensors=tensors)
    options = GenerateOptions(max_tokens=60, ignore_eos=True, drafter="mtp", draft_length=4)
    with edgespec.load(path, threads=1, drafter="mtp", engine=engine_name) as model:
        found = model.generate([0, 1, 2], Sampling(temperature=0), options)
    assert found.token_ids == tuple(range(3, 63))
    rounds, last = 0, 3  # of the prompt the first token
    while last < 62:
        right = next((n for n in range(4) if last + n > 60 or not known[last + n]), 4)
        rounds, last = rounds + 1, last + right + 1
    assert found.stats.rounds == rounds


def test_a_model_without_the_layer_is_named(tmp_path: Path) -> None:
    plain, other = write_qwen35(tmp_path / "plain.gguf", SHAPE), write_lfm2(tmp_path / "other.gguf", SHAPE)
    for path in (plain, other):
        assert not has_mtp(read_header(path))
        with pytest.raises(CapabilityError, match="'mtp' needs multi-token prediction layers"):
            edgespec.load(path, threads=1, drafter="mtp")
    with pytest.raises(CapabilityError, match="'mtp' needs multi-token prediction layers"):
        edgespec.load(DEMO, drafter="mtp")


def test_the_layer_in_a_file_of_its_own_drafts_the_same(model_path: Path, alone_path: Path, tmp_path: Path) -> None:
    without = write_qwen35(tmp_path / "without.gguf", SHAPE)
    options = GenerateOptions(max_tokens=40, ignore_eos=True, drafter="mtp", draft_length=3)
    with edgespec.load(model_path, threads=1, drafter="mtp") as model:
        own = model.generate(PROMPT, Sampling(temperature=0), options)
    for target in (without, model_path):
        with edgespec.load(target, draft=alone_path, threads=1) as model:
            assert "mtp" in model.drafters.names
            found = model.generate(PROMPT, Sampling(temperature=0), options)
            plain = model.generate(PROMPT, Sampling(temperature=0), replace(options, drafter="none"))
        assert found.token_ids == own.token_ids == plain.token_ids
        assert found.stats.drafted_tokens == own.stats.drafted_tokens > 0
        assert found.stats.accepted_tokens == own.stats.accepted_tokens


def test_a_file_with_the_layer_alone_is_named(alone_path: Path, tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="a multi-token prediction layer, which only drafts for another model"):
        edgespec.load(alone_path, threads=1)
    for name, shape, fix in (
        ("wide", replace(SHAPE, width=128), "reads a target of width 64, this target has 128"),
        ("deep", replace(SHAPE, layers=8), "for a target of 4 layers, this one has 8"),
        ("other", replace(SHAPE, merges=50), "was made for"),
    ):
        target = write_qwen35(tmp_path / f"{name}.gguf", shape)
        with pytest.raises(CapabilityError, match=fix):
            edgespec.load(target, draft=alone_path, threads=1)
    with pytest.raises(CapabilityError, match=r"'model' needs a draft .*, a multi-token prediction layer, and"):
        edgespec.load(write_qwen35(tmp_path / "plain.gguf", SHAPE), draft=alone_path, drafter="model")


def test_a_file_without_layers_of_a_model_is_refused(alone_path: Path, tmp_path: Path) -> None:
    """llama.cpp would count its layers below zero."""
    data, key = alone_path.read_bytes(), b"qwen35.nextn_predict_layers"
    at = data.index(key) + len(key) + 4
    (tmp_path / "wrong.gguf").write_bytes(data[:at] + (9).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ModelFileError, match="no layers but those that predict further tokens"):
        try_head(tmp_path / "wrong.gguf")


def test_damaged_weights_are_named(alone_path: Path, tmp_path: Path) -> None:
    eh_proj = f"blk.{SHAPE.layers}.nextn.eh_proj.weight"
    tensors = {eh_proj: np.full((SHAPE.width, 2 * SHAPE.width), np.nan, np.float32)}
    path = write_qwen35(tmp_path / "nan.gguf", SHAPE, has_mtp=True, only_mtp=True, tensors=tensors)
    with pytest.raises(ModelFileError, match=r"nan.gguf"):
        try_head(path)
    try_head(alone_path)


def test_the_layer_is_planned_where_it_drafts(model_path: Path, alone_path: Path) -> None:
    """In the model's own file, and in one of its own."""
    uses = (ModelUse(256, speculates=drafts, has_mtp=drafts) for drafts in (True, False))
    drafted, plain = (footprint(model_path, use).own for use in uses)
    alone = head_footprint(alone_path, ModelUse(256))
    engine = LlamaCppEngine.load(model_path, context_length=256, threads=1, has_mtp=True)
    with engine, engine.load_head() as head:
        assert drafted - plain > head.facts.num_bytes > 0
    with LlamaCppEngine.load(model_path, threads=1) as engine, engine.load_head(alone_path) as head:
        assert alone.mapped == alone_path.stat().st_size and alone.mapped + alone.own > head.facts.num_bytes > 0
