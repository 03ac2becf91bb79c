"""Files that change while a model runs: an error before the next pass, never a crash of the process."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

import edgespec
from edgespec import GenerateOptions
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.model_files import HeldFiles
from edgespec.engines.onnx import OnnxEngine
from edgespec.errors import EngineError
from edgespec.types import Batch


def test_files_changed_in_place_are_detected_renamed_ones_not(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x" * 100)
    held = HeldFiles([path, tmp_path / "missing"])
    held.check()
    (tmp_path / "new").write_bytes(b"y")
    (tmp_path / "new").replace(path)
    held.check()
    held.close()
    held.close()
    held = HeldFiles([path])
    os.truncate(path, 0)
    with pytest.raises(EngineError, match="weights was changed while the model was in use"):
        held.check()
    held.close()


def test_a_truncated_gguf_ends_the_pass_and_not_the_process(tiny_path: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(tiny_path, tmp_path / "model.gguf"))
    with LlamaCppEngine.load(path, threads=1, reproducible=False) as engine:
        engine.forward(Batch.chain([1, 2, 3]))
        os.truncate(path, 4096)
        with pytest.raises(EngineError, match=r"model\.gguf was changed"):
            engine.forward(Batch.chain([4]))
        assert engine.length() == 3


def test_onnx_weights_that_are_written_over_are_noticed(onnx_path: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(onnx_path.parent, tmp_path / "model")
    with OnnxEngine.load(folder / "model.onnx", threads=1, reproducible=False) as engine:
        engine.forward(Batch.chain([1, 2, 3]))
        weights = next(folder.glob("*.data"))
        os.utime(weights, ns=(1, 1))
        with pytest.raises(EngineError, match="was changed"):
            engine.forward(Batch.chain([4]))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not remove a file that is in use")
def test_a_model_whose_file_was_replaced_answers_and_keeps_what_it_learnt_under_its_own_version(
    target_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    path = Path(shutil.copy(target_path, tmp_path / "model.gguf"))
    options = GenerateOptions(max_tokens=24, drafter="ngram", draft_length="auto", ignore_eos=True)
    with edgespec.load(path, threads=1, reproducible=False) as model:
        (tmp_path / "new").write_bytes(b"another version")
        (tmp_path / "new").replace(path)
        assert model.generate("Hello", options=options).stats.new_tokens == 24
        assert model.drafters.costs.curve.at(1) > 0
    with edgespec.load(target_path, threads=1, reproducible=False) as model:
        path.unlink()
        assert model.generate("Hello", options=options).stats.new_tokens == 24
