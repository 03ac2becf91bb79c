"""Tries model files in child processes, as a load does, whatever was found of them before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgespec.engines.trial_child import USED, order_of_reports, start_child
from edgespec.errors import ModelFileError


def faults(paths: Sequence[Path], *, timeout_s: float) -> list[str | None]:
    """What is wrong with each file, or None. After a file that ends its child, another one tries the rest again."""
    found: dict[Path, str | None] = {}
    waiting = list(paths)
    while waiting:
        with start_child(waiting, timeout_s=timeout_s) as child:
            reports = child.results((USED + 1) * len(waiting))
        if len(reports) == (USED + 1) * len(waiting):
            found |= zip(waiting, reports[USED * len(waiting) :], strict=True)
            break
        deadly = order_of_reports(waiting)[len(reports) - 1]
        found[deadly] = reports[-1]
        waiting.remove(deadly)
    return [found[path] for path in paths]


def probe(path: Path, *, timeout_s: float = 60) -> None:
    """Raises ModelFileError when loading `path` in a child process fails, crashes or takes longer."""
    if (fault := faults([path], timeout_s=timeout_s)[0]) is not None:
        raise ModelFileError(fault)
