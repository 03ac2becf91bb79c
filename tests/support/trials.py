"""Tries model files in child processes, as a load does, whatever was found of them before."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from edgespec.contained import Child
from edgespec.engines import trial
from edgespec.errors import ModelFileError


def faults(paths: Sequence[Path], *, timeout_s: float) -> list[str | None]:
    """What is wrong with each file, or None. After a file that ends its child, another one tries the rest."""
    found: list[str | None] = []
    while len(found) < len(paths):
        with Child(trial.__name__) as child:
            for path in paths[len(found) :]:
                child.ask(trial.fault_of, path)
            while child.is_alive and len(found) < len(paths):
                found.append(trial.fault_in(child, paths[len(found)], timeout_s))
    return found


def probe(path: Path, *, timeout_s: float = 60) -> None:
    """Raises ModelFileError when loading `path` in a child process fails, crashes or takes longer."""
    if (fault := faults([path], timeout_s=timeout_s)[0]) is not None:
        raise ModelFileError(fault)


def ends_on_deadly(path: Path) -> None:
    """Stands in for a library that ends the process on some file."""
    if "deadly" in path.name:
        os.abort()
