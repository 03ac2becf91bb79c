"""The settings that `tune` tries for one model: how to load it, which drafter and which draft length."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgespec.config import DrafterName, DraftLength, EngineName, LoadOptions, keywords_of
from edgespec.drafters.spec import HEADS, MEDIUM, MTP_LAYERS, SPECS
from edgespec.errors import CapabilityError
from edgespec.loading.requirements import target_has_mtp
from edgespec.platform.machine import physical_cores
from edgespec.runtime import Model, load
from edgespec.sampling import Sampling

LENGTHS: tuple[DraftLength, ...] = ("auto", 2, 4, 8)
FEW_LENGTHS: tuple[DraftLength, ...] = ("auto", 4)  # for what takes a load of its own
_TARGET_ONLY = frozenset({"none", *(name for name, spec in SPECS.items() if not spec.needs)})
_FEW_CORES = 4  # up to here every number of threads is tried, above it powers of two
_EXIT_PARTS, _LATEST_EXIT = 8, 6  # exits are tried after this many eighths of the layers: later ones save too little


@dataclass(frozen=True, slots=True)
class Loaded:
    """One way to load `model`, a registry name or path.

    `reproducible` None: as the user chose; False: mode off, only for comparison. `opens`: the drafter to load it for;
    `exit_layer`: that of early exit, None for the pair's own.
    """

    model: str
    engine: EngineName
    threads: int
    reproducible: bool | None
    opens: DrafterName = "auto"
    exit_layer: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One combination of settings to try."""

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
class TuneRequest:
    """The user's request. `options` to load with; `fixed`: names of the settings that must not be tuned."""

    options: LoadOptions
    fixed: frozenset[str]
    sampling: Sampling
    max_tokens: int

    def load(self, loaded: Loaded, drafter: DrafterName) -> Model:
        """Load the pair as `loaded` says, for `drafter`. Raises the errors of `edgespec.load`."""
        values = keywords_of(self.options)
        values |= {"model": loaded.model, "engine": loaded.engine, "threads": loaded.threads or None}
        values["drafter"] = drafter
        if loaded.reproducible is False:
            values["reproducible"] = False
        if loaded.exit_layer is not None:
            values["exit_layer"] = loaded.exit_layer
        return load(**values)


def candidates(request: TuneRequest, scout: Loaded, model: Model) -> list[Candidate]:
    """All settings to try for `model`, which was loaded with `scout`."""
    found = []
    for threads in thread_counts(request, model.target.facts.threads):
        loaded = dataclasses.replace(scout, threads=threads)
        found.append(Candidate(loaded, "none", "auto"))
        if model.target.facts.can_speculate:
            found += _speculative(request, loaded, model)
        if "drafter" not in request.fixed:
            found += _opt_in(request, loaded, model)
        pinned = model.target.facts.pinned_class
        if pinned is not None and pinned[0] > 1:
            found.append(Candidate(dataclasses.replace(loaded, reproducible=False), "none", "auto"))
    return found


def thread_counts(request: TuneRequest, usual: int) -> list[int]:
    """The numbers of threads to try: up to `usual`, those that the engine took, and all cores where it left slow ones
    out; only `usual` if fixed.
    """
    if "threads" in request.fixed or usual <= 1:
        return [usual]
    few = range(1, usual + 1) if usual <= _FEW_CORES else (2**power for power in range(usual.bit_length()))
    return sorted({*few, usual, max(usual, physical_cores())})


def needed(loaded: Loaded, chosen: Sequence[Candidate]) -> DrafterName:
    """The drafter to load for, such that all `chosen` settings can be decoded; none if no draft model is used."""
    return "none" if all(candidate.drafter in _TARGET_ONLY for candidate in chosen) else loaded.opens


def exit_layers(own: int, num_layers: int) -> list[int]:
    """Early exits to try in a model of `num_layers`, spread evenly, without the pair's `own` exit."""
    spread = {part * num_layers // _EXIT_PARTS for part in range(1, _LATEST_EXIT + 1)}
    return sorted(spread - {0, own})


def _speculative(request: TuneRequest, loaded: Loaded, model: Model) -> Iterator[Candidate]:
    is_fixed = "drafter" in request.fixed
    names = [request.options.drafter] if is_fixed else [*model.drafter_names, "auto"]
    for name in names:
        if name != "none":
            yield from (Candidate(loaded, name, length) for length in _lengths(request, name))
    if "early-exit" in names and "exit_layer" not in request.fixed:
        for layer in _other_exits(model):
            opening = dataclasses.replace(loaded, opens="early-exit", exit_layer=layer)
            yield from (
                Candidate(opening, "early-exit", length) for length in _lengths(request, "early-exit", FEW_LENGTHS)
            )


def _opt_in(request: TuneRequest, loaded: Loaded, model: Model) -> Iterator[Candidate]:
    """Drafters that the pair has files for but that `auto` does not load: they take memory, time or another load."""
    for name, spec in SPECS.items():
        has_medium = "medium" in model.pair.files and model.draft_name in ("model", "early-exit")
        has_heads = request.options.heads is None and name in model.pair.heads
        is_there = (MEDIUM in spec.needs and has_medium) or (HEADS in spec.needs and has_heads)
        may = is_there and model.target.facts.can_speculate
        if name not in model.drafter_names and (may or (MTP_LAYERS in spec.needs and target_has_mtp(model.pair))):
            opening = dataclasses.replace(loaded, opens=name)
            yield from (Candidate(opening, name, length) for length in _lengths(request, name, FEW_LENGTHS))


def _other_exits(model: Model) -> list[int]:
    """Exits to try besides the loaded one; none if the engine cannot cut the target at another layer."""
    try:
        loaded = model.target.early_exit()
    except CapabilityError:
        return []
    return exit_layers(loaded.layers, loaded.num_layers)


def _lengths(
    request: TuneRequest, drafter: DrafterName, lengths: Sequence[DraftLength] = LENGTHS
) -> Sequence[DraftLength]:
    if "draft_length" in request.fixed:
        return (request.options.draft_length,)
    return ("auto",) if drafter == "auto" else lengths
