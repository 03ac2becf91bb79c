"""The memory that a pair will take, by part, from the files' metadata and the options, and whether it fits.

No weights are read. The same plan is printed by `edgespec plan` and checked at every load. A plan's own memory is a
hard limit, mapped weights a soft one, which only costs speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from edgespec.config.options import LoadOptions
from edgespec.config.values import as_size, budget_bytes
from edgespec.control.constants import MAX_AUTO_LENGTH
from edgespec.drafters.spec import SPECS
from edgespec.engines.model_use import BYTES_PER_FEATURE, WINDOW, Footprint, ModelUse
from edgespec.errors import CapabilityError, EdgespecError
from edgespec.formats.gguf.heads import head_kind_of
from edgespec.formats.manifest import ModelFile, ModelPair
from edgespec.loading.requirements import Chosen, draft_use, head_paths, target_use
from edgespec.platform.files import expanded
from edgespec.platform.machine import default_threads
from edgespec.platform.memory import Limit, free_memory, limits, own_bytes

MIB = 1 << 20
# Python, our modules and the libraries, (own, mapped) bytes: measured on CPython 3.11, Linux.
_PYTHON = 27 * MIB, 17 * MIB
_LIBRARIES = {"llamacpp": (9 * MIB, 7 * MIB), "onnx": (16 * MIB, 32 * MIB)}
_CHILD = 24 * MIB  # the child process in which chat templates are rendered: 14 of its own, and its pages of files
_CUDA = 340 * MIB  # what CUDA's libraries take of this machine's memory: measured on one of NVIDIA's H200, CUDA 13.0
_STACK_BYTES = 8 << 20
_COMMON_BYTES = 7 * MIB  # of the common texts' index, which models whose vocabulary takes less do without
_SURVEYED_ROWS = 63
# Bytes in memory for a weight of 8 bits in the file: of heads there are 8 bits and scales; their vocabulary is there as
# well in half precision, from which inputs are looked up.
_LAYER, _VOCABULARY = 1.25, 3.25
_HEAD_CONTEXT = 2048  # pairs of an EAGLE head
_OPENING = 10.0  # the same while they are opened: in float32, as they are kept, and copies; measured on SmolLM2's


class PlanRow(NamedTuple):
    """One line of a plan. `own`: memory that the system cannot drop; `mapped`: pages of files that it can."""

    name: str
    own: int
    mapped: int = 0


def _parts(role: str, need: Footprint) -> list[PlanRow]:
    texts = f" for each of {need.sequences} answers" if need.sequences > 1 else ""
    found = (
        PlanRow(f"{role}: weights in their file", 0, need.mapped - need.read_once),
        PlanRow(f"{role}: weights read once from their file", 0, need.read_once),
        PlanRow(f"{role}: weights copied for the processor", need.packed),
        PlanRow(f"{role}: KV cache, {need.context_length} tokens{texts}, {need.cache_type}", need.cache),
        PlanRow(f"{role}: results of a pass", need.compute),
        PlanRow(f"{role}: logits", need.logits),
        PlanRow(f"{role}: vocabulary", need.vocabulary),
    )
    return [part for part in found if part.own or part.mapped]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a pair takes once its context is full. Sizes in bytes; `tables`: of drafters without a model; `heads` files.

    `models`: by role, in the order in which they are opened, the target first. `process`: Python and the libraries;
    `threads`: started by the load and by the first answer; `device`: of ONNX Runtime, None for the CPU.
    `shares_device`: what lies on a GPU takes this machine's memory. `heads_opening`: of `heads`, while they are opened.
    """

    name: str
    models: Mapping[str, Footprint]
    tables: int
    heads: int
    process: PlanRow
    threads: int
    device: str | None = None
    shares_device: bool = False
    heads_opening: int = 0

    @property
    def parts(self) -> list[PlanRow]:
        rows = [part for role, need in self.models.items() for part in _parts(role, need)]
        rest = (PlanRow("drafters' tables", self.tables), PlanRow("heads", self.heads), self.process)
        return [*rows, *(part for part in rest if part.own or part.mapped)]

    @property
    def own_bytes(self) -> int:
        """Memory that the system cannot drop, at its peak: with a full context, or while a model is opened."""
        steady = self.process.own + sum(map(self._own, self.models.values())) + self.tables + self.heads
        return max(steady, *(own for own, _ in self._openings()))

    @property
    def mapped_bytes(self) -> int:
        return sum(part.mapped for part in self.parts)

    @property
    def total_bytes(self) -> int:
        """The peak with everything resident, which is fastest."""
        opening = max(own + mapped for own, mapped in self._openings())
        return max(self.own_bytes + self.mapped_bytes, opening)

    @property
    def working_bytes(self) -> int:
        """What must be resident for passes that read nothing from a disk."""
        return self.total_bytes - self.read_once_bytes

    @property
    def read_once_bytes(self) -> int:
        """Pages of files that are needed while models are opened only."""
        return sum(need.read_once for need in self.models.values())

    def _openings(self) -> Iterator[tuple[int, int]]:
        """(own, mapped) bytes while each model is opened after others and its tokenizer is read, and heads at last."""
        before = self.process.own
        for need in self.models.values():
            yield before + need.packed + need.loading, self.mapped_bytes + need.loading_mapped
            yield before + need.packed + need.vocabulary + need.reading, self.mapped_bytes
            before += self._own(need)
        loaded = sum(need.packed + need.vocabulary + need.cache * (not need.grows) for need in self.models.values())
        yield self.process.own + loaded + self.heads_opening, self.mapped_bytes

    def _own(self, need: Footprint) -> int:
        return need.own + (need.device if self.shares_device else 0)

    @property
    def device_bytes(self) -> int:
        """Memory of a GPU, or of another device of ONNX Runtime's."""
        return sum(need.device for need in self.models.values())

    @property
    def device_note(self) -> str:
        """What lies elsewhere or may, of which no memory is known; empty where all is this machine's memory."""
        if not self.device_bytes:
            return ""
        # llama.cpp tells how much memory its devices have.
        rest = ", which shares this machine's memory" if self.shares_device else ""
        rest = f"{rest}, not checked: how much memory it has is not known" if self.device else rest
        return f"on {self.device or 'the GPU'}: about {as_size(self.device_bytes)}{rest}"

    @property
    def reserved_bytes(self) -> int:
        """Addresses beyond the memory used."""
        return sum(need.reserved for need in self.models.values()) + self.threads * _STACK_BYTES

    @property
    def context_length(self) -> int:
        return self.models["target"].context_length


