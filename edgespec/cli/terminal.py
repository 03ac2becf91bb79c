"""What the commands print: token events as they come, notes, counters."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import click

from edgespec.config import GenerateOptions, RuleName
from edgespec.runtime import Model
from edgespec.sampling import Sampling
from edgespec.types import Stats, TokenEvent

DRAFT_COLOUR = "cyan"
# A model's text must not move the cursor, retitle the window or answer for the user.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def note(text: str) -> None:
    """One dimmed line beside the answer, on stderr."""
    click.secho(text, err=True, dim=True)


def complain(text: str) -> None:
    """One error line on stderr, for failures that do not end the program."""
    click.echo(f"error: {' '.join(text.split())}", err=True)


def printable(text: str) -> str:
    """A model's text without what would move the cursor or change the terminal."""
    return text.translate(_CONTROLS)


class EventPrinter:
    """Prints the text of events to stdout as it comes; remembers it whole in `text`.

    The last event ends the line: what is told of the answer afterwards must not stand behind its last word.
    """

    def __init__(self, *, show_draft: bool = False) -> None:
        self.text = ""
        self._show_draft = show_draft
        self._is_terminal = sys.stdout.isatty()
        self._has_ended = False

    def push(self, event: TokenEvent) -> None:
        if event.text:
            self._print(event)
        if event.finish_reason is not None:
            self.end_line()

    def _print(self, event: TokenEvent) -> None:
        self.text += event.text
        shown = printable(event.text) if self._is_terminal else event.text
        if self._show_draft and event.from_draft:
            shown = click.style(shown, fg=DRAFT_COLOUR)
        click.echo(shown, nl=False)

    def end_line(self) -> None:
        """Once: an answer that was stopped has no last event."""
        if not (self._has_ended or self.text.endswith("\n")):
            click.echo()
        self._has_ended = True


def configuration_line(model: Model, sampling: Sampling, options: GenerateOptions) -> str:
    """What is really in effect, in one line."""
    facts = model.target.facts
    drafter = options.drafter or model.drafter_name
    length = model.options.draft_length if options.draft_length is None else options.draft_length
    rule = options.verify or model.options.verify
    parts = (
        model.pair.name,
        f"{facts.name} on {facts.device}, threads {facts.threads}, context {facts.context_length}",
        f"drafter {drafter}" if drafter == "none" else f"drafter {drafter}, draft length {length}, rule {rule}",
        _mode(model, rule),
        f"seed {sampling.seed}",
    )
    return " | ".join(parts)


def _mode(model: Model, rule: RuleName) -> str:
    if model.is_reproducible(rule):
        return "reproducible"
    return "fastest mode" if rule == "coupled" else "not reproducible"


def stats_lines(stats: Stats) -> Iterable[str]:
    """Counters and rates of one generation, for people."""
    reused = f" ({stats.reused_tokens} cached)" if stats.reused_tokens else ""
    yield (
        f"{stats.new_tokens} tokens at {stats.tokens_per_second:.1f} tokens/s, "
        f"prompt {stats.prompt_tokens}{reused} in {stats.prefill_s:.2f} s"
    )
    if stats.drafted_tokens:
        yield (
            f"{stats.target_passes} target passes, {stats.drafted_tokens} drafted, {stats.accepted_tokens} accepted "
            f"({stats.acceptance_rate:.0%}), {stats.mean_accepted_length:.2f} tokens per pass"
        )
    yield (
        f"draft {stats.draft_s:.3f} s, verify {stats.verify_s:.3f} s, overhead {stats.overhead_s:.3f} s; "
        f"peak memory {stats.peak_rss_bytes / 1e6:.0f} MB"
    )
