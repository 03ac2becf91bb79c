"""Hugging Face folder -> GGUF: the shipped files, and bad folders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from demo import DEMO, change_json, changed_copy
from edgespec.errors import ModelFileError
from edgespec.export.gguf.convert import convert
from edgespec.installation import install_command


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "config.json").unlink(), r"config\.json is missing"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), r"holds \[\], an object was expected"),
        (lambda f: change_json(f / "config.json", rms_norm_eps="x"), "config.json has an impossible setting: .*'x'"),
        (lambda f: change_json(f / "config.json", rms_norm_eps=1e99), "a setting that GGUF cannot hold"),
        (
            lambda f: change_json(f / "config.json", vocab_size=4000),
            r"config.json implies \(4000, 128\)",
        ),
        (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (
            lambda f: change_json(f / "tokenizer.json", model={"type": "Unigram"}),
            "holds a Unigram tokenizer; allowed: byte-level BPE",
        ),
        (lambda f: change_json(f / "tokenizer.json", pre_tokenizer=None), "splits text by None"),
        (lambda f: change_json(f / "tokenizer_config.json", eos_token="</s>"), "eos_token '</s>', which .* lacks"),
        (lambda f: (f / "model.safetensors").unlink(), r"has no model\.safetensors"),
    ],
)
def test_a_bad_folder_is_refused_and_nothing_is_left(tmp_path: Path, break_it: Any, message: str):
    folder = changed_copy(tmp_path / "hf")
    break_it(folder)
    with pytest.raises(ModelFileError, match=message):
        convert(folder, tmp_path / "out.gguf", "f32")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_shipped_gguf_is_the_shipped_checkpoint(tmp_path: Path, role: str):
    folder = DEMO / "hf" / role
    convert(folder, tmp_path / "again.gguf", "q8_0", name=f"edgespec demo {role}", licence="cc-by-sa-4.0")
    assert (tmp_path / "again.gguf").read_bytes() == (DEMO / f"demo-{role}-q8_0.gguf").read_bytes()


def test_a_missing_package_is_named():
    code = "import sys; sys.modules['gguf'] = None; import edgespec.export.gguf"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"CapabilityError: an export needs gguf: {install_command('convert')}" in done.stderr
