"""4-bit weights of a GGUF stay what they are in a graph; floats are fitted by blocks with offsets."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

import tiny_graphs
from demo import DEMO, TEST_THREADS
from edgespec.errors import ModelFileError
from edgespec.export.gguf.convert import quantise
from edgespec.export.onnx.writer import kept_in_more, open_gguf
from edgespec.export.source import of_gguf
from edgespec.formats.onnx.forms import quantise_blocks
from edgespec.formats.onnx.four_bits import STORED_TYPES, FourBits, fit, take_apart
from needs import NEEDS_LLAMA
from tiny_checkpoints import TOKEN_IDS, write_checkpoint
from tiny_gguf import Shape, write_model
from tiny_graphs import Floats, mean_kl

Q = gguf.GGMLQuantizationType
TOKENS = [token % 299 for token in TOKEN_IDS]
MATRIX = "model.layers.1.mlp.down_proj.weight"


def graph(source: Path, folder: Path, quant: str = "int4") -> Path:
    return tiny_graphs.graph(source, folder, quant)


def logits(path: Path, token_ids: list[int] | None = None) -> Floats:
    return tiny_graphs.logits(path, token_ids or TOKENS)


def operators(path: Path) -> Counter[str]:
    nodes = onnx.load(path, load_external_data=False).graph.node
    kinds = Counter(node.op_type for node in nodes)
    for node in nodes:
        if node.op_type == "MatMulNBits":
            bits = next(attribute.i for attribute in node.attribute if attribute.name == "bits")
            kinds[f"{bits} bits{', zero points' if len(node.input) > 3 else ''}"] += 1
    return kinds


def noise(kind: str, rows: int = 7, blocks: int = 16) -> NDArray[np.uint8]:
    """Rows of random bytes of a type whose numbers in half precision are finite."""
    weights, size = gguf.GGML_QUANT_SIZES[Q[kind]]
    found = np.random.default_rng(0).integers(0, 256, (rows * blocks, size), np.uint8)
    halves = np.random.default_rng(1).standard_normal((rows * blocks, 2)).astype(np.float16)
    count = 1 if kind == "Q4_0" else 2
    found[:, : 2 * count] = np.ascontiguousarray(halves[:, :count]).view(np.uint8)
    assert weights % 32 == 0
    return found.reshape(rows, -1)


def floats(blocks: FourBits) -> Floats:
    return (blocks.codes * blocks.scales[..., None] + blocks.offsets[..., None]).reshape(len(blocks.codes), -1)


@pytest.mark.parametrize("kind", STORED_TYPES)
def test_blocks_are_what_ggml_decodes(kind: str):
    raw = noise(kind)
    wanted = gguf.quants.dequantize(raw, Q[kind])
    found = take_apart(raw, kind)
    np.testing.assert_array_equal(floats(found), wanted)
    assert found.codes.max() == 15 and found.scales.shape == found.offsets.shape == (7, wanted.shape[1] // 32)


def test_fitted_blocks_lose_less_than_blocks_around_zero():
    rows = np.random.default_rng(0).standard_normal((300, 256), np.float32)
    codes, scales = quantise_blocks(rows, 4, 32)
    apart = np.stack((codes & 15, codes >> 4), axis=-1).reshape(300, -1, 32).astype(np.float32) - 8
    around_zero = (apart * scales[..., None]).reshape(rows.shape)

    def lost(found: Floats) -> float:
        return float(((found - rows) ** 2).mean())

    assert lost(floats(fit(rows))) < 0.76 * lost(around_zero)


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path):
    def refused(kind: str, broken: bytes) -> None:
        path = write_model(tmp_path / f"{kind} {broken.hex()}.gguf", Shape(weights=Q[kind]))
        model = open_gguf(path)
        place = model.header.data_start + model.tensors[MATRIX][0].offset
        content = bytearray(path.read_bytes())
        content[place : place + len(broken)] = broken
        path.write_bytes(content)
        with pytest.raises(ModelFileError, match=r"blk\.1\.ffn_down\.weight holds infinity or NaN"):
            graph(path, tmp_path / f"of {path.stem}")

    nan = np.array([np.nan], np.float16).tobytes()
    refused("Q4_1", nan)
    refused("Q4_1", b"\0\0" + nan)
    refused("F32", np.array([np.inf], np.float32).tobytes())


@pytest.mark.parametrize(("kind", "limit"), [("Q4_0", 0.003), ("Q4_1", 0.003)])
def test_a_graph_of_4_bit_weights_computes_what_they_do(kind: str, limit: float, tmp_path: Path):
    """But for inputs rounded to 8 bits, as in int8."""
    path = write_model(tmp_path / "tiny.gguf", Shape(weights=Q[kind]))
    exact = logits(graph(path, tmp_path / "float", "fp32"))
    assert mean_kl(logits(graph(path, tmp_path / "made")), exact) < limit


def test_a_mix_of_types_is_kept(q4_k_m_path: Path, tmp_path: Path):
    model = open_gguf(q4_k_m_path)
    kept = kept_in_more(model)
    assert {model.header.architecture} == {"llama"} and 0 < len(kept) < 25
    made = graph(q4_k_m_path, tmp_path / "made")
    kinds = operators(made)
    assert kinds["4 bits, zero points"] > kinds["8 bits"] > 1
    size = sum(file.stat().st_size for file in made.parent.glob("*.data"))
    assert size < of_gguf(model).output_bytes("onnx", "int4")
    size = json.loads((DEMO / "hf" / "target" / "config.json").read_text())["vocab_size"]
    ids = [size // (token + 2) for token in TOKEN_IDS]
    exact = logits(graph(q4_k_m_path, tmp_path / "float", "fp32"), ids)
    assert mean_kl(logits(made, ids), exact) < 0.003


@NEEDS_LLAMA
def test_rows_that_llama_cpp_cannot_store_in_4_bits_keep_their_5(tmp_path: Path):
    """Q4_K wants rows of 256 weights; most of this file is Q5_0 for that, and a larger table is Q8_0, as in Gemma 3."""
    source = write_model(tmp_path / "source.gguf", Shape(layers=3, width=64, hidden=256))
    path = tmp_path / "q4_k_m.gguf"
    quantise(source, path, "q4_k_m", threads=TEST_THREADS)
    kinds = Counter(tensor.kind for tensor, _ in open_gguf(path).tensors.values())
    assert kinds["Q5_0"] > 4 * kinds["Q4_K"] > 0
    exact = logits(graph(path, tmp_path / "float", "fp32"))
    assert mean_kl(logits(graph(path, tmp_path / "made")), exact) < 0.003


def test_rows_of_a_width_that_blocks_do_not_divide_are_padded(tmp_path: Path):
    source = write_checkpoint(tmp_path / "source", "smollm2", intermediate_size=104)
    exact, made = (logits(graph(source, tmp_path / quant, quant)) for quant in ("fp32", "int4"))
    assert np.corrcoef(exact.ravel(), made.ravel())[0, 1] > 0.93
