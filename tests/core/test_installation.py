"""What is installed, and hints that name what pip can find from where edgespec was installed."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from pathlib import Path

import pytest

from edgespec import installation
from edgespec.cli import main
from edgespec.errors import ModelNotFound, StateError
from edgespec.installation import install_command, not_importable, reinstall_command, requirements
from edgespec.loading import own_models
from edgespec.loading.catalogue import check_name

ROOT = Path(__file__).resolve().parents[2]
PIP = f"{shlex.quote(sys.executable)} -m pip"
DECLARED = {
    "": ["onnx>=1.19", "onnxruntime>=1.31"],
    "llamacpp": ["llama-cpp-python<0.4,>=0.3.36"],
    "gpu": ["onnxruntime-gpu[cuda,cudnn]>=1.31"],
}
POSIX = pytest.mark.skipif(os.name == "nt", reason="the shell of POSIX quotes otherwise")


@pytest.fixture
def installed_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if edgespec lay in site-packages, without a word of where it came from."""
    monkeypatch.setattr(installation, "_checkout", lambda: None)
    monkeypatch.setattr(installation, "requirements", lambda: DECLARED)


@POSIX
def test_a_checkout_installs_into_the_environment_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert install_command("export") == f"{PIP} install -e {shlex.quote(f'{ROOT}[export]')}"


@POSIX
def test_the_environment_of_the_script_is_left_to_the_script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))
    assert install_command("llamacpp") == f"python3 {shlex.quote(str(ROOT / 'scripts' / 'run.py'))} install llamacpp"


@POSIX
def test_elsewhere_the_packages_themselves_are_named(installed_elsewhere: None):
    """An index knows these packages, and edgespec perhaps not."""
    assert install_command("llamacpp") == f"{PIP} install 'llama-cpp-python<0.4,>=0.3.36'"
    assert install_command() == f"{PIP} install 'onnx>=1.19' 'onnxruntime>=1.31'"
    remove = f"{PIP} uninstall -y onnxruntime onnxruntime-gpu"
    assert install_command("gpu") == f"{remove}, then {PIP} install 'onnxruntime-gpu[cuda,cudnn]>=1.31'"
    assert reinstall_command("onnx") == f"{PIP} install --force-reinstall 'onnx>=1.19'"


def test_requirements_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch):
    lines = ["onnx>=1.19", "torch>=2; extra == 'export'", "m>=3; extra == 'export'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: lines)
    assert requirements.__wrapped__() == {"": ["onnx>=1.19"], "export": ["torch>=2", "m>=3"]}


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ModuleNotFoundError("No module named 'no_such'", name="no_such"), "a graph needs no_such: "),
        (ImportError("x.so: undefined symbol: _Zx", name="onnx.part"), "a graph needs onnx, which fails: x.so"),
        (AttributeError("partially initialized module 'onnx'"), "a graph needs onnx, which fails: partially"),
    ],
)
def test_a_library_that_fails_to_import_is_told_by_its_cause(error: Exception, told: str):
    said = str(not_importable("a graph", error, "onnx"))
    assert said.startswith(told) and "pip" in said
    assert ("ulimit -v" in said) == ("which fails" in said)


# -- what Windows does otherwise, as far as another system can show it


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
