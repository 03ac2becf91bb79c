"""`edgespec tune`: finds the fastest settings for a user's own prompts and stores them for later runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import click

from edgespec.cli import FilePath, say
from edgespec.cli.bar import bar
from edgespec.cli.help import SettingsCommand
from edgespec.cli.main import INTERRUPTED
from edgespec.cli.options import resolve_settings, settings_options
from edgespec.cli.terminal import note
from edgespec.cli.tune_view import Found, as_object, conclude, show
from edgespec.config import EngineName, LoadOptions
from edgespec.config.options import PRINTING, PROMPTING, REMEMBERING
from edgespec.config.sources import Settings
from edgespec.errors import ConfigError
from edgespec.loading.requirements import resolve_pair
from edgespec.sampling import Sampling
from edgespec.tuning.profiles import (
    DEFAULT_MODEL,
    GIVEN_FILES,
    TUNED,
    Profile,
    forget_profile,
    new_profile,
    profile_path,
    save_profile,
    source_of,
)
from edgespec.tuning.prompts import Prompts, choose_prompts
from edgespec.tuning.settings_grid import TuneRequest
from edgespec.tuning.sweep import Sweep, prepare

DEFAULT_TOKENS, DEFAULT_PROMPTS = 48, 8


@click.command(cls=SettingsCommand)
@settings_options("load", "sampling", "session", leave_out=(*PROMPTING, *PRINTING, *REMEMBERING))
@click.option("--prompts", type=FilePath(), metavar="FILE", help='JSON lines with "text", or plain lines')
@click.option(
    "--max-prompts", type=int, default=DEFAULT_PROMPTS, show_default=True, help="Maximum number of prompts to decode"
)
@click.option("-n", "--max-tokens", type=int, default=DEFAULT_TOKENS, show_default=True, help="Tokens per answer")
@click.option(
    "--weights",
    multiple=True,
    metavar="MODEL",
    help="The same model in another quantisation, to try as well; repeatable",
)
@click.option("--forget", is_flag=True, help="Remove the profile of this model")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table")
def command(
    model_name: str | None,
    config_file: Path | None,
    prompts: Path | None,
    max_prompts: int,
    max_tokens: int,
    weights: tuple[str, ...],
    forget: bool,
    as_json: bool,
    **given: Any,
) -> int:
    """Try engines, threads, drafters and draft lengths on your prompts. Options that you give stay as given.

    The best setting is kept in a profile that later commands on this model use, if it is faster than the default by
    more than the measured error; --no-profile ignores it. Only decoding is timed. MODEL is a name, a GGUF or ONNX
    file, or a folder with one. Each of --weights gets a profile of its own; which one you use is your choice, since
    their texts differ.
    """
    settings = resolve_settings({**given, "no_profile": True}, model_name, config_file).without(REMEMBERING)
    model = settings.values.get("model", DEFAULT_MODEL)
    paths = _profile_paths((model, *weights), [settings.values.get(name) for name in GIVEN_FILES])
    if forget:
        for name, path in paths.items():
            _forget(name, path)
        return 0
    for name, count in (("--max-prompts", max_prompts), ("--max-tokens", max_tokens)):
        if count < 2:
            raise ConfigError(f"{name} must be at least 2, got {count}")
    chosen = choose_prompts(prompts, max_prompts, chat_template=settings.values.get("chat_template", True))
    sweep = _prepare(settings, list(paths), chosen, max_tokens)
    if not _run(sweep, chosen):
        return INTERRUPTED
    found = [_settle(sweep, name, path) for name, path in paths.items()]
    if as_json:
        click.echo(json.dumps(as_object(sweep, found), allow_nan=False))
    else:
        show(sweep)
        conclude(sweep, found)
    return 0


def _settle(sweep: Sweep, model: str, path: Path | None) -> Found:
    """Keep a profile where the best setting gains more than its measured error; else none, nor an older one."""
    assert path is not None, "a model that could be loaded has an identity"
    gain, error = sweep.gain(sweep.best(model))
    found = Found(_profile(sweep, model), path, gain, error)
    if found.is_kept:
        save_profile(path, found.profile)
    elif forget_profile(path):
        note(f"removed: {source_of(path)}, which tune had saved")
    return found


def _profile_paths(models: Sequence[str], given: Sequence[Path | None]) -> dict[str, Path | None]:
    """Where each model's profile lies, None for one that is not there. Raises ConfigError for one that came twice."""
    paths: dict[str, Path | None] = {}
    for model in models:
        path = profile_path(model, *given)
        if model in paths or (path is not None and path in paths.values()):
            raise ConfigError(
                f"--weights {model}: these weights were already given; give another quantisation of MODEL"
            )
        paths[model] = path
    return paths


def _run(sweep: Sweep, prompts: Prompts) -> bool:
    """Whether the search finished; if not, its results so far are shown."""
    try:
        _show_beginning(sweep, prompts)
        with bar("", sweep.num_runs()) as progress:
            sweep.advance, sweep.on_progress = progress.advance, progress.on_progress
            sweep.run()
    except KeyboardInterrupt:
        note("interrupted: no profile is written; results so far:")
        show(sweep)
        return False
    return True


def _forget(model: str, path: Path | None) -> None:
    if path is not None and forget_profile(path):
        say(f"removed: {source_of(path)}")
    else:
        note(f"nothing to forget: no profile of {model!r} on this machine")


def _prepare(settings: Settings, models: Sequence[str], prompts: Prompts, max_tokens: int) -> Sweep:
    options = LoadOptions(**settings.part("load"))
    pairs = {model: resolve_pair(replace(options, model=model)) for model in models}
    pair = pairs[models[0]]
    settings = settings.below(pair.recommended, f"recommended for {pair.name}")
    asked = TuneRequest(
        options,
        frozenset(name for name in TUNED if name in settings.values),
        Sampling(**settings.part("sampling")),
        max_tokens,
    )
    known: tuple[EngineName, ...] = get_args(EngineName) if options.engine == "auto" else (options.engine,)
    engines = {model: [name for name in known if name in own.engines] for model, own in pairs.items()}
    sweep = prepare(asked, engines, lambda loaded: prompts.encode(loaded, max_tokens))
    sweep.usual_engines = {model: cast("EngineName", own.files["target"].engine) for model, own in pairs.items()}
    return sweep


def _show_beginning(sweep: Sweep, prompts: Prompts) -> None:
    if not prompts.are_own:
        note(f"{len(prompts.chosen)} built-in prompts: --prompts FILE tunes for yours")
    elif len(prompts.chosen) < prompts.num_given:
        note(f"{len(prompts.chosen)} of {prompts.num_given} prompts, spread evenly; --max-prompts takes more")
    note(f"{len(sweep.scores)} settings, at most {sweep.num_runs()} decodings of {sweep.request.max_tokens} tokens")
    if len({engine for _, engine in sweep.prompts}) > 1:
        note(
            "engines may write different texts, as two builds of one model do: tokens are reproducible per engine; "
            "--engine chooses one"
        )


def _profile(sweep: Sweep, model: str) -> Profile:
    best = sweep.best(model)
    candidate = best.candidate
    settings: dict[str, Any] = {
        "engine": candidate.loaded.engine,
        "drafter": candidate.drafter,
        "draft_length": candidate.draft_length,
        "threads": candidate.loaded.threads,
    }
    if candidate.is_plain:
        del settings["draft_length"]
    if candidate.loaded.exit_layer is not None:
        settings["exit_layer"] = candidate.loaded.exit_layer
    return new_profile(model, settings, best.rate(), sweep.speedup(best))
