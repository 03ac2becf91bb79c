"""What `edgespec tune` shows: a table of settings, what follows from it, or all of it as one object."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from edgespec.cli import say
from edgespec.cli.terminal import note
from edgespec.tuning.profiles import Profile
from edgespec.tuning.sweep import Score, Sweep

_SHOWN = 12  # rows of the table


@dataclass(frozen=True, slots=True)
class Found:
    """The best setting of one model, as a factor over the default settings with its error, and where it is kept."""

    profile: Profile
    path: Path
    gain: float
    error: float

    @property
    def is_kept(self) -> bool:
        return self.gain > 1 + self.error


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


def conclude(sweep: Sweep, found: Sequence[Found]) -> None:
    """The best setting of each model, whether it is kept, and of several models which was fastest."""
    labels = _labels(sweep.models)
    for one in found:
        profile = one.profile
        whose = f"best for {labels[profile.model]}" if len(found) > 1 else "best"
        named = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in profile.settings.items())
        say(f"{whose}: {named}: {profile.tokens_per_second:.1f} tokens/s, {profile.speedup:.2f}x of plain decoding")
        say(_outcome(one))
        fastest = next(score for score in sweep.finalists() if score.candidate.loaded.model == profile.model)
        if fastest.candidate.loaded.reproducible is False:
            say(
                f"plain decoding with --no-reproducible was faster still: {fastest.rate():.1f} tokens/s, since "
                "reproducible mode pads single-token steps on this model"
            )
    if len(found) > 1:
        say(_compared([one.profile for one in found], labels))


def _outcome(one: Found) -> str:
    if one.is_kept:
        return f"{one.gain:.2f}x of the default settings (error {one.error:.2f}), kept: {one.path}"
    if one.gain == 1 and one.error == 0:
        return "nothing gained: these are the default settings, so no profile is kept"
    within = "which was not measured" if math.isinf(one.error) else f"of {one.error:.2f}"
    return (
        f"nothing gained: {one.gain:.2f}x of the default settings is within the error {within}, so no profile is kept"
    )


def _compared(profiles: Sequence[Profile], labels: Mapping[str, str]) -> str:
    """Which weights were fastest, and by how much."""
    fastest, *others = sorted(profiles, key=lambda profile: -profile.tokens_per_second)
    gains = ", ".join(
        f"{fastest.tokens_per_second / other.tokens_per_second:.2f}x of {labels[other.model]}" for other in others
    )
    return (
        f"fastest weights: {labels[fastest.model]}, {gains}. Other weights write other texts: compare their quality "
        "before you switch"
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


def as_object(sweep: Sweep, found: Sequence[Found]) -> dict[str, Any]:
    """All that was found, for --json: the best of MODEL, of each of the `weights`, and every setting that was tried.

    "profile" is null where the gain is within its error; an error that could not be measured is null too.
    """
    best = [
        {
            "model": one.profile.model,
            "profile": str(one.path) if one.is_kept else None,
            "settings": dict(one.profile.settings),
            "tokens_per_second": one.profile.tokens_per_second,
            "speedup": one.profile.speedup,
            "gain": one.gain,
            "gain_error": None if math.isinf(one.error) else one.error,
        }
        for one in found
    ]
    return {
        "machine": found[0].profile.machine,
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
