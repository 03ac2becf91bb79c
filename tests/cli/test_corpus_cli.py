"""`edgespec corpus` on files that are damaged: the command that an error names mends it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from edgespec.cli.main import cli


@pytest.mark.parametrize(("kind", "flag"), [("corpus", "--all"), ("learnt", "--learnt")])
def test_a_file_that_is_no_database_names_what_removes_it(kind: str, flag: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    (tmp_path / "notes.txt").write_text("Some text of mine.")
    run = CliRunner().invoke
    assert run(cli, ["corpus", "add", str(tmp_path / "notes.txt")]).exit_code == 0
    (found,) = (tmp_path / "texts").iterdir()
    found.with_name(found.name.replace("corpus", kind)).write_bytes(b"no database at all")
    refused = run(cli, ["corpus", "ls"])
    assert refused.exit_code == 1 and f"{flag} " in refused.stderr.partition("edgespec corpus rm ")[2]
    assert run(cli, ["corpus", "rm", flag]).exit_code == 0
    assert run(cli, ["corpus", "ls"]).exit_code == 0
