"""The Python blocks of docs/clients.md and the programs in docs/examples run, where what they need is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo import ROOT
from edgespec.installation import is_importable
from serving import read_line, served

BLOCKS = re.findall(r"^```py\n(.+?)^```", (ROOT / "docs" / "clients.md").read_text(), re.DOTALL | re.MULTILINE)
# A Python that has clients which edgespec's own environment lacks.
PYTHON = os.environ.get("CLIENTS_PYTHON", sys.executable)


def package_of(block: str) -> str:
    found = re.search(r"^(?:from|import) (\w+)", block, re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home: Path = tmp_path_factory.mktemp("home")
    with served(home, "--port", "0", "--alias", "local", "--seed", "1", "-n", "20") as process:
        yield read_line(process)["url"]


@pytest.mark.parametrize("block", BLOCKS, ids=package_of)
def test_a_client_gets_an_answer(block: str, url: str) -> None:
    package = package_of(block)
    if sys.executable == PYTHON and not is_importable(package):
        pytest.skip(f"the package {package} is not installed")
    code = block.replace("http://127.0.0.1:8080", url)
    assert code != block
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


# -- the programs in docs/examples run, where what they need is installed


EXAMPLES = ROOT / "docs" / "examples"
NODE = shutil.which("node")


def run(home: Path, *command: str) -> str:
    """What a program prints; it must end with 0."""
    environment = os.environ | {"EDGESPEC_HOME": str(home), "EDGESPEC_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_node_drives_the_sidecar(private_home: Path):
    serve = (sys.executable, "-m", "edgespec", "serve", "demo", "--stdio")
    first, *_, stopped, last = run(private_home, str(NODE), str(EXAMPLES / "sidecar.mjs"), *serve).splitlines()
    assert first.startswith("demo, ") and stopped == "stopped: cancelled" and last == "ended with code 0"


@pytest.mark.skipif(not is_importable("openai"), reason="the openai package is not installed")
def test_the_openai_client(private_home: Path):
    *_, speed, last = run(private_home, sys.executable, str(EXAMPLES / "openai_client.py")).splitlines()
    assert speed.endswith("tokens/s") and last == "ended with code 0"
