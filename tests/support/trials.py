"""Tries model files in child processes, as a load does, whatever was found of them before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgespec.engines.trial import results, start_child
from edgespec.errors import ModelFileError


def faults(paths: Sequence[Path], *, timeout_s: float) -> list[str | None]:
    """What is wrong with each file, or None. After a file that ends its child, another one tries the rest."""
    found: list[str | None] = []
    while len(found) < len(paths):
        waiting = paths[len(found) :]
        found += results(start_child(waiting), waiting, timeout_s)
    return found


def probe(path: Path, *, timeout_s: float = 60) -> None:
    """Raises ModelFileError when loading `path` in a child process fails, crashes or takes longer."""
    if (fault := faults([path], timeout_s=timeout_s)[0]) is not None:
        raise ModelFileError(fault)
