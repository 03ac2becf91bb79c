"""Chooses the options of a pair so that it fits into memory: what is given up, in which order, and how to report it.

Only options that the user did not give are changed. The first of `_setups` that fits is taken, else the first that at
least works. Without a budget only the draft is given up, as it cannot change a text. In reproducible mode the cache
keeps its type: a text must not depend on whether there was room for a draft.

Before that, numbers take the place of `-c auto` and `-ngl auto`: of the latter as many layers of the target as the free
memory of the GPU holds, then the draft if it fits beside them; of a mixture the experts stay behind first. What is on
no device runs on the CPU. Last comes the number of answers at once, where that is to be chosen.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from edgespec.config.options import LoadOptions
from edgespec.config.values import as_size
from edgespec.drafters.spec import SPECS
from edgespec.engines.llamacpp.library import has_gpu
from edgespec.engines.model_use import ModelUse
from edgespec.errors import CapabilityError, EdgespecError
from edgespec.formats.gguf.check import main_layers
from edgespec.formats.gguf.header import read_header
from edgespec.formats.manifest import ModelFile, ModelPair
from edgespec.loading.requirements import without_drafts
from edgespec.memory.plan import BUDGET, Fit, FitVerdict, Plan, Room, planned

COMFORTABLE_CONTEXT, LEAST_CONTEXT = 2048, 512
MOST_SEQUENCES = 4  # that nobody asked for
_FLAGS = {"context_length": "-c", "cache_type_k": "-ctk", "cache_type_v": "-ctv"}


@dataclass(frozen=True, slots=True)
class GivenUp:
    """One thing that was given up. `what`: context, cache or draft; `text`: for people.

    `changes`: of LoadOptions.
    """

    what: str
    text: str
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def flags(self) -> str:
        """What asks for the same on the command line."""
        return " ".join(f"{_FLAGS[name]} {value}" for name, value in self.changes.items()) or "--drafter ngram"


_NO_DRAFT = GivenUp("draft", "no draft model and no heads (lookups stay on)")


@dataclass(frozen=True, slots=True)
class Fitted:
    """What to load: the options in effect, the pair, its plan and verdict, and what was given up."""

    options: LoadOptions
    pair: ModelPair
    plan: Plan
    verdict: FitVerdict
    given_up: tuple[GivenUp, ...] = ()

    @property
    def note(self) -> str:
        """What was given up, and whether the model will be slow, in one line; empty when there is nothing to say."""
        given_up = ", ".join(each.text for each in self.given_up)
        if self.verdict.fit == "pages":
            return f"memory: {f'{given_up}; ' if given_up else ''}{self.verdict}"
        limit = f"{as_size(self.verdict.free_bytes)} ({self.verdict.name})"
        return f"memory: {given_up}, to stay within {limit}" if given_up else ""


def fit(options: LoadOptions, pair: ModelPair, room: Room | None = None) -> Fitted:
    """The pair as it can be loaded in `room` (None: what there is now).

    Raises CapabilityError when it cannot, with what is needed, what is left, and the smallest that would fit, and as
    `planned`.
    """
    room = Room.now(options.memory) if room is None else room
    options = with_sequences(placed(chosen_context(options, pair, room), pair), pair, room)
    whole = _fitted(options, pair, room)
    # Where nobody set a budget, weights may be read from their files again and again.
    wanted: tuple[Fit, ...] = ("fits",) if options.memory is not None else ("fits", "pages")
    if whole.verdict.fit in wanted:
        return whole
    tried = list(_tried(whole, room))
    allowed = [each for each in tried if options.memory is not None or each.given_up in ((), (_NO_DRAFT,))]
    possible = [each for each in allowed if each.verdict.fit != "refused"]
    found = next((each for each in possible if each.verdict.fit in wanted), possible[0] if possible else None)
    if found is None:
        raise CapabilityError(_refusal(whole, tried, room))
    return found


def with_sequences(options: LoadOptions, pair: ModelPair, room: Room) -> LoadOptions:
    """`options` with a number in place of parallel="auto": the most that fit with full texts, where these touch memory
    as they grow. Raises as `planned`.
    """
    if options.parallel != "auto":
        return options
    for count in range(MOST_SEQUENCES, 1, -1):
        found = _fitted(replace(options, parallel=count), pair, room)
        if not all(need.grows for need in found.plan.models.values()):
            break
        if found.verdict.fit == "fits":
            return found.options
    return replace(options, parallel=1)


def _tried(whole: Fitted, room: Room) -> Iterator[Fitted]:
    for given_up in _setups(whole):
        with contextlib.suppress(EdgespecError):  # the model has no cache of that type
            yield _fitted(whole.options, whole.pair, room, given_up)


def _fitted(options: LoadOptions, pair: ModelPair, room: Room, given_up: tuple[GivenUp, ...] = ()) -> Fitted:
    for step in given_up:
        options = replace(options, **step.changes)
        if step is _NO_DRAFT:
            options, pair = without_drafts(options, pair)
    plan = planned(options, pair)
    return Fitted(options, pair, plan, room.verdict(plan), given_up)


def _setups(whole: Fitted) -> Iterator[tuple[GivenUp, ...]]:
    """What is given up together, the best setup first: what is kept longest is a context of 2048 tokens, then the draft
    model, the plain type of the cache, and a longer context."""
    options, plan = whole.options, whole.plan
    sizes = []
    if options.context_length is None:
        halves = (plan.context_length >> times for times in range(1, plan.context_length.bit_length()))
        sizes = [size for size in halves if size >= LEAST_CONTEXT]
    steps = [GivenUp("context", f"context {size}", {"context_length": size}) for size in sizes]
    num_long = sum(size >= COMFORTABLE_CONTEXT for size in sizes)
    contexts = [(None, *steps[:num_long]), *((step,) for step in steps[num_long:])]
    drafts = (None, _NO_DRAFT) if (len(plan.models) > 1 or plan.heads) and options.drafter not in SPECS else (None,)
    caches: tuple[GivenUp | None, ...] = (None,)
    if not options.reproducible and options.cache_type_k is None and options.cache_type_v is None:
        caches = (None, GivenUp("cache", "KV cache q8_0", {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}))
    for alike in contexts:
        for draft, cache, context in product(drafts, caches, alike):
            yield tuple(step for step in (context, cache, draft) if step is not None)


def _refusal(whole: Fitted, tried: Sequence[Fitted], room: Room) -> str:
    """What is needed and left, and the smallest setup that there is."""
    verdict = whole.verdict
    needed, free = as_size(verdict.needed_bytes), as_size(verdict.free_bytes)
    needs, remedy = f"about {needed} more memory, {free} is left under {verdict.name}", "or free memory"
    if verdict.name == BUDGET:
        needs, remedy = f"about {needed}, the budget is {free}", "or a larger --memory"
    smallest = min(tried, key=lambda each: each.plan.own_bytes)
    least = as_size(smallest.verdict.needed_bytes)
    flags = " ".join(each.flags for each in smallest.given_up)
    said = f"The smallest possible setup ({flags}) needs {least}: use" if flags else "Use"
    return (
        f"{whole.pair.name} needs {needs}. {said} a smaller --ctx-size (auto: the largest that fits) or model, {remedy}"
    )


STEP = 512  # tokens between the contexts that "auto" chooses from, of which the first is the smallest
_MOST_CELLS = 1 << 24  # of all answers at once, llama.cpp's limit
_USUAL = 4096  # of a model that does not say what it was trained for


def chosen_context(options: LoadOptions, pair: ModelPair, room: Room) -> LoadOptions:
    """`options` with a number of tokens in place of 0 and "auto".

    Where no context fits with nothing given up, "auto" is the default, which may be reduced. Raises as `planned`.
    """
    if options.context_length not in (0, "auto"):
        return options
    most = min(own_context(pair.files["target"]), _MOST_CELLS // options.sequences)
    if options.context_length == 0:
        return replace(options, context_length=most)

    def is_too_large(size: int) -> bool:
        return _fitted(replace(options, context_length=size), pair, room).verdict.fit != "fits"

    sizes = [*range(STEP, most, STEP), most]
    num_fitting = bisect_left(sizes, True, key=is_too_large)
    return replace(options, context_length=sizes[num_fitting - 1] if num_fitting else None)


def own_context(file: ModelFile) -> int:
    """Tokens that a model was trained for. Raises as `planned`."""
    if file.is_gguf:
        return read_header(file.path).context_length or _USUAL
    from edgespec.engines.onnx.footprint import footprint

    return footprint(file.path, ModelUse(default_context=_MOST_CELLS)).context_length


DeviceRoom = Callable[[Sequence[str] | None], int]


def placed(options: LoadOptions, pair: ModelPair, room: DeviceRoom | None = None) -> LoadOptions:
    """`options` with numbers of layers in place of "auto"; `room`: bytes on devices, None: what they report as free.

    Raises CapabilityError for a device that is missing or does not report its memory, and as `planned`.
    """
    is_llamacpp = pair.files["target"].engine == "llamacpp"
    is_free = not (options.reproducible or options.rpc or options.device)
    if options.gpu_layers is None and is_free and is_llamacpp and has_gpu():
        options = replace(options, gpu_layers="auto")
    if options.gpu_layers != "auto":
        return options
    if not is_llamacpp or options.target_devices == ():
        return _with(options, 0, 0)
    if options.rpc is not None:  # llama.cpp splits the layers by the servers' free memory
        return _with(options, -1, 0)
    from edgespec.engines.llamacpp.devices import room_on_devices

    free = (room or room_on_devices)(options.target_devices)

    def needed(count: int, draft: int, experts_here: int | None) -> list[int]:
        """Bytes on devices, of the target and of each draft."""
        plan = planned(replace(_with(options, count, draft), cpu_moe_layers=experts_here), pair)
        return [need.device for need in plan.models.values()]

    _, *drafts = needed(-1, -1, options.cpu_moe_layers)
    if _is_said(options) and options.draft_devices == options.target_devices:
        free, drafts = free - sum(drafts), []
    header = read_header(pair.files["target"].path)
    layers, own = main_layers(header), options.cpu_moe_layers
    # The best first: all, then the target alone. Of a mixture the experts leave before anything else, which are most of
    # its bytes, and of which a token reads few; a draft stays longer, as every token reads all of it.
    setups: list[tuple[int, int, int | None]] = [(-1, -1, own), (-1, 0, own)]
    if own is None and any("_exps." in tensor.name for tensor in header.tensors):
        own = layers
        setups += [(-1, draft, here) for draft in (-1, 0) for here in range(1, layers + 1)]
    setups += [(count, 0, own) for count in range(layers + 1, -1, -1)]
    for count, draft, here in setups:  # the last one where none fits
        if needed(count, 0, here)[0] <= free - (sum(drafts) if draft else 0):
            break
    return replace(_with(options, count, draft), cpu_moe_layers=here)


def _with(options: LoadOptions, layers: int, draft_layers: int | None) -> LoadOptions:
    """`options` with these numbers instead of "auto", for the draft unless the user placed it."""
    draft_layers = options.draft_gpu_layers if _is_said(options) else draft_layers
    return replace(options, gpu_layers=layers, draft_gpu_layers=draft_layers)


def _is_said(options: LoadOptions) -> bool:
    """Whether the user placed the draft."""
    return options.draft_gpu_layers is not None or options.draft_device is not None