def planned(options: LoadOptions, pair: ModelPair) -> Plan:
    """The plan for `pair` under `options`.

    Raises ModelNotFound, ModelFileError, CapabilityError where the pair lacks what the options need, and ConfigError.
    """
    chosen = Chosen.of(options, pair)
    models = {"target": _footprint(pair.files["target"], "target", _target_use(options, chosen))}
    context = models["target"].context_length
    for role in chosen.roles[1:]:
        use = replace(draft_use(options, pair.files[role], context), rows=1)
        models[role] = _footprint(pair.files[role], role, use)
    engines = {pair.files[role].engine for role in chosen.roles}
    heads = [head_bytes(path, context, options.sequences) for path in head_paths(options, pair)]
    return Plan(
        pair.name,
        models,
        _table_bytes(options, models["target"]),
        sum(kept for kept, _ in heads),
        _process(engines),
        _threads(options, engines, len(models)),
        None if options.provider in ("auto", "cpu") else options.provider,
        _shares_device(options, engines),
        sum(opening for _, opening in heads),
    )


def _shares_device(options: LoadOptions, engines: set[str]) -> bool:
    """Whether layers go to a GPU that has no memory of its own."""
    if "llamacpp" not in engines:
        return False
    placed = [(options.target_gpu_layers, options.target_devices)]
    placed += [(options.draft_model_gpu_layers, options.draft_devices)]
    names = [devices for layers, devices in placed if layers and devices != ()]
    if not names or options.rpc is not None:
        return False
    from edgespec.engines.llamacpp.devices import any_shares_memory

    with suppress(CapabilityError):  # llama.cpp is not here, or too old to tell
        return any(map(any_shares_memory, names))
    return False


def _target_use(options: LoadOptions, chosen: Chosen) -> ModelUse:
    use = target_use(options, chosen)
    speculates = options.drafter != "none" and options.draft_length != 0
    length = MAX_AUTO_LENGTH if options.draft_length == "auto" else options.draft_length
    rows = length + 1 if speculates else 1
    # Reproducible mode tries all widths once.
    return replace(use, rows=max(rows, _SURVEYED_ROWS) if use.reproducible else rows)


def _footprint(file: ModelFile, role: str, use: ModelUse) -> Footprint:
    if file.engine == "onnx":
        from edgespec.engines.onnx.footprint import footprint

        return footprint(file.path, use)
    from edgespec.engines.llamacpp import footprint as llamacpp

    is_head = role != "target" and head_kind_of(file.path)
    return (llamacpp.head_footprint if is_head else llamacpp.footprint)(file.path, use)


def _table_bytes(options: LoadOptions, target: Footprint) -> int:
    """Bytes of drafters that keep tables of the text, each of which also has a limit of its own, and of other texts."""
    if options.drafter == "none" or options.draft_length == 0:
        return 0
    free = [name for name, spec in SPECS.items() if spec.cost == "free"]  # a request may name those not in `auto`
    names = free if options.drafter == "auto" else [options.drafter]
    specs = [SPECS[name] for name in names if name in SPECS]
    tables = sum(min(target.context_length, spec.most_tokens) * spec.bytes_per_token for spec in specs)
    has_common = options.corpus and SPECS["suffix"] in specs and target.vocabulary >= _COMMON_BYTES
    return tables * options.sequences + has_common * _COMMON_BYTES


