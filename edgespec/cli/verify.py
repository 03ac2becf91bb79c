"""`edgespec verify`: decodes built-in prompts with and without speculation, compares tokens and log probabilities."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from edgespec.bench.verify import Comparison, Divergence, Report, comparisons
from edgespec.cli import say
from edgespec.cli.options import SettingsCommand, require_speculation, resolve_settings, settings_options
from edgespec.cli.session import Session, open_session, show_configuration
from edgespec.cli.terminal import note
from edgespec.config.options import REMEMBERING
from edgespec.reports import Stats, Totals

DEFAULT_TOKENS = 64
DRAFT_LENGTH = 4


@click.command(cls=SettingsCommand)
@settings_options("load", "generate", "sampling", leave_out=("stop", *REMEMBERING))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines")
def command(model_name: str | None, config_file: Path | None, as_json: bool, **given: Any) -> int:
    """Decode built-in prompts with and without speculation, greedily and sampled; compare tokens, log probabilities.

    Runs in reproducible mode unless --no-reproducible is given, and drafts 4 tokens a step unless --draft-length says
    otherwise, so that there is something to compare even where no draft pays. It checks the text; bench measures the
    speed. Exit code 0: identical, 1: some token differs. MODEL is a name, a GGUF or ONNX file, or a folder with one.
    """
    settings = resolve_settings(given, model_name, config_file)
    settings = settings.below({"draft_length": DRAFT_LENGTH, "max_tokens": DEFAULT_TOKENS}, "verify")
    if settings.values.get("verify", "coupled") == "coupled":
        settings = settings.below({"reproducible": True}, "what verify checks")
    require_speculation(settings, "verify")
    session = open_session(settings)
    with session.model:
        show_configuration(session)
        report = _run(session, as_json)
    if as_json:
        click.echo(json.dumps(_report_object(session, report), allow_nan=False))
    else:
        _print_summary(session, report)
    return 0 if report.identical else 1


def _run(session: Session, as_json: bool) -> Report:
    done = []
    for comparison in comparisons(session.model, session.sampling, session.options):
        done.append(comparison)
        if not as_json:
            say(_line(session, comparison))
    return Report(tuple(done))


def _line(session: Session, comparison: Comparison) -> str:
    outcome = "identical" if comparison.divergence is None else _describe(session, comparison.divergence)
    return (
        f"{comparison.domain:<10}  T={comparison.temperature:<4g}  {comparison.drafted.new_tokens:>4} tokens  "
        f"{outcome}  {_accepted(comparison.drafted)}"
    )


def _accepted(counts: Stats | Totals) -> str:
    """0% would be said of a run in which nothing was drafted, too."""
    if not counts.drafted_tokens:
        return "nothing drafted"
    return f"{counts.accepted_tokens} of {counts.drafted_tokens} draft tokens accepted"


def _describe(session: Session, divergence: Divergence) -> str:
    name = session.model.target.vocabulary.token_name
    tokens = [
        "the end" if token_id is None else f"{token_id} {name(token_id)!r}"
        for token_id in (divergence.plain_token_id, divergence.drafted_token_id)
    ]
    margin = "" if divergence.logit_margin is None else f", logit margin {divergence.logit_margin:.2g}"
    if divergence.plain_token_id == divergence.drafted_token_id:
        return f"DIFFERENT log probability of token {divergence.position}: {tokens[0]}{margin}"
    return f"DIFFERENT at token {divergence.position}: {tokens[0]} plain, {tokens[1]} drafted{margin}"


def _print_summary(session: Session, report: Report) -> None:
    totals = report.totals
    different = sum(comparison.divergence is not None for comparison in report.comparisons)
    num_runs = len(report.comparisons)
    say(
        f"identical with and without speculation: {totals.new_tokens} tokens in {num_runs} runs, {_accepted(totals)}"
        if report.identical
        else f"DIFFERENT in {different} of {num_runs} runs with and without speculation, {totals.new_tokens} tokens"
    )
    length = session.model.options.draft_length
    drafts = "automatically" if length == "auto" else f"{length} tokens a step, whether they pay or not"
    note(
        f"This checks the text, not the speed: it drafts {drafts} (median speed here: {report.speed_ratio:.2f}x of "
        "plain decoding). edgespec bench measures the speed of automatic speculation"
    )


def _report_object(session: Session, report: Report) -> dict[str, Any]:
    model, totals = session.model, report.totals
    return {
        "model": model.pair.name,
        "engine": model.target.facts.name,
        "drafter": model.drafter_name,
        "draft_length": model.options.draft_length,
        "verify": model.options.verify,
        "seed": session.sampling.seed,
        "reproducible": model.reproducible,
        "identical": report.identical,
        "num_tokens": totals.new_tokens,
        "acceptance_rate": totals.acceptance_rate,
        "mean_accepted_length": totals.mean_accepted_length,
        "speed_ratio": report.speed_ratio,
        "comparisons": [
            {
                "domain": one.domain,
                "temperature": one.temperature,
                "num_tokens": one.drafted.new_tokens,
                "acceptance_rate": one.drafted.acceptance_rate,
                "speed_ratio": one.speed_ratio,
                "divergence": dataclasses.asdict(one.divergence) if one.divergence else None,
            }
            for one in report.comparisons
        ],
    }
