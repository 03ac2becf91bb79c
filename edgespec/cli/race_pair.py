"""Which pair a race runs when none is named: the expanded demo, if the user agrees to build it, else the small one.

A race of this pair is in reproducible mode unless an option says otherwise: in the fastest mode about half of these
races end in two texts, which differ where two tokens are about equally likely, and a demonstration should not. Testing
the widths of its passes takes seconds, once. A model of the user's own is raced in the mode in which it would answer,
since its test may take minutes. Both pairs run on ONNX Runtime, where reproducible mode costs least.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from edgespec.bench.expanded_pair import WEIGHT_TYPES, ExpandedPair
from edgespec.bench.offer import find_offer
from edgespec.cli.lines import is_interactive
from edgespec.cli.terminal import note
from edgespec.config.sources import Settings
from edgespec.errors import CapabilityError, ConfigError
from edgespec.installation import has_engine
from edgespec.types import Progress as OnProgress

SOURCE = "edgespec race"
_SMALL = "using the small demo pair, whose passes are too cheap for speculation to gain"


def names_model(settings: Settings) -> bool:
    """Whether a pair was chosen by the user."""
    return "model" in settings.values or "draft" in settings.values


def demonstrating(settings: Settings) -> Settings:
    """The settings for a race of our own pair; what was given goes before."""
    defaults: dict[str, object] = {}
    if settings.values.get("verify", "coupled") == "coupled":
        defaults["reproducible"] = True
    if has_engine("onnx"):
        defaults["engine"] = "onnx"
    return settings.below(defaults, SOURCE)


def choose_pair(settings: Settings, expands: bool | None) -> Settings:
    """The settings with the model that is raced. `expands`: True builds without asking, False takes the small demo.

    Raises ConfigError when a model is named as well, and whatever building raises where it was demanded.
    """
    if names_model(settings):
        if expands is not None:
            raise ConfigError("--yes, --no and --demo are about the demo pair: leave them out where a model is named")
        return settings
    if expands is False:
        return settings
    try:
        offer = find_offer(settings.values.get("engine", "auto"))
    except CapabilityError as exc:
        if expands:
            raise
        note(f"note: {_SMALL}. {exc}")
        return settings
    if not offer.is_built():
        if not expands and not _agrees(offer):
            return settings
        with _progress() as on_progress:
            offer.build(on_progress)
    return settings.below({"model": str(offer.folder)}, "the demo pair, expanded")


def _agrees(offer: ExpandedPair) -> bool:
    """Say what building takes, and ask. Where nobody can answer, it is not built."""
    needs, size = offer.needs(), offer.shape.parameters() / 1e9
    what = (
        "The demo target has 8 million parameters, too few for speculation to gain. Expanded once to the cost of a "
        f"model of {size:.2g} billion ({WEIGHT_TYPES[offer.engine]}) it writes the same text. That takes "
        f"{needs.disk_bytes / 1e9:.1f} GB of disk in {offer.folder}, {needs.memory_bytes / 1e9:.1f} GB of memory and "
        f"about {max(5, round(needs.seconds, -1)):.0f} s."
    )
    if not is_interactive():
        note(f"note: {_SMALL}. {what} edgespec race --yes does so")
        return False
    click.echo(what, err=True)
    agreed = click.confirm("Expand it now?", default=True, err=True)
    if not agreed:
        note(f"note: {_SMALL}")
    return agreed


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """Progress of building: a bar on stderr where that is a terminal, elsewhere a line when a part is done."""
    console = Console(stderr=True)
    columns = TextColumn("{task.percentage:>3.0f}%"), BarColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("")

        def on_progress(done: int, total: int, what: str) -> None:
            if console.is_terminal:
                bar.update(task, completed=done, total=total, description=what)
            elif done == total:
                note(what)

        yield on_progress
