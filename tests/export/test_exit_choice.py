"""early-exit:auto: every exit of the demo target is measured on its own text, and the one that should pay is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="measuring exits at an export needs the export extra")
pytest.importorskip("transformers", reason="measuring exits at an export needs the export extra")

from edgespec.cli.main import cli
from edgespec.errors import ConfigError, ModelFileError
from edgespec.export.exit_choice import Exit, best_exit, exits_of
from edgespec.formats.manifest import read_pair

TARGET = Path(__file__).resolve().parents[2] / "models" / "demo" / "hf" / "target"


def test_every_exit_is_worth_what_it_agrees_and_costs() -> None:
    exits = exits_of(TARGET, 1)
    assert [found.layers for found in exits] == list(range(1, 9))
    shares = [found.acceptance for found in exits]
    assert shares == sorted(shares)  # this model was trained so that a later exit agrees more often
    assert 0.3 < shares[0] < 0.6 < 0.85 < shares[-1] < 1
    assert best_exit(exits).speedup == pytest.approx(max(found.speedup for found in exits), abs=1e-3)
    assert exits[-1].speedup < 1 < best_exit(exits).speedup  # all layers but one: as dear as what it saves


def test_of_equals_the_shortest_is_taken() -> None:
    exits = [Exit(1, 0.5, 1.0, 1), Exit(2, 0.7, 1.30004, 2), Exit(3, 0.8, 1.3001, 2), Exit(4, 0.9, 1.2, 1)]
    assert best_exit(exits).layers == 2


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a number instead"):
        exits_of(tmp_path / "some/hub-id")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="cannot load"):
        exits_of(tmp_path)


def test_the_command_tells_what_it_measured_and_uses_it(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the export extra")
    arguments = ["export", str(TARGET), "-o", str(tmp_path / "pair"), "--derive", "early-exit:auto", "--no-check"]
    done = CliRunner().invoke(cli, [*arguments, "-t", "1"])
    assert done.exit_code == 0, done.output
    assert "exit after layer 8: matches 9" in done.output
    chosen = int(done.output.partition("chosen: early-exit:")[2].split()[0])
    draft = read_pair(tmp_path / "pair").files["draft"]
    assert len(draft.parts) == 1
    assert 1 <= chosen <= 8
