"""Architectures that run on our kernels only: the logits of llama.cpp, always the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import edgespec
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.llamacpp.tokenizer import VocabularyFile
from edgespec.engines.model_use import ModelUse
from edgespec.engines.onnx import OnnxEngine
from edgespec.engines.onnx.footprint import SESSION_BYTES, footprint
from edgespec.engines.onnx.graph import read_graph
from edgespec.engines.onnx.kernel_engine import KernelEngine
from edgespec.engines.onnx.source import open_source, readable_model
from edgespec.engines.onnx.tokenizer import TokenizerFile
from edgespec.errors import CapabilityError, ConfigError
from edgespec.formats.gguf.tables import KINDS
from edgespec.formats.onnx.llama_config import WRITABLE
from edgespec.types import Batch, packed
from hybrid_gguf import HybridShape, write_granite, write_lfm2, write_qwen35
from lossless import assert_same_text
from needs import NEEDS_KERNELS, NEEDS_LLAMA
from tiled import bits
from tiny_architectures import CASES, LONG, write
from tiny_graphs import assert_same_vocabulary, mean_kl, scored, tiny_files
from tiny_mixtures import CASES as MIXTURES
from tiny_mixtures import Twin
from tiny_mixtures import write as write_mixture

pytestmark = NEEDS_KERNELS
IDS = np.random.default_rng(5).integers(3, 250, 400).tolist()
# Phi's factors of longer contexts than it was trained for have names of their own.
NAMES = [*CASES, "phi4-long"]
HYBRIDS = "qwen35", "qwen35moe", "lfm2", "lfm2moe", "granitehybrid"  # see test_hybrid_engine, too
CONVERTED = [name for name in WRITABLE if name not in CASES]  # from checkpoints
FOUR = HybridShape(weights=gguf.GGMLQuantizationType.Q4_0)
FOUR_BITS = {
    "qwen35": partial(write_qwen35, shape=FOUR),
    "qwen35moe": partial(write_qwen35, shape=replace(FOUR, experts=(6, 2, 32), is_joined=True)),
    "lfm2": partial(write_lfm2, shape=FOUR),
    "granitehybrid": partial(write_granite, shape=FOUR),
}
NEARLY_WHOLE = (8.0, 4096.0, 32.0, 1.0)  # a ramp of YaRN from 4.05 to 8.70
ALL = [*NAMES, *MIXTURES, *CONVERTED, *HYBRIDS]


@pytest.fixture(scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    writable = tiny_files(tmp_path_factory.mktemp("writable"))
    folder, made = tmp_path_factory.mktemp("tiny"), dict[str, Path]()

    def path(name: str) -> Path:
        name = name.removesuffix("-long")
        if name not in made:
            to = folder / f"{name}.gguf"
            if name in HYBRIDS:
                made[name] = request.getfixturevalue(f"{name}_path")
            elif name in CONVERTED:
                made[name] = writable(name)
            else:
                made[name] = write(to, CASES[name]) if name in CASES else write_mixture(to, MIXTURES[name])
        return made[name]

    return path


def use(name: str) -> dict[str, Any]:
    return {"threads": 1, "context_length": 512 if name.endswith("-long") else 192}


def test_all_that_run_are_compared() -> None:
    others = {"qwen3moe", "gpt-oss", "gemma4", "gemma4-assistant", "eagle3", "dflash", *HYBRIDS, *WRITABLE}
    assert set(KINDS) == others | {case.kind for case in CASES.values()}


@NEEDS_LLAMA
@pytest.mark.parametrize("name", ALL)
def test_logits_are_those_of_llama_cpp(name: str, tiny, tmp_path: Path) -> None:
    """But for queries and GELU in half precision there; with weights of 4 bits for activations, which both round.

    Where a layer adds little to a large embedding, so do its faults. llama.cpp rounds the ends of YaRN's ramp.
    """
    case, mixture, hybrid = CASES.get(name.removesuffix("-long")), MIXTURES.get(name), FOUR_BITS.get(name)
    path, limit, four = tiny(name), 1e-3, tmp_path / "four.gguf"
    if case and "embedding_scale" in case.metadata:
        limit *= 0.02
    if mixture and mixture.yarn:
        path, limit = write_mixture(tmp_path / "yarn.gguf", replace(mixture, yarn=NEARLY_WHOLE)), 3e-3
    files = [(path, limit)]
    if case or hybrid:
        files.append((write(four, case, "Q4_0") if case else hybrid(four), 0.04))
    for path, limit in files:
        with (
            OnnxEngine.load(path, **use(name)) as ours,
            LlamaCppEngine.load(path, **use(name), reproducible=False, flash_attention=False) as theirs,
        ):
            wanted, found = scored(theirs, IDS[:150], 50), scored(ours, IDS[:150], 50)
        assert np.sqrt(np.square(found - wanted).mean()) < limit * wanted.std()
        assert mean_kl(found, wanted) < limit


@pytest.mark.parametrize("name", MIXTURES)
def test_logits_are_those_of_the_definition(name: str, tiny):
    with OnnxEngine.load(tiny(name), threads=1) as engine:
        found = scored(engine, IDS[:40], 16)
    wanted = Twin(MIXTURES[name]).logits(IDS[:40])
    assert np.sqrt(np.square(found - wanted).mean()) < 1e-4 * wanted.std()


@pytest.mark.parametrize("name", ALL)
def test_a_row_has_the_same_bits_at_all_widths_in_trees_and_beside_others(name: str, tiny) -> None:
    """Chains of other texts in the same pass take other experts; on two threads as on one."""
    path, ids = tiny(name), IDS[:130]
    with OnnxEngine.load(path, **use(name)) as engine:
        wanted = scored(engine, ids, 63)
        for step in (1, 2, 3, 7, 16, 130):
            assert np.array_equal(bits(scored(engine, ids, step)), bits(wanted)), step
        scored(engine, ids[:20], 20)
        parents, zeros = np.array([-1, 0, 1, 0, 3, 4], np.int32), np.zeros(6, np.int32)
        tokens = np.array([*ids[20:23], *ids[40:43]], np.int32)
        tree = engine.forward(Batch(tokens, parents, zeros, zeros == 0)).copy()
        engine.rollback(20)
        alone = engine.forward(Batch.chain([ids[20], *ids[40:43]])).copy()
        assert np.array_equal(bits(tree[[0, 3, 4, 5]]), bits(alone))
    others = [np.random.default_rng(seed).integers(3, 250, 20).tolist() for seed in range(3)]
    with OnnxEngine.load(path, **use(name) | {"threads": 2}, max_sequences=4) as engine:
        texts = [ids[:20], *others]
        together = engine.forward(packed([Batch.chain(text, sequence=at) for at, text in enumerate(texts)])).copy()
    assert np.array_equal(bits(together[:20]), bits(wanted[:20]))


@pytest.mark.parametrize("name", ALL)
def test_memory_is_what_was_planned(name: str, tiny) -> None:
    given = use(name)
    planned = footprint(tiny(name), ModelUse(**given))
    with OnnxEngine.load(tiny(name), **given) as engine:
        arrays = engine.source.arrays().values()
        if name not in HYBRIDS:  # whose states are in it, see there
            assert planned.cache == engine._cache._chunks.nbytes
        # Padding of tiles to 16 outputs, and vectors that lie in the graph.
        held = sum(each.nbytes for each in arrays)
        assert abs(planned.packed - SESSION_BYTES - held) < 0.03 * held + 20_000


@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith("gemma4")])
def test_the_first_layers_alone_draft(name: str, tiny) -> None:
    """Though they are of one kind, and need not all that the model has."""
    config = readable_model(tiny(name)).config
    recurrent = getattr(config, "recurrent_layers", ())
    least = 1 + next(layer for layer in range(config.num_layers) if layer not in recurrent)
    if least == config.num_layers:
        pytest.skip("its only attention is in its last layer")
    with OnnxEngine.load(tiny(name), ModelUse(**use(name), exit_layer=least)) as engine:
        with engine.first_layers(least) as first:
            assert np.isfinite(first.forward(Batch.chain(IDS[:20]))).all()
        for count in (least - 1, config.num_layers):
            with pytest.raises(ConfigError, match=f"allows {least}..{config.num_layers - 1}"):
                engine.first_layers(count)


@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith("gemma4") and name not in HYBRIDS])
def test_heads_get_the_inputs_of_layers(name: str, tiny) -> None:
    """What the model that the layers before make would norm for its head."""
    last = readable_model(tiny(name)).config.num_layers - 1
    given = ModelUse(**use(name), hidden_states=True, state_layers=(last,))
    if name.startswith(("olmo", "exaone4")):
        with pytest.raises(CapabilityError, match="it has no norm before it"):
            OnnxEngine.load(tiny(name), given)
        return
    with OnnxEngine.load(tiny(name), given) as engine:
        engine.forward(Batch.chain(IDS[:20]))
        states = engine.hidden_states()
        source = engine.source.first_layers(last)
        graph = read_graph(source, cells=given.context_length or 0, hidden_states=True)
        with KernelEngine(source, graph, engine.settings, engine.vocabulary) as part:
            part.forward(Batch.chain(IDS[:20]))
            wanted = part.hidden_states()
        states = states[:, : wanted.shape[1]]
        config = source.model.config
        weight = source._weights().vector("model.norm.weight") * config.logit_scale
        normed = states / np.sqrt(np.square(states).mean(axis=1, keepdims=True) + config.norm_epsilon) * weight
        np.testing.assert_allclose(normed, wanted, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("name", ["granite", "olmo3", "phi4", "gemma2", "mistral3", "glm4", *MIXTURES])
def test_drafts_change_no_token_and_no_log_probability(name: str, tiny) -> None:
    """The draft model is the target's own twin, so that some of its tokens are accepted."""
    with edgespec.load(tiny(name), draft=tiny(name), threads=2, context_length=256) as model:
        assert model.target.facts.name == "onnx"
        asked = [("model", 1), ("model", 5), ("ngram", 4), ("suffix", 8), ("auto", "auto")]
        found = assert_same_text(model, asked, num_tokens=16)
    for length in (1, 5):
        assert 0 < found["model", length].accepted_tokens <= found["model", length].drafted_tokens


