"""From settings to a loaded model and the options of its generations."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgespec.cli.options import sampling_of
from edgespec.cli.terminal import configuration_line, note
from edgespec.config import GenerateOptions, SessionOptions
from edgespec.errors import CapabilityError
from edgespec.runtime import Model, load
from edgespec.sampling import Sampling
from edgespec.settings import REMEMBERING, Settings
from edgespec.tuning.profiles import profile_in_effect
from edgespec.types import Stats


@dataclass(slots=True)
class Session:
    """A loaded model and how it is being used; the options may be replaced between two generations."""

    model: Model
    settings: Settings
    sampling: Sampling
    options: GenerateOptions
    shown: SessionOptions
    told: set[str] = field(default_factory=set)  # notes of answers that were shown

    @property
    def seed(self) -> int:
        """The seed of the next answer; `open_session` chose one where none was given."""
        return self.sampling.seed or 0

    def tell_notes(self, stats: Stats) -> None:
        """What a user must know of an answer, once each."""
        for line in stats.notes:
            if line not in self.told:
                self.told.add(line)
                note(f"note: {line}")


def open_session(settings: Settings, *, remembers: bool = False) -> Session:
    """Load what the settings name. Every option is checked before any file is opened.

    `remembers`: a command whose answers may be kept on disk and drafted from, where the settings ask for it; any other
    does neither, whatever they say. With `learn`, earlier answers are drafted from too, unless that is switched off.
    Raises ConfigError, SamplingError, and whatever `edgespec.load` raises.
    """
    if not remembers:
        settings = settings.without(REMEMBERING)
    elif settings.values.get("learn"):
        settings = settings.below({"recall": True}, "--learn")
    seed = sampling_of(settings).seed
    options = GenerateOptions(**settings.part("generate"))
    shown = SessionOptions(**settings.part("session"))
    model = _load(settings)
    settings = settings.below(model.pair.recommended, f"recommended for {model.pair.name}")
    settings = settings.below({"seed": seed}, "chosen at random")
    return Session(model, settings, sampling_of(settings), options, shown)


def _load(settings: Settings) -> Model:
    try:
        return load(**settings.part("load"))
    except CapabilityError as exc:
        profile = profile_in_effect(settings)
        if profile is None:
            raise
        raise CapabilityError(f"{exc} ({profile} is in effect; --no-profile ignores it)") from exc


def tell_configuration(session: Session) -> None:
    """The model's banner, the effective configuration and what a user must know of it, on stderr."""
    model = session.model
    if model.pair.banner:
        note(model.pair.banner)
    note(in_effect(session))
    for line in model.notes:
        note(f"note: {line}")


def in_effect(session: Session) -> str:
    """The effective configuration in one line, and the profile that a part of it comes from."""
    line = configuration_line(session.model, session.sampling, session.options)
    profile = profile_in_effect(session.settings)
    return line if profile is None else f"{line} | {profile}"
