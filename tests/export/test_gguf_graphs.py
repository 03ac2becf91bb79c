"""Graphs written of GGUF files: float graphs compute what transformers and llama.cpp do, other types lose little.

Random models of every architecture, made by our own converter to GGUF, and the demo target as it ships.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from demo import DEMO, TEST_THREADS
from edgespec.engines.onnx import OnnxEngine
from edgespec.errors import ModelFileError
from edgespec.export.gguf.convert import convert
from edgespec.export.gguf.tokenizer import check_tokenizer
from edgespec.export.onnx.writer import GgufWeights, open_gguf
from edgespec.formats.gguf.tables import KINDS
from edgespec.formats.onnx.forms import quantise_blocks
from edgespec.formats.onnx.llama_config import WRITABLE
from edgespec.types import Batch
from needs import NEEDS_LLAMA
from tiny_checkpoints import CASES as SETTINGS
from tiny_checkpoints import COLUMNS, LOGITS, write_checkpoint
from tiny_gguf import Shape, write_model
from tiny_graphs import CASES, IDS, difference, export_gguf, graph, logits, mean_kl, tiny_files
from tiny_mixtures import CASES as MIXTURES
from tiny_mixtures import write


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return tiny_files(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("case", [case for case in CASES if case in SETTINGS])
def test_a_float_graph_computes_what_transformers_does(case: str, tiny: Callable[[str], Path], tmp_path: Path):
    found = logits(graph(tiny(case), tmp_path / "made"))
    assert difference(found[:, COLUMNS], np.load(LOGITS)[case]) < 2e-5


@NEEDS_LLAMA
def test_gemma_2_whose_checkpoints_are_not_converted(tiny: Callable[[str], Path], tmp_path: Path):
    path, ids = tiny("gemma2"), IDS % 290  # of a smaller vocabulary
    assert difference(logits(graph(path, tmp_path / "made"), ids), logits(path, ids)) < 2e-3


def test_capped_logits_are_those_without_a_cap_through_its_formula(tiny: Callable[[str], Path], tmp_path: Path):
    source = write_checkpoint(tmp_path / "source", "gemma3", final_logit_softcapping=3.0)
    convert(source, tmp_path / "capped.gguf", "f32")
    found, plain = (logits(graph(path, tmp_path / path.stem)) for path in (tmp_path / "capped.gguf", tiny("gemma3")))
    np.testing.assert_allclose(found, 3 * np.tanh(plain / 3), atol=1e-5)


@pytest.mark.parametrize("case", ["smollm2", "llama", "qwen3", "gemma3"])
def test_other_types_lose_little(case: str, tiny: Callable[[str], Path], tmp_path: Path):
    """Tied and not, with biases, with products of their own for queries and keys."""
    wanted = logits(graph(tiny(case), tmp_path / "fp32"))
    losses = {quant: mean_kl(logits(graph(tiny(case), tmp_path / quant, quant)), wanted) for quant in LOSSES}
    assert {quant: losses[quant] < limit for quant, limit in LOSSES.items()} == dict.fromkeys(LOSSES, True), losses


LOSSES = {"int8": 0.006, "int4": 0.6}


@NEEDS_LLAMA
@pytest.mark.parametrize("name", ["smaug-bpe", "dbrx", "chatglm-bpe", "glm4", "seed-coder", "exaone4", "refact"])
def test_splitters_that_exports_do_not_write(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Files of SmolLM3, OLMo 2, GLM-4, Seed-OSS, EXAONE 4 and Granite have these names."""
    monkeypatch.setitem(SETTINGS, "smollm2", (SETTINGS["smollm2"][0], "llama-bpe"))
    monkeypatch.setattr("edgespec.export.gguf.tokenizer.pre_tokenizer_name", lambda _: name)
    path = tmp_path / "tiny.gguf"
    convert(write_checkpoint(tmp_path / "source", "smollm2"), path, "f32")
    folder = graph(path, tmp_path / "made").parent
    assert json.loads((folder / "tokenizer.json").read_text())["model"]["ignore_merges"] is (name == "glm4")
    assert check_tokenizer(folder, path) > 200


@NEEDS_LLAMA
@pytest.mark.parametrize("quant", ["q6_k", "iq4_nl"])  # q4_k_m: see test_four_bits
def test_the_types_of_llama_cpp_are_read(quant: str, tmp_path: Path):
    """The demo target: llama.cpp rounds inputs, the float graph does not, and that is all that differs."""
    path = tmp_path / f"{quant}.gguf"
    export_gguf(DEMO / "hf" / "target", path, quant, threads=TEST_THREADS)
    ids = np.array(
        json.loads((DEMO / "hf" / "target" / "config.json").read_text())["vocab_size"] // (IDS + 2), np.int32
    )
    assert mean_kl(logits(graph(path, tmp_path / "made"), ids), logits(path, ids)) < 0.005


