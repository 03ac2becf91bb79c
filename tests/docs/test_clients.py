"""The Python blocks of docs/clients.md talk to this server, where the client is installed."""

from __future__ import annotations

import os
import re
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
