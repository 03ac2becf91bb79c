"""Files that llama.cpp would end the process on are refused, and 200 mutations of a sound file crash nobody."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trials
from edgespec.config.options import LoadOptions
from edgespec.contained import Child
from edgespec.engines import trial
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.errors import ModelFileError, ModelNotFound
from edgespec.formats.gguf.check import check_gguf
from edgespec.formats.gguf.header import read_header
from edgespec.runtime import load
from edgespec.types import Batch
from tiny_gguf import Shape, matrices, vocabulary, write_model
from trials import faults, probe

SHAPE = Shape(layers=1, width=32, heads=2, kv_heads=1, hidden=32, merges=5)
TOKENS, _ = vocabulary(SHAPE.merges)
VECTOR = matrices(SHAPE, len(TOKENS))["output_norm.weight"]
MATRIX = matrices(SHAPE, len(TOKENS))["blk.0.attn_q.weight"]

METADATA_FAULTS = {
    "block_count is 0": {"llama.block_count": 0},
    "block_count is 'two'": {"llama.block_count": "two"},
    "context_length is 0": {"llama.context_length": 0},
    "attention.head_count is 2147483648": {"llama.attention.head_count": 1 << 31},
    "expert_count is 1000": {"llama.expert_count": 1000, "llama.expert_used_count": 2},
    "is in its vocabulary twice": {"tokenizer.ggml.tokens": [*TOKENS[:-1], TOKENS[0]]},
    "token_type list does not fit": {"tokenizer.ggml.token_type": [1] * 5},
    "scores list does not fit": {"tokenizer.ggml.scores": [0.0] * 3},
    "lacks a token for some byte": {"tokenizer.ggml.model": "llama"},
    "has no tokenizer": {"tokenizer.ggml.model": None},
    "vocabulary is empty": {"tokenizer.ggml.tokens": None},
    "alignment is 3": {"general.alignment": 3},
    "does not name its architecture": {"general.architecture": None},
}
# What ends the process that loads it, or is refused there.
LEFT_TO_THE_TRIAL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"llama.embedding_length": 33}, {}),
    ({"llama.attention.head_count_kv": 0}, {}),
    ({"llama.attention.layer_norm_rms_epsilon": -1.0}, {}),
    ({"llama.rope.scaling.type": "weird"}, {}),
    ({}, {"blk.0.attn_norm.weight": VECTOR.astype(np.float16)}),
    ({}, {"blk.0.attn_q.weight": MATRIX.astype(np.int32)}),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("sound") / "sound.gguf", SHAPE)


@pytest.mark.parametrize("reason", METADATA_FAULTS)
def test_bad_metadata_is_refused(tmp_path, reason):
    with pytest.raises(ModelFileError, match=reason):
        LlamaCppEngine.load(write_model(tmp_path / "bad.gguf", SHAPE, metadata=METADATA_FAULTS[reason]))


def test_what_only_the_library_minds_is_found_in_a_child(tmp_path):
    paths = [
        write_model(tmp_path / f"{number}.gguf", SHAPE, metadata=metadata, tensors=tensors)
        for number, (metadata, tensors) in enumerate(LEFT_TO_THE_TRIAL)
    ]
    for path, fault in zip(paths, faults(paths, timeout_s=60), strict=True):
        assert fault is not None and fault.startswith(str(path))


def test_what_is_no_model_file_is_refused(tmp_path):
    with pytest.raises(ModelNotFound, match=r"nowhere\.gguf"):
        check_gguf(tmp_path / "nowhere.gguf")
    with pytest.raises(ModelFileError, match="cannot be read"):
        check_gguf(tmp_path)
    contents = {
        "empty": b"",
        "text": b"hello, this is not a model at all, not even nearly",
        "version 1": b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + bytes(64),
        "many tensors": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + bytes(64),
        "many entries": b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + bytes(64),
        "long key": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60) + bytes(64),
    }
    for name, content in contents.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelFileError, match="not a usable model"):
            check_gguf(path)


def test_every_truncation_is_refused(sound, tmp_path):
    whole = sound.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in {*range(0, 600, 7), *range(600, len(whole), 997), len(whole) - 32}:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelFileError):
            check_gguf(cut)


def mutate(whole: bytes, data_start: int, rng: random.Random) -> bytes:
    """One of: cut short; a few bits flipped in the header; noise in the header; noise in the tensor infos."""
    data = bytearray(whole)
    kind = rng.randrange(4)
    if kind == 0:
        return bytes(data[: rng.randrange(len(data))])
    if kind == 1:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(data_start)] ^= 1 << rng.randrange(8)
    if kind == 2:
        start = rng.randrange(data_start)
        length = min(rng.randrange(1, 16), data_start - start)
        data[start : start + length] = rng.randbytes(length)
    if kind == 3:
        tensor_infos = whole.index(b"output_norm.weight") - 100
        data[rng.randrange(tensor_infos, data_start)] = rng.randrange(256)
    return bytes(data)


def test_mutated_files_fail_cleanly_or_work(sound, tmp_path):
    whole, data_start = sound.read_bytes(), read_header(sound).data_start
    rng = random.Random(0)
    passed, refused = [], 0
    for index in range(200):
        path = tmp_path / f"{index}.gguf"
        path.write_bytes(mutate(whole, data_start, rng))
        try:
            check_gguf(path)
            passed.append(path)
        except ModelFileError:
            refused += 1
    found = faults(passed, timeout_s=60)
    assert len(found) == len(passed)
    assert refused > 50
    working = [path for path, fault in zip(passed, found, strict=True) if fault is None]
    assert len(working) > 10
    for path in working[:10]:
        with LlamaCppEngine.load(path, context_length=16, threads=1, reproducible=False) as engine:
            assert np.isfinite(engine.forward(Batch.chain([1, 2, 3]))).all()


def test_a_probe_survives_what_ends_its_child(sound, tmp_path, monkeypatch):
    deadly, last = tmp_path / "deadly.gguf", tmp_path / "last.gguf"
    for path in (deadly, last):
        path.write_bytes(sound.read_bytes())
    monkeypatch.setenv("PYTHONPATH", str(Path(trials.__file__).parent))
    monkeypatch.setattr(trial, "fault_of", trials.ends_on_deadly)
    found = faults([sound, deadly, last], timeout_s=30)
    assert found[0] is found[2] is None
    assert "ended a trial process (SIGABRT" in str(found[1])


def test_a_probe_reports_nan_weights_and_logits(tmp_path):
    weights = write_model(tmp_path / "nan.gguf", SHAPE, tensors={"blk.0.attn_q.weight": MATRIX * np.float32(math.nan)})
    logits = write_model(tmp_path / "rope.gguf", SHAPE, tensors={"rope_freqs.weight": np.zeros(8, np.float32)})
    with pytest.raises(ModelFileError, match="invalid data"):
        probe(weights)
    with pytest.raises(ModelFileError, match="not numbers"):
        probe(logits)


def test_a_probe_that_hangs_is_ended(tmp_path):
    path = write_model(tmp_path / "rwkv.gguf", SHAPE, metadata={"tokenizer.ggml.model": "rwkv"})
    with pytest.raises(ModelFileError, match=r"could not be tried: loading it took more than 5 s .* less busy"):
        probe(path, timeout_s=5)


@pytest.fixture
def started(monkeypatch):
    """The files that are tried."""
    calls: list[Path] = []

    class Started(Child):
        def ask(self, function, *args):
            calls.extend(args)
            super().ask(function, *args)

    monkeypatch.setattr(trial, "Child", Started)
    return calls


def test_a_file_is_probed_once_until_it_changes(sound, tmp_path, started):
    path = tmp_path / "model.gguf"
    path.write_bytes(sound.read_bytes())
    trial.FileTrial({path: True}).require_sound()  # its checksum is known
    assert not started
    trial.FileTrial({path: False}).require_sound()
    trial.FileTrial({path: False}).require_sound()
    assert started == [path]
    write_model(path, Shape(layers=2, width=32, heads=2, kv_heads=1, hidden=32, merges=6))
    trial.FileTrial({path: False}).require_sound()
    assert started == [path, path]


def test_damaged_weights_end_a_load(tmp_path):
    whole = matrices(SHAPE, len(TOKENS))["token_embd.weight"]
    damaged = whole.copy()
    damaged[-1] = math.nan  # of a token that no trial reads
    path = write_model(tmp_path / "nan.gguf", SHAPE, tensors={"token_embd.weight": damaged, "output.weight": whole})
    with pytest.raises(ModelFileError, match=r"infinity or NaN|invalid data"):  # our kernels, llama.cpp
        load(LoadOptions(model=str(path), reproducible=False, context_length=16))
