"""edgespec as a stranger installs it, in a fresh environment without extras; and without engines or libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]


class Environment:
    """A virtual environment that nothing of this one reaches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder / "env" / ("Scripts" if os.name == "nt" else "bin")
        self.python, self.edgespec = programs / "python", programs / "edgespec"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EDGESPEC_"))}
        self._variables = kept | {"EDGESPEC_HOME": str(folder / "home")}

    def run(self, *command: str | Path, said: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            input=said,
            cwd=self.folder,
            env=self._variables,
            timeout=600,
            check=False,
        )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """Needs a package index: half a minute, most of it to unpack."""
    made = Environment(tmp_path_factory.mktemp("base"))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    if made.run(*pip, "download", "--no-deps", "--no-cache-dir", "--dest", "asked", "platformdirs>=4.2").returncode:
        pytest.skip("no package index can be reached")
    assert made.run(sys.executable, "-m", "venv", "env").returncode == 0
    only_wheels = ("--only-binary=:all:", "--no-binary=edgespec")
    done = made.run(made.python, "-m", "pip", "install", "--no-compile", *only_wheels, ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    yield made


def test_the_requirements_fit_and_hold_no_llama_cpp(base: Environment):
    done = base.run(base.python, "-m", "pip", "check")
    assert done.returncode == 0, done.stdout
    assert base.run(base.python, "-c", "import llama_cpp").returncode == 1


def test_generate_and_chat_answer(base: Environment):
    done = base.run(base.edgespec, "generate", "-p", "I want a table for two.", "-n", "8", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["engine"] == "onnx"
    done = base.run(base.edgespec, "chat", "-n", "8", said="hello\n")
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_every_command_starts(base: Environment):
    """What a command imports lies in the package: the checkout's scripts do not come with it."""
    code = (
        "import sys\nfrom edgespec.cli.main import cli\nfor name in sys.argv[1:]:\n"
        "    try: cli.main([name, '--help'])\n    except SystemExit as left: assert not left.code, name"
    )
    done = base.run(base.python, "-c", code, *COMMANDS)
    assert done.returncode == 0 and done.stdout.count("Usage: ") == len(COMMANDS), done.stderr


def test_the_kernels_were_compiled_and_load(base: Environment):
    """By the compiler that is here, else by the one that pip fetched for it."""
    code = "from edgespec.kernels.library import library_path, why_missing; print(library_path() or why_missing())"
    found = base.run(base.python, "-c", code).stdout.strip()
    assert (base.folder / "env") in Path(found).parents and Path(found).is_file(), found


# -- where llama.cpp, or every engine, is not installed: simulated in a child, whose import fails


ENGINES = ("llama_cpp", "onnxruntime")
CHILD = """
import sys
blocked, sys.argv = sys.argv[1].split(","), sys.argv[1:]
sys.modules |= dict.fromkeys(blocked)
from edgespec.__main__ import main
main()
"""


def run(*arguments: str, without: tuple[str, ...] = ("llama_cpp",), said: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, ",".join(without), *arguments]
    return subprocess.run(command, capture_output=True, text=True, input=said, timeout=120, check=False)


@pytest.mark.parametrize("arguments", [["--engine", "llamacpp"], ["models/demo/demo-target-q8_0.gguf"]])
def test_gguf_names_the_command_in_one_line(arguments: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EDGESPEC_KERNELS", "none")
    if arguments[-1].endswith(".gguf"):
        arguments = [str(ROOT / arguments[-1])]
    done = run("generate", "-p", "hello", *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: demo-target-q8_0.gguf needs llama.cpp, which is not installed here: ")
    assert "llamacpp" in line and "install" in line and "4 to 10 minutes" in line


def test_a_damaged_gguf_is_told_of_before_anything_is_to_be_installed(tmp_path: Path):
    (tmp_path / "cut.gguf").write_bytes((ROOT / "models/demo/demo-target-q8_0.gguf").read_bytes()[:5000])
    done = run("generate", "-p", "hello", str(tmp_path / "cut.gguf"))
    assert done.returncode == 2
    assert "not a usable model" in done.stderr and "llama.cpp" not in done.stderr


def test_doctor_finds_nothing_wrong():
    done = run("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["problems"] == []
    assert report["engines"]["llamacpp"]["available"] is False
    assert "install" in report["engines"]["llamacpp"]["reason"]
    assert report["engines"]["onnx"]["available"] is True


def test_without_any_engine_only_doctor_complains():
    for arguments in (["--help"], ["corpus", "--help"], ["generate", "--help"]):
        done = run(*arguments, without=ENGINES)
        assert done.returncode == 0, done.stderr
    done = run("doctor", without=ENGINES)
    assert done.returncode == 1
    assert "problem: no engine works, so nothing can be run: " in done.stdout
    done = run("generate", "-p", "hello", without=ENGINES)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and " needs llama.cpp, which is not installed here: " in done.stderr


def test_a_server_without_its_libraries_names_the_command():
    done = run("serve", without=("starlette", "uvicorn"))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: edgespec serve needs starlette and uvicorn") and "install" in line


@pytest.mark.parametrize("package", ["onnx", "tokenizers"])
def test_a_damaged_installation_names_its_repair(package: str):
    done = run("generate", "-p", "hello", without=("llama_cpp", package))
    assert done.returncode == 2
    assert package in done.stderr and "pip install" in done.stderr