def head_bytes(path: Path, context_length: int, texts: int) -> tuple[int, int]:
    """Of a heads file, for several `texts` at once of at most `context_length` tokens each; and while it is opened."""
    from edgespec.formats.head_file import read_head_manifest

    stored = 0
    try:
        stored = expanded(path).stat().st_size
        sizes = read_head_manifest(path)
    except (EdgespecError, OSError, ValueError):  # reading the heads says best what is wrong; ValueError: a NUL
        return stored, 0
    layer = min(sum(map(math.prod, sizes.shapes().values())), stored)
    weights, opening = _LAYER * layer + _VOCABULARY * (stored - layer), int(_OPENING * stored)
    # All keep windows of states; an EAGLE head has a cache of halves, and tables of positions.
    states = min(WINDOW, context_length) * sizes.feature_size * BYTES_PER_FEATURE
    cache = min(_HEAD_CONTEXT, context_length) * 4 * sizes.kv_heads * sizes.head_dim
    kept = int(weights) + texts * (states + cache) + 4 * _HEAD_CONTEXT * sizes.head_dim
    return kept, opening


def _threads(options: LoadOptions, engines: set[str], models: int) -> int:
    """One runs the rounds; ONNX Runtime's models have helpers of their own, llama.cpp's share theirs."""
    helpers = (options.threads or default_threads()) - 1
    return 1 + helpers * (models if "onnx" in engines else 1)


def _process(engines: set[str]) -> PlanRow:
    from edgespec.engines.llamacpp.library import has_cuda

    sizes = [_PYTHON, (_CHILD, 0), *(_LIBRARIES[engine] for engine in engines)]
    if "llamacpp" in engines and has_cuda():
        sizes.append((_CUDA, 0))
    return PlanRow("Python and libraries", sum(own for own, _ in sizes), sum(mapped for _, mapped in sizes))


Fit = Literal["fits", "pages", "refused"]
BUDGET = "the budget"
_ORDER: tuple[Fit, ...] = ("fits", "pages", "refused")


@dataclass(frozen=True, slots=True)
class FitVerdict:
    """`needed_bytes` against `free_bytes` under the limit `name`, the tightest one."""

    fit: Fit
    needed_bytes: int
    free_bytes: int
    name: str

    def __str__(self) -> str:
        needed, free = as_size(self.needed_bytes), as_size(self.free_bytes)
        if self.fit == "fits":
            more = "" if self.name == BUDGET else " more"  # Python and the libraries are in memory already
            return f"fits: {needed}{more} of {free}, {self.name}"
        if self.fit == "pages":
            when = " once the machine runs out of free memory" if self.name == BUDGET else ""
            return f"will page (slow){when}: {needed} with the weights in their files, {free} of {self.name}"
        return f"refused: needs {needed}, {free} is left under {self.name}"


@dataclass(frozen=True, slots=True)
class Room:
    """What this process may take. `budget_bytes`: set by the user, for all of it; `own`: what it takes already."""

    budget_bytes: int | None
    limits: tuple[Limit, ...]
    own: int = 0

    @classmethod
    def now(cls, memory: str | int | None) -> Room:
        """The room there is at present; `memory` as in LoadOptions. Raises ConfigError."""
        own = own_bytes() or 0
        free = free_memory()
        total = None if free is None else free + own
        return cls(None if memory is None else budget_bytes(memory, total), limits(), own)

    def most_own(self, plan: Plan) -> int | None:
        """What the process's own memory may grow to; None without a limit."""
        most = [self.own + each.free_bytes for each in self.limits if each.kind != "addresses"]
        in_budget = self.most_in_budget(plan)
        return min(most if in_budget is None else [*most, in_budget], default=None)

    def most_in_budget(self, plan: Plan) -> int | None:
        """What the process's own memory may grow to under the user's budget; None without one."""
        if self.budget_bytes is None:
            return None
        return self.own - min(self.own, plan.process.own) + self.budget_bytes

    def verdict(self, plan: Plan) -> FitVerdict:
        """The worst over all limits; of equals the tightest."""
        found = [self._under(limit, plan) for limit in self.limits]
        if self.budget_bytes is not None:
            found.append(_judged(plan.own_bytes, plan.working_bytes, self.budget_bytes, self.budget_bytes, BUDGET))
        unknown = FitVerdict("fits", plan.working_bytes, plan.working_bytes, "no known limit")
        return max(found, key=lambda v: (_ORDER.index(v.fit), v.needed_bytes - v.free_bytes), default=unknown)

    def _under(self, limit: Limit, plan: Plan) -> FitVerdict:
        # What Python and the libraries take already was taken from what is left.
        own = plan.own_bytes - min(self.own, plan.process.own)
        if limit.kind == "memory":
            mapped = plan.working_bytes - plan.own_bytes - plan.process.mapped
            return _judged(own, own + mapped, limit.free_bytes, limit.free_bytes - limit.swap_bytes, limit.name)
        needed = own + plan.reserved_bytes
        if limit.kind == "addresses":
            needed += plan.mapped_bytes - plan.process.mapped
        return _judged(needed, needed, limit.free_bytes, limit.free_bytes, limit.name)


def _judged(hard: int, soft: int, most: int, fast: int, name: str) -> FitVerdict:
    """Refused if `hard` bytes exceed `most`; pages if `soft`, which includes mapped files, exceed `fast`."""
    if hard > most:
        return FitVerdict("refused", hard, most, name)
    return FitVerdict("pages" if soft > fast else "fits", soft, fast, name)
