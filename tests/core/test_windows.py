"""What Windows does otherwise, as far as another system can show it."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest

from edgespec import installation
from edgespec.cli import main
from edgespec.errors import ModelNotFound, StateError
from edgespec.loading import own_models
from edgespec.loading.catalogue import check_name


class _Named:
    """Enough of `os` for a module that asks which system this is."""

    name = "nt"
    environ: dict[str, str] = {}  # noqa: RUF012


def test_words_are_quoted_as_both_shells_take_them(monkeypatch):
    monkeypatch.setattr(installation, "os", _Named)
    words = {r"C:\x.gguf": r"C:\x.gguf", r"C:\Ann Lee\x": r'"C:\Ann Lee\x"', 'say "hi"': r'"say \"hi\""', "": '""'}
    for text, word in words.items():
        assert installation.joined(["edgespec", text]) == f"edgespec {word}"


@pytest.mark.parametrize("name", ["con", "NUL", "com1", "aux.gguf", "model."])
def test_a_device_is_no_name_of_a_model(name: str):
    with pytest.raises(ModelNotFound, match="not a valid name"):
        check_name(name)


def test_a_model_in_use_can_be_removed_later(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("EDGESPEC_MODELS", str(tmp_path))
    folder = tmp_path / "pulled"
    folder.mkdir()
    (folder / "manifest.toml").write_text('format = 1\nname = "pulled"\nsource = "hub"\n', encoding="utf-8")

    def refused(path: Path, new: Path) -> None:
        raise PermissionError(errno.EACCES, "in use")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refused)
        with pytest.raises(StateError, match="close the program"):
            own_models.remove("pulled")
    assert (folder / "manifest.toml").exists()
    own_models.remove("pulled")
    assert not folder.exists()


def test_files_get_utf_8(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(main, "os", _Named)
    with (tmp_path / "out").open("w", encoding="cp1252") as out:
        monkeypatch.setattr(sys, "stdout", out)
        main._make_streams_tolerant()
        print("日本 é", end="")
    assert (tmp_path / "out").read_bytes() == "日本 é".encode()