@pytest.mark.parametrize("quant", ["int8", "Q4_0", "Q4_1"])
def test_reproducible_mode_holds_on_a_written_graph(quant: str, tmp_path: Path):
    """Rows of one pass have the bits of passes of two rows."""
    source, kind = DEMO / "demo-target-q8_0.gguf", quant
    if quant.startswith("Q"):
        shape, kind = Shape(weights=gguf.GGMLQuantizationType[quant]), "int4"
        source = write_model(tmp_path / "tiny.gguf", shape)
    path = graph(source, tmp_path / "made", kind)
    ids = IDS[:8] % 299  # of the smaller vocabulary
    with OnnxEngine.load(path, context_length=64, threads=TEST_THREADS, reproducible=True) as engine:
        whole = engine.forward(Batch.chain(ids)).copy()
        engine.rollback(0)
        parts = [engine.forward(Batch.chain(ids[start : start + 2])).copy() for start in range(0, 8, 2)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize(("bits", "size"), [(8, 64), (8, 32), (4, 32), (4, 16)])
def test_blocks_are_rounded_to_the_nearest_code(bits: int, size: int):
    rows = np.random.default_rng(0).standard_normal((6, 100), np.float32)
    rows[2] = 0
    codes, scales = quantise_blocks(rows, bits, size)
    if bits == 4:
        codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(6, -1, size)
    middle = 1 << bits - 1
    back = ((codes.astype(np.float32) - middle) * scales[..., None]).reshape(6, -1)
    assert np.abs(back[:, 100:]).max() == 0  # padding
    errors = np.abs(back[:, :100] - rows)
    steps = np.repeat(np.abs(scales), size, axis=1)[:, :100]
    assert (errors <= steps * 1.001).all() and np.mean(errors <= steps * 0.501) > 0.99
    extremes = np.abs(np.pad(rows, ((0, 0), (0, -100 % size)))).reshape(6, -1, size).max(axis=2)
    used = extremes > 0
    np.testing.assert_allclose(np.abs(scales[used]) * middle, extremes[used], rtol=1e-6)


def test_what_is_not_known_is_refused_by_name(tmp_path: Path):
    def refused(message: str, *, tensors: Any = None, **metadata: Any) -> None:
        named = {f"llama.{key.replace('__', '.')}": value for key, value in metadata.items()}
        path = write_model(tmp_path / "changed.gguf", metadata=named, tensors=tensors)
        with pytest.raises(ModelFileError, match=message):
            open_gguf(path)

    refused(r"llama\.attention\.scale = 0\.25 is not known", attention__scale=0.25)
    refused("llama models read a whole text at once", attention__causal=False)
    refused("settings that YaRN cannot have", rope__scaling__type="yarn", rope__scaling__factor=0.5)
    refused("expert_count = 8 is not known", expert_count=8, expert_used_count=2)
    refused("its rope.dimension_count 8 is not its head size 16", rope__dimension_count=8)
    refused(
        "holds 1 tensors that are not known, such as 'blk.0.attn_sinks.weight'",
        tensors={"blk.0.attn_sinks.weight": np.ones(4, np.float32)},
    )
    refused("needs the tensor 'blk.1.ffn_up.weight' .* it lacks it", tensors={"blk.1.ffn_up.weight": None})
    refused("some of its layers or projections have biases", tensors={"blk.0.attn_q.bias": np.ones(64, np.float32)})
    refused(
        "rope_freqs.weight contains values that cannot divide a frequency",
        tensors={"rope_freqs.weight": np.zeros(8, np.float32)},
    )
    refused(r"attention\.key_length is .* one number was expected", attention__key_length=[16, 32])


def test_an_architecture_that_is_not_known_is_refused(tmp_path: Path):
    path = tmp_path / "gpt2.gguf"
    convert(write_checkpoint(tmp_path / "source", "gpt2"), path, "f32")
    known = ", ".join(WRITABLE)
    with pytest.raises(ModelFileError, match=f"architecture 'gpt2'; allowed for ONNX: {known}. Run the GGUF as it is"):
        open_gguf(path)
    with pytest.raises(ModelFileError, match="runs as it is, on its own kernels; allowed for an export"):
        open_gguf(write(tmp_path / "tiny.gguf", MIXTURES["qwen3moe"]))
    assert KINDS.keys() >= WRITABLE.keys()


def test_heads_that_onnx_runtime_cannot_rotate_are_refused(tmp_path: Path):
    path = write_model(tmp_path / "tiny.gguf", Shape(width=32))
    with pytest.raises(ModelFileError, match=r"attention heads of 8 values; .* a multiple of 16"):
        open_gguf(path)


@pytest.mark.parametrize(
    ("given", "factor"),
    [
        ({"type": "linear", "factor": 4.0}, 4.0),
        ({"factor": 4.0}, 4.0),
        ({"type": "none", "factor": 4.0}, 1.0),
        ({"type": "linear"}, 1.0),
    ],
)
def test_positions_are_scaled_as_in_llama_cpp(given: dict[str, Any], factor: float, tmp_path: Path):
    path = write_model(tmp_path / "tiny.gguf", metadata={f"llama.rope.scaling.{key}": v for key, v in given.items()})
    assert open_gguf(path).config.rope_divisors[:1] == (() if factor == 1.0 else (factor,))


def test_a_window_caps_the_context_where_llama_cpp_has_none(tmp_path: Path):
    path = write_model(tmp_path / "tiny.gguf", metadata={"llama.attention.sliding_window": 128})
    assert open_gguf(path).config.max_positions == 128


@pytest.mark.parametrize(
    ("kind", "width"), [("F16", 64), ("Q4_0", 64), ("Q5_1", 64), ("Q4_1", 2048), ("Q8_0", 2304), ("BF16", 2304)]
)
def test_rows_are_decoded_as_the_package_does(tmp_path: Path, kind: str, width: int):
    """Whatever their width and number: 299 rows of the embeddings have no factor in common with the rows joined."""
    quant = gguf.GGMLQuantizationType[kind]
    path = write_model(tmp_path / "m.gguf", Shape(layers=1, width=width, heads=width // 32, hidden=64, weights=quant))
    model = open_gguf(path)
    [info] = [tensor for tensor in model.header.tensors if tensor.name == "token_embd.weight"]
    start = model.header.data_start + info.offset
    raw = np.fromfile(path, np.uint8, info.num_bytes, offset=start).reshape(info.shape[1], -1)
    found = np.concatenate(list(GgufWeights(model).rows("model.embed_tokens.weight")))
    assert np.array_equal(found, gguf.quants.dequantize(raw, quant))
