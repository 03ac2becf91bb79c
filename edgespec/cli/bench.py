"""`edgespec bench`: speed of decoding with and without speculation, on prompts of several domains."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from edgespec import __version__
from edgespec.bench.html import page
from edgespec.bench.journal import Journal, default_path
from edgespec.bench.output import check_outputs
from edgespec.bench.report import Setup, report_of
from edgespec.bench.runner import Runner, Task, load_standard, tasks_of
from edgespec.bench.table import table_lines
from edgespec.cli import FilePath
from edgespec.cli.bench_progress import progress, trial_line
from edgespec.cli.help import SettingsCommand
from edgespec.cli.interrupt import stops
from edgespec.cli.main import INTERRUPTED
from edgespec.cli.options import resolve_settings, settings_options
from edgespec.cli.session import Session, open_session, show_configuration
from edgespec.cli.terminal import note
from edgespec.config import keywords_of
from edgespec.config.options import PRINTING, PROMPTING, REMEMBERING, STRUCTURE
from edgespec.config.sources import Settings
from edgespec.control.measure import cost_key
from edgespec.errors import ConfigError
from edgespec.platform.disk_cache import file_key
from edgespec.platform.files import write_atomically
from edgespec.tuning.prompt_sources import built_in, read_data, read_prompts
from edgespec.tuning.workload import SYNTHETIC, BenchPrompt, Domains, choose, with_synthetic

DEFAULT_TOKENS = 96
DEFAULT_PER_DOMAIN = 4
_LEFT_OUT = ("stop", *PROMPTING, *STRUCTURE, *PRINTING, *REMEMBERING)
_PATH = FilePath()


@click.command(cls=SettingsCommand)
@settings_options("load", "generate", "sampling", "session", leave_out=_LEFT_OUT)
@click.option("--prompts", type=_PATH, metavar="FILE", help='Your own prompts: lines of text, or of {"domain", "text"}')
@click.option("--data", type=_PATH, metavar="FOLDER", help="Folder of data files  [default: built-in prompts]")
@click.option("--domain", "domains", multiple=True, metavar="NAME", help="Only this domain; repeatable")
@click.option("--per-domain", type=click.IntRange(1), help="Prompts per domain  [default: 4 of --data, else all]")
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Runs of each prompt")
@click.option("--plot", type=_PATH, metavar="PNG|FOLDER", help="Draw the figures, in one PNG or one each")
@click.option("--html", "html_file", type=_PATH, metavar="FILE", help="Write the report as one HTML page")
@click.option("--resume", type=_PATH, metavar="FILE", help="Journal to continue from and keep")
@click.option("--restart", is_flag=True, help="Begin anew: discard an unfinished run")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table")
def command(model_name: str | None, config_file: Path | None, **given: Any) -> int:
    """Decode each prompt with and without speculation, in turns and on empty caches, and compare the speed.

    An interrupted run continues when the same command is given again. Prompts are drawn and answers sampled with seed
    0 unless --seed says otherwise. MODEL is a name, a GGUF or ONNX file, or a folder with one.
    """
    own = {name: given.pop(name) for name in _OWN}
    settings = _checked(resolve_settings(given, model_name, config_file, speculates=True))
    check_outputs(own["plot"], own["html_file"])
    found = _sources(own["prompts"], own["data"])
    session = open_session(settings)
    if session.options.max_tokens is None:
        session.options = dataclasses.replace(session.options, max_tokens=DEFAULT_TOKENS)
    with session.model:
        show_configuration(session)
        prompts = _choose(session, found, own)
        standard = load_standard(session.model)
        with standard:
            setup = Setup(session.model, standard, session.sampling, session.options)
            return _bench(session, setup, prompts, own)


_OWN = ("prompts", "data", "domains", "per_domain", "repeat", "plot", "html_file", "resume", "restart", "as_json")


def _checked(settings: Settings) -> Settings:
    """Settings with seed 0 below them: the same prompts and the same journal when the command is given again."""
    for name in ("drafter", "draft_length"):
        if settings.values.get(name) in ("none", 0):
            raise ConfigError(
                f"bench compares speculation with plain decoding, and {name.replace('_', '-')} "
                f"{settings.values[name]} ({settings.sources[name]}) turns speculation off"
            )
    return settings.below({"seed": 0}, "bench")


def _sources(prompts: Path | None, data: Path | None) -> Domains:
    if prompts is not None and data is not None:
        raise ConfigError("--prompts and --data both say where prompts come from: keep one")
    if prompts is not None:
        return read_prompts(prompts)
    return built_in() if data is None else read_data(data)


def _choose(session: Session, found: Domains, own: dict[str, Any]) -> list[BenchPrompt]:
    """The prompts of this run: all domains of a user's own file, else generated ones too."""
    model, seed = session.model, session.seed
    domains = with_synthetic(found, model.target.vocabulary, seed)
    per_domain, wanted = own["per_domain"], own["domains"]
    if own["prompts"] is not None:
        domains, wanted = {**domains, **found}, wanted or list(found)
    elif own["data"] is not None:
        per_domain = per_domain or DEFAULT_PER_DOMAIN
    elif per_domain is None:
        domains.update({name: domains[name][:DEFAULT_PER_DOMAIN] for name in SYNTHETIC})
    most = model.context_length - (session.options.max_tokens or 0)
    too_long = 0

    def fits(prompt: BenchPrompt) -> bool:
        nonlocal too_long
        is_short = len(_encode(session, prompt)) <= most
        too_long += not is_short
        return is_short

    chosen = choose(domains, wanted, per_domain, seed, fits)
    if too_long:
        note(f"left out: {too_long} prompts, too long for the context with a full answer")
    return chosen


