"""Routed experts, gpt-oss and Gemma 4 on our kernels: the numbers of their definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.llamacpp.tokenizer import VocabularyFile
from edgespec.engines.onnx import OnnxEngine
from edgespec.engines.onnx.source import open_source
from edgespec.engines.onnx.tokenizer import TokenizerFile
from needs import NEEDS_KERNELS, NEEDS_LLAMA
from tiny_graphs import assert_same_vocabulary, scored
from tiny_mixtures import CASES, Twin, write

pytestmark = NEEDS_KERNELS
NEARLY_WHOLE = (8.0, 4096.0, 32.0, 1.0)  # a ramp from 4.05 to 8.70
IDS = np.random.default_rng(5).integers(3, 250, 40).tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return lambda name: write(folder / f"{name}.gguf", CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_definition(name: str, tiny):
    with OnnxEngine.load(tiny(name), threads=1) as engine:
        found = scored(engine, IDS, 16)
    wanted = Twin(CASES[name]).logits(IDS)
    assert np.sqrt(np.square(found - wanted).mean()) < 1e-4 * wanted.std()


@NEEDS_LLAMA
@pytest.mark.parametrize("name", CASES)
def test_logits_are_llama_cpps(name: str, tmp_path: Path):
    """But for GELU and attention in half precision there, and the ends of YaRN's ramp, which it rounds."""
    case = replace(CASES[name], yarn=NEARLY_WHOLE) if CASES[name].yarn else CASES[name]
    path = write(tmp_path / "tiny.gguf", case)
    with OnnxEngine.load(path, threads=1) as ours, LlamaCppEngine.load(path, threads=1, reproducible=False) as theirs:
        wanted, found = scored(theirs, IDS, 40), scored(ours, IDS, 40)
    assert np.sqrt(np.square(found - wanted).mean()) < 3e-3 * wanted.std()


@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "gemma4-26b"])
def test_quantised_experts_lose_what_their_inputs_do(name: str, kind: str, tmp_path: Path):
    """Against the same weights in double precision: inputs become bytes, and that is all. No choice depends on it."""
    case = replace(CASES[name], experts=(5, 5, 32))
    path = write(tmp_path / "tiny.gguf", case, {"_exps.weight": kind})
    weights = {each.name: gguf.dequantize(each.data, each.tensor_type) for each in gguf.GGUFReader(path).tensors}
    with OnnxEngine.load(path, threads=1) as engine:
        found = scored(engine, IDS, 16)
    wanted = Twin(case, weights).logits(IDS)
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
    size, case = len(metadata["tokenizer.ggml.tokens"]), CASES["gemma4-31b"]
    changed = {"token_embd.weight": np.ones((size, case.width), np.float32)}
    path = write(tmp_path / "tiny.gguf", case, metadata=metadata, changed=changed)
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
