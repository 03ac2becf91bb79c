"""`edgespec export ... --to onnx` as tests run it, and what they ask of the pair."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from click.testing import CliRunner, Result

from demo import TEST_THREADS
from edgespec.cli.main import cli
from edgespec.export.check import open_engine
from edgespec.formats.manifest import ModelPair
from edgespec.types import Batch

CHILD = """
import sys
blocked, sys.argv = sys.argv[1].split(","), sys.argv[1:]
sys.modules |= dict.fromkeys(blocked)
from edgespec.__main__ import main
main()
"""


def export(source: Path | str, output: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["export", str(source), "--to", "onnx", "-o", str(output), *arguments])


def export_without(packages: tuple[str, ...], *arguments: str) -> str:
    """What an export prints in a process that cannot import `packages`."""
    command = [sys.executable, "-c", CHILD, ",".join(packages), "export", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def answer(model: Path) -> dict[str, object]:
    options = ["-p", "I want a table for two.", "-n", "24", "--temp", "0", "--json"]
    ran = CliRunner().invoke(cli, ["generate", str(model), *options])
    assert ran.exit_code == 0, ran.output
    found: dict[str, object] = json.loads(ran.stdout)
    return found


def agreement(pair: ModelPair) -> float:
    """The share of a text's positions at which target and draft have the same likeliest token."""
    assert pair.draft is not None
    with open_engine("onnx", pair.target, 64, TEST_THREADS) as target:
        ids = np.array(target.vocabulary.encode("I want a table for two people at seven, please."), np.int32)
        likeliest = target.forward(Batch.chain(ids)).argmax(axis=1)
    with open_engine("onnx", pair.draft, 64, TEST_THREADS) as draft:
        return float((draft.forward(Batch.chain(ids)).argmax(axis=1) == likeliest).mean())
