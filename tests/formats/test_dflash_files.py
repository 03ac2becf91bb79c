"""Which files of the architecture dflash are taken as heads, and what is said of the others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo import DEMO, TEST_THREADS
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.trial import FileTrial
from edgespec.errors import CapabilityError, ModelFileError, VocabularyMismatch
from edgespec.formats.gguf.heads import MAX_CHAIN, MAX_CHAIN_LAYERS, head_kind_of, read_head
from tiny_dflash import LAYERS, MASK_ID, TARGET, WIDTH, HeadShape, write_dflash
from tiny_gguf import write_model
from tiny_head import write_head

DSPARK = HeadShape(markov=8, has_confidence=True)
OWN_TABLES = "token_embd.weight", "output.weight"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaCppEngine]:
    path = write_model(tmp_path_factory.mktemp("target") / "tiny.gguf", TARGET)
    with LlamaCppEngine.load(path, threads=TEST_THREADS, context_length=128, reproducible=False) as engine:
        yield engine


def test_a_sound_head_is_told_from_others(target: LlamaCppEngine, tiny_path: Path, tmp_path: Path) -> None:
    path, other = write_dflash(tmp_path / "head.gguf", DSPARK), write_head(tmp_path / "eagle3.gguf")
    assert [head_kind_of(each) for each in (path, other, tiny_path)] == ["dflash", "eagle3", None]
    sizes = read_head(path)
    assert (sizes.width, sizes.layers, sizes.feature_width, sizes.mask_id) == (WIDTH, tuple(LAYERS), 192, MASK_ID)
    assert (sizes.has_markov, sizes.has_confidence, sizes.first_row, sizes.most_drafted) == (True, True, 0, 6)
    FileTrial({path: False}).require_sound()
    FileTrial({write_dflash(tmp_path / "bare.gguf", tensors=dict.fromkeys(OWN_TABLES)): False}).require_sound()
    with target.load_head(path) as head:
        assert head.facts.end_ids == target.vocabulary.end_ids
    with pytest.raises(CapabilityError, match=r"is a DFlash head, .* draft="):
        LlamaCppEngine.load(path)
    with pytest.raises(ModelFileError, match="it is a 'llama', and a draft head is needed"):
        target.load_head(tiny_path)


@pytest.mark.parametrize(
    ("metadata", "tensors", "variant"),
    [
        ({"dflash.hyper_connection.count": 4}, {}, "DeepSeek-V4's layers"),
        ({"dflash.rope.dimension_sections": [4, 2, 2, 0]}, {}, "also reads images"),
    ],
)  # fmt: skip
def test_a_variant_that_does_not_run_is_named(
    target: LlamaCppEngine, tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, Any], variant: str
) -> None:
    path = write_dflash(tmp_path / "head.gguf", metadata=metadata, tensors=tensors)
    with pytest.raises(CapabilityError, match=f"{variant}.*give a DFlash or DSpark head"):
        target.load_head(path)
    with pytest.raises(CapabilityError, match=r"only edgespec's own kernels run"):
        target.load_head(write_dflash(path, metadata={"dflash.rope.dimension_sections": [8, 0, 0, 0]}))


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("metadata", "tensors", "reason"),
    [
        ({"tokenizer.ggml.mask_token_id": None}, {}, r"mask_token_id is None, a token of 0\.\.298"),
        ({"dflash.block_size": None}, {}, "block_size is missing"),
        ({"dflash.block_size": 65}, {}, r"block_size is 65, 2\.\.64"),
        ({"dflash.block_size": "six"}, {}, "block_size is six"),
        ({"dflash.target_layers": [0, 1, 1]}, {}, "one or more different ones"),
        ({"dflash.rope.dimension_count": 15}, {}, "rotates 15 of 16"),
        ({"dflash.attention.sliding_window": 8, "dflash.attention.sliding_window_pattern": [False, False]}, {},
         "names a sliding window"),
        ({"dflash.attention.causal": "no"}, {}, "causal is 'no', true or false"),
        ({}, {"token_embd.weight": ones(100, WIDTH)}, "'token_embd.weight' has the shape"),
        ({}, {"d2t": np.arange(299, dtype=np.int32)}, "a list of I64"),
        ({}, {"d2t": np.arange(299, dtype=np.int64) + 1}, r"different tokens of 0\.\.298"),
        ({}, {"d2t": np.arange(100, dtype=np.int64), "output.weight": None}, "no output.weight"),
        ({}, {"fc.scale": np.ones(1, np.int32)}, "'fc.scale' is I32, F32 is needed"),
    ],
)  # fmt: skip
def test_a_head_that_is_not_sound_is_refused(
    target: LlamaCppEngine, tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, Any], reason: str
) -> None:
    """Named before llama.cpp sees it, which ends the process on some of these."""
    path = write_dflash(tmp_path / "head.gguf", metadata=metadata, tensors=tensors)
    with pytest.raises(ModelFileError, match=reason):
        target.load_head(path)


def test_what_llama_cpp_finds_is_told_in_its_words(tmp_path: Path) -> None:
    """Also of a head without embeddings, which is not run until its target is there."""
    for number, (metadata, tensors, said) in enumerate([
        ({"dflash.target_layers": [0, 1]}, {}, "'fc.weight' has wrong shape"),
        ({"dflash.block_count": 3}, {}, "'blk.2.attn_norm.weight' not found"),
        ({}, {"blk.1.attn_q_norm.weight": None}, "'blk.1.attn_q_norm.weight' not found"),
        ({}, {"blk.1.attn_v.weight": ones(16, 64)}, "'blk.1.attn_v.weight' has wrong shape"),
        ({}, {"d2t": np.arange(100, dtype=np.int64)}, "'output.weight' has wrong shape"),
        ({}, {"markov_w1.weight": ones(299, 8)}, "'markov_w2.weight' not found"),
        ({}, {"output_norm.weight": np.full(WIDTH, np.nan, np.float32)}, "invalid data"),
    ]):  # fmt: skip
        own = {} if "d2t" in tensors else dict.fromkeys(OWN_TABLES)
        path = write_dflash(tmp_path / f"{number}.gguf", metadata=metadata, tensors={**own, **tensors})
        with pytest.raises(ModelFileError, match=said):
            FileTrial({path: False}).require_sound()


def test_a_head_of_another_target_is_refused(target: LlamaCppEngine, tmp_path: Path) -> None:
    path = write_dflash(tmp_path / "head.gguf")
    demo = DEMO / "demo-target-q8_0.gguf"
    with (
        LlamaCppEngine.load(demo, threads=TEST_THREADS, context_length=64, reproducible=False) as other,
        pytest.raises(CapabilityError, match="reads a target of width 64, this target has 256"),
    ):
        other.load_head(path)
    deep = write_dflash(tmp_path / "deep.gguf", metadata={"dflash.target_layers": [0, 1, 4]})
    with pytest.raises(CapabilityError, match=r"reads layer 4 of its target, this one has 0\.\.3"):
        target.load_head(deep)
    tables = {name: ones(300, WIDTH) for name in OWN_TABLES}
    tokens = [*map(str, range(300))]
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["1 2"], "tokenizer.ggml.token_type": None}
    more = write_dflash(tmp_path / "more.gguf", metadata=changed, tensors=tables)
    with pytest.raises(CapabilityError, match="was made for 300 tokens, this target has 299"):
        target.load_head(more)
    renamed = write_dflash(tmp_path / "renamed.gguf", metadata=changed | {"tokenizer.ggml.tokens": tokens[:299]})
    with pytest.raises(VocabularyMismatch, match="token 0 is"):
        target.load_head(renamed)


def test_the_longest_markov_chain_that_is_taken_runs(tmp_path: Path) -> None:
    """llama.cpp ends the process where its graph has more nodes than it made room for."""
    shape = replace(DSPARK, layers=MAX_CHAIN_LAYERS, block=MAX_CHAIN, drafted=100, has_extras=True, kv_heads=4)
    path = write_dflash(tmp_path / "head.gguf", shape)
    code = "import sys, pathlib; from edgespec.engines.llamacpp.heads import try_head"
    code += "; try_head(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    with pytest.raises(CapabilityError, match=f"blocks of 17 tokens; allowed: 8 layers and {MAX_CHAIN} tokens"):
        read_head(write_dflash(path, replace(shape, block=MAX_CHAIN + 1)))
