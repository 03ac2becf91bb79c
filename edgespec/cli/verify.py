"""`edgespec verify`: decodes built-in prompts with and without speculation, compares tokens and log probabilities."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from statistics import median
from typing import Any

import click

from edgespec.bench.prompts import BenchPrompt
from edgespec.bench.report import Summary
from edgespec.bench.runner import Divergence, Runner, Task, Trial, first_divergence
from edgespec.cli import say
from edgespec.cli.options import SettingsCommand, require_speculation, resolve_settings, settings_options
from edgespec.cli.session import Session, open_session, show_configuration
from edgespec.cli.terminal import note
from edgespec.config.options import PRINTING, PROMPTING, REMEMBERING
from edgespec.loading.drafts import PROMPTS

DEFAULT_TOKENS = 64
DRAFT_LENGTH = 4
Compared = list[tuple[Trial, Divergence | None]]


@click.command(cls=SettingsCommand)
@settings_options("load", "generate", "sampling", "session", leave_out=("stop", *PROMPTING, *PRINTING, *REMEMBERING))
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
        compared: Compared = []
        for trial in Runner(session.model, session.options, compares=True).run(_tasks(session)):
            found = first_divergence(trial.standard, trial.speculative, exact=session.model.reproducible)
            compared.append((trial, found))
            if not as_json:
                say(_line(session, *compared[-1]))
    if as_json:
        click.echo(json.dumps(_report(session, compared), allow_nan=False))
    else:
        _print_summary(session, compared)
    return int(_num_different(compared) > 0)


def _tasks(session: Session) -> list[Task]:
    """Every built-in prompt greedily, then with the sampling asked for where that is another."""
    prompts, in_chat = [BenchPrompt(*each) for each in PROMPTS], session.shown.chat_template
    encoded = [(prompt, tuple(prompt.encode(session.model, chat_template=in_chat))) for prompt in prompts]
    heats = [
        dataclasses.replace(session.sampling, temperature=heat) for heat in sorted({0.0, session.sampling.temperature})
    ]
    pairs = [(*each, heat) for heat in heats for each in encoded]
    return [Task(prompt, ids, heat, index) for index, (prompt, ids, heat) in enumerate(pairs)]


def _num_different(compared: Compared) -> int:
    return sum(divergence is not None for _, divergence in compared)


def _speed_ratio(compared: Compared) -> float:
    """Median of the trials' speed ratios."""
    return median(trial.speedup or 0.0 for trial, _ in compared)


def _line(session: Session, trial: Trial, divergence: Divergence | None) -> str:
    stats = trial.speculative.stats
    return (
        f"{trial.task.prompt.domain:<10}  T={trial.task.sampling.temperature:<4g}  {stats.new_tokens:>4} tokens  "
        f"{'identical' if divergence is None else _described(session, divergence)}  "
        f"{_accepted(stats.accepted_tokens, stats.drafted_tokens)}"
    )


def _accepted(accepted: float, drafted: float) -> str:
    """0% would be said of a run in which nothing was drafted, too."""
    return f"{accepted:.0f} of {drafted:.0f} draft tokens accepted" if drafted else "nothing drafted"


def _described(session: Session, divergence: Divergence) -> str:
    name = session.model.target.vocabulary.token_name
    tokens = [
        "the end" if token_id is None else f"{token_id} {name(token_id)!r}"
        for token_id in (divergence.plain_token_id, divergence.drafted_token_id)
    ]
    margin = "" if divergence.logit_margin is None else f", logit margin {divergence.logit_margin:.2g}"
    if divergence.plain_token_id == divergence.drafted_token_id:
        return f"DIFFERENT log probability of token {divergence.position}: {tokens[0]}{margin}"
    return f"DIFFERENT at token {divergence.position}: {tokens[0]} plain, {tokens[1]} drafted{margin}"


def _print_summary(session: Session, compared: Compared) -> None:
    drafted, different = Summary(trial for trial, _ in compared).speculative, _num_different(compared)
    tokens, runs = f"{drafted.total('new_tokens'):.0f} tokens", len(compared)
    accepted = _accepted(drafted.total("accepted_tokens"), drafted.total("drafted_tokens"))
    say(
        f"DIFFERENT in {different} of {runs} runs with and without speculation, {tokens}"
        if different
        else f"identical with and without speculation: {tokens} in {runs} runs, {accepted}"
    )
    length = session.model.options.draft_length
    drafts = "automatically" if length == "auto" else f"{length} tokens a step, whether they pay or not"
    note(
        f"This checks the text, not the speed: it drafts {drafts} (median speed here: {_speed_ratio(compared):.2f}x of "
        "plain decoding). edgespec bench measures the speed of automatic speculation"
    )


def _report(session: Session, compared: Compared) -> dict[str, Any]:
    model, summary = session.model, Summary(trial for trial, _ in compared)
    return {
        "model": model.pair.name,
        "engine": model.target.facts.name,
        "drafter": model.drafter_name,
        "draft_length": model.options.draft_length,
        "verify": model.options.verify,
        "seed": session.sampling.seed,
        "reproducible": model.reproducible,
        "identical": not _num_different(compared),
        "num_tokens": int(summary.speculative.total("new_tokens")),
        "acceptance_rate": summary.acceptance_rate or 0.0,
        "mean_accepted_length": summary.mean_accepted_length or 0.0,
        "speed_ratio": _speed_ratio(compared),
        "comparisons": [
            {
                "domain": trial.task.prompt.domain,
                "temperature": trial.task.sampling.temperature,
                "num_tokens": trial.speculative.stats.new_tokens,
                "acceptance_rate": trial.speculative.stats.acceptance_rate,
                "speed_ratio": trial.speedup or 0.0,
                "divergence": dataclasses.asdict(divergence) if divergence else None,
            }
            for trial, divergence in compared
        ],
    }
