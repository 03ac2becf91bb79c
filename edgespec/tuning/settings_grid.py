"""What a tuning tries of one model: ways to load it, and the drafters and draft lengths to decode with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.config import DrafterName, DraftLength, EngineName, LoadOptions
from edgespec.drafters.spec import HEADS, MEDIUM, SPECS
from edgespec.errors import CapabilityError
from edgespec.runtime import Model, load
from edgespec.sampling import Sampling

LENGTHS: tuple[DraftLength, ...] = ("auto", 2, 4, 8)
FEW_LENGTHS: tuple[DraftLength, ...] = ("auto", 4)  # for what takes a load of its own
_UNAIDED = frozenset({"none", *(name for name, spec in SPECS.items() if not spec.needs)})
_FEW_CORES = 4  # up to here every number of threads is tried, above it powers of two
_EXIT_PARTS, _LATEST_EXIT = 8, 6  # exits are tried after this many eighths of the layers: later ones save too little


@dataclass(frozen=True, slots=True)
class Loaded:
    """One way to load `model`, a name or a path as users give it.

    `reproducible` None: as asked for; False: without the mode, to compare with only. `opens`: the drafter that it is
    loaded for; `exit_layer`: of an early exit, None for the pair's own.
    """

    model: str
    engine: EngineName
    threads: int
    reproducible: bool | None
    opens: DrafterName = "auto"
    exit_layer: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One setting that may be the best."""

    loaded: Loaded
    drafter: DrafterName
    draft_length: DraftLength

    @property
    def is_plain(self) -> bool:
        return self.drafter == "none"

    @property
    def is_adaptive(self) -> bool:
        return self.drafter == "auto" and self.draft_length == "auto"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user has fixed: `options` to load with, and of the tuned settings those in `fixed`, by name."""

    options: LoadOptions
    fixed: frozenset[str]
    sampling: Sampling
    max_tokens: int

    def load(self, loaded: Loaded, drafter: DrafterName) -> Model:
        """The pair as `loaded` says, with models to draft with only if `drafter` wants them."""
        values: dict[str, Any] = {f.name: getattr(self.options, f.name) for f in dataclasses.fields(self.options)}
        values |= {"model": loaded.model, "engine": loaded.engine, "threads": loaded.threads or None}
        values["drafter"] = drafter
        if loaded.reproducible is False:
            values["reproducible"] = False
        if loaded.exit_layer is not None:
            values["exit_layer"] = loaded.exit_layer
        return load(**values)


def candidates(asked: Asked, scout: Loaded, model: Model) -> list[Candidate]:
    """All settings for what was loaded as `scout` says."""
    found = []
    for threads in thread_counts(asked, model.target.facts.threads):
        loaded = dataclasses.replace(scout, threads=threads)
        found.append(Candidate(loaded, "none", "auto"))
        if model.target.facts.can_rollback:
            found += _speculating(asked, loaded, model)
        pinned = model.target.facts.pinned_class
        if pinned is not None and pinned[0] > 1:
            found.append(Candidate(dataclasses.replace(loaded, reproducible=False), "none", "auto"))
    return found


def thread_counts(asked: Asked, usual: int) -> list[int]:
    """1 up to the physical cores that the engine found, or what was fixed."""
    if "threads" in asked.fixed or usual <= 1:
        return [usual]
    if usual <= _FEW_CORES:
        return list(range(1, usual + 1))
    return sorted({usual, *(2**power for power in range(usual.bit_length()) if 2**power <= usual)})


def needed(loaded: Loaded, chosen: Sequence[Candidate]) -> DrafterName:
    """What to load with so that all of these can be decoded: models to draft with only where one is used."""
    return "none" if all(candidate.drafter in _UNAIDED for candidate in chosen) else loaded.opens


def exit_layers(own: int, num_layers: int) -> list[int]:
    """Layers after which a model of `num_layers` may end early, spread evenly, but for the `own` exit of its pair."""
    spread = {part * num_layers // _EXIT_PARTS for part in range(1, _LATEST_EXIT + 1)}
    return sorted(spread - {0, own})


def _speculating(asked: Asked, loaded: Loaded, model: Model) -> Iterator[Candidate]:
    is_fixed = "drafter" in asked.fixed
    names = [asked.options.drafter] if is_fixed else [*model.drafter_names, "auto"]
    for name in names:
        if name != "none":
            yield from (Candidate(loaded, name, length) for length in _lengths(asked, name))
    for name in () if is_fixed else _by_name(asked, model):
        opening = dataclasses.replace(loaded, opens=name)
        yield from (Candidate(opening, name, length) for length in _lengths(asked, name, FEW_LENGTHS))
    if "early-exit" in names and "exit_layer" not in asked.fixed:
        for layer in _other_exits(model):
            opening = dataclasses.replace(loaded, opens="early-exit", exit_layer=layer)
            yield from (
                Candidate(opening, "early-exit", length) for length in _lengths(asked, "early-exit", FEW_LENGTHS)
            )


def _by_name(asked: Asked, model: Model) -> list[DrafterName]:
    """Drafters that the pair has files for and that automatic leaves closed: they take memory, or one more load."""
    found: list[DrafterName] = []
    for name, spec in SPECS.items():
        has_medium = "medium" in model.pair.files and model.draft_name in ("model", "early-exit")
        has_heads = asked.options.heads is None and name in model.pair.heads
        if (MEDIUM in spec.needs and has_medium) or (HEADS in spec.needs and has_heads):
            found.append(name)
    return [name for name in found if name not in model.drafter_names]


def _other_exits(model: Model) -> list[int]:
    """Exits to try beside the one that is loaded; none where a target cannot be cut anew."""
    try:
        loaded = model.target.early_exit()
    except CapabilityError:
        return []
    return exit_layers(loaded.layers, loaded.num_layers)


def _lengths(asked: Asked, drafter: DrafterName, lengths: Sequence[DraftLength] = LENGTHS) -> Sequence[DraftLength]:
    if "draft_length" in asked.fixed:
        return (asked.options.draft_length,)
    return ("auto",) if drafter == "auto" else lengths
