"""Models cut down to some of their layers: as Hugging Face folders, and as early exits that share their weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="conversion needs the package gguf: scripts/run.py install export")
pytest.importorskip("tokenizers", reason="the test folders need the package tokenizers")

from edgespec.engines.llamacpp import LlamaCppEngine
from edgespec.errors import ConfigError, ModelFileError, UsageError
from edgespec.export.derive import prune
from edgespec.export.gguf import convert
from edgespec.formats.checkpoint import Checkpoint
from edgespec.types import Batch
from tiny_checkpoints import CASES, TOKEN_IDS, logits_of_transformers, write_checkpoint

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "hf"


def logits_of(path: Path) -> np.ndarray:
    exact: dict[str, Any] = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": False}
    with LlamaCppEngine.load(path, threads=1, reproducible=False, context_length=64, **exact) as engine:
        return engine.forward(Batch.chain(TOKEN_IDS)).copy()


def test_kept_layers_are_renumbered_and_bytes_are_copied(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "hf", "llama", num_hidden_layers=5, dtype="BF16")
    assert prune(folder, tmp_path / "out", (0, 2, 4)) == tmp_path / "out"
    before, after = Checkpoint.open(folder), Checkpoint.open(tmp_path / "out")
    assert after.config["num_hidden_layers"] == 3
    for old, new in {0: 0, 2: 1, 4: 2}.items():
        for name in before.names():
            if f".layers.{old}." in name:
                renamed = name.replace(f".layers.{old}.", f".layers.{new}.")
                assert after.tensors[renamed].dtype == "BF16"
                assert np.array_equal(before.weights(name), after.weights(renamed))
    assert len(after.tensors) == len(before.tensors) - 2 * sum(".layers.0." in name for name in before.names())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "out"}


@pytest.mark.parametrize("case", CASES)
def test_transformers_runs_the_pruned_model_as_llama_cpp_does(tmp_path: Path, case: str):
    pytest.importorskip("torch", reason="this comparison needs torch: scripts/run.py install export")
    pytest.importorskip("transformers", reason="this comparison needs transformers")
    folder = write_checkpoint(tmp_path / "hf", case)
    layers = (0, 1, 2) if case == "smollm3" else (1, 2)
    prune(folder, tmp_path / "out", layers)
    convert(tmp_path / "out", tmp_path / "out.gguf", "f32")
    wanted = logits_of_transformers(tmp_path / "out")
    assert np.abs(logits_of(tmp_path / "out.gguf") - wanted).max() < (1e-3 if "ge" in case or "gpt" in case else 1e-4)


@pytest.mark.parametrize("case", ["gemma3", "smollm3"])
def test_embeddings_are_tied_where_the_config_leaves_it_to_transformers(case: str, tmp_path: Path):
    folder = write_checkpoint(tmp_path / case, case)
    convert(folder, tmp_path / "said.gguf", "f32")
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    convert(folder, tmp_path / "left.gguf", "f32")
    assert np.array_equal(logits_of(tmp_path / "said.gguf"), logits_of(tmp_path / "left.gguf"))


def test_settings_per_layer_follow_their_layers(tmp_path: Path):
    gemma2 = write_checkpoint(tmp_path / "gemma2", "gemma2", num_hidden_layers=4)
    prune(gemma2, tmp_path / "a", (1, 2))
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["layer_types"] == ["full_attention", "sliding_attention"]
    smollm3 = write_checkpoint(tmp_path / "smollm3", "smollm3")
    prune(smollm3, tmp_path / "b", (0, 3, 4))
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["no_rope_layers"] == [1, 0, 1]
    with pytest.raises(ModelFileError, match=r"differs at \[1\]\. Prune it by whole groups of four"):
        convert(tmp_path / "b", tmp_path / "b.gguf", "f32")
    gpt2 = write_checkpoint(tmp_path / "gpt2", "gpt2")
    prune(gpt2, tmp_path / "c", (2,))
    assert json.loads((tmp_path / "c" / "config.json").read_text())["n_layer"] == 1
    broken = write_checkpoint(tmp_path / "broken", "smollm3", no_rope_layers=[1, 1])
    with pytest.raises(ModelFileError, match="2 no_rope_layers for a model of 5 layers"):
        prune(broken, tmp_path / "d", (0,))


@pytest.mark.parametrize("layers", [(), (0, 9), (-1, 0), (1, 0), (0, 0)])
def test_layers_that_are_not_there(tmp_path: Path, layers: tuple[int, ...]):
    with pytest.raises(ConfigError, match=r"has 0\.\.8: give one or more of them, ascending"):
        prune(DEMO / "target", tmp_path / "out", layers)
    assert not any(tmp_path.iterdir())


def test_refusals_leave_nothing(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "hf", "qwen2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["OtherForCausalLM"]}))
    with pytest.raises(ModelFileError, match="is a OtherForCausalLM; supported for GGUF"):
        prune(folder, tmp_path / "out", (0,))
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(UsageError, match="full exists and is not empty"):
        prune(folder, tmp_path / "full", (0,))
    (tmp_path / "plain").write_text("mine")
    with pytest.raises(UsageError, match="plain exists"):
        prune(folder, tmp_path / "plain", (0,))
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "full", "plain"}


def test_what_progress_raises_leaves_nothing(tmp_path: Path):
    def stop(done: int, _total: int, _what: str) -> None:
        if done == 7:
            raise KeyboardInterrupt

    folder = write_checkpoint(tmp_path / "hf", "smollm2")
    with pytest.raises(KeyboardInterrupt):
        prune(folder, tmp_path / "out", (0, 1), progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


LIMITED = """
import resource, sys
from pathlib import Path
from edgespec.errors import StateError
from edgespec.export.derive import prune
resource.setrlimit(resource.RLIMIT_FSIZE, (300000, 300000))
try:
    prune(Path(sys.argv[1]), Path(sys.argv[2]), (0, 1))
