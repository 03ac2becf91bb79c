"""The result of a race where no picture is wanted: lines of text for a pipe, or one JSON object."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from edgespec.bench.race import Lap, Outcome
from edgespec.bench.race_reasons import prices
from edgespec.cli.generate import stats_object
from edgespec.cli.session import Session


def print_plainly(outcome: Outcome, lines: list[str]) -> None:
    """Both results as they are: the text once where it is the same, then the figures and the reasons."""
    if outcome.plain.token_ids == outcome.drafted.token_ids:
        _print_text("plain and speculative", outcome.plain)
    else:
        _print_text("plain", outcome.plain)
        _print_text("speculative", outcome.drafted)
    for line in lines:
        click.echo(line)


def _print_text(whose: str, lap: Lap) -> None:
    click.echo(f"--- {whose}, {len(lap.marks)} tokens")
    click.echo(lap.text.removesuffix("\n"))
    click.echo("---")


def print_json(session: Session, outcome: Outcome, lines: list[str]) -> None:
    """One object; its keys are a contract."""
    model = session.model
    values: dict[str, Any] = {
        "model": model.pair.name,
        "engine": model.target.facts.name,
        "drafter": model.drafter_name,
        "draft_length": model.options.draft_length,
        "seed": session.sampling.seed,
        "temperature": session.sampling.temperature,
        "reproducible": outcome.is_reproducible,
        "identical": outcome.divergence is None,
        "divergence": _asdict(outcome.divergence),
        "speed_ratio": outcome.speed_ratio if outcome.has_drafted else None,
        "pace": outcome.pace,
        "fastest": outcome.fastest,
        "prices": _asdict(prices(outcome))
        if outcome.curve is not None and outcome.plain.stats.tokens_per_second
        else None,
        "plain": _side(outcome.plain),
        "speculative": _side(outcome.drafted),
        "explanation": lines,
    }
    click.echo(json.dumps(values, allow_nan=False))


def _asdict(value: Any) -> dict[str, Any] | None:
    return None if value is None else {key.rstrip("_"): each for key, each in dataclasses.asdict(value).items()}


def _side(lap: Lap) -> dict[str, Any]:
    return {
        "text": lap.text,
        "token_ids": list(lap.token_ids),
        "drafters": [mark.event.drafter for mark in lap.marks],
        "at_s": [mark.at_s for mark in lap.marks],
        "stats": stats_object(lap.stats),
    }
