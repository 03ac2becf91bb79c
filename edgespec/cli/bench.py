"""`edgespec bench`: speed of decoding with and without speculation, on prompts of several domains; and `verify`, which
compares the tokens and log probabilities of both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click

from edgespec.bench.prompts import built_in, choose, encode, random_text, read_prompts
from edgespec.bench.report import Report, Side, Summary, check_picture, describe, picture, report_of, shown, table_lines
from edgespec.bench.runner import BenchTrial, Divergence, Task, first_divergence, run_trials, tasks_of
from edgespec.bench.sweep import PLAIN, Sweep, costs_of, explain_json, explain_lines, sweep_json, sweep_lines
from edgespec.cli import FilePath
from edgespec.cli.main import INTERRUPTED
from edgespec.cli.options import SettingsCommand, resolve_settings, settings_options
from edgespec.cli.session import Session, open_measured
from edgespec.cli.terminal import note, stops
from edgespec.config.options import PRINTING, PROMPTING, REMEMBERING, STRUCTURE
from edgespec.errors import ConfigError
from edgespec.loading.drafts import PROMPTS
from edgespec.runtime import Model

DEFAULT_TOKENS, SWEEP_TOKENS = 96, 48
DEFAULT_REPEAT, SWEEP_REPEAT = 3, 1
_LEFT_OUT = ("stop", *PROMPTING, *STRUCTURE, *PRINTING, *REMEMBERING)
_PATH = FilePath()
_SHOWN_CHARACTERS, _COLUMNS = 44, 110  # of a prompt beside its speed; of a picture


@click.command(cls=SettingsCommand)
@settings_options("load", "generate", "sampling", "session", leave_out=_LEFT_OUT)
@click.option("--prompts", type=_PATH, metavar="FILE", help="One prompt per line  [built-in prompts]")
@click.option("--repeat", type=click.IntRange(1), help="Runs of each prompt  [default: 3; 1 with --sweep]")
@click.option("--sweep", is_flag=True, help="Try every drafter and draft length; show the best beside auto")
@click.option("--explain", is_flag=True, help="Show costs, acceptance, the speedup to expect, what would help")
@click.option("--plot", type=_PATH, metavar="SVG", help="Draw the result")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table")
def command(
    model_name: str | None,
    config_file: Path | None,
    prompts: Path | None,
    repeat: int | None,
    sweep: bool,
    explain: bool,
    plot: Path | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Decode each prompt with and without speculation, in turns and on empty caches, and compare the speed.

    Prompts are drawn and answers sampled with seed 0 unless --seed says otherwise. --sweep tries fixed settings on
    fewer and shorter answers. MODEL is a name, a GGUF or ONNX file, or a folder with one.
    """
    settings = resolve_settings(given, model_name, config_file)
    if plot is not None:
        if sweep:
            raise ConfigError("--plot draws the comparison with plain decoding: leave --sweep out")
        check_picture("--plot", plot)
    domains = built_in() if prompts is None else read_prompts(prompts)
    # The same prompts when the command is given again.
    usual = {"seed": 0, "max_tokens": SWEEP_TOKENS if sweep else DEFAULT_TOKENS}
    session = open_measured(settings, "bench", usual)
    with session.model:
        if prompts is None:
            domains |= random_text(session.model.target.vocabulary, session.seed)
        most = session.model.context_length - (session.options.max_tokens or 0)
        encoded = partial(encode, session.model, session.shown.chat_template)
        chosen, too_long = choose(
            domains, lambda prompt: len(encoded(prompt)) <= most, one_each=sweep and prompts is None
        )
        if too_long:
            note(f"left out: {too_long} prompts, too long for the context with a full answer")
        tasks = tasks_of(chosen, encoded, session.sampling, repeat or (SWEEP_REPEAT if sweep else DEFAULT_REPEAT))
        if sweep:
            return _sweep(session, tasks, explain, as_json)
        return _bench(session, tasks, explain, as_json, plot)


