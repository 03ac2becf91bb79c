"""A size that fits a head: the package does not grow unless somebody says so in pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("*.py", "*.cpp", "*.h")


def test_the_package_does_not_grow_by_itself() -> None:
    lines = sum(
        len(path.read_text(encoding="utf-8").splitlines())
        for pattern in SOURCES
        for path in (ROOT / "edgespec").rglob(pattern)
    )
    most = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["edgespec"]["most_lines"]
    assert lines <= most, f"edgespec/ has {lines} lines, pyproject.toml allows {most}: raise it in a commit of its own"
    assert lines > most - 2000, f"edgespec/ has only {lines} lines now: lower most_lines in pyproject.toml to it"
