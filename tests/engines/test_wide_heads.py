"""Attention heads of more than 128 values, as Gemma's: their products round otherwise in texts of up to 64 tokens."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="makes the models with the package gguf: scripts/run.py install export")

from edgespec.engines import proof
from edgespec.engines.onnx import OnnxEngine, sessions
from edgespec.engines.onnx.passes import end_of_pass, rows_before
from edgespec.engines.onnx.sessions import FLASH_OFF
from edgespec.engines.onnx.settings import OnnxSettings
from edgespec.export.gguf.convert import convert
from edgespec.export.onnx.writer import convert_gguf, open_gguf
from edgespec.types import Batch, Logits, packed
from tiny_checkpoints import write_checkpoint

LENGTH = 150
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 as int8, with heads of 256 values and a window of 96."""
    folder = tmp_path_factory.mktemp("wide")
    source = write_checkpoint(folder / "source", "gemma3", head_dim=256, sliding_window=96, max_position_embeddings=512)
    convert(source, folder / "wide.gguf", "f32")
    (folder / "int8").mkdir()
    return convert_gguf(open_gguf(folder / "wide.gguf"), folder / "int8", "int8")


def opened(path: Path, **options: object) -> OnnxEngine:
    given = {"context_length": 256, "threads": 1, "reproducible": True, **options}
    return OnnxEngine.load(path, **given)  # type: ignore[arg-type]


def text(engine: OnnxEngine) -> np.ndarray:
    return np.random.default_rng(0).integers(3, engine.vocabulary.size, LENGTH).astype(np.int32)


def read(engine: OnnxEngine, widths: list[int]) -> Logits:
    """All logits of the text, in passes of these widths, over and over."""
    engine.rollback(0)
    ids, found = text(engine), []
    while engine.length() < ids.size:
        width = min(widths[len(found) % len(widths)], ids.size - engine.length())
        found.append(engine.forward(Batch.chain(ids[engine.length() :][:width])).copy())
    return np.concatenate(found)


@pytest.mark.parametrize("widths", [[2], [3], [5], [33], [63], [1], [1, 4, 1, 17], [62, 2, 40], [63, 2], [64 - 7, 60]])
def test_rows_have_the_same_bits_in_passes_of_any_width(widths: list[int], wide: Path):
    with opened(wide) as engine:
        assert engine.facts.pinned_class is not None
        assert np.array_equal(read(engine, widths), read(engine, [48, 16]))
        state = engine.save_state()
        read(engine, widths)
        assert engine.save_state() == state


def test_hidden_states_of_a_pass_across_the_edge_are_those_of_its_rows(wide: Path):
    with opened(wide, hidden_states=True) as engine:
        ids, found = text(engine), {}
        for widths in ((40, 20, 10), (40, 24, 6)):
            engine.rollback(0)
            for width in widths:
                engine.forward(Batch.chain(ids[engine.length() :][:width]))
            found[widths] = engine.hidden_states()
        assert found[40, 20, 10].shape[0] == 10
        assert np.array_equal(found[40, 20, 10][-6:], found[40, 24, 6])


def test_several_sequences_keep_their_bits(wide: Path):
    """One behind the edge, one that crosses it and one before it, in one batch."""
    with opened(wide, max_sequences=3) as engine:
        ids, starts, widths = text(engine), (80, 61, 20), (3, 6, 2)
        for sequence, start in enumerate(starts):
            engine.forward(Batch.chain(ids[:start][:48], sequence=sequence))
            if start > 48:
                engine.forward(Batch.chain(ids[48:start], sequence=sequence))
        parts = [
            Batch.chain(ids[start : start + width], sequence=sequence)
            for sequence, (start, width) in enumerate(zip(starts, widths, strict=True))
        ]
        together = engine.forward(packed(parts)).copy()
    with opened(wide) as engine:
        alone = read(engine, [48, 16])
    wanted = [alone[start : start + width] for start, width in zip(starts, widths, strict=True)]
    assert np.array_equal(together, np.concatenate(wanted))


@pytest.mark.parametrize("context", [64, 65, 66, 67])
def test_a_context_that_ends_behind_the_edge_can_be_filled(context: int, wide: Path):
    with opened(wide) as engine:
        wanted = read(engine, [48, 16])[:context]
    with opened(wide, context_length=context) as engine:
        ids = text(engine)[:context]
        found = [engine.forward(Batch.chain(ids[at : at + 1])).copy() for at in range(context)]
        assert np.array_equal(np.concatenate(found), wanted)


def test_only_reproducible_sessions_go_without_flash_attention(wide: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[str | None] = []
    inner = sessions._open

    def watched(*given: object, **named: object) -> object:
        seen.append(os.environ.get(FLASH_OFF))
        return inner(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(sessions, "_open", watched)
    for reproducible in (False, True, False):
        opened(wide, reproducible=reproducible).close()
    assert [value == "1" for value in seen] == [False, True, False]


@pytest.mark.parametrize("machine, without", [("x86_64", False), ("arm64", True), ("aarch64", True)])
def test_attention_of_arm_goes_without_flash_in_reproducible_mode(
    machine: str, without: bool, monkeypatch: pytest.MonkeyPatch
):
    """There a row of flash attention has other bits in a pass of one row, of two or three, and of more."""
    monkeypatch.setattr("platform.machine", lambda: machine)
    given = {"context_length": 64, "threads": 1, "max_sequences": 1, "max_batch": 8, "provider": "cpu"}
    for reproducible in (True, False, None):
        settings = OnnxSettings(**given, head_size=64, reproducible=reproducible, widest=8)
        assert settings.flash is not (without and reproducible is True)


def test_no_pass_and_no_padding_goes_across_the_edge():
    passes = {(0, 64): 64, (60, 64): 64, (60, 70): 64, (64, 70): 70, (70, 90): 90}
    assert {cells: end_of_pass(*cells, 64) for cells in passes} == passes
    assert end_of_pass(60, 70, 0) == 70
    assert [rows_before(base, 2, 64) for base in (0, 1, 2, 62, 63, 64, 65, 66, 90)] == [0, 0, 2, 2, 2, 0, 0, 2, 2]
    assert [rows_before(base, 2, 0) for base in (0, 1, 64, 65)] == [0, 0, 2, 2]


def test_a_class_is_refuted_by_the_beginning_of_a_text_alone(monkeypatch: pytest.MonkeyPatch, wide: Path):
    """What the proof would miss if it began where llama.cpp's kernels change."""
    with opened(wide) as engine:
        assert proof.confirm(engine, 2, (2, 63))
        inner = engine.forward

        def early(batch: Batch) -> Logits:
            is_early = engine.length() < 60 and batch.width == 2
            return inner(batch) + np.float32(is_early)

        monkeypatch.setattr(engine, "forward", early)
        assert not proof.confirm(engine, 2, (2, 63))
