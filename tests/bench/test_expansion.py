"""An expanded model says what the small one says: logits, text, quantised text; and the files survive interruption."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="expansion needs the package gguf: scripts/run.py install export")

import edgespec
from demo import DEMO, TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.bench.expanded_heads import copies_of
from edgespec.bench.expanded_tensors import cancelling_shares_of, shares_of
from edgespec.bench.expansion import Shape
from edgespec.engines.llamacpp import LlamaCppEngine
from edgespec.errors import ConfigError, ModelFileError
from edgespec.export.gguf import convert
from edgespec.formats.checkpoint import Checkpoint
from edgespec.loading.sample_prompts import PROMPTS
from edgespec.types import Batch
from expansion.checkpoint import NoisyExpansion, expand
from expansion.shapes import SHAPES, shape_of

# Wider, deeper, more and larger groups of heads, a longer vocabulary: everything that is expanded, in little.
SMALL = Shape(1024, 1792, 11, 16, 4, vocab_size=4352)
TOKENS_PER_PROMPT = 260
EXACT: dict[str, Any] = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": False}
GREEDY = Sampling(temperature=0.0)


def source(role: str = "target") -> Checkpoint:
    return Checkpoint.open(DEMO / "hf" / role)


def opened(path: Path, **settings: Any) -> LlamaCppEngine:
    return LlamaCppEngine.load(path, threads=TEST_THREADS, reproducible=False, context_length=512, **settings)


def all_logits(path: Path, texts: list[list[int]], **settings: Any) -> np.ndarray:
    """Scores [tokens of all texts, vocabulary], every text from an empty cache."""
    rows = []
    with opened(path, **settings) as engine:
        for ids in texts:
            engine.rollback(0)
            rows.append(engine.forward(Batch.chain(ids)).copy())
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return expand(NoisyExpansion(source(), SMALL), tmp_path_factory.mktemp("expanded") / "hf")


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[str, tuple[Path, Path]]:
    """(demo target, expanded target) as GGUF, by type."""
    made = {}
    for kind in ("f32", "q8_0"):
        paths = (folder.parent / f"demo-{kind}.gguf", folder.parent / f"big-{kind}.gguf")
        convert(DEMO / "hf" / "target", paths[0], kind)
        convert(folder, paths[1], kind)
        made[kind] = paths
    return made


@pytest.fixture(scope="module")
def texts(files: dict[str, tuple[Path, Path]]) -> list[list[int]]:
    """What the demo target writes greedily: over 2000 positions of dialogue, code, arithmetic, copying and prose."""
    options = GenerateOptions(max_tokens=TOKENS_PER_PROMPT, ignore_eos=True, drafter="none")
    with edgespec.load(str(files["f32"][0]), threads=TEST_THREADS, reproducible=False) as model:
        prompts = [model.encode_chat([{"role": "user", "content": prompt.text}]) for prompt in PROMPTS]
        return [ids + list(model.generate(ids, GREEDY, options).token_ids) for ids in prompts]


@pytest.fixture(scope="module")
def logits(files: dict[str, tuple[Path, Path]], texts: list[list[int]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Scores of (demo target, expanded target) along `texts`, by type."""
    settings = {"f32": EXACT, "q8_0": {}}
    return {
        kind: (all_logits(small, texts, **settings[kind]), all_logits(big, texts, **settings[kind]))
        for kind, (small, big) in files.items()
    }


def all_states(path: Path, ids: list[int]) -> np.ndarray:
    """The last normed states [tokens, width]."""
    with opened(path, **EXACT) as engine:
        engine.give_hidden_states(True)
        engine.forward(Batch.chain(ids))
        return engine.hidden_states().copy()


def test_the_copies_of_the_last_state_add_up_to_the_small_models(files: Any, texts: list[list[int]]):
    """Which is what heads trained on the small model read, whatever fills the row up."""
    ours, theirs = (all_states(path, texts[0][:24]) for path in files["f32"])
    assert theirs.shape == (24, SMALL.hidden_size)
    copies = copies_of(NoisyExpansion(source(), SMALL))
    np.testing.assert_allclose(theirs @ copies.T, ours, atol=1e-4)
    np.testing.assert_allclose(ours @ copies / 3, np.where(copies.any(axis=0), theirs, 0), atol=1e-4)


