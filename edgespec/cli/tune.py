"""`edgespec tune`: finds the best settings for a user's own prompts and keeps them for later runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console
from rich.table import Table

from edgespec.cli.bar import bar
from edgespec.cli.options import resolve_settings, settings_options
from edgespec.cli.terminal import note
from edgespec.config import EngineName, LoadOptions
from edgespec.errors import ConfigError
from edgespec.models import resolve
from edgespec.profiles import (
    DEFAULT_MODEL,
    TUNED,
    Profile,
    forget_profile,
    new_profile,
    profile_path,
    save_profile,
    source_of,
)
from edgespec.sampling import Sampling
from edgespec.settings import REMEMBERING, Settings
from edgespec.tuning.prompts import Prompts, choose_prompts
from edgespec.tuning.sweep import Asked, Score, Sweep, prepare

INTERRUPTED = 130
DEFAULT_TOKENS, DEFAULT_PROMPTS = 48, 8
_SHOWN = 12  # rows of the table


@click.command(short_help="Find the best settings for your prompts, and keep them for later runs.")
@settings_options("load", "sampling", "session", leave_out=("system", "show_draft", "stats", *REMEMBERING))
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE", help='JSON lines with "text", or lines.')
@click.option("--max-prompts", type=int, default=DEFAULT_PROMPTS, show_default=True, help="Most prompts to decode.")
@click.option("-n", "--max-tokens", type=int, default=DEFAULT_TOKENS, show_default=True, help="Tokens per answer.")
@click.option("--forget", is_flag=True, help="Remove what was found for this model on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def command(
    model_name: str | None,
    config_file: Path | None,
    prompts: Path | None,
    max_prompts: int,
    max_tokens: int,
    forget: bool,
    as_json: bool,
    **given: Any,
) -> int:
    """Try engines, threads, drafters and draft lengths on your prompts; what is given as an option stays as given.

    Settings take turns, and bad ones are dropped early. The best one is kept in a profile, from which later commands
    on this model start wherever nothing else is said; --no-profile ignores it. Decoding is timed, reading prompts is
    not. MODEL is a registry name or the path of a GGUF or ONNX file.
    """
    settings = resolve_settings({**given, "no_profile": True}, model_name, config_file).without(REMEMBERING)
    model = settings.values.get("model", DEFAULT_MODEL)
    path = profile_path(model, settings.values.get("draft"))
    if forget:
        return _forget(model, path)
    for name, count in (("--max-prompts", max_prompts), ("--max-tokens", max_tokens)):
        if count < 2:
            raise ConfigError(f"{name} must be at least 2, got {count}")
    chosen = choose_prompts(prompts, max_prompts, chat_template=settings.values.get("chat_template", True))
    sweep = _prepare(settings, chosen, max_tokens)
    if not _run(sweep, chosen):
        return INTERRUPTED
    assert path is not None, "a model that could be loaded has an identity"
    profile = _profile(sweep, model)
    save_profile(path, profile)
    if as_json:
        click.echo(json.dumps(_as_object(sweep, profile, path), allow_nan=False))
    else:
        _show(sweep)
        _conclude(sweep, profile, path)
    return 0


def _run(sweep: Sweep, prompts: Prompts) -> bool:
    """Whether the search came to its end; if not, what it found so far is shown."""
    try:
        _tell_beginning(sweep, prompts)
        with bar("", sweep.num_runs()) as progress:
            sweep.advance, sweep.tell = progress.advance, progress.tell
            sweep.run()
    except KeyboardInterrupt:
        note("interrupted: no profile is written; so far")
        _show(sweep)
        return False
    return True


def _forget(model: str, path: Path | None) -> int:
    if path is not None and forget_profile(path):
        click.echo(f"removed: {source_of(path)}")
    else:
        note(f"nothing to forget: no profile of {model!r} on this machine")
    return 0


def _prepare(settings: Settings, prompts: Prompts, max_tokens: int) -> Sweep:
    options = LoadOptions(**settings.part("load"))
    pair = resolve(options.model, options.draft, options.engine)
    settings = settings.below(pair.recommended, f"recommended for {pair.name}")
    asked = Asked(
        options,
        frozenset(name for name in TUNED if name in settings.values),
        Sampling(**settings.part("sampling")),
        max_tokens,
    )
    engines: list[EngineName] = [name for name in get_args(EngineName) if name in pair.engines]
    if options.engine != "auto":
        engines = [options.engine]
    return prepare(asked, engines, lambda loaded: prompts.encode(loaded, max_tokens))


def _tell_beginning(sweep: Sweep, prompts: Prompts) -> None:
    if not prompts.are_own:
        note(f"{len(prompts.chosen)} built-in prompts: --prompts FILE tunes for yours")
    elif len(prompts.chosen) < prompts.num_given:
        note(f"{len(prompts.chosen)} of {prompts.num_given} prompts, spread evenly; --max-prompts takes more")
    note(f"{len(sweep.scores)} settings, at most {sweep.num_runs()} decodings of {sweep.asked.max_tokens} tokens")
    if len(sweep.prompts) > 1:
        note(
            "engines may differ in the text they give, as two builds of one model do: the tokens are reproducible per "
            "engine, and --engine keeps to one"
        )


def _profile(sweep: Sweep, model: str) -> Profile:
    best = sweep.best()
    candidate = best.candidate
    settings: dict[str, Any] = {
        "engine": candidate.loaded.engine,
        "drafter": candidate.drafter,
        "draft_length": candidate.draft_length,
        "threads": candidate.loaded.threads,
    }
    if candidate.is_plain:
        del settings["draft_length"]
    return new_profile(model, settings, best.rate(), sweep.speedup(best))


# -- what is shown


def _show(sweep: Sweep) -> None:
    """The finalists and the best of those that were dropped, with the prompts that each was measured on."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("engine", "threads", "drafter", "length"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens/s", "speedup", "accepted", "prompts"):
        table.add_column(name, justify="right")
    finalists = sweep.finalists()
    best = next((score for score in finalists if score.candidate.loaded.reproducible is None), None)
    measured = [score for score in sweep.scores.values() if score.tokens]
    dropped = sorted((s for s in measured if s not in finalists), key=lambda s: (-s.rounds, -sweep.speedup(s)))
    shown = [*finalists, *dropped][: max(_SHOWN, len(finalists))]
    for score in shown:
        table.add_row(*_row(sweep, score), style="bold" if score is best else "dim" if score in dropped else None)
    Console(highlight=False, markup=False).print(table)
    if len(measured) > len(shown):
        note(f"{len(measured) - len(shown)} more were dropped early")


