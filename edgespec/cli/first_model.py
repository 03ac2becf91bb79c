"""What `chat` talks with where no model was named: a real one, which is fetched if the user agrees, else the demo.

The demo knows a few subjects and is made for trying things out. A small real model is asked for once, in a terminal
only.
"""

from __future__ import annotations

import shutil

import click

from edgespec.cli.pull import fetched
from edgespec.cli.stdin import is_interactive
from edgespec.cli.terminal import note, verbosity
from edgespec.config.sources import Settings
from edgespec.errors import EdgespecError
from edgespec.installation import has_engine, install_command
from edgespec.kernels.library import library_path
from edgespec.loading.catalogue import entries
from edgespec.loading.registry import registered_folders
from edgespec.platform import disk_cache

FIRST = "smollm2-135m"
CHOSEN_HERE = "chosen by chat, as no model was named"  # where /show says the model comes from
_KEY = disk_cache.key_of("first model", FIRST)


def first_model(settings: Settings) -> str | None:
    """The model to chat with where the settings name none and there is a better one than the demo; else None.

    Asks and fetches where that is possible and was not declined before; what fails is said, and the demo serves.
    """
    if settings.values.get("model") is not None or settings.values.get("engine", "auto") != "auto":
        return None
    return _usable() or _fetched()


def _runs_ggufs() -> bool:
    return library_path() is not None or has_engine("llamacpp")


def _usable() -> str | None:
    return FIRST if FIRST in registered_folders() and _runs_ggufs() else None


def _fetched() -> str | None:
    if not is_interactive() or verbosity() == "quiet" or disk_cache.get("asked", _KEY, bool) is not None:
        return None
    if not _runs_ggufs():
        note(f"no model named: using the demo. To get a real model, first run {install_command('llamacpp')}")
        return None
    entry = entries()[FIRST]
    size = entry.guessed_bytes() / 1e6
    offer = (
        f"No model named. {entry.description} (about {size:.0f} MB, {entry.licence}) is small and talks about "
        "anything; without it, the demo answers, which knows restaurants, travel and the like."
    )
    click.echo(click.wrap_text(offer, shutil.get_terminal_size().columns), err=True)
    if not click.confirm(f"Get {FIRST}?", default=True, err=True):
        disk_cache.put("asked", _KEY, False)
        note(f"edgespec pull {FIRST} gets it later")
        return None
    try:
        fetched(FIRST, wants_draft=False)
    except EdgespecError as exc:
        note(f"{exc}\nusing the demo for now")
        return None
    return _usable()
