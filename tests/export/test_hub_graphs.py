"""Hugging Face folders to graphs without torch: what their settings, types and files mean."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from demo import TEST_THREADS, change_json
from edgespec.errors import ModelFileError
from edgespec.export.check import open_engine
from edgespec.formats.checkpoint import Checkpoint
from edgespec.formats.onnx import DATA
from tiny_checkpoints import (
    COLUMNS,
    LOGITS,
    VARIANTS,
    read_weights,
    shard,
    write_checkpoint,
    write_safetensors,
    write_variant,
)
from tiny_graphs import difference, graph, logits

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", VARIANTS)
def test_settings_mean_what_they_mean_to_transformers(name: str, tmp_path: Path):
    """Windows, both spellings of rotary settings, capped logits: the logits of transformers are beside the tests."""
    found = logits(graph(write_variant(tmp_path / name, name), tmp_path / "made"))
    assert difference(found[:, COLUMNS], np.load(LOGITS)[name]) < 2e-5


@pytest.mark.parametrize("dtype", ["F64", "F16", "BF16"])
def test_every_type_of_weights_is_read(dtype: str, tmp_path: Path):
    """As its values rounded to that type and stored in 32 bits."""
    source = write_checkpoint(tmp_path / dtype, "qwen3", dtype=dtype)
    rounded = write_checkpoint(tmp_path / "rounded", "qwen3")
    write_safetensors(rounded / "model.safetensors", read_weights(source), "F32")
    ours, theirs = (graph(folder, tmp_path / f"made-{folder.name}") for folder in (source, rounded))
    assert (ours.parent / DATA).read_bytes() == (theirs.parent / DATA).read_bytes()


@pytest.mark.parametrize("has_shards", [True, False])
def test_a_whole_file_outranks_an_old_index(tmp_path: Path, has_shards: bool):
    """transformers' save_pretrained leaves the index of a model that was in several files, and reads the whole file."""
    whole = write_checkpoint(tmp_path / "whole", "llama", seed=1)
    folder = write_checkpoint(tmp_path / "both", "llama")
    shard(folder)
    if not has_shards:
        for path in folder.glob("model-*.safetensors"):
            path.unlink()
    shutil.copy(whole / "model.safetensors", folder)
    ours, theirs = (graph(each, tmp_path / f"made-{each.name}", "int8") for each in (folder, whole))
    assert (ours.parent / DATA).read_bytes() == (theirs.parent / DATA).read_bytes()


def test_ends_and_template_of_the_folder_come_along(tmp_path: Path):
    source = write_checkpoint(tmp_path / "q", "qwen3")
    change_json(source / "tokenizer_config.json", chat_template="{{ messages }}")
    (source / "generation_config.json").write_text('{"eos_token_id": [398, 397]}')
    with open_engine("onnx", graph(source, tmp_path / "made"), 64, TEST_THREADS) as engine:
        assert engine.vocabulary.end_ids == {397, 398}
        assert engine.vocabulary.chat_template == "{{ messages }}"


def test_a_file_cut_while_it_is_read_is_told(tmp_path: Path):
    source = write_checkpoint(tmp_path / "tiny", "smollm2")
    checkpoint, path = Checkpoint.open(source), source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    last = max(checkpoint.tensors, key=lambda name: checkpoint.tensors[name].offset)
    with pytest.raises(ModelFileError, match=f"became shorter while tensor {last} was read"):
        checkpoint.weights(last)
