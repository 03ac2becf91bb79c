"""DFlash and DSpark heads as drafters of a GGUF target: texts stay the target's, and the pair is opened and planned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

import edgespec
from demo import TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.config.options import LoadOptions
from edgespec.config.values import EngineName
from edgespec.control.base import FixedLength
from edgespec.drafters.heads import DFlashDrafter
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.model_use import BYTES_PER_FEATURE, MAX_BATCH, WINDOW
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.formats.gguf.heads import read_head
from edgespec.loading.drafts import find_aim, rank
from edgespec.loading.requirements import resolve_pair
from edgespec.memory.plan import planned
from edgespec.sampling.acceptance import RULES
from edgespec.types import Batch
from gguf_heads import assert_plan_is_what_it_takes
from lossless import assert_same_text, assert_several_draft_apart, assert_window_changes_no_text, run_of, speculative
from needs import NEEDS_KERNELS
from tiny_dflash import LAYERS, MASK_ID, NUM_TOKENS, TARGET, WIDTH, HeadShape, write_dflash
from tiny_gguf import matrices, write_model

DSPARK = HeadShape(markov=8, has_confidence=True)
SMALL = replace(TARGET, weights=gguf.GGMLQuantizationType.Q8_0)  # such a target has a reproducible mode
BARE = dict.fromkeys(("token_embd.weight", "output.weight"))
HEADS = {
    "DFlash": (HeadShape(), {}),
    "DFlash with the target's tables": (HeadShape(), BARE),
    "DSpark": (DSPARK, {}),
    "DSpark in eight bits": (replace(DSPARK, markov=32, weights=gguf.GGMLQuantizationType.Q8_0), BARE),
    "DSpark behind the anchor": (replace(DSPARK, from_anchor=False, drafted=120), {"token_embd.weight": None}),
}


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target") / "tiny.gguf", SMALL)


@pytest.fixture(scope="module", params=HEADS.values(), ids=HEADS)
def head_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape, tensors = request.param
    return write_dflash(tmp_path_factory.mktemp("head") / "head.gguf", shape, tensors=tensors)


@pytest.fixture(scope="module")
def pair(engine_name: EngineName, target_path: Path, head_path: Path) -> Iterator[edgespec.Model]:
    given = {"draft": head_path, "engine": engine_name, "reproducible": True, "threads": TEST_THREADS}
    with edgespec.load(str(target_path), **given) as model:
        assert model.target.facts.name == engine_name
        yield model


# -- texts


def test_text_does_not_depend_on_the_head(pair: edgespec.Model) -> None:
    stats = assert_same_text(pair, [*(("dflash", n) for n in (1, 3, 5, 12, "auto")), ("auto", "auto"), ("auto", 4)])
    assert stats["dflash", 5].drafted_tokens > 6 * 48


def test_texts_that_are_decoded_together_draft_from_their_own_tokens(
    engine_name: EngineName, target_path: Path, head_path: Path
) -> None:
    texts = ("The quick brown", "def add(a, b):", "Tom has 3 apples. " * 6, "Book a table")
    assert_several_draft_apart(str(target_path), texts, "dflash", draft=head_path, engine=engine_name)


def test_a_text_longer_than_the_heads_window_stays_the_same(
    engine_name: EngineName, target_path: Path, head_path: Path
) -> None:
    assert_window_changes_no_text(str(target_path), "dflash", draft=head_path, engine=engine_name)


def test_auto_takes_the_head_as_the_pairs_draft(pair: edgespec.Model) -> None:
    assert pair.drafters.draft_name == "dflash"
    drafter = pair.drafters.drafter("dflash")
    assert isinstance(drafter, DFlashDrafter) and drafter.costs_once
    assert drafter.bytes_used > 100_000


def repeating(folder: Path, from_anchor: bool | None) -> tuple[Path, Path]:
    """A target that repeats its last token, and a head whose block passes the anchor's embedding on to all rows.

    The anchor's is the only value in the head's attention: features are multiplied by 0, and so is the mask's row.
    """
    tables = matrices(TARGET, NUM_TOKENS)
    table = tables["token_embd.weight"]
    still = {f"blk.{layer}.{name}.weight": np.zeros_like(tables[f"blk.{layer}.{name}.weight"])
             for layer in range(TARGET.layers) for name in ("attn_output", "ffn_down")}  # fmt: skip
    target = write_model(folder / "target.gguf", SMALL, tensors={**still, "output.weight": table})
    shape = HeadShape(layers=1, kv_heads=4, markov=0 if from_anchor is None else 4, from_anchor=bool(from_anchor))
    ones, eye = np.ones(WIDTH, np.float32), np.eye(WIDTH, dtype=np.float32)
    tensors = {
        "token_embd.weight": np.where(np.arange(NUM_TOKENS)[:, None] == MASK_ID, 0, table).astype(np.float32),
        "output.weight": table,
        "fc.weight": np.zeros((WIDTH, 3 * WIDTH), np.float32),
        "output_norm.weight": ones,
        "blk.0.attn_norm.weight": ones,
        "blk.0.attn_v.weight": eye,
        "blk.0.attn_output.weight": 100 * eye,
        "blk.0.ffn_down.weight": np.zeros((WIDTH, shape.hidden), np.float32),
    }
    if shape.markov:
        tensors["markov_w2.weight"] = np.zeros((NUM_TOKENS, shape.markov), np.float32)
    return target, write_dflash(folder / "head.gguf", shape, tensors=tensors)


@pytest.mark.parametrize("from_anchor", [None, False, True], ids=["DFlash", "DSpark behind the anchor", "DSpark"])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_head_that_knows_the_target_is_accepted(
    engine_name: EngineName, tmp_path: Path, from_anchor: bool | None, temperature: float
) -> None:
    target, head = repeating(tmp_path, from_anchor)
    most = 6 if from_anchor else 5
    with edgespec.load(str(target), draft=head, threads=TEST_THREADS, engine=engine_name) as model:
        options = GenerateOptions(max_tokens=2 * (most + 1) + 1, draft_length=9, drafter="dflash", ignore_eos=True)
        found = model.generate("abcd", Sampling(temperature=temperature, seed=1), options)
    assert found.text == (2 * most + 3) * "d"
    assert (found.stats.rounds, found.stats.accepted_tokens) == (2, 2 * most)


def test_after_many_rejected_drafts_the_head_knows_the_text_and_nothing_else(
    target_path: Path, head_path: Path
) -> None:
    load = {"threads": TEST_THREADS, "context_length": 256, "reproducible": True}
    with LlamaCppEngine.load(target_path, **load) as target, target.load_head(head_path) as head:
        drafter, cached = DFlashDrafter(head, WINDOW), CachedSequence(target)
        cached.keep_features(True)
        prompt = range(40, 60)
        run = run_of(cached, Sampling(temperature=0.8, seed=5), 60, prompt, logprobs=False)
        events = list(speculative(run, FixedLength(drafter, 5), RULES["coupled"]))
        assert run.stats.drafted_tokens - run.stats.accepted_tokens > 100
        text = np.array([*prompt, *(event.token_id for event in events)], np.int32)[: head.end]
        target.rollback(0)
        target.give_hidden_states(True)
        parts = []
        for part in (text[:40], text[40:]):
            target.forward(Batch.chain(part, last_only=True))
            parts.append(target.hidden_states())
        found = head.block(7)[0].copy()
        head.restart(0)
        head.inject(np.concatenate(parts))
        wanted = head.block(7)[0]
        known = np.isfinite(wanted)
        np.testing.assert_allclose(found[known], wanted[known], atol=0.02 * np.abs(wanted[known]).max())


@NEEDS_KERNELS
@pytest.mark.parametrize("shape", [DSPARK, HeadShape(candidates=5)], ids=["DSpark", "DFlash2"])
def test_a_hybrid_drafts_with_a_head_for_it(qwen35_path: Path, tmp_path: Path, shape: HeadShape) -> None:
    """Whose rotary sections are a text's alone, as those of Qwen3.5's heads."""
    head = write_dflash(tmp_path / "head.gguf", shape, metadata={"dflash.rope.dimension_sections": [8, 0, 0, 0]})
    assert_plan_is_what_it_takes(qwen35_path, LAYERS, head)
    with edgespec.load(qwen35_path, draft=head, threads=TEST_THREADS) as model:
        stats = assert_same_text(model, [("dflash", 5), ("auto", "auto")])
    assert stats["dflash", 5].drafted_tokens > 6 * 48


# -- the pair


def test_what_is_given_as_draft_must_be_what_the_drafter_needs(
    target_path: Path, onnx_path: Path, tiny_path: Path, tmp_path: Path
) -> None:
    head = write_dflash(tmp_path / "head.gguf")
    with pytest.raises(CapabilityError, match=r"needs a draft model .* has head\.gguf, a DFlash head, .*'dflash'"):
        edgespec.load(str(target_path), draft=head, drafter="model", threads=TEST_THREADS)
    with pytest.raises(CapabilityError, match=r"drafter 'dflash' needs a DFlash head .*, a draft model, and runs on"):
        edgespec.load(str(target_path), draft=tiny_path, drafter="dflash", threads=TEST_THREADS)
    with pytest.raises(CapabilityError, match="drafter 'dflash' needs a DFlash head for a target in GGUF"):
        edgespec.load(str(onnx_path), draft=head, threads=TEST_THREADS)


def test_a_head_that_does_not_fit_is_named_at_load(target_path: Path, tmp_path: Path) -> None:
    """Also by the child that tries files of unknown contents."""
    wide = write_model(tmp_path / "wide.gguf", replace(TARGET, width=128))
    with pytest.raises(CapabilityError, match=r"head\.gguf reads a target of width 64, this target has 128"):
        edgespec.load(str(wide), draft=write_dflash(tmp_path / "head.gguf"), threads=TEST_THREADS)
    blind = write_dflash(tmp_path / "blind.gguf", metadata={"tokenizer.ggml.mask_token_id": None})
    with pytest.raises(ModelFileError, match=r"blind\.gguf is not a usable DFlash head: .*mask_token_id"):
        edgespec.load(str(target_path), draft=blind, threads=TEST_THREADS)
    newer = write_dflash(tmp_path / "newer.gguf", HeadShape(candidates=5), metadata={"dflash.conv_group_size": None})
    with pytest.raises(ModelFileError, match=r"newer\.gguf is not a usable DFlash head: .*conv_group_size is missing"):
        edgespec.load(str(target_path), draft=newer, threads=TEST_THREADS)


def test_a_head_counts_where_it_fits(tmp_path: Path) -> None:
    shapes = {"right": TARGET, "wide": replace(TARGET, width=128)}
    for name, shape in shapes.items():
        (tmp_path / name).mkdir()
        write_model(tmp_path / name / "target.gguf", shape)
        write_dflash(tmp_path / name / "head.gguf", HeadShape(layers=1), tensors=BARE)
    (fitting,), (wrong,) = (rank(find_aim(str(tmp_path / name / "target.gguf"))) for name in shapes)
    assert fitting.vocabulary == "a DFlash head that fits" and not fitting.why_not
    assert "was trained for it" in wrong.why_not


def test_the_plan_counts_weights_cache_and_results(target_path: Path, head_path: Path) -> None:
    def plan(**changed: int) -> tuple[int, int, int]:
        options = LoadOptions(model=str(target_path), draft=head_path, engine="llamacpp", **changed)
        need = planned(options, resolve_pair(options)).models["draft"]
        return need.mapped, need.cache, need.compute

    sizes = read_head(head_path)
    mapped, cache, compute = plan(draft_context_length=100)
    assert mapped == head_path.stat().st_size
    assert cache == 256 * 2 * 2 * 32 * 2  # cells, layers, keys and values, heads * size, bytes
    features = sizes.feature_width * (BYTES_PER_FEATURE * 100 + 4 * MAX_BATCH)
    results = compute - features - 4 * sizes.block_size * NUM_TOKENS
    assert 4 * 64 * NUM_TOKENS < results < 8 * 64 * (NUM_TOKENS + 3 * 96 + 7 * 64)
    assert plan(draft_context_length=100, parallel=3) == (mapped, 3 * cache, 3 * compute)


@NEEDS_KERNELS
def test_the_plan_on_the_kernels_is_what_the_head_takes(target_path: Path, head_path: Path) -> None:
    assert_plan_is_what_it_takes(target_path, LAYERS, head_path)
