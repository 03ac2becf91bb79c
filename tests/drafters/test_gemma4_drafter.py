"""Gemma 4's drafter: its passes against numpy, and drafts that change no text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edgespec
from demo import DEMO, TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.config.options import LoadOptions
from edgespec.config.values import EngineName
from edgespec.engines.head import DraftHead
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.llamacpp.footprint import head_footprint
from edgespec.engines.llamacpp.heads import try_head
from edgespec.engines.model_use import ModelUse
from edgespec.engines.onnx import OnnxEngine
from edgespec.engines.onnx.kernel_engine import KernelEngine
from edgespec.engines.onnx.kernel_head import load_drafter
from edgespec.errors import CapabilityError, EdgespecError, ModelFileError
from edgespec.formats.gguf.heads import head_kind_of
from edgespec.loading.requirements import resolve_pair, runs_on_kernels
from edgespec.types import Batch
from lossless import assert_same_text, assert_several_draft_apart
from tiny_gguf import write_model
from tiny_mixtures import DRAFTER, GEMMA, Case, PairTwin, write, write_drafter

Floats = NDArray[np.float32]
TEXT = [5, 77, 130, 201, 33, 34, 35, 201, 33, 90]
PROMPT = "the cat sat on the mat, the cat"


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gemma") / "target.gguf", GEMMA)


@pytest.fixture(scope="module")
def drafter_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("gemma") / "drafter.gguf")


def opened(name: str, path: Path, **settings: Any) -> LlamaCppEngine | KernelEngine:
    if name == "llamacpp":
        return LlamaCppEngine.load(path, context_length=64, threads=1, reproducible=False, **settings)
    found = OnnxEngine.load(path, context_length=64, threads=1, hidden_states=True, **settings)
    assert isinstance(found, KernelEngine)
    return found


def head_of(engine: LlamaCppEngine | KernelEngine, path: Path) -> DraftHead:
    return engine.load_head(path) if isinstance(engine, LlamaCppEngine) else load_drafter(engine, path)


def close(ours: Floats, theirs: Floats) -> bool:
    """But for keys and values that are cached in half precision."""
    return bool(np.abs(ours - theirs).max() < 0.02 * theirs.std())


@pytest.mark.parametrize("window", [512, 5])
def test_its_passes_are_its_definition(engine_name: EngineName, window: int, tmp_path: Path) -> None:
    shape = replace(GEMMA, window=window)
    path, drafter = write(tmp_path / "target.gguf", shape), write_drafter(tmp_path / "drafter.gguf", shape)
    with opened(engine_name, path) as engine, head_of(engine, drafter) as head:
        engine.give_hidden_states(True)
        twin = PairTwin(shape)
        scores, hidden = twin.read(TEXT)
        ours = engine.forward(Batch.chain(np.array(TEXT, np.int32)))
        assert close(ours, scores) and close(engine.hidden_states(), hidden), "the numpy twin is no Gemma 4"
        state = theirs = hidden[-1]
        for token_id in (44, 45, 46):  # all steps of a draft are at the place of the last token
            logits, state = head.step(token_id, state, len(TEXT))
            expected, theirs = twin.draft(token_id, theirs, len(TEXT))
            assert close(logits, expected) and close(state, theirs)
            state = state.copy()
        assert engine.length() == len(TEXT), "it adds nothing to the target's cache"
        engine.rollback(4)
        logits, _ = head.step(44, hidden[3], 4)
        twin.read(TEXT[:4])
        assert close(logits, twin.draft(44, hidden[3], 4)[0]), "what was rolled back is not attended to"


@pytest.mark.parametrize("branches", [0, 4], ids=["cells of their own", "shared cells"])
def test_each_sequence_has_its_own(
    engine_name: EngineName, target_path: Path, drafter_path: Path, branches: int
) -> None:
    with opened(engine_name, target_path, max_sequences=2, max_branches=branches) as engine:
        twin, texts = PairTwin(GEMMA), (TEXT, TEXT[::-1])
        with head_of(engine, drafter_path) as head:
            for sequence, text in enumerate(texts):
                engine.forward(Batch.chain(np.array(text, np.int32), sequence=sequence))
            for sequence, text in enumerate(texts):
                state = twin.read(text)[1][-1]
                logits, _ = head.step(44, state, len(text), sequence)
                assert close(logits, twin.draft(44, state, len(text))[0])


def test_rows_of_padding_are_no_text(target_path: Path, drafter_path: Path) -> None:
    """They stay behind a sequence with cells of its own, at the very place of the drafter's next step."""
    load: dict[str, Any] = {"max_sequences": 2, "max_branches": 0, "cache_type_k": "f16", "cache_type_v": "f16"}
    with LlamaCppEngine.load(target_path, context_length=512, threads=1, reproducible=True, **load) as engine:
        pinned = engine.facts.pinned_class
        assert pinned is not None and pinned[0] > 1
        twin = PairTwin(GEMMA)
        with engine.load_head(drafter_path) as head:
            engine.forward(Batch.chain(np.array(TEXT[:-1], np.int32)))
            engine.forward(Batch.chain(np.array(TEXT[-1:], np.int32)))
            state = twin.read(TEXT)[1][-1]
            logits, _ = head.step(44, state, len(TEXT))
            assert close(logits, twin.draft(44, state, len(TEXT))[0])