except StateError as error:
    sys.exit(f"StateError: {error}")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are a POSIX matter")
def test_a_full_disk_leaves_nothing(tmp_path: Path):
    command = [sys.executable, "-c", LIMITED, str(DEMO / "target"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "StateError" in done.stderr and "cannot be written" in done.stderr, done.stderr
    assert not any(tmp_path.iterdir())


KILLED = """
import os, sys
from pathlib import Path
from edgespec.export.derive import prune
from edgespec.export.gguf import early_exit_gguf, export_gguf
what, out, moment = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
demo = Path(sys.argv[4])
calls = 0
def die(done, total, name):
    global calls
    calls += 1
    if calls == moment:
        os.kill(os.getpid(), 9)
if what == "prune":
    prune(demo / "hf" / "target", out / "model", (0, 1, 2), progress=die)
elif what == "early-exit":
    early_exit_gguf(demo / "demo-target-q8_0.gguf", out, 3, progress=die)
else:
    export_gguf(demo / "hf" / "target", out / "model.gguf", what, threads=1, progress=die)
"""
MOMENTS = {"prune": (1, 20, 29), "early-exit": (2, 10, 40, 86), "q8_0": (1, 40, 84), "q5_0": (40, 100, 167)}


@pytest.mark.skipif(sys.platform == "win32", reason="signal 9 is a POSIX matter")
@pytest.mark.parametrize("what", MOMENTS)
def test_a_kill_leaves_nothing_that_looks_finished_and_the_next_run_succeeds(tmp_path: Path, what: str):
    def run(moment: int) -> int:
        command = [sys.executable, "-c", KILLED, what, str(tmp_path), str(moment), str(DEMO.parent)]
        return subprocess.run(command, check=False).returncode

    for moment in MOMENTS[what]:
        assert run(moment) == -9
        finished = {path.name for path in tmp_path.iterdir() if not path.name.endswith(".tmp")}
        # Of an early exit shards may be whole, but no model names them yet.
        assert all(name.endswith(("-shared.gguf", "-rest.gguf")) for name in finished)
        for name in finished:
            with pytest.raises(ModelFileError, match="is a part of a model"):
                LlamaCppEngine.load(tmp_path / name)
    assert run(0) == 0
    left = {path.name for path in tmp_path.iterdir()}
    assert left and not any(name.endswith(".tmp") for name in left)
