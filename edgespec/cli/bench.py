"""`edgespec bench`: speed of decoding with and without speculation, on prompts of several domains."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import click

from edgespec.bench.plot import check_plot, draw
from edgespec.bench.prompts import BenchPrompt, Domains, built_in, choose, read_prompts, with_generated
from edgespec.bench.report import Report, describe, report_of, shown, table_lines
from edgespec.bench.runner import Runner, Task, Trial, tasks_of
from edgespec.bench.sweep import (
    Sweep,
    explain_json,
    explain_lines,
    explained_choices,
    sweep_json,
    sweep_lines,
    swept_choices,
)
from edgespec.cli import FilePath
from edgespec.cli.main import INTERRUPTED
from edgespec.cli.options import SettingsCommand, require_speculation, resolve_settings, settings_options
from edgespec.cli.session import Session, open_session, show_configuration
from edgespec.cli.terminal import note, stops
from edgespec.config.options import PRINTING, PROMPTING, REMEMBERING, STRUCTURE
from edgespec.errors import ConfigError

DEFAULT_TOKENS, SWEEP_TOKENS = 96, 48
DEFAULT_REPEAT, SWEEP_REPEAT = 3, 1
_LEFT_OUT = ("stop", *PROMPTING, *STRUCTURE, *PRINTING, *REMEMBERING)
_PATH = FilePath()
_SHOWN_CHARACTERS = 44


@click.command(cls=SettingsCommand)
@settings_options("load", "generate", "sampling", "session", leave_out=_LEFT_OUT)
@click.option("--prompts", type=_PATH, metavar="FILE", help='Lines; .jsonl: {"domain", "text"}  [built-in prompts]')
@click.option("--domain", "domains", multiple=True, metavar="NAME", help="Only this domain; repeatable")
@click.option("--repeat", type=click.IntRange(1), help="Runs of each prompt  [default: 3; 1 with --sweep, --explain]")
@click.option("--sweep", is_flag=True, help="Try every drafter and draft length; show the best beside auto")
@click.option("--explain", is_flag=True, help="Show costs, acceptance, expected beside measured speed, what would help")
@click.option("--plot", type=_PATH, metavar="PNG", help="Draw the result")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table")
def command(model_name: str | None, config_file: Path | None, **given: Any) -> int:
    """Decode each prompt with and without speculation, in turns and on empty caches, and compare the speed.

    Prompts are drawn and answers sampled with seed 0 unless --seed says otherwise. --sweep and --explain try fixed
    settings on fewer and shorter answers. MODEL is a name, a GGUF or ONNX file, or a folder with one.
    """
    own = {name: given.pop(name) for name in _OWN}
    sweeps = own["sweep"] or own["explain"]
    settings = resolve_settings(given, model_name, config_file)
    require_speculation(settings, "bench")
    if own["plot"] is not None:
        if sweeps:
            raise ConfigError("--plot draws the comparison with plain decoding: leave --sweep and --explain out")
        check_plot(own["plot"])
    domains = built_in() if own["prompts"] is None else read_prompts(own["prompts"])
    # The same prompts when the command is given again.
    usual = {"seed": 0, "max_tokens": SWEEP_TOKENS if sweeps else DEFAULT_TOKENS}
    session = open_session(settings.below(usual, "bench"))
    with session.model:
        show_configuration(session)
        prompts = _choose(session, domains, own)
        repeat = own["repeat"] or (SWEEP_REPEAT if sweeps else DEFAULT_REPEAT)
        tasks = tasks_of(prompts, lambda prompt: _encode(session, prompt), session.sampling, repeat)
        return _sweep(session, tasks, own) if sweeps else _bench(session, tasks, own)


_OWN = ("prompts", "domains", "repeat", "sweep", "explain", "plot", "as_json")


def _choose(session: Session, sources: Domains, own: dict[str, Any]) -> list[BenchPrompt]:
    """The prompts of this run: all domains of a user's own file, else generated ones too; one each for a sweep."""
    model, wanted = session.model, own["domains"]
    domains = with_generated(sources, model.target.vocabulary, session.seed)
    if own["prompts"] is not None:
        domains, wanted = {**domains, **sources}, wanted or list(sources)
    most = model.context_length - (session.options.max_tokens or 0)
    too_long = 0

    def fits(prompt: BenchPrompt) -> bool:
        nonlocal too_long
        is_short = len(_encode(session, prompt)) <= most
        too_long += not is_short
        return is_short

    is_sweep = own["prompts"] is None and (own["sweep"] or own["explain"])
    chosen = choose(domains, wanted, fits, one_each=is_sweep)
    if too_long:
        note(f"left out: {too_long} prompts, too long for the context with a full answer")
    return chosen