def test_other_factors_of_rotary_frequencies_belong_to_a_longer_context(tiny) -> None:
    found = {}
    for length in (100, LONG, LONG + 1):
        with OnnxEngine.load(tiny("phi4"), threads=1, context_length=length) as engine:
            found[length] = scored(engine, IDS[:20], 20)
    assert np.array_equal(found[100], found[LONG])
    assert np.abs(found[LONG + 1] - found[LONG]).max() > 0.1


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("granite", {"residual_scale": None}, "granite.residual_scale is missing"),
        ("granite", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping = 5.0 is not known"),
        ("gemma2", {"attention.sliding_window": None}, "gemma2.attention.sliding_window is missing"),
        ("olmo3", {"rope.scaling.yarn_attn_factor": 2.0}, "yarn_attn_factor is 2.0; 1.20794 is that of its factor 8"),
        ("olmo3", {"attention.sliding_window_pattern": [True]}, "its pattern of windows is for 1 layers, it has 4"),
        ("phi4", {"rope.dimension_count": 26}, "rope_factors_short.weight is F32 (12,), F32 (13,) is needed"),
    ],
)
def test_what_the_kernels_lack_is_told(name: str, change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", CASES[name], metadata=change)
    with pytest.raises(CapabilityError) as told:
        OnnxEngine.load(path)
    assert reason in str(told.value)


# -- experts and Gemma 4's vocabulary


@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "gemma4-26b"])
def test_quantised_experts_lose_what_their_inputs_do(name: str, kind: str, tmp_path: Path):
    """Against the same weights in double precision: inputs become bytes, and that is all. No choice depends on it."""
    case = replace(MIXTURES[name], experts=(5, 5, 32))
    path = write_mixture(tmp_path / "tiny.gguf", case, {"_exps.weight": kind})
    weights = {each.name: gguf.dequantize(each.data, each.tensor_type) for each in gguf.GGUFReader(path).tensors}
    with OnnxEngine.load(path, threads=1) as engine:
        found = scored(engine, IDS[:40], 16)
    wanted = Twin(case, weights).logits(IDS[:40])
    assert np.sqrt(np.square(found - wanted).mean()) < 0.05 * wanted.std()


