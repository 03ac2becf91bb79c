"""Early exits of a GGUF: two models over the same shards, bitwise those of one file each, mapped once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="conversion needs the package gguf: scripts/run.py install export")
pytest.importorskip("tokenizers", reason="the test folders need the package tokenizers")

from edgespec.engines.llamacpp import LlamaCppEngine, VocabularyFile
from edgespec.engines.model_files import fingerprint
from edgespec.errors import ConfigError, ModelFileError, ModelNotFound, StateError
from edgespec.export.derive import prune
from edgespec.export.gguf import EarlyExit, convert, early_exit_gguf
from edgespec.export.onnx.from_gguf import open_gguf
from edgespec.formats.gguf.check import FILES, ID, check_gguf, model_files
from edgespec.formats.gguf.header import GgufNumbers, read_header
from edgespec.types import Batch
from tiny_checkpoints import CASES, TOKEN_IDS, write_checkpoint
from tiny_gguf import Shape, write_model
from trials import probe

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
TARGET = DEMO / "demo-target-q8_0.gguf"


def logits_of(path: Path, **options: Any) -> np.ndarray:
    with LlamaCppEngine.load(path, threads=1, reproducible=False, context_length=64, **options) as engine:
        return engine.forward(Batch.chain(TOKEN_IDS)).copy()


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> EarlyExit:
    return early_exit_gguf(TARGET, tmp_path_factory.mktemp("split"), 3)


@pytest.fixture
def copied(split: EarlyExit, tmp_path: Path) -> EarlyExit:
    """One that a test may spoil."""
    files = (split.target, split.draft, split.shared, split.rest)
    for file in files:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return EarlyExit(*(tmp_path / file.name for file in files))


def test_the_target_is_bitwise_the_model_in_one_file(split: EarlyExit):
    assert np.array_equal(logits_of(split.target), logits_of(TARGET))
    one, other = check_gguf(TARGET), check_gguf(split.target)
    assert {tensor.name: tensor.num_bytes for tensor in one.tensors} == {t.name: t.num_bytes for t in other.tensors}
    ours = {key: value for key, value in other.metadata.items() if "split" not in key}
    assert ours == one.metadata
    assert split.target_parts == (split.shared, split.rest)
    sizes = sum(file.stat().st_size for file in (split.target, *split.target_parts))
    assert sizes < TARGET.stat().st_size + 200_000


def test_the_draft_is_bitwise_the_model_cut_short(split: EarlyExit, tmp_path: Path):
    prune(DEMO / "hf" / "target", tmp_path / "short", range(3))
    convert(tmp_path / "short", tmp_path / "short.gguf", "q8_0")
    assert np.array_equal(logits_of(split.draft), logits_of(tmp_path / "short.gguf"))
    assert check_gguf(split.draft).metadata["llama.block_count"] == 3


@pytest.mark.parametrize("case", CASES)
def test_every_architecture_can_be_cut(tmp_path: Path, case: str):
    convert(write_checkpoint(tmp_path / "hf", case), tmp_path / "whole.gguf", "f16")
    made = early_exit_gguf(tmp_path / "whole.gguf", tmp_path, 2)
    assert np.array_equal(logits_of(made.target), logits_of(tmp_path / "whole.gguf"))
    prune(tmp_path / "hf", tmp_path / "short", (0, 1))
    convert(tmp_path / "short", tmp_path / "short.gguf", "f16")
    assert np.array_equal(logits_of(made.draft), logits_of(tmp_path / "short.gguf"))


def test_metadata_per_layer_are_cut_with_the_layers(tmp_path: Path):
    convert(write_checkpoint(tmp_path / "hf", "gemma3"), tmp_path / "whole.gguf", "f16")
    made = early_exit_gguf(tmp_path / "whole.gguf", tmp_path, 2)
    key = "gemma3.attention.sliding_window_pattern"
    windows = [read_header(path).metadata[key] for path in (made.target, made.draft)]
    assert [found.items for found in windows if isinstance(found, GgufNumbers)] == [(True, False, True), (True, False)]


def test_a_split_model_passes_the_trial_process_and_gives_its_vocabulary(split: EarlyExit):
    probe(split.target)
    probe(split.draft)
    with VocabularyFile(split.draft) as one, VocabularyFile(TARGET) as other:
        assert one.pieces == other.pieces
        assert one.encode("hello world") == other.encode("hello world")


def test_the_same_model_gives_the_same_files(split: EarlyExit, tmp_path: Path):
    again = early_exit_gguf(TARGET, tmp_path, 3)
    for one, other in zip((split.target, *split.target_parts), (again.target, *again.target_parts), strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_states_and_measurements_depend_on_the_shards(copied: EarlyExit):
    assert model_files(copied.target) == (copied.target, copied.shared, copied.rest)
    options: dict[str, Any] = {"threads": 1, "reproducible": False, "context_length": 64}
    with LlamaCppEngine.load(copied.target, **options) as engine:
        engine.forward(Batch.chain(TOKEN_IDS))
        state = engine.save_state()
    # Other weights behind the same header: the end of a shard is part of its fingerprint.
    data = bytearray(copied.rest.read_bytes())
    data[-40] ^= 1
    before = fingerprint(copied.rest)
    copied.rest.write_bytes(data)
    assert fingerprint(copied.rest) != before
    with LlamaCppEngine.load(copied.target, **options) as engine, pytest.raises(StateError, match="another model"):
        engine.load_state(state)


def spoil(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1 and len(old) == len(new)
    path.write_bytes(data.replace(old, new))


def test_shards_that_are_missing_renamed_or_cut_short(copied: EarlyExit):
    whole = copied.rest.read_bytes()
    for size in (0, 10, 200, len(whole) // 2, len(whole) - 32):
        copied.rest.write_bytes(whole[:size])
        with pytest.raises(ModelFileError, match=r"-rest\.gguf is not a usable model"):
            check_gguf(copied.target)
    copied.rest.rename(copied.rest.with_name("other.gguf"))
    with pytest.raises(ModelFileError, match=r"-rest\.gguf is missing, a part of .*-target\.gguf"):
        LlamaCppEngine.load(copied.target)
    check_gguf(copied.draft)  # which does not need it
    copied.rest.write_bytes(copied.shared.read_bytes())
    with pytest.raises(ModelFileError, match=r"-rest\.gguf is part 1 of a model, .* names it as part 2"):
        LlamaCppEngine.load(copied.target)


def test_shards_of_another_model_or_another_cut(copied: EarlyExit, tmp_path: Path):
    (tmp_path / "other").mkdir()
    other = early_exit_gguf(TARGET, tmp_path / "other", 4)
    copied.rest.write_bytes(other.rest.read_bytes())
    with pytest.raises(ModelFileError, match=r"-rest\.gguf belongs to another model"):
        LlamaCppEngine.load(copied.target)


def test_a_shard_alone_is_no_model(split: EarlyExit):
    for shard in split.target_parts:
        with pytest.raises(ModelFileError, match=r"is a part of a model; open the file that ends in -target\.gguf"):
            LlamaCppEngine.load(shard)


NUMBER_TYPE, COUNT_TYPE = (name + b"\x02\0\0\0" for name in (b"split.no", b"split.count"))


def test_headers_that_contradict_their_shards(copied: EarlyExit):
    faults = [
        (COUNT_TYPE + b"\x03\0", COUNT_TYPE + b"\x02\0", "names 2 parts and says split.no 0, split.count 2"),
        (NUMBER_TYPE + b"\0\0", NUMBER_TYPE + b"\x01\0", "says split.no 1"),
        (b"split.tensors.count\x05\0\0\0\x53", b"split.tensors.count\x05\0\0\0\x52", "hold 83 tensors, it says 82"),
    ]
    sound = copied.target.read_bytes()
    for old, new, message in faults:
        copied.target.write_bytes(sound)
        spoil(copied.target, old, new)
        with pytest.raises(ModelFileError, match=message):
            LlamaCppEngine.load(copied.target)


@pytest.mark.parametrize(
    "names",
    [
        ["../x-rest.gguf"],
        ["/etc/x-rest.gguf"],
        ["a\\b.gguf"],
        ["C:x.gguf"],
        [".."],
        [""],
        ["a.gguf", "a.gguf"],
        ["x\n.gguf"],
        ["self.gguf"],
        [str(number) for number in range(17)],
        5,
        [1, 2],
    ],
)
def test_names_that_lead_out_of_the_folder(tmp_path: Path, names: Any):
    path = write_model(tmp_path / "self.gguf", Shape(layers=1), metadata={FILES: names, ID: "x"})
    with pytest.raises(ModelFileError, match=r"is not a plain file name|different file names"):
        check_gguf(path)


def test_what_cannot_be_cut(split: EarlyExit, tmp_path: Path, tiny_path: Path):
    for layers in (0, 9, -1, 40):
        with pytest.raises(ConfigError, match=rf"after {layers} layers was requested; .* allows 1\.\.8"):
            early_exit_gguf(TARGET, tmp_path, layers)
    with pytest.raises(ModelFileError, match="is already split; give the model in one file"):
        early_exit_gguf(split.target, tmp_path, 2)
    with pytest.raises(ModelNotFound):
        early_exit_gguf(tmp_path / "none.gguf", tmp_path, 2)
    folder = write_checkpoint(tmp_path / "hf", "gemma2", num_hidden_layers=46)
    convert(folder, tmp_path / "deep.gguf", "q8_0")
    with pytest.raises(ModelFileError, match="scales the attention of a gemma2 of 46 layers differently"):
        early_exit_gguf(tmp_path / "deep.gguf", tmp_path, 2)
    with pytest.raises(StateError, match="cannot be written"):
        early_exit_gguf(tiny_path, tmp_path / "no", 1)
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "deep.gguf"}


def test_a_file_that_llama_cpp_has_joined_is_one_file(tmp_path: Path):
    """`llama-gguf-split --merge` leaves the keys of the parts, with a count of 0."""
    keys = {"split.no": 0, "split.count": 0, "split.tensors.count": 21}
    path = write_model(tmp_path / "joined.gguf", metadata=keys)
    assert open_gguf(path).config.num_layers == 2
    assert early_exit_gguf(path, tmp_path, 1).target.is_file()
    with pytest.raises(ModelFileError, match="is one of 2 parts of a model"):
        open_gguf(write_model(tmp_path / "part.gguf", metadata={**keys, "split.count": 2}))


@pytest.mark.parametrize("moment", [0.2, 0.6, 0.9, 1.0])
def test_what_progress_raises_leaves_nothing(tmp_path: Path, moment: float):
    def stop(done: int, total: int, _what: str) -> None:
        if done >= moment * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        early_exit_gguf(TARGET, tmp_path, 3, progress=stop)
    assert not any(tmp_path.iterdir())


LIMITED = """
import resource, sys
from pathlib import Path
from edgespec.errors import StateError
from edgespec.export.gguf import early_exit_gguf
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
try:
    early_exit_gguf(Path(sys.argv[1]), Path(sys.argv[2]), 3)
