"""Architectures that run on our kernels only: the logits of llama.cpp and of transformers, always the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec import GenerateOptions, Sampling
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.model_use import ModelUse
from edgespec.engines.onnx import OnnxEngine
from edgespec.engines.onnx.footprint import SESSION_BYTES, footprint
from edgespec.engines.onnx.graph import read_graph
from edgespec.engines.onnx.kernel_engine import KernelEngine
from edgespec.engines.onnx.source import readable_model
from edgespec.errors import CapabilityError, ConfigError
from edgespec.formats.gguf.tables import KINDS
from edgespec.formats.onnx.llama_config import WRITABLE
from edgespec.types import Batch, packed
from needs import NEEDS_KERNELS, NEEDS_LLAMA
from tiled import bits
from tiny_architectures import CASES, LONG, hub_model, with_halves, write
from tiny_graphs import mean_kl, scored, tiny_files
from tiny_mixtures import CASES as MIXTURES
from tiny_mixtures import write as write_mixture

pytestmark = NEEDS_KERNELS
IDS = np.random.default_rng(5).integers(3, 250, 400).tolist()
# Phi's factors of longer contexts than it was trained for have names of their own.
NAMES = [*CASES, "phi4-long"]
HYBRIDS = "qwen35", "qwen35moe", "lfm2", "lfm2moe", "granitehybrid"  # see test_hybrid_engine, too
CONVERTED = [name for name in WRITABLE if name not in CASES]  # from checkpoints
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


@pytest.mark.parametrize("name", [*NAMES, *CONVERTED])
def test_logits_are_those_of_transformers(name: str, tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose attention is over keys and values in half precision, too."""
    torch = pytest.importorskip("torch", reason="compares with transformers, which needs torch")
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    ids = IDS if name.endswith("-long") else IDS[:150]
    case = CASES.get(name.removesuffix("-long"))
    read = partial(transformers.AutoModelForCausalLM.from_pretrained, attn_implementation="eager")
    model = hub_model(case) if case else read(tiny(name).with_suffix(""))
    module = import_module(type(model).__module__)
    monkeypatch.setattr(module, "eager_attention_forward", with_halves(module.eager_attention_forward))
    with torch.no_grad():
        wanted = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    with OnnxEngine.load(tiny(name), **use(name)) as engine:
        found = scored(engine, ids, len(ids))
    limit = 4e-4 if case and case.layers >= 64 else 1e-4
    assert np.sqrt(np.square(found - wanted).mean()) < limit * wanted.std()


@NEEDS_LLAMA
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_llama_cpp(name: str, tiny, tmp_path: Path) -> None:
    """But for queries in half precision there; with weights of 4 bits for activations, which both round.

    Where a layer adds little to a large embedding, so do its faults.
    """
    four = write(tmp_path / "four.gguf", CASES[name.removesuffix("-long")], "Q4_0")
    share = 0.02 if "embedding_scale" in CASES[name.removesuffix("-long")].metadata else 1.0
    for path, limit in ((tiny(name), 1e-3 * share), (four, 0.04)):
        with (
            OnnxEngine.load(path, **use(name)) as ours,
            LlamaCppEngine.load(path, **use(name), reproducible=False, flash_attention=False) as theirs,
        ):
            wanted, found = scored(theirs, IDS[:150], 50), scored(ours, IDS[:150], 50)
        assert np.sqrt(np.square(found - wanted).mean()) < limit * wanted.std()
        assert mean_kl(found, wanted) < limit


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


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", ["granite", "olmo3", "phi4", "gemma2", "mistral3", "glm4", *MIXTURES])
def test_drafts_change_no_token_and_no_log_probability(name: str, temperature: float, tiny) -> None:
    """The draft model is the target's own twin, so that some of its tokens are accepted."""
    with edgespec.load(tiny(name), draft=tiny(name), threads=2, context_length=128) as model:
        assert model.target.facts.name == "onnx"

        def answer(drafter: str, length: int | str) -> tuple[Any, ...]:
            options = GenerateOptions(
                max_tokens=40, ignore_eos=True, drafter=drafter, draft_length=length, logprobs=True
            )
            result = model.generate("abab baba abab baba", Sampling(temperature=temperature, seed=11), options)
            return result.token_ids, result.logprobs, result.stats

        ids, logprobs, _ = answer("none", 0)
        for drafter, length in (("model", 1), ("model", 5), ("ngram", 4), ("suffix", 8), ("auto", "auto")):
            others, theirs, stats = answer(drafter, length)
            assert (others, theirs) == (ids, logprobs), drafter
            assert drafter != "model" or 0 < stats.accepted_tokens <= stats.drafted_tokens


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