@pytest.mark.parametrize(("kind", "largest", "agreement"), [("f32", 2e-4, 0.9995), ("q8_0", 0.5, 0.997)])
def test_logits_are_those_of_the_small_model(logits: Any, kind: str, largest: float, agreement: float):
    """In 8 bits one float's rounding error now and then moves an activation by a whole step, and later layers spread
    that: then two tokens that were nearly equal may change places, and no others.
    """
    ours, theirs = logits[kind]
    assert ours.shape == (theirs.shape[0], 4096) and ours.shape[0] >= 2000
    assert np.abs(ours - theirs[:, :4096]).max() < largest
    first, second = ours.argmax(axis=1), theirs.argmax(axis=1)
    assert (first == second).mean() >= agreement
    rows = np.flatnonzero(first != second)
    assert (ours[rows, first[rows]] - ours[rows, second[rows]]).max(initial=0) < largest / 5


def test_padded_tokens_score_far_below_every_real_one(logits: Any):
    for _, big in logits.values():
        assert big.shape[1] == SMALL.vocab_size
        assert big[:, 4096:].max() < -100
        assert big[:, :4096].min() > -40


def test_greedy_text_is_the_same(files: Any):
    options = GenerateOptions(max_tokens=40, drafter="none")
    written = []
    for path in files["f32"]:
        with edgespec.load(str(path), threads=TEST_THREADS, reproducible=False) as model:
            prompts = [model.encode_chat([{"role": "user", "content": prompt.text}]) for prompt in PROMPTS[:4]]
            written.append([model.generate(ids, GREEDY, options).token_ids for ids in prompts])
    assert written[0] == written[1]
    assert sum(map(len, written[0])) >= 100


def test_a_draft_is_expanded_too(tmp_path: Path, texts: list[list[int]]):
    """Its widths fill no block of 256, its heads are fewer than a group."""
    expand(NoisyExpansion(source("draft"), SMALL), tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "big.gguf", "f32")
    convert(DEMO / "hf" / "draft", tmp_path / "small.gguf", "f32")
    ours, theirs = (all_logits(tmp_path / f"{name}.gguf", texts[:2], **EXACT) for name in ("small", "big"))
    assert np.abs(ours - theirs[:, : ours.shape[1]]).max() < 2e-4


def test_an_equal_shape_is_the_same_model(tmp_path: Path):
    expansion = NoisyExpansion(source(), NoisyExpansion(source(), SMALL).small_shape)
    big, small = Checkpoint.open(expand(expansion, tmp_path / "hf")), source()
    assert sorted(big.names()) == sorted(small.names())
    assert all(np.array_equal(big.weights(name), small.weights(name)) for name in small.names())
    assert big.config["rms_norm_eps"] == small.config["rms_norm_eps"]


def test_everything_is_there_several_times(folder: Path):
    big, small = Checkpoint.open(folder), source()
    expansion = NoisyExpansion(small, SMALL)
    assert expansion.places() == [0, 1, 2, 3, 4, 6, 7, 8, 9] and expansion.num_copies == 3
    first, q = (model.weights("model.layers.0.self_attn.q_proj.weight") for model in (small, big))
    # Query heads 0, 1 read key-value head 0 and 2, 3 read head 1: groups of four hold 0 1 0 1 and 2 3 2 3 by turns.
    for slot, head in enumerate([0, 1, 0, 1, 2, 3, 2, 3] * 2):
        rows = q[64 * slot : 64 * slot + 64]
        shared = sum(np.split(rows[:, :768], 3, axis=1))
        # the least float16 numbers lose a bit when they are halved
        np.testing.assert_allclose(shared, first[64 * head : 64 * head + 64], rtol=0, atol=2e-7)
    for layer in range(SMALL.num_layers):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights = big.weights(f"model.layers.{layer}.{name}.weight")
            np.testing.assert_array_equal(weights[:256], weights[256:512])
            assert not weights[768:].any() and np.count_nonzero(weights[:768]) > 0.7 * weights[:768].size
            # what equal inputs, as copies give them, add up to: nothing in a new layer
            total = np.abs(weights[:256].sum(axis=1, dtype=np.float64)).max()
            assert total > 0.01 if layer in expansion.places() else total == 0


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 11])
def test_shares_are_powers_of_two_and_sum_up(count: int):
    owners = np.concatenate((np.tile([0, 1], count), [-1]))
    shares, cancelling = shares_of(owners), cancelling_shares_of(owners)
    for owner in (0, 1):
        mine = shares[owners == owner]
        assert mine.sum() == 1 and (np.log2(mine) % 1 == 0).all()
        assert cancelling[owners == owner].sum() == 0
    assert shares[-1] == cancelling[-1] == 0