def gemma_vocabulary() -> dict[str, Any]:
    """Metadata of a small vocabulary of Gemma 4's kind: bytes, letters, then what the merges make."""
    merges = ["h e", "l l", "he ll", "hell o", "\u2581 hello", "\u2581 w", "\n \n", "\n\n \n\n", "\u2581 \u2581", "o r"]
    letters = ["\u2581", "\n", *"helowrd.,1\u00fc"]
    texts = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    texts += [merge.replace(" ", "") for merge in merges]
    kinds = [3, 3, 3, 2, 4] + [6] * 256 + [1] * (len(letters) + len(merges))
    found = {"tokens": texts, "token_type": kinds, "scores": [0.0] * len(texts), "merges": merges}
    found |= {"model": "gemma4", "pre": None, "bos_token_id": 2, "eos_token_id": 1, "add_bos_token": True}
    found |= {"unknown_token_id": np.uint32(3), "padding_token_id": np.uint32(0), "add_space_prefix": False}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


@NEEDS_LLAMA
def test_texts_become_the_tokens_that_llama_cpp_makes_of_gemmas_vocabulary(tmp_path: Path):
    metadata = gemma_vocabulary()
    size, case = len(metadata["tokenizer.ggml.tokens"]), MIXTURES["gemma4-31b"]
    changed = {"token_embd.weight": np.ones((size, case.width), np.float32)}
    path = write_mixture(tmp_path / "tiny.gguf", case, metadata=metadata, changed=changed)
    texts = [
        "hello world",
        " hello\n\n\nhell  w",
        "\n\n\n\n\n",
        "hello<|turn>hello \u00fc\u4f60",
        "",
        "a\n \n h",
        "<0x41>1",
    ]
    with VocabularyFile(path) as theirs:
        ours = TokenizerFile(open_source(path).folder, theirs.size)
        assert_same_vocabulary(ours, theirs, texts)
