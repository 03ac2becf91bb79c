"""`edgespec export MODEL --draft HEADS.npz`: heads of train-heads become the draft of the pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("gguf", reason="export needs the package gguf: scripts/run.py install export")

from test_gguf_conversion import export

from demo import DEMO
from edgespec.cli.main import cli
from edgespec.formats.manifest import read_pair, sha256_of
from edgespec.installation import has_engine

TARGET, HEADS = DEMO / "demo-target-q8_0.gguf", DEMO / "heads" / "eagle.npz"

pytestmark = pytest.mark.usefixtures("one_thread")


def answer(model: Path, *options: str) -> dict[str, Any]:
    given = ["-p", "I want a table for two.", "-n", "40", "--temp", "0", "--reproducible", "--json", *options]
    ran = CliRunner().invoke(cli, ["generate", str(model), *given])
    assert ran.exit_code == 0, ran.output
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("source", [TARGET, DEMO / "hf" / "target"])
def test_the_heads_draft_and_change_no_text(source: Path, tmp_path: Path) -> None:
    result = export(source, tmp_path / "pair", "--draft", str(HEADS))
    assert result.exit_code == 0, result.output
    pair = read_pair(tmp_path / "pair")
    assert pair.draft is None
    assert pair.heads["eagle"].path == tmp_path / "pair" / "heads" / "eagle.npz"
    assert pair.heads["eagle"].sha256 == sha256_of(HEADS)
    drafted = answer(tmp_path / "pair", "--drafter", "eagle", "--draft-max", "3")
    assert drafted["stats"]["accepted_tokens"] > 0
    assert drafted["text"] == answer(tmp_path / "pair", "--drafter", "none")["text"]


@pytest.mark.skipif(not has_engine("llamacpp"), reason="makes a GGUF, which llama.cpp checks")
def test_they_lie_beside_a_gguf_too(tmp_path: Path) -> None:
    arguments = ["export", str(DEMO / "hf" / "target"), "--to", "both", "--draft", str(HEADS), "--no-check"]
    result = CliRunner().invoke(cli, [*arguments, "-o", str(tmp_path / "pair")])
    assert result.exit_code == 0, result.output
    found = answer(tmp_path / "pair", "--engine", "llamacpp", "--drafter", "eagle", "--draft-max", "3")
    assert found["stats"]["accepted_tokens"] > 0


@pytest.mark.parametrize(
    ("draft", "arguments", "said"),
    [
        (HEADS, ["--derive", "early-exit:3"], "--draft and --derive both give a draft"),
        (HEADS, ["--draft-quant", "int8"], "heads go into the pair as they are"),
        (HEADS, ["--draft-vocab", "512"], "--draft-vocab needs a draft with files of its own"),
        (DEMO / "heads" / "none.npz", [], "train-heads has written"),
    ],
)
def test_what_does_not_go_together_is_one_line(draft: Path, arguments: list[str], said: str, tmp_path: Path) -> None:
    result = export(TARGET, tmp_path / "pair", "--draft", str(draft), *arguments)
    assert result.exit_code == 2 and said in result.stderr
    assert not list(tmp_path.iterdir())


def test_damaged_heads_and_those_of_another_target_are_refused(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.npz"
    damaged.write_bytes(HEADS.read_bytes()[:1000])
    result = export(TARGET, tmp_path / "pair", "--draft", str(damaged))
    assert result.exit_code == 2 and "damaged" in result.stderr
    result = export(DEMO / "demo-draft-q8_0.gguf", tmp_path / "pair", "--draft", str(HEADS))
    assert result.exit_code != 0 and "heads for another target" in result.stderr
    assert not (tmp_path / "pair").exists()
