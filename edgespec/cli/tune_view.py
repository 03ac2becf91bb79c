"""What `edgespec tune` shows: a table of settings, what follows from it, or all of it as one object."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from edgespec.cli.terminal import note
from edgespec.tuning.profiles import Profile
from edgespec.tuning.sweep import Score, Sweep

_SHOWN = 12  # rows of the table


def show(sweep: Sweep) -> None:
    """The finalists and the best of those that were dropped, with the prompts that each was measured on."""
    labels = _short(_labels(sweep.models))
    table = Table(box=None, header_style="bold", padding=(0, 1 if len(labels) > 1 else 2, 0, 0))
    if len(labels) > 1:
        table.add_column("weights", overflow="fold", min_width=8)
    for name in ("engine", "threads", "drafter", "length"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens/s", "speedup", "accepted", "prompts"):
        table.add_column(name, justify="right", no_wrap=True)
    finalists = sweep.finalists()
    best = next((score for score in finalists if score.candidate.loaded.reproducible is None), None)
    measured = [score for score in sweep.scores.values() if score.tokens]
    dropped = sorted((s for s in measured if s not in finalists), key=lambda s: (-s.rounds, -sweep.speedup(s)))
    shown = [*finalists, *dropped][: max(_SHOWN, len(finalists))]
    for score in shown:
        own = (labels[score.candidate.loaded.model],) if len(labels) > 1 else ()
        style = "bold" if score is best else "dim" if score in dropped else None
        table.add_row(*own, *_row(sweep, score), style=style)
    Console(highlight=False, markup=False).print(table)
    if len(measured) > len(shown):
        note(f"{len(measured) - len(shown)} more were dropped early")


def _row(sweep: Sweep, score: Score) -> tuple[str, ...]:
    candidate = score.candidate
    name = candidate.drafter + (" (unpadded)" if candidate.loaded.reproducible is False else "")
    if candidate.loaded.exit_layer is not None:
        name += f" of {candidate.loaded.exit_layer}"
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


def conclude(sweep: Sweep, kept: Sequence[tuple[Profile, Path]]) -> None:
    """The best setting of each model, where it is kept, and of several models which was fastest."""
    labels = _labels(sweep.models)
    for profile, path in kept:
        whose = f"best for {labels[profile.model]}" if len(kept) > 1 else "best"
        named = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in profile.settings.items())
        click.echo(
            f"{whose}: {named}: {profile.tokens_per_second:.1f} tokens/s, {profile.speedup:.2f}x of the best plain "
            "decoding"
        )
        click.echo(f"kept: {path}")
        fastest = next(score for score in sweep.finalists() if score.candidate.loaded.model == profile.model)
        if fastest.candidate.loaded.reproducible is False:
            click.echo(
                f"faster still was plain decoding with --no-reproducible, {fastest.rate():.1f} tokens/s: the "
                "reproducible mode pads a lone token here, and is yours to give up"
            )
    if len(kept) > 1:
        click.echo(_compared([profile for profile, _ in kept], labels))


def _compared(profiles: Sequence[Profile], labels: Mapping[str, str]) -> str:
    """Which weights were fastest, and by how much; whether they are good enough is not for a clock to say."""
    fastest, *others = sorted(profiles, key=lambda profile: -profile.tokens_per_second)
    gains = ", ".join(
        f"{fastest.tokens_per_second / other.tokens_per_second:.2f}x of {labels[other.model]}" for other in others
    )
    return (
        f"fastest weights: {labels[fastest.model]}, {gains}. Other weights of a model write other texts: which quality "
        "is enough is yours to say, so nothing switches to them by itself"
    )


def _labels(models: Sequence[str]) -> dict[str, str]:
    """The last part of each name or path, or all of it where that would not tell them apart."""
    short = {model: Path(model).name for model in models}
    return short if len(set(short.values())) == len(short) else {model: model for model in models}


def _short(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels without the parts that all of them begin and end with, where something is left of each."""
    names = [re.findall(r"[^-./]*[-./]?", label) for label in labels.values()]
    most = min(map(len, names))
    first = next((i for i in range(most) if len({name[i] for name in names}) > 1), most)
    last = next((i for i in range(most) if len({name[-1 - i] for name in names}) > 1), most)
    cut = ["".join(name[first : len(name) - last]).strip("-./") for name in names]
    return dict(zip(labels, cut if all(cut) else labels.values(), strict=True))


def as_object(sweep: Sweep, kept: Sequence[tuple[Profile, Path]]) -> dict[str, Any]:
    """All that was found, for --json: the best of MODEL, of each of the `weights`, and every setting that was tried."""
    best = [
        {
            "model": profile.model,
            "profile": str(path),
            "settings": dict(profile.settings),
            "tokens_per_second": profile.tokens_per_second,
            "speedup": profile.speedup,
        }
        for profile, path in kept
    ]
    return {
        "machine": kept[0][0].machine,
        **best[0],
        "weights": sorted(best, key=lambda one: -one["tokens_per_second"]),
        "tried": [
            {
                "model": score.candidate.loaded.model,
                "engine": score.candidate.loaded.engine,
                "threads": score.candidate.loaded.threads,
                "reproducible": score.candidate.loaded.reproducible,
                "drafter": score.candidate.drafter,
                "draft_length": score.candidate.draft_length,
                "exit_layer": score.candidate.loaded.exit_layer,
                "tokens_per_second": score.rate(),
                "speedup": sweep.speedup(score),
                "acceptance_rate": score.totals.acceptance_rate,
                "num_prompts": len(score.seconds),
                "rounds": score.rounds,
            }
            for score in sweep.scores.values()
        ],
    }
