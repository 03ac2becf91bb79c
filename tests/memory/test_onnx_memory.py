"""What ONNX models take of a process's own memory, in child processes, beside what is planned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
TOKENIZER_CHILD = """
import sys
from pathlib import Path
import numpy, tokenizers
from edgespec.platform.memory import own_bytes
from edgespec.engines.onnx.tokenizer import TokenizerFile
before = own_bytes()
vocabulary = TokenizerFile(Path(sys.argv[1]), int(sys.argv[2]))
pieces = vocabulary.pieces
print(own_bytes() - before)
"""


def child(code: str, *words: str) -> str:
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180, env=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.quiet
def test_a_tokenizer_keeps_what_is_planned_and_not_what_reading_it_took(tmp_path: Path) -> None:
    size = 50_000
    write_tokenizer(tmp_path, size)
    kept = int(child(TOKENIZER_CHILD, str(tmp_path), str(size)))
    assert 0.5 * 360 * size < kept < 1.25 * 360 * size


def write_tokenizer(folder: Path, size: int) -> None:
    """BPE over bytes with merges in lists, as converters write it today."""
    from edgespec.engines.onnx.tokenizer import BYTE_OF

    letters = list(BYTE_OF)
    merges = [[one, other] for one in letters for other in letters][: size - len(letters)]
    names = [*letters, *map("".join, merges)]
    model: dict[str, Any] = {
        "type": "BPE",
        "vocab": {name: index for index, name in enumerate(names)},
        "merges": merges,
        "unk_token": None,
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    whole = {"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": level, "decoder": level}
    (folder / "tokenizer.json").write_text(json.dumps(whole, ensure_ascii=False), encoding="utf-8")