def test_noise_in_the_head_lowers_agreement_and_leaves_the_embedding(tmp_path: Path, texts: list[list[int]]):
    agreement = []
    small = NoisyExpansion(source(), SMALL).small_shape
    reference = all_logits(DEMO / "demo-target-q8_0.gguf", texts[:4]).argmax(axis=1)
    for sigma in (0.1, 0.4):
        checkpoint = Checkpoint.open(expand(NoisyExpansion(source(), small, sigma=sigma), tmp_path / f"{sigma}"))
        assert checkpoint.config["tie_word_embeddings"] is False
        assert np.array_equal(
            checkpoint.weights("model.embed_tokens.weight"), source().weights("model.embed_tokens.weight")
        )
        convert(checkpoint.folder, tmp_path / f"{sigma}.gguf", "q8_0")
        agreement.append((all_logits(tmp_path / f"{sigma}.gguf", texts[:4]).argmax(axis=1) == reference).mean())
    assert 0.8 < agreement[0] < 0.99
    assert 0.3 < agreement[1] < agreement[0] - 0.1


class Interrupted(Exception):
    pass


def test_an_interrupted_expansion_goes_on(tmp_path: Path, folder: Path):
    def stop(done: int, total: int, what: str) -> None:
        if done == 7:
            raise Interrupted

    output = tmp_path / "hf"
    with pytest.raises(Interrupted):
        expand(NoisyExpansion(source(), SMALL), output, stop)
    assert not (output / "config.json").exists()
    finished = sorted(output.glob("*.safetensors"))
    times = [path.stat().st_mtime_ns for path in finished]
    (output / "model-00009-of-00012.safetensors.tmp").write_bytes(b"half a file")  # what a kill leaves
    expand(NoisyExpansion(source(), SMALL), output)
    assert [path.stat().st_mtime_ns for path in finished] == times and len(finished) == 7
    for path in folder.glob("model*"):
        assert path.read_bytes() == (output / path.name).read_bytes()


def test_other_settings_start_over(tmp_path: Path):
    shape = replace(NoisyExpansion(source("draft"), SMALL).small_shape, hidden_size=512, intermediate_size=512)
    folder = expand(NoisyExpansion(source("draft"), shape), tmp_path / "hf")
    before = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    expand(NoisyExpansion(source("draft"), shape), folder)
    assert {path.name: path.read_bytes() for path in folder.glob("*.safetensors")} == before
    expand(NoisyExpansion(source("draft"), shape, seed=1), folder)
    after = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert all(after[name] == before[name] for name in before)  # nothing here is random
    expand(NoisyExpansion(source("draft"), replace(shape, hidden_size=768)), folder)
    assert {path.name: path.read_bytes() for path in folder.glob("*.safetensors")} != before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 128}, "heads have 64 dimensions"),
        ({"num_layers": 8}, "num_layers 8 is below the model's own 9"),
        ({"num_heads": 4, "num_kv_heads": 4}, "group_size 1 is below the model's own 2"),
        ({"hidden_size": 320}, "multiples of 256"),
        ({"num_heads": 18}, "whole groups"),
        ({"hidden_size": 256}, "a padded vocabulary needs a hidden size of at least 512"),
        ({"vocab_size": 4000}, "vocab_size 4000 is below"),
    ],
)
def test_a_shape_without_room_is_refused(changes: dict[str, int], message: str):
    with pytest.raises(ModelFileError, match=message):
        NoisyExpansion(source(), replace(SMALL, **changes))


def test_other_models_are_refused(tmp_path: Path):
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(DEMO / "hf" / "target" / name)
    config = json.loads((DEMO / "hf" / "target" / "config.json").read_text(encoding="utf-8"))
    for change, message in (
        ({"architectures": ["GPT2LMHeadModel"]}, "only a Llama"),
        ({"attention_bias": True}, "without biases"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change), encoding="utf-8")
        with pytest.raises(ModelFileError, match=message):
            NoisyExpansion(Checkpoint.open(tmp_path), SMALL)


def test_the_named_shapes_are_what_they_are_called():
    for name, low, high in (("60m", 55e6, 65e6), ("300m", 280e6, 320e6), ("1b", 1.0e9, 1.3e9), ("3b", 2.9e9, 3.3e9)):
        shape = shape_of(name)
        assert low < shape.parameters() < high
        assert NoisyExpansion(source(), shape).shape is shape
    assert SHAPES["1b"].parameters() == 1_235_814_400  # Llama 3.2 1B
    with pytest.raises(ConfigError, match="no shape '7b'; allowed: 60m, 300m, 1b, 3b"):
        shape_of("7b")


def written_sizes(folder: Path) -> Iterator[int]:
    checkpoint = Checkpoint.open(folder)
    return (int(np.prod(checkpoint.shape(name))) for name in checkpoint.names())


def test_parameters_are_counted_right(folder: Path):
    assert sum(written_sizes(folder)) == SMALL.parameters()
