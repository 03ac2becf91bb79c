"""edgespec as a stranger installs it: in a fresh environment, from the index, without a single extra."""

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