def _encode(session: Session, prompt: BenchPrompt) -> list[int]:
    return prompt.encode(session.model, chat_template=session.shown.chat_template)


def _bench(session: Session, tasks: list[Task], own: dict[str, Any]) -> int:
    trials: list[Trial] = []
    on_trial = progress(len(tasks))
    with stops(session.model.cancel) as interruption:
        for trial in Runner(session.model, session.options, lambda: interruption.happened).run(tasks):
            trials.append(trial)
            on_trial(_trial_line(trial))
    if not trials:
        note("interrupted before the first result")
        return INTERRUPTED
    _show(report_of(session.model, session.sampling, session.options, trials, len(tasks)), own)
    if interruption.happened:
        note(f"interrupted: {len(trials)} of {len(tasks)} runs are shown")
        return INTERRUPTED
    return 0


def _show(report: Report, own: dict[str, Any]) -> None:
    if own["as_json"]:
        click.echo(json.dumps(report, allow_nan=False))
    else:
        for line in table_lines(report):
            click.echo(line)
    if own["plot"] is not None:
        draw(report, own["plot"])
        note(f"drawn: {own['plot']}")


def _sweep(session: Session, tasks: list[Task], own: dict[str, Any]) -> int:
    model = session.model
    choices = swept_choices(model) if own["sweep"] else []
    choices += explained_choices(model) if own["explain"] else []
    sweep = Sweep(model, choices, session.options)
    on_run = progress(len(tasks) * len(sweep.choices))
    with stops(model.cancel) as interruption:
        for task, choice, measured in sweep.run(tasks, lambda: interruption.happened):
            on_run(f"{task.prompt.domain:<15}  {choice!s:<20}  {measured.stats.tokens_per_second:.1f}")
    if not sweep.domains:
        note("interrupted before the first result")
        return INTERRUPTED
    if own["as_json"]:
        facts = describe(model, session.sampling, session.options)
        swept = {"sweep": sweep_json(sweep)} if own["sweep"] else {}
        explained = {"explain": explain_json(sweep)} if own["explain"] else {}
        click.echo(json.dumps({**facts, **swept, **explained}, allow_nan=False))
    else:
        for line in (*(sweep_lines(sweep) if own["sweep"] else ()), *(explain_lines(sweep) if own["explain"] else ())):
            click.echo(line)
    if interruption.happened:
        note("interrupted: the kinds of text that were measured whole are shown")
        return INTERRUPTED
    return 0


def _trial_line(trial: Trial) -> str:
    """A finished trial: domain, the beginning of the prompt, tokens per second plain and with speculation."""
    prompt = trial.task.prompt
    text = " ".join(prompt.text.split())
    text = text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
    plain, drafted = (side.stats.tokens_per_second for side in (trial.standard, trial.speculative))
    ratio = shown(trial.speedup, "{:.2f}x") if trial.speculative.stats.drafted_tokens else "nothing drafted"
    return f"{prompt.domain:<15}  {text:<{_SHOWN_CHARACTERS}}  {plain:.1f} -> {drafted:.1f}  {ratio}"


def progress(total: int) -> Callable[[str], None]:
    """Shows each finished run as a line: a thread that redraws a bar would take the time of what is measured."""
    done = count(1)
    return lambda line: note(f"{next(done)}/{total}  {line}")
