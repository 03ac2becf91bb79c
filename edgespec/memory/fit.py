"""Chooses the options of a pair so that it fits into memory: what is given up, in which order, and how to report it.

Only options that the user did not give are changed. Of all choices that fit, the best in the order of `_rows` is taken,
where the first difference decides: a context of 2048 tokens, the draft model, its context, the plain type of the cache,
a longer context. So a larger budget never gets less of one of these unless it gets more of an earlier one. Fitting
without paging comes before all of them. Without a budget only the draft is given up, as it cannot change a text. In
reproducible mode the cache keeps its type: a text must not depend on whether there was room for a draft.

Before that, numbers take the place of `-c auto` and `-ngl auto`: of the latter as many layers of the target as the free
memory of the GPU holds, then the draft if it fits beside them; of a mixture the experts stay behind first. What is on
no device runs on the CPU. Last comes the number of answers at once, where that is to be chosen.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from edgespec.memory.plan import Fit, Plan, Room, Verdict, planned

COMFORTABLE_CONTEXT, LEAST_CONTEXT = 2048, 512
MOST_SEQUENCES = 4  # that nobody asked for
_DRAFT_CONTEXTS = (1024, 512)
# What may be given up of one kind, the least of it first; None: nothing is.
Choices = tuple["GivenUp | None", ...]
_FLAGS = {"context_length": "-c", "draft_context_length": "-cd", "cache_type_k": "-ctk", "cache_type_v": "-ctv"}
_SAID = ("context", "cache", "draft context", "draft")


@dataclass(frozen=True, slots=True)
class GivenUp:
    """One thing that was given up. `what`: context, cache, draft context or draft; `text`: for people.

    `changes`: of LoadOptions.
    """

    what: str
    text: str
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def flags(self) -> str:
        """What asks for the same on the command line."""
        return " ".join(f"{_FLAGS[name]} {value}" for name, value in self.changes.items()) or "--drafter ngram"


@dataclass(frozen=True, slots=True)
class Fitted:
    """What to load: the options in effect, the pair, its plan and verdict, and what was given up."""

    options: LoadOptions
    pair: ModelPair
    plan: Plan
    verdict: Verdict
    given_up: tuple[GivenUp, ...] = ()

    @property
    def note(self) -> str:
        """What was given up, and whether the model will be slow, in one line; empty when there is nothing to say."""
        given_up = ", ".join(each.text for each in self.given_up)
        if self.verdict.fit == "pages":
            return f"memory: {f'{given_up}; ' if given_up else ''}{self.verdict}"
        return f"memory: {given_up}, to stay within {self._limit}" if given_up else ""

    @property
    def _limit(self) -> str:
        return f"{as_size(self.verdict.free_bytes)} ({self.verdict.name})"


def fit(options: LoadOptions, pair: ModelPair, room: Room | None = None) -> Fitted:
    """The pair as it can be loaded in `room` (None: what there is now).

    Raises CapabilityError when it cannot, with what is needed, what is left, and the smallest that would fit, and as
    `planned`.
    """
    room = Room.now(options.memory) if room is None else room
    options = with_sequences(placed(chosen_context(options, pair, room), pair), pair, room)
    whole = _fitted(options, pair, room, {})
    # Where nobody set a budget, weights may be read from their files again and again.
    wanted: tuple[Fit, ...] = ("fits",) if options.memory is not None else ("fits", "pages")
    if whole.verdict.fit in wanted:
        return whole
    rows = _rows(whole)
    allowed = rows if options.memory is not None else [row for row in rows if row[0].startswith("draft")]
    found = _best(whole, allowed, room, wanted) or _best(whole, allowed, room, ("fits", "pages"))
    if found is None:
        raise CapabilityError(_refusal(whole, rows, room))
    return found


def with_sequences(options: LoadOptions, pair: ModelPair, room: Room) -> LoadOptions:
    """`options` with a number in place of parallel="auto": the most that fit with full texts, where these touch memory
    as they grow. Raises as `planned`.
    """
    if options.parallel != "auto":
        return options
    for count in range(MOST_SEQUENCES, 1, -1):
        found = _fitted(replace(options, parallel=count), pair, room, {})
        if not all(model.footprint.grows for model in found.plan.models):
            break
        if found.verdict.fit == "fits":
            return found.options
    return replace(options, parallel=1)


def _best(whole: Fitted, rows: Sequence[tuple[str, Choices]], room: Room, wanted: tuple[Fit, ...]) -> Fitted | None:
    """The best choice with a `wanted` verdict; None if not even the smallest has one.

    Goes through the rows, and keeps the best of each with which the smallest of all later rows still fits.
    """
    steps = {what: choices[-1] for what, choices in reversed(rows)}
    found = _fitted(whole.options, whole.pair, room, steps)
    if found.verdict.fit not in wanted:
        return None
    for what, choices in rows:
        for step in choices:
            if step is steps[what]:
                break
            tried = _fitted(whole.options, whole.pair, room, {**steps, what: step})
            if tried.verdict.fit in wanted:
                steps[what], found = step, tried
                break
    return found


def _fitted(options: LoadOptions, pair: ModelPair, room: Room, steps: Mapping[str, GivenUp | None]) -> Fitted:
    given_up = [step for what in _SAID if (step := steps.get(what)) is not None]
    if steps.get("draft") is not None:
        given_up = [step for step in given_up if step.what != "draft context"]
        options, pair = without_drafts(options, pair)
    for step in given_up:
        options = replace(options, **step.changes)
    plan = planned(options, pair)
    return Fitted(options, pair, plan, room.verdict(plan), tuple(given_up))


def _rows(whole: Fitted) -> list[tuple[str, Choices]]:
    """What may be given up, by kind; the kind that is kept longest comes first."""
    options, plan = whole.options, whole.plan
    contexts: Choices = (None,)
    size = plan.context_length // 2
    while options.context_length is None and size >= LEAST_CONTEXT:
        contexts = (*contexts, GivenUp("context", f"context {size}", {"context_length": size}))
        size //= 2
    comfortable = sum(step is not None and step.changes["context_length"] >= COMFORTABLE_CONTEXT for step in contexts)
    draft = next((model for model in plan.models if model.role == "draft"), None)
    drafts: Choices = (None,)
    if len(plan.models) > 1 and options.drafter not in SPECS:
        drafts = (None, GivenUp("draft", "no draft model (drafters that need none stay on)"))
    draft_contexts: Choices = (None,)
    if draft is not None and options.draft_context_length is None:
        sizes = (size for size in _DRAFT_CONTEXTS if size < draft.footprint.context_length)
        smaller = (GivenUp("draft context", f"draft context {n}", {"draft_context_length": n}) for n in sizes)
        draft_contexts = (None, *smaller)
    rows = [
        ("context", contexts[comfortable:]),
        ("draft", drafts),
        ("draft context", draft_contexts),
        ("cache", (None, *_cache_steps(whole))),
        ("context", contexts[: comfortable + 1]),
    ]
    return [(what, found) for what, found in rows if len(found) > 1]


def _cache_steps(whole: Fitted) -> Choices:
    """Smaller types of the target's keys and values that the engine has for this model and that save memory.

    llama.cpp first has the keys alone in q8_0, which costs no time. Values in q8_0 do, more with every cached token.
    """
    options = whole.options
    if options.reproducible or options.cache_type_k is not None or options.cache_type_v is not None:
        return ()
    kinds: dict[str, tuple[str, ...]]
    if whole.pair.files["target"].engine == "onnx":
        kinds = {"KV cache q8_0": ("q8_0", "q8_0")}  # our kernels'
    else:
        kinds = {"keys in the cache q8_0": ("q8_0",), "KV cache q8_0": ("q8_0", "q8_0")}
    found: list[GivenUp] = []
    least = whole.plan.models[0].footprint.own
    for text, types in kinds.items():
        step = GivenUp("cache", text, dict(zip(("cache_type_k", "cache_type_v"), types, strict=False)))
        with contextlib.suppress(EdgespecError):  # the model has no cache of that type
            size = planned(replace(options, **step.changes), whole.pair).models[0].footprint.own
            if size < least:
                least = size
                found.append(step)
    return tuple(found)


def _refusal(whole: Fitted, rows: Sequence[tuple[str, Choices]], room: Room) -> str:
    """What is needed and left, and the smallest that would fit."""
    verdict = whole.verdict
    needs = (
        f"{whole.pair.name} needs about {as_size(verdict.needed_bytes)} more memory, {as_size(verdict.free_bytes)} is "
        f"left under {verdict.name}"
    )
    remedy = "or free memory"
    if room.budget_bytes is not None and verdict.free_bytes == room.budget_bytes:
        size, budget = as_size(verdict.needed_bytes), as_size(verdict.free_bytes)
        needs = f"{whole.pair.name} needs about {size}, the budget is {budget}"
        remedy = "or a larger --memory"
    smallest = _fitted(whole.options, whole.pair, room, {what: choices[-1] for what, choices in reversed(rows)})
    given_up = smallest.given_up
    flags = " ".join(each.flags for each in given_up)
    size = as_size(smallest.verdict.needed_bytes)
    if not given_up:
        return f"{needs}. Use a smaller --ctx-size (auto: the largest that fits) or model, {remedy}"
    if smallest.verdict.fit == "refused":
        return f"{needs}. The smallest possible setup ({flags}) needs {size}: use a smaller model, {remedy}"
    found = _best(whole, rows, room, ("fits",)) or _best(whole, rows, room, ("fits", "pages")) or smallest
    flags = " ".join(each.flags for each in found.given_up)
    return f"{needs}. This would fit: {flags} (--memory auto chooses it)"


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
        return _fitted(replace(options, context_length=size), pair, room, {}).verdict.fit != "fits"

    sizes = [*range(STEP, most, STEP), most]
    num_fitting = bisect_left(sizes, True, key=is_too_large)
    return replace(options, context_length=sizes[num_fitting - 1] if num_fitting else None)


def own_context(file: ModelFile) -> int:
    """Tokens that a model was trained for. Raises as `planned`."""
    if file.is_gguf:
        return read_header(file.path).context_length or _USUAL
    from edgespec.engines.onnx.footprint import footprint

    return footprint(file.path, ModelUse(default_context=_MOST_CELLS)).context_length


MOST_LAYERS = 512  # of llama.cpp
DeviceRoom = Callable[[Sequence[str] | None], int]


def placed(options: LoadOptions, pair: ModelPair, room: DeviceRoom | None = None) -> LoadOptions:
    """`options` with numbers of layers in place of "auto"; `room`: bytes on devices, None: what they report as free.

    Raises CapabilityError for a device that is missing or does not report its memory, and as `planned`.
    """
    if options.gpu_layers is None and _goes_to_gpu(options, pair):
        options = replace(options, gpu_layers="auto")
    if options.gpu_layers != "auto":
        return options
    if pair.files["target"].engine != "llamacpp" or options.target_devices == ():
        return _with(options, 0, 0)
    if options.rpc is not None:  # llama.cpp splits the layers by the servers' free memory
        return _with(options, -1, 0)
    from edgespec.engines.llamacpp.devices import room_on_devices

    free = (room or room_on_devices)(options.target_devices)

    def needed(layers: int, draft_layers: int, experts_here: int | None = None) -> list[int]:
        """Bytes on devices, of the target and of each draft."""
        tried = _with(options, layers, draft_layers)
        plan = planned(tried if experts_here is None else replace(tried, cpu_moe_layers=experts_here), pair)
        return [model.footprint.device for model in plan.models]

    every, *drafts = needed(-1, -1)
    if _is_said(options) and options.draft_devices == options.target_devices:
        free, drafts = free - sum(drafts), []
    if every <= free:
        return _with(options, -1, -1 if every + sum(drafts) <= free else 0)
    header = read_header(pair.files["target"].path)
    if options.cpu_moe_layers is None and any("_exps." in tensor.name for tensor in header.tensors):
        return _experts_first(options, main_layers(header), free, needed, sum(drafts))
    return _with(options, bisect_right(range(MOST_LAYERS), free, key=lambda layers: needed(layers, 0)[0]) - 1, 0)


def _experts_first(
    options: LoadOptions, layers: int, free: int, needed: Callable[..., list[int]], drafts: int
) -> LoadOptions:
    """A mixture's experts leave the GPU before anything else: they are most of its bytes, and a token reads few.

    `needed`: bytes on the GPU, the target's first, for layers of target and draft, and for how many of the `layers` the
    experts are here. A draft of `drafts` bytes goes to the GPU before experts do, as every token reads all of it.
    """
    for draft_layers, room in ((-1, free - drafts), (0, free)):
        here = 1 + bisect_left(range(1, layers), True, key=lambda count: needed(-1, 0, count)[0] <= room)
        if needed(-1, 0, here)[0] <= room:
            return replace(_with(options, -1, draft_layers), cpu_moe_layers=here)
    most = bisect_right(range(MOST_LAYERS), free, key=lambda count: needed(count, 0, layers)[0]) - 1
    return replace(_with(options, most, 0), cpu_moe_layers=layers)


def _goes_to_gpu(options: LoadOptions, pair: ModelPair) -> bool:
    """Whether layers go to the GPU where nobody says how many."""
    is_free = not (options.reproducible or options.rpc or options.device)
    return is_free and pair.files["target"].engine == "llamacpp" and has_gpu()


def _with(options: LoadOptions, layers: int, draft_layers: int | None) -> LoadOptions:
    """`options` with these numbers instead of "auto", for the draft unless the user placed it."""
    draft_layers = options.draft_gpu_layers if _is_said(options) else draft_layers
    return replace(options, gpu_layers=layers, draft_gpu_layers=draft_layers)


def _is_said(options: LoadOptions) -> bool:
    """Whether the user placed the draft."""
    return options.draft_gpu_layers is not None or options.draft_device is not None
