"""What ONNX models take of a process's own memory, in child processes, beside what is planned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.config.options import LoadOptions
from edgespec.engines.model_use import ModelUse
from edgespec.engines.onnx.footprint import footprint
from edgespec.engines.onnx.pages import untouched_zeros
from edgespec.loading.requirements import resolve_pair
from edgespec.platform.memory import own_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
MB = 1_000_000
CONTEXT = 2048
CHILD = """
import json, sys
import edgespec
with edgespec.load(**json.loads(sys.argv[1])) as model:
    loaded = model.memory.own_bytes
    ids = (model.encode("The quick brown fox jumps over the lazy dog. ") * 400)[: model.context_length - 20]
    model.generate(ids, options=edgespec.GenerateOptions(max_tokens=16, ignore_eos=True))
    print(json.dumps([loaded, model.memory.own_bytes]))
"""
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


def own_of(home: Path, kind: str | None) -> tuple[int, int]:
    """Bytes after the load, and with a full context."""
    options = {"model": "demo", "engine": "onnx", "drafter": "none", "threads": 1, "context_length": CONTEXT}
    options |= {"cache_type_k": kind, "cache_type_v": kind}
    loaded, full = json.loads(child(CHILD, json.dumps(options), home=home))
    return loaded, full


def child(code: str, *words: str, home: Path | None = None) -> str:
    environment = os.environ if home is None else {**os.environ, "EDGESPEC_HOME": str(home)}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.quiet
def test_an_int8_cache_saves_what_it_is_smaller_by_at_the_first_load_too(tmp_path: Path) -> None:
    """The first load measures the cache's scales in a session of its own, whose memory must be given back."""
    first = own_of(tmp_path, "int8")
    later, plain = own_of(tmp_path, "int8"), own_of(tmp_path, None)
    assert first[0] < later[0] + 5 * MB and first[1] < later[1] + 5 * MB
    path = resolve_pair(LoadOptions(engine="onnx"), check_hashes=False).target
    wide, small = (
        footprint(path, ModelUse(CONTEXT, cache_type_k=kind, cache_type_v=kind, rows=1)) for kind in (None, "int8")
    )
    assert wide.own - small.own == wide.cache - small.cache > 10 * MB
    assert plain[1] - later[1] > 0.7 * (wide.own - small.own)


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


def test_zeros_take_memory_where_they_are_written_only() -> None:
    size = 64 * MB
    before = own_bytes() or 0
    array = untouched_zeros((2, size // 2), np.uint8)
    assert not array.any() and array.flags.writeable and (own_bytes() or 0) < before + size // 4
    array[1] = 1
    assert (own_bytes() or 0) > before + size // 4
    with pytest.raises(MemoryError, match="no room for"):
        untouched_zeros(1 << 50, np.uint8)