def _bench(session: Session, tasks: list[Task], explain: bool, as_json: bool, plot: Path | None) -> int:
    model, trials = session.model, list[BenchTrial]()
    with stops(model.cancel) as interruption:
        for trial in run_trials(model, session.options, tasks, interruption.is_set):
            trials.append(trial)
            # no bar: a thread that redraws one would take the time of what is measured
            note(f"{len(trials)}/{len(tasks)}  {_trial_line(trial)}")
    if not trials:
        note("interrupted before the first result")
        return INTERRUPTED
    report = report_of(model, session.sampling, session.options, trials, len(tasks))
    lines, summary = [*table_lines(report)], Summary(trials)
    _print(report, lines, (model, summary.standard, summary.speculative) if explain else None, as_json)
    if plot is not None:
        with picture(plot, f"edgespec bench, {report['model']}", _COLUMNS) as canvas:
            for number, line in enumerate(lines):
                canvas.print(line, style="" if number else "bold", markup=False)
        note(f"drew {plot}")
    if interruption.is_set():
        note(f"interrupted: {len(trials)} of {len(tasks)} runs are shown")
        return INTERRUPTED
    return 0


def _sweep(session: Session, tasks: list[Task], explain: bool, as_json: bool) -> int:
    model = session.model
    sweep = Sweep(model, session.options)
    total = len(tasks) * len(sweep.choices)
    with stops(model.cancel) as interruption:
        for number, (task, choice, measured) in enumerate(sweep.run(tasks, interruption.is_set), 1):
            rate = f"{measured.stats.tokens_per_second:.1f}"
            note(f"{number}/{total}  {task.prompt.domain:<15}  {choice!s:<20}  {rate}")
    if not sweep.domains:
        note("interrupted before the first result")
        return INTERRUPTED
    report = {**describe(model, session.sampling, session.options), "sweep": sweep_json(sweep)}
    explained = (model, sweep.side(PLAIN), sweep.drafted) if explain else None
    _print(report, sweep_lines(sweep), explained, as_json)
    if interruption.is_set():
        note("interrupted: the kinds of text that were measured whole are shown")
        return INTERRUPTED
    return 0


def _print(report: Report, lines: Iterable[str], explained: tuple[Model, Side, Side] | None, as_json: bool) -> None:
    """The report or its lines, with why the second side of `explained` is faster or slower than the first."""
    costs = costs_of(*explained) if explained else None
    if as_json:
        click.echo(json.dumps(report | ({"explain": explain_json(costs)} if explained else {}), allow_nan=False))
        return
    for line in (*lines, *(("", *explain_lines(costs, *explained[1:])) if explained else ())):
        click.echo(line)


def _trial_line(trial: BenchTrial) -> str:
    """A finished trial: domain, the beginning of the prompt, tokens per second plain and with speculation."""
    prompt = trial.task.prompt
    text = " ".join(prompt.text.split())
    text = text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
    plain, drafted = (side.stats.tokens_per_second for side in (trial.standard, trial.speculative))
    ratio = shown(trial.speedup) if trial.speculative.stats.drafted_tokens else "nothing drafted"
    return f"{prompt.domain:<15}  {text:<{_SHOWN_CHARACTERS}}  {plain:.1f} -> {drafted:.1f}  {ratio}"


# -- verify

VERIFIED_TOKENS = 64
DRAFT_LENGTH = 4
Compared = list[tuple[BenchTrial, Divergence | None]]