except StateError as error:
    sys.exit(f"StateError: {error}")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are a POSIX matter")
@pytest.mark.parametrize("limit", [1_000_000, 4_500_000])
def test_a_full_disk_leaves_nothing(tmp_path: Path, limit: int):
    """In the middle of the first shard, and of the second, which is longer."""
    command = [sys.executable, "-c", LIMITED, str(TARGET), str(tmp_path), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "StateError" in done.stderr and "cannot be written" in done.stderr, done.stderr
    assert not any(tmp_path.iterdir())


MEMORY = """
import sys
from pathlib import Path
from edgespec.engines.llamacpp import LlamaCppEngine
from edgespec.types import Batch

def mapped(names):
    # Resident and proportional kB of all mappings of the files, from /proc/self/smaps.
    rss = pss = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split()[0].count("-") == 1 and not line.split()[0].endswith(":"):
            inside = line.endswith(names)
        elif inside and line.startswith("Rss:"):
            rss += int(line.split()[1])
        elif inside and line.startswith("Pss:"):
            pss += int(line.split()[1])
    return rss, pss

options = {"threads": 1, "reproducible": False, "context_length": 64}
engines = []
for name in sys.argv[2:]:
    engines.append(LlamaCppEngine.load(Path(name), **options))
    engines[-1].forward(Batch.chain(list(range(40))))
    print(*mapped(sys.argv[1]))
"""


@pytest.mark.quiet
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of mapped pages")
def test_the_shared_shard_is_in_memory_once(split: EarlyExit):
    def measured(*paths: Path) -> list[list[int]]:
        command = [sys.executable, "-c", MEMORY, split.shared.name, *map(str, paths)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [[int(number) for number in line.split()] for line in done.stdout.splitlines()]

    shared_kb = split.shared.stat().st_size / 1024
    (rss_alone, pss_alone), (rss_both, pss_both) = measured(split.target, split.draft)
    assert 0.9 * shared_kb < pss_alone < 1.05 * shared_kb and rss_alone < 1.05 * shared_kb
    # Both models map it, which the resident size counts twice and the proportional one once.
    assert rss_both > 1.7 * shared_kb
    assert pss_both < 1.1 * shared_kb


def test_only_headers_name_shards(split: EarlyExit):
    assert read_header(split.shared).metadata.keys() == {"split.no", ID}
    assert model_files(TARGET) == (TARGET,)
    assert not read_header(split.target).tensors