def _row(sweep: Sweep, score: Score) -> tuple[str, ...]:
    candidate = score.candidate
    name = candidate.drafter + (" (unpadded)" if candidate.loaded.reproducible is False else "")
    return (
        candidate.loaded.engine,
        str(candidate.loaded.threads),
        name,
        "" if candidate.is_plain else str(candidate.draft_length),
        f"{score.rate():.1f}",
        f"{sweep.speedup(score):.2f}x",
        "" if candidate.is_plain else f"{score.totals.acceptance_rate:.0%}",
        str(len(score.seconds)),
    )


def _conclude(sweep: Sweep, profile: Profile, path: Path) -> None:
    named = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in profile.settings.items())
    click.echo(
        f"best: {named}: {profile.tokens_per_second:.1f} tokens/s, {profile.speedup:.2f}x of the best plain decoding"
    )
    click.echo(f"kept: {path}")
    fastest = sweep.finalists()[0]
    if fastest.candidate.loaded.reproducible is False:
        click.echo(
            f"faster still was plain decoding with --no-reproducible, {fastest.rate():.1f} tokens/s: the reproducible "
            "mode pads a lone token here, and is yours to give up"
        )


def _as_object(sweep: Sweep, profile: Profile, path: Path) -> dict[str, Any]:
    return {
        "model": profile.model,
        "machine": profile.machine,
        "profile": str(path),
        "settings": dict(profile.settings),
        "tokens_per_second": profile.tokens_per_second,
        "speedup": profile.speedup,
        "tried": [
            {
                "engine": score.candidate.loaded.engine,
                "threads": score.candidate.loaded.threads,
                "reproducible": score.candidate.loaded.reproducible,
                "drafter": score.candidate.drafter,
                "draft_length": score.candidate.draft_length,
                "tokens_per_second": score.rate(),
                "speedup": sweep.speedup(score),
                "acceptance_rate": score.totals.acceptance_rate,
                "num_prompts": len(score.seconds),
                "rounds": score.rounds,
            }
            for score in sweep.scores.values()
        ],
    }
