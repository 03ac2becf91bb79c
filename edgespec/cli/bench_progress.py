"""What `edgespec bench` shows while it runs: a line per finished trial, and a bar where stderr is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edgespec.bench.record import Trial
from edgespec.bench.runner import Task
from edgespec.bench.table import shown
from edgespec.cli.terminal import note

_SHOWN_CHARACTERS = 44


def trial_line(task: Task, trial: Trial) -> str:
    """A finished trial: domain, the beginning of the prompt, tokens per second plain and with speculation."""
    text = " ".join(task.prompt.text.split())
    text = text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
    rates = (side.stats.tokens_per_second for side in (trial.standard, trial.speculative))
    ratio = shown(trial.speedup, "{:.2f}x") if trial.speculative.stats.drafted_tokens else "nothing drafted"
    return (
        f"{task.prompt.domain:<15}  {text:<{_SHOWN_CHARACTERS}}  "
        + " -> ".join(f"{r:.1f}" for r in rates)
        + f"  {ratio}"
    )


@contextmanager
def progress(total: int, done: int) -> Iterator[Callable[[str], None]]:
    """Show each finished trial: a line, and a bar below it where stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.percentage:>3.0f}%"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # A thread that redraws the bar would take the time of what is measured: it is drawn between two trials only.
    with Progress(*columns, console=console, disable=not console.is_terminal, auto_refresh=False) as bars:
        bar = bars.add_task("", total=total, completed=done)

        def on_trial(line: str) -> None:
            if console.is_terminal:
                bars.console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
            else:
                note(line)
            bars.update(bar, advance=1, refresh=True)

        yield on_trial
