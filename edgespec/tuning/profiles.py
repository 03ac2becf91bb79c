"""Profiles: the best settings that `edgespec tune` found for one model on one machine, which later runs start from.

One TOML file per model and machine in the user's config folder, so that two tunings at once never mix. A profile stands
below everything that a user says (flag, environment, config file) and above the defaults; what was said and contradicts
it takes the part of it along that was found under the opposite.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomli_w

from edgespec.config.sources import Settings, find
from edgespec.errors import ConfigError, ModelFileError, StateError
from edgespec.formats.manifest import MANIFEST
from edgespec.loading.registry import folder_of, model_in
from edgespec.platform.files import expanded, is_file, read_text, resolved, user_folder, write_atomically
from edgespec.platform.machine import machine_name

PROFILE_FORMAT = 1
TUNED = ("engine", "drafter", "draft_length", "exit_layer", "threads")  # the settings that a profile may hold
DEFAULT_MODEL = "demo"
GIVEN_FILES = ("draft", "heads", "medium")  # of the command line; what a profile says may need them


@dataclass(frozen=True, slots=True)
class Profile:
    """The best settings of one model on one machine, by setting name, and what they gained when they were found.

    `tokens_per_second` and `speedup` (over the best plain decoding) are for the reader; nothing is decided by them.
    """

    model: str
    machine: str
    created: str
    settings: Mapping[str, Any]
    tokens_per_second: float
    speedup: float

    def applicable(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Its settings that still mean something next to those a user gave.

        Settings found for one engine say nothing of another, nor a draft length or an exit for one drafter of another.
        """
        if given.get("engine", self.settings.get("engine")) != self.settings.get("engine"):
            return {}
        found = {name: value for name, value in self.settings.items() if name not in given}
        if given.get("drafter", self.settings.get("drafter")) != self.settings.get("drafter"):
            found.pop("draft_length", None)
            found.pop("exit_layer", None)
        return found


def profile_path(model: str, draft: Path | None = None, *others: Path | None) -> Path | None:
    """Where the profile of this model on this machine lies, there or not; None when there is no such model.

    `draft`, `others`: the files that were given with it, a draft model, and heads and a medium model: what needs them
    is nothing for a command without.
    """
    identity = _identity(model)
    if identity is None:
        return None
    given, *beside = (None if path is None else _identity(str(path)) for path in (draft, *others))
    whole = (identity, given, machine_name(), *(beside if any(beside) else ()))
    key = hashlib.sha256(repr(whole).encode()).hexdigest()[:16]
    name = "".join(letter if letter.isalnum() else "-" for letter in Path(model).stem)[:40]
    return user_folder("config") / "profiles" / f"{name}-{key}.toml"


def with_profile(settings: Settings, *, leaves_plain: bool = False) -> Settings:
    """`settings` with this model's profile underneath, where there is one.

    `leaves_plain`: that plain decoding is best is left out of it, for commands that compare with plain decoding.
    Raises ConfigError, naming the file and the fix, for a profile that is damaged.
    """
    values = settings.values
    path = profile_path(values.get("model", DEFAULT_MODEL), *map(values.get, GIVEN_FILES))
    if path is None or not is_file(path):
        return settings
    found = load_profile(path).applicable(values)
    if leaves_plain and found.get("drafter") == "none":
        del found["drafter"]
    return settings.below(found, source_of(path))


def source_of(path: Path) -> str:
    """How the settings of a profile are said to be given."""
    return f"profile {path.stem}"


def profile_in_effect(settings: Settings) -> str | None:
    """The source that names the profile which some of these settings come from, or None."""
    return next((source for source in settings.sources.values() if source.startswith("profile ")), None)


def load_profile(path: Path) -> Profile:
    """Read a profile. Raises ConfigError for one that is damaged, naming the file and the fix."""
    try:
        table = tomllib.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as exc:  # ValueError: TOML, UTF-8, an integer without end
        raise _damaged(path, str(exc)) from exc
    if table.get("format") != PROFILE_FORMAT:
        raise _damaged(path, f"its format is {table.get('format')!r}, this edgespec reads {PROFILE_FORMAT}")
    try:
        texts = [str(table[key]) for key in ("model", "machine", "created")]
        figures = [float(table[key]) for key in ("tokens_per_second", "speedup")]
        entries = dict(table["settings"])
    except (KeyError, TypeError, ValueError) as exc:
        raise _damaged(path, f"{exc} is missing or has a wrong type") from exc
    return Profile(texts[0], texts[1], texts[2], _checked(path, entries), figures[0], figures[1])


def save_profile(path: Path, profile: Profile) -> None:
    """Write a profile whole or not at all, over an older one. Raises StateError when the folder cannot be written."""
    write_atomically(path, _as_toml(profile), parents=True)


def forget_profile(path: Path) -> bool:
    """Remove a profile, damaged or not; False when there was none. Raises StateError when it cannot be removed."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise StateError(f"the profile {path} cannot be removed: {exc.strerror}; delete it by hand") from exc
    return True


def new_profile(model: str, settings: Mapping[str, Any], tokens_per_second: float, speedup: float) -> Profile:
    """A profile of this machine, made now."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return Profile(model, machine_name(), created, settings, tokens_per_second, speedup)


def _identity(model: str) -> tuple[object, ...] | None:
    """What tells a model from any other, whichever of its engines runs: its manifest's contents, else its file's place,
    size and time. None when there is no such model; loading says so better."""
    path = folder_of(model) or expanded(model)
    try:
        path = model_in(path)
    except ModelFileError:
        return None
    for file in (path / MANIFEST, path):
        if is_file(file):
            if file.name == MANIFEST:
                return (hashlib.sha256(file.read_bytes()).hexdigest(),)
            found = file.stat()
            return str(resolved(file)), found.st_size, found.st_mtime_ns
    return None


def _checked(path: Path, entries: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in entries.items():
        try:
            setting = find(key, "settings")
            found[setting.name] = setting.from_toml(value, f"settings.{key}")
        except ConfigError as exc:
            raise _damaged(path, str(exc)) from exc
        if setting.name not in TUNED:
            raise _damaged(path, f"settings.{key} is not a setting that tune writes")
    return found


def _damaged(path: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"profile {path} is damaged: {problem}; remove it with edgespec tune MODEL --forget, or ignore it with "
        "--no-profile"
    )


def _as_toml(profile: Profile) -> str:
    found = {find(name, "profile").key: value for name, value in profile.settings.items()}
    figures = {"tokens_per_second": round(profile.tokens_per_second, 2), "speedup": round(profile.speedup, 3)}
    about = {"model": profile.model, "machine": profile.machine, "created": profile.created}
    table = {"format": PROFILE_FORMAT, **about, **figures, "settings": found}
    first = "# Written by `edgespec tune`; `edgespec tune --forget` removes it, --no-profile ignores it.\n"
    return first + tomli_w.dumps(table)