def _encode(session: Session, prompt: BenchPrompt) -> list[int]:
    return prompt.encode(session.model, chat_template=session.shown.chat_template)


def _bench(session: Session, setup: Setup, prompts: list[BenchPrompt], own: dict[str, Any]) -> int:
    tasks = tasks_of(prompts, lambda prompt: _encode(session, prompt), session.sampling, own["repeat"])
    kept = own["resume"]
    loaded = setup.speculative.options
    identity = {
        "edgespec": __version__,
        **setup.describe(),
        "files": _files_key(setup),
        "given": [file_key(path) for path in (loaded.heads, loaded.chat_template_file) if path is not None],
        "sampling": {each.name: str(getattr(setup.sampling, each.name)) for each in dataclasses.fields(setup.sampling)},
        "load": {name: str(value) for name, value in keywords_of(loaded).items()},
        "chat_template": session.shown.chat_template,
    }
    path = kept or default_path(identity)
    with Journal(path, identity, restart=own["restart"]) as journal:
        is_complete = _run(setup, tasks, journal)
        if not any(task.key in journal.trials for task in tasks):
            note("interrupted before the first result")
            return INTERRUPTED
        report = report_of(setup, tasks, journal.trials)
        _show(report, own)
        if not is_complete:
            note(f"interrupted: the same command continues from {report['num_trials']} of {len(tasks)}, kept in {path}")
            return INTERRUPTED
        if kept is None:
            journal.remove()
    return 0


def _files_key(setup: Setup) -> list[str]:
    pair = setup.speculative.pair
    return [cost_key(setup.speculative.target, pair.paths(role)) for role in sorted(pair.files)]


def _run(setup: Setup, tasks: list[Task], journal: Journal) -> bool:
    """Do what the journal lacks; False when it was interrupted."""
    missing = [task for task in tasks if task.key not in journal.trials]
    if len(missing) < len(tasks):
        done = len(tasks) - len(missing)
        note(f"{done} of {len(tasks)} are already done, from {journal.path}; --restart measures them again")

    if missing:
        _ = setup.speculative.cost_curve  # measured now: it is part of the report, and measuring empties the caches

    def cancel() -> None:
        setup.speculative.cancel()
        setup.standard.cancel()

    by_key = {task.key: task for task in missing}
    with stops(cancel) as interruption, progress(len(tasks), len(tasks) - len(missing)) as on_trial:
        runner = Runner(setup.speculative, setup.standard, setup.options, lambda: interruption.happened)
        for trial in runner.run(missing):
            journal.add(trial)
            on_trial(trial_line(by_key[trial.key], trial))
    return all(task.key in journal.trials for task in tasks)


def _show(report: dict[str, Any], own: dict[str, Any]) -> None:
    if own["as_json"]:
        click.echo(json.dumps(report, allow_nan=False))
    else:
        for line in table_lines(report):
            click.echo(line)
    if own["plot"] is not None:
        from edgespec.bench.plots import draw

        note(f"figures: {', '.join(str(path) for path in draw(report, own['plot']))}")
    if own["html_file"] is not None:
        write_atomically(own["html_file"], page(report))
        note(f"page: {own['html_file']}")
