"""A progress bar on stderr where that is a terminal; silence elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Bar:
    """The progress of one long piece of work."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def advance(self, steps: int = 1) -> None:
        self._progress.update(self._task, advance=steps)

    def grow(self, steps: int) -> None:
        """There are `steps` more to do than was known."""
        total = self._progress.tasks[self._task].total or 0
        self._progress.update(self._task, total=total + steps)

    def on_progress(self, text: str) -> None:
        """What is being done now."""
        self._progress.update(self._task, description=text)


@contextmanager
def bar(text: str, steps: int = 0) -> Iterator[Bar]:
    """A bar for `steps` steps of work, gone when the block ends."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.percentage:>3.0f}%"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield Bar(progress, progress.add_task(text, total=steps))