@click.command("verify", cls=SettingsCommand)
@settings_options("load", "generate", "sampling", "session", leave_out=("stop", *PROMPTING, *PRINTING, *REMEMBERING))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines")
def verify(model_name: str | None, config_file: Path | None, as_json: bool, **given: Any) -> int:
    """Decode built-in prompts with and without speculation, greedily and sampled; compare tokens, log probabilities.

    Runs in reproducible mode unless --no-reproducible is given, and drafts 4 tokens a step unless --draft-length says
    otherwise, so that there is something to compare even where no draft pays. It checks the text; bench measures the
    speed. Exit code 0: identical, 1: some token differs. MODEL is a name, a GGUF or ONNX file, or a folder with one.
    """
    settings = resolve_settings(given, model_name, config_file)
    if settings.values.get("verify", "coupled") == "coupled":
        settings = settings.below({"reproducible": True}, "what verify checks")
    session = open_measured(settings, "verify", {"draft_length": DRAFT_LENGTH, "max_tokens": VERIFIED_TOKENS})
    with session.model as model:
        # greedily, and with the sampling asked for where that is another
        heats = [replace(session.sampling, temperature=heat) for heat in sorted({0.0, session.sampling.temperature})]
        encoded = partial(encode, model, session.shown.chat_template)
        tasks = [task for heat in heats for task in tasks_of(PROMPTS, encoded, heat, 1)]
        compared: Compared = []
        for trial in run_trials(model, session.options, tasks, compares=True):
            found = first_divergence(trial.standard, trial.speculative, exact=model.reproducible)
            compared.append((trial, found))
            if not as_json:
                click.echo(_compared_line(model, trial, found))
    report = _verified(session, compared)
    if as_json:
        click.echo(json.dumps(report, allow_nan=False))
    else:
        _show_verified(report, Summary(trial for trial, _ in compared).speculative)
    return int(not report["identical"])


def _compared_line(model: Model, trial: BenchTrial, divergence: Divergence | None) -> str:
    stats, said = trial.speculative.stats, "identical"
    if divergence is not None:
        name = model.target.vocabulary.token_name
        ids = divergence.plain_token_id, divergence.drafted_token_id
        plain, drafted = ("the end" if each is None else f"{each} {name(each)!r}" for each in ids)
        what = "log probability of token" if plain == drafted else "at token"
        said = f"DIFFERENT {what} {divergence.position}: {plain} plain, {drafted} drafted"
        said += "" if divergence.logit_margin is None else f", logit margin {divergence.logit_margin:.2g}"
    return (
        f"{trial.task.prompt.domain:<10}  T={trial.task.sampling.temperature:<4g}  {stats.new_tokens:>4} tokens  "
        f"{said}  {_accepted(stats.accepted_tokens, stats.drafted_tokens)}"
    )


def _accepted(accepted: float, drafted: float) -> str:
    """0% would be said of a run in which nothing was drafted, too."""
    return f"{accepted:.0f} of {drafted:.0f} draft tokens accepted" if drafted else "nothing drafted"


def _show_verified(report: dict[str, Any], drafted: Side) -> None:
    trials, length = report["comparisons"], report["draft_length"]
    different = sum(each["divergence"] is not None for each in trials)
    said = f"DIFFERENT in {different} runs" if different else "identical"
    accepted = _accepted(drafted.total("accepted_tokens"), drafted.total("drafted_tokens"))
    counts = f"{report['num_tokens']} tokens in {len(trials)} runs, {accepted}"
    click.echo(f"{said} with and without speculation: {counts}")
    drafts = "automatically" if length == "auto" else f"{length} tokens a step, whether they pay or not"
    note(
        f"This checks the text, not the speed: it drafts {drafts} (median speed here: {report['speed_ratio']:.2f}x of "
        "plain decoding). edgespec bench measures the speed of automatic speculation"
    )


def _verified(session: Session, compared: Compared) -> dict[str, Any]:
    """What `verify --json` prints; the keys are a contract."""
    summary = Summary(trial for trial, _ in compared)
    facts = describe(session.model, session.sampling, session.options)
    names = ("model", "engine", "drafter", "draft_length", "verify", "seed", "reproducible")
    return {name: facts[name] for name in names} | {
        "identical": all(divergence is None for _, divergence in compared),
        "num_tokens": int(summary.speculative.total("new_tokens")),
        "acceptance_rate": summary.speculative.acceptance_rate or 0.0,
        "mean_accepted_length": summary.mean_accepted_length or 0.0,
        "speed_ratio": median(trial.speedup or 0.0 for trial, _ in compared),
        "comparisons": [
            {
                "domain": trial.task.prompt.domain,
                "temperature": trial.task.sampling.temperature,
                "num_tokens": trial.speculative.stats.new_tokens,
                "acceptance_rate": trial.speculative.stats.acceptance_rate,
                "speed_ratio": trial.speedup or 0.0,
                "divergence": asdict(divergence) if divergence else None,
            }
            for trial, divergence in compared
        ],
    }
