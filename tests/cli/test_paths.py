"""Paths that are given to commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from edgespec.cli.main import cli


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "-p", "x", "--config=~/c.toml"], "c.toml: unknown setting 'found'"),
        (["chat", "--session=~/c.toml"], "c.toml"),
    ],
)
def test_a_tilde_behind_an_option_is_the_home_folder(arguments, said, tmp_path: Path, monkeypatch) -> None:
    """Shells replace it in a word of its own only."""
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(tmp_path))
    (tmp_path / "c.toml").write_text("found = 1")
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code, result.output
    assert str(tmp_path / "c.toml") in result.stderr
    assert said in result.stderr
