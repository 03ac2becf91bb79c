"""`edgespec export MODEL --draft HEADS.npz`: trained heads become the draft of the pair."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from demo import DEMO
from edgespec.cli.main import cli
from edgespec.formats.head_file import read_head_file
from edgespec.formats.manifest import read_pair, sha256_of
from edgespec.loading import requirements as given_heads
from edgespec.loading.own_models import drafted_from
from edgespec.loading.requirements import SHIPPED, shipped_heads
from edgespec.platform.files import shipped_models
from gguf_conversions import export
from needs import NEEDS_LLAMA
from trainlib.head_files import write_head_file

TARGET, HEADS = DEMO / "demo-target-q8_0.gguf", DEMO / "heads" / "eagle.npz"

pytestmark = pytest.mark.usefixtures("one_thread")


def answer(model: Path, *options: str) -> dict[str, Any]:
    given = ["-p", "I want a table for two.", "-n", "40", "--temp", "0", "--reproducible", "--json", *options]
    ran = CliRunner().invoke(cli, ["generate", str(model), *given])
    assert ran.exit_code == 0, ran.output
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_the_heads_draft_and_change_no_text(tmp_path: Path) -> None:
    result = export(TARGET, tmp_path / "pair", "--draft", str(HEADS))
    assert result.exit_code == 0, result.output
    pair = read_pair(tmp_path / "pair")
    assert pair.draft is None
    assert pair.heads["eagle"].path == tmp_path / "pair" / "heads" / "eagle.npz"
    assert pair.heads["eagle"].sha256 == sha256_of(HEADS)
    drafted = answer(tmp_path / "pair", "--drafter", "eagle", "--draft-max", "3")
    assert drafted["stats"]["accepted_tokens"] > 0
    assert drafted["text"] == answer(tmp_path / "pair", "--drafter", "none")["text"]


@NEEDS_LLAMA
def test_they_lie_beside_a_gguf_too(tmp_path: Path) -> None:
    arguments = ["export", str(DEMO / "hf" / "target"), "--to", "both", "--draft", str(HEADS), "--no-check"]
    result = CliRunner().invoke(cli, [*arguments, "-o", str(tmp_path / "pair")])
    assert result.exit_code == 0, result.output
    found = answer(tmp_path / "pair", "--engine", "llamacpp", "--drafter", "eagle", "--draft-max", "3")
    assert found["stats"]["accepted_tokens"] > 0


@pytest.mark.parametrize(
    ("draft", "arguments", "said"),
    [
        (HEADS, ["--draft-quant", "int8"], "heads go into the pair as they are"),
        (DEMO / "heads" / "none.npz", [], "heads.py has written"),
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


def shipped(folder: Path, sha256: str) -> Path:
    """The demo's heads as those that edgespec has for a file with `sha256`."""
    heads, path = read_head_file(HEADS), folder / "demo" / SHIPPED
    path.parent.mkdir(parents=True)
    write_head_file(path, replace(heads, manifest=replace(heads.manifest, target_sha256=sha256)))
    return path


def test_a_pair_of_a_known_file_gets_its_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shipped(tmp_path / "models", sha256_of(TARGET))
    monkeypatch.setattr(given_heads, "shipped_models", lambda: tmp_path / "models")
    assert shipped_heads(TARGET) == shipped_heads(TARGET, sha256_of(TARGET)) == path
    assert shipped_heads(DEMO / "hf" / "target") is shipped_heads(tmp_path / "none.gguf") is None
    for arguments, wanted in (((), {"eagle"}), (("--draft", "none"), set())):
        output = tmp_path / f"pair-{len(arguments)}"
        result = export(TARGET, output, "--quant", min(given_heads.GAINING), "--no-check", *arguments)
        assert result.exit_code == 0, result.output
        pair = read_pair(output)
        assert pair.heads.keys() == wanted and drafted_from(pair) == ("eagle heads" if wanted else "")
        assert ("has for this file" in result.stderr) == bool(wanted)


def test_heads_of_another_file_and_damaged_ones_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(given_heads, "shipped_models", lambda: tmp_path)
    path = shipped(tmp_path, "0" * 64)
    assert shipped_heads(TARGET) is None and not caplog.records
    path.write_bytes(path.read_bytes()[:1000])
    assert shipped_heads(TARGET) is None and "left out" in caplog.text


def test_the_heads_that_are_shipped_can_be_read_and_are_installed() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    found = sorted(shipped_models().glob(f"*/{SHIPPED}"))
    assert found
    for path in found:
        manifest = read_head_file(path).manifest
        assert manifest.kind == "eagle" and len(manifest.target_sha256) == 64
        assert {f"models/{path.parent.name}/{name}" for name in (SHIPPED, "NOTICE")} <= set(included)
