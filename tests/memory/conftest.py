"""What tests of memory need of every process that they measure."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_bytecode_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compile and write a module takes memory that no plan counts, and only the first child would need it."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
