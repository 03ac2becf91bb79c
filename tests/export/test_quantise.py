"""Quantisation through llama.cpp: final types, failures that leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import ModelFileError, StateError
from edgespec.export.gguf.convert import GGUF_QUANTS, convert, quantise
from edgespec.formats.gguf.check import check_gguf
from tiny_checkpoints import write_checkpoint
from tiny_graphs import export_gguf, logits

LEAST_CORRELATION = {"q2": 0.5, "q3": 0.8, "q4": 0.93, "q5": 0.98, "q6": 0.99}  # of random weights' logits


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose rows llama.cpp's blocks of 256 divide, as a folder."""
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    return write_checkpoint(tmp_path_factory.mktemp("wide") / "hf", "smollm2", dtype="F16", **shape)


@pytest.fixture(scope="module")
def wide_gguf(wide: Path) -> Path:
    convert(wide, wide.parent / "source.gguf", "f16")
    return wide.parent / "source.gguf"


@pytest.mark.parametrize("quant", GGUF_QUANTS)
def test_every_usual_type_stays_close(wide: Path, wide_gguf: Path, tmp_path: Path, quant: str):
    export_gguf(wide, tmp_path / "out.gguf", quant, threads=1)
    wanted, found = logits(wide_gguf), logits(tmp_path / "out.gguf")
    correlation = np.corrcoef(wanted.ravel(), found.ravel())[0, 1]
    assert correlation > LEAST_CORRELATION.get(quant.removeprefix("i")[:2], 0.999), correlation
    assert len(check_gguf(tmp_path / "out.gguf").tensors) == len(check_gguf(wide_gguf).tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


def test_bad_requests(wide: Path, wide_gguf: Path, tmp_path: Path):
    quantise(wide_gguf, tmp_path / "q4.gguf", "q4_0", threads=1)
    with pytest.raises(ModelFileError, match=r"cannot be quantised by llama\.cpp: .*requantizing from type q4_0"):
        quantise(tmp_path / "q4.gguf", tmp_path / "out.gguf", "q5_0", threads=1)
    with pytest.raises(StateError, match=r"out\.gguf cannot be written"):
        quantise(wide_gguf, tmp_path / "no" / "out.gguf", "q4_0", threads=1)
    assert [path.name for path in tmp_path.iterdir()] == ["q4.gguf"]


LIMITED = """
import resource, sys
from pathlib import Path
from edgespec.errors import StateError
from edgespec.export.gguf.convert import convert, quantise
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]), int(sys.argv[4])))
source, output, quant = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
try:
    (convert if source.is_dir() else quantise)(source, output, quant)
except StateError as error:
    sys.exit(f"StateError: {error}")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are a POSIX matter")
@pytest.mark.parametrize("quant", ["f16", "q4_0"])
def test_a_full_disk_leaves_nothing(wide: Path, wide_gguf: Path, tmp_path: Path, quant: str):
    source = wide if quant == "f16" else wide_gguf
    command = [sys.executable, "-c", LIMITED, str(source), str(tmp_path / "out.gguf"), quant, "300000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "StateError" in done.stderr and "cannot be written" in done.stderr, done.stderr
    assert not any(tmp_path.iterdir())
