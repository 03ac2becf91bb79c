"""`edgespec tune`: finds the best settings for a user's own prompts and keeps them for later runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import click

from edgespec.cli.bar import bar
from edgespec.cli.options import resolve_settings, settings_options
from edgespec.cli.terminal import note
from edgespec.cli.tune_view import as_object, conclude, show
from edgespec.config import EngineName, LoadOptions
from edgespec.errors import ConfigError
from edgespec.loading.registry import resolve
from edgespec.sampling import Sampling
from edgespec.settings import REMEMBERING, Settings
from edgespec.tuning.profiles import (
    DEFAULT_MODEL,
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

INTERRUPTED = 130
DEFAULT_TOKENS, DEFAULT_PROMPTS = 48, 8


@click.command(short_help="Find the best settings for your prompts, and keep them for later runs.")
@settings_options("load", "sampling", "session", leave_out=("system", "show_draft", "stats", *REMEMBERING))
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE", help='JSON lines with "text", or lines.')
@click.option("--max-prompts", type=int, default=DEFAULT_PROMPTS, show_default=True, help="Most prompts to decode.")
@click.option("-n", "--max-tokens", type=int, default=DEFAULT_TOKENS, show_default=True, help="Tokens per answer.")
@click.option(
    "--weights",
    multiple=True,
    metavar="MODEL",
    help="The same model in other weights, another quantisation, to be tried as well. May be repeated.",
)
@click.option("--forget", is_flag=True, help="Remove what was found for this model on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
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
    """Try engines, threads, drafters and draft lengths on your prompts; what is given as an option stays as given.

    Settings take turns, and bad ones are dropped early. The best one is kept in a profile, from which later commands
    on this model start wherever nothing else is said; --no-profile ignores it. Decoding is timed, reading prompts is
    not. MODEL is a registry name or the path of a GGUF or ONNX file. With --weights, other quantisations of it take
    turns too; each keeps a profile of its own, and which one you use stays your choice, since their texts differ.
    """
    settings = resolve_settings({**given, "no_profile": True}, model_name, config_file).without(REMEMBERING)
    model = settings.values.get("model", DEFAULT_MODEL)
    paths = _profile_paths((model, *weights), settings.values.get("draft"))
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
    kept: list[tuple[Profile, Path]] = []
    for name, path in paths.items():
        assert path is not None, "a model that could be loaded has an identity"
        kept.append((_profile(sweep, name), path))
        save_profile(path, kept[-1][0])
    if as_json:
        click.echo(json.dumps(as_object(sweep, kept), allow_nan=False))
    else:
        show(sweep)
        conclude(sweep, kept)
    return 0


def _profile_paths(models: Sequence[str], draft: Path | None) -> dict[str, Path | None]:
    """Where each model's profile lies, None for one that is not there. Raises ConfigError for one that came twice."""
    paths: dict[str, Path | None] = {}
    for model in models:
        path = profile_path(model, draft)
        if model in paths or (path is not None and path in paths.values()):
            raise ConfigError(f"--weights {model}: these weights were given before; give another quantisation of MODEL")
        paths[model] = path
    return paths


def _run(sweep: Sweep, prompts: Prompts) -> bool:
    """Whether the search came to its end; if not, what it found so far is shown."""
    try:
        _tell_beginning(sweep, prompts)
        with bar("", sweep.num_runs()) as progress:
            sweep.advance, sweep.on_progress = progress.advance, progress.tell
            sweep.run()
    except KeyboardInterrupt:
        note("interrupted: no profile is written; so far")
        show(sweep)
        return False
    return True


def _forget(model: str, path: Path | None) -> None:
    if path is not None and forget_profile(path):
        click.echo(f"removed: {source_of(path)}")
    else:
        note(f"nothing to forget: no profile of {model!r} on this machine")


def _prepare(settings: Settings, models: Sequence[str], prompts: Prompts, max_tokens: int) -> Sweep:
    options = LoadOptions(**settings.part("load"))
    pairs = {model: resolve(model, options.draft, options.engine, options.medium) for model in models}
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
    return prepare(asked, engines, lambda loaded: prompts.encode(loaded, max_tokens))


def _tell_beginning(sweep: Sweep, prompts: Prompts) -> None:
    if not prompts.are_own:
        note(f"{len(prompts.chosen)} built-in prompts: --prompts FILE tunes for yours")
    elif len(prompts.chosen) < prompts.num_given:
        note(f"{len(prompts.chosen)} of {prompts.num_given} prompts, spread evenly; --max-prompts takes more")
    note(f"{len(sweep.scores)} settings, at most {sweep.num_runs()} decodings of {sweep.request.max_tokens} tokens")
    if len({engine for _, engine in sweep.prompts}) > 1:
        note(
            "engines may differ in the text they give, as two builds of one model do: the tokens are reproducible per "
            "engine, and --engine keeps to one"
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