def test_drafts_change_no_text(engine_name: EngineName, target_path: Path, drafter_path: Path) -> None:
    options: dict[str, Any] = {"engine": engine_name, "threads": TEST_THREADS, "reproducible": True}
    with edgespec.load(str(target_path), draft=str(drafter_path), context_length=192, **options) as model:
        stats = assert_same_text(model, [*(("mtp", length) for length in (1, 3, 6)), ("auto", "auto")], num_tokens=40)
    assert stats["mtp", 6].drafted_tokens > 200


def test_a_target_whose_last_layers_share_keys(tmp_path: Path, drafter_path: Path) -> None:
    """As E2B and E4B: the drafter reads those of the layers that they share with."""
    path = write(tmp_path / "sharing.gguf", replace(GEMMA, sharing=2))
    with edgespec.load(str(path), draft=str(drafter_path), context_length=192, threads=1, reproducible=True) as model:
        found = assert_same_text(model, [("mtp", 3)], num_tokens=24)
    assert found["mtp", 3].drafted_tokens > 0


def test_several_chats_draft_at_once(target_path: Path, drafter_path: Path) -> None:
    texts = (PROMPT, "a dog", "one two three one two")
    assert_several_draft_apart(str(target_path), texts, "mtp", draft=str(drafter_path))


def test_a_file_says_what_it_is(target_path: Path, drafter_path: Path) -> None:
    assert head_kind_of(drafter_path) == "mtp" and head_kind_of(target_path) is None
    with pytest.raises(CapabilityError, match="only drafts for another model"):
        LlamaCppEngine.load(drafter_path)
    try_head(drafter_path)
    need = head_footprint(drafter_path, ModelUse(context_length=64))
    assert need.cache == 0 and need.mapped == drafter_path.stat().st_size


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (replace(GEMMA, width=96), "target of width 96"),
        (replace(GEMMA, merges=30), "tokens"),
        (replace(GEMMA, size=64), "keys and values of the shape"),
        (replace(GEMMA, size_windowed=32), "keys and values of the shape"),
        (replace(GEMMA, kv_heads=4), "keys and values of the shape"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    engine_name: EngineName, target_path: Path, tmp_path: Path, shape: Case, words: str
) -> None:
    path = write_drafter(tmp_path / "other.gguf", shape)
    with opened(engine_name, target_path) as engine, pytest.raises(EdgespecError, match=words):
        head_of(engine, path)


def test_a_target_that_is_no_gemma_4_is_refused(tmp_path: Path, drafter_path: Path) -> None:
    path = write_model(tmp_path / "llama.gguf")
    with pytest.raises(CapabilityError, match="drafts for a Gemma 4"):
        edgespec.load(str(path), draft=str(drafter_path), threads=1)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({f"{DRAFTER}.nextn_predict_layers": 2}, "differ from its 4 layers"),
        ({f"{DRAFTER}.attention.sliding_window_pattern": [True]}, "has 1 entries for 4 layers"),
        ({f"{DRAFTER}.attention.head_count": 3}, r"faulty\.gguf cannot be loaded"),
        ({f"{DRAFTER}.embedding_length_out": None}, "embedding_length_out is missing"),
        ({f"{DRAFTER}.rope.dimension_count": 64}, "rotates 64 of 32"),
        ({f"{DRAFTER}.attention.key_length_swa": None}, "key_length_swa is missing"),
    ],
)
def test_a_faulty_file_is_named(tmp_path: Path, metadata: dict[str, Any], words: str) -> None:
    path = write_drafter(tmp_path / "faulty.gguf", metadata=metadata)
    with pytest.raises(ModelFileError, match=words):
        try_head(path)


def test_a_head_beside_the_file_that_is_named_for_it_is_found(tmp_path: Path) -> None:
    target = write(tmp_path / "gemma-Q8_0.gguf", GEMMA)
    head = write_drafter(tmp_path / "mtp-gemma-BF16.gguf")
    write_drafter(tmp_path / "mtp-other.gguf")
    given: dict[str, Any] = {"context_length": 128, "engine": "llamacpp"}
    found = resolve_pair(LoadOptions(str(target), **given))
    assert found.draft == head
    with edgespec.load(target, threads=1, **given) as model:
        assert "mtp" in model.drafters.names
        drafted = model.generate(PROMPT, Sampling(temperature=0), GenerateOptions(max_tokens=12, drafter="mtp"))
        assert drafted.stats.drafted_tokens
    for off in ({"drafter": "none"}, {"drafter": "ngram"}, {"heads": DEMO / "heads" / "eagle.npz"}):
        assert resolve_pair(LoadOptions(str(target), **given, **off)).draft is None
    if runs_on_kernels(target):
        automatic = resolve_pair(LoadOptions(str(target)))
        assert automatic.files["target"].engine == "onnx", "a head that the kernels lack does not take the target away"
        assert automatic.draft is None or runs_on_kernels(head)
    assert resolve_pair(LoadOptions(str(target), drafter="mtp")).draft == head
    head.unlink()
    wide = write_drafter(tmp_path / "gemma-assistant.gguf", replace(GEMMA, width=128))
    assert head_kind_of(wide) and resolve_pair(LoadOptions(str(target), **given)).draft is None, "it does not fit"
