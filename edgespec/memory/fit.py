"""Chooses what a pair is loaded with so that its plan fits: what is given up, in which order, and how that is said.

Only options that nobody gave are changed, in the order of `_steps`: the context, the type of the cache, the draft's
context, the draft model, and the rest of the context. What turns out not to be needed is put back, the first first.
Without a budget only what cannot change a text gives way, the draft. In reproducible mode the cache keeps its type: a
text must not depend on whether there was room for a draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from edgespec.config import LoadOptions
from edgespec.drafters.spec import SPECS
from edgespec.errors import CapabilityError, EdgespecError
from edgespec.formats.manifest import ModelPair
from edgespec.loading.heads import head_paths
from edgespec.loading.requirements import Chosen, without_drafts
from edgespec.memory.plan import Plan, planned
from edgespec.memory.verdict import Room, Verdict
from edgespec.sizes import as_size

PARALLEL = 4  # answers at once of a server
ONE_TEXT = {"eagle3", "hierarchical"}  # drafters with a model that serve one text at a time
COMFORTABLE_CONTEXT, LEAST_CONTEXT = 2048, 512
_DRAFT_CONTEXTS = (1024, 512)


@dataclass(frozen=True, slots=True)
class GivenUp:
    """One thing that was given up. `what`: context, cache, draft context or draft; `text`: for people.

    `flags` ask for the same; `changes`: of LoadOptions.
    """

    what: str
    text: str
    flags: str
    changes: dict[str, Any] = field(default_factory=dict)


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
        """What was given up, or that the model will be slow, in one line; empty when there is nothing to say."""
        if self.given_up:
            return f"memory: {', '.join(each.text for each in self.given_up)}, to stay within {self._limit}"
        return f"memory: {self.verdict}" if self.verdict.fit == "pages" else ""

    @property
    def _limit(self) -> str:
        return f"{as_size(self.verdict.free_bytes)} ({self.verdict.name})"


def usual_parallel(options: LoadOptions, pair: ModelPair, room: Room | None = None) -> int:
    """Answers at once for a server where nobody said how many: PARALLEL if they fit with nothing given up, else 1.

    1 too where a drafter of the pair serves one text only, as heads and early exits do. Raises as `planned`.
    """
    chosen = Chosen.of(options, pair)
    serves_one = any(SPECS[name].owns == "layers of the target" or name in ONE_TEXT for name in chosen.wanted)
    if serves_one or head_paths(options, pair, is_cut=chosen.is_cut):
        return 1
    room = Room.now(options.memory) if room is None else room
    return PARALLEL if _fitted(replace(options, parallel=PARALLEL), pair, room, ()).verdict.fit == "fits" else 1


def fit(options: LoadOptions, pair: ModelPair, room: Room | None = None) -> Fitted:
    """The pair as it can be loaded in `room` (None: what there is now).

    Raises CapabilityError when it cannot, with what is needed, what is left, and the smallest that would fit, and as
    `planned`.
    """
    room = Room.now(options.memory) if room is None else room
    whole = _fitted(options, pair, room, ())
    if whole.verdict.fit == "fits" or (options.memory is None and whole.verdict.fit == "pages"):
        return whole
    steps = tuple(_steps(whole))
    allowed = steps if options.memory is not None else tuple(s for s in steps if s.what.startswith("draft"))
    found = _first(whole, allowed, room)
    if found is not None:
        return found
    raise CapabilityError(_refusal(whole, steps, room))


def _first(whole: Fitted, steps: tuple[GivenUp, ...], room: Room) -> Fitted | None:
    """With as few of `steps` as possible; where nothing fits at once, what pages with the fewest given up."""
    paging = whole if whole.verdict.fit == "pages" else None
    for count in range(1, len(steps) + 1):
        found = _fitted(whole.options, whole.pair, room, steps[:count])
        if found.verdict.fit == "fits":
            return _put_back(whole, found, room)
        if found.verdict.fit == "pages" and paging is None:
            paging = found
    return None if paging is None else _put_back(whole, paging, room)


def _put_back(whole: Fitted, found: Fitted, room: Room) -> Fitted:
    """`found` without what it did not need to give up."""
    for step in found.given_up:
        kept = tuple(each for each in found.given_up if each is not step)
        tried = _fitted(whole.options, whole.pair, room, kept)
        if tried.verdict.fit == found.verdict.fit:
            found = tried
    return found


def _fitted(options: LoadOptions, pair: ModelPair, room: Room, steps: tuple[GivenUp, ...]) -> Fitted:
    for step in steps:
        options = replace(options, **step.changes)
    if any(step.what == "draft" for step in steps):
        options, pair = without_drafts(options, pair)
    plan = planned(options, pair)
    # A later step of a kind replaces an earlier one.
    last = {step.what: step for step in steps}
    if "draft" in last:
        last.pop("draft context", None)
    return Fitted(options, pair, plan, room.verdict(plan), tuple(last.values()))


def _steps(whole: Fitted) -> Iterator[GivenUp]:
    """All that may be given up, in this order; steps of one kind replace each other."""
    options, plan = whole.options, whole.plan
    contexts = [] if options.context_length is not None else _halves(plan.context_length)
    yield from (_context(size) for size in contexts if size >= COMFORTABLE_CONTEXT)
    yield from _cache_step(whole)
    draft = next((model for model in plan.models if model.role == "draft"), None)
    if draft is not None and options.draft_context_length is None:
        sizes = (size for size in _DRAFT_CONTEXTS if size < draft.footprint.context_length)
        for size in sizes:
            yield GivenUp("draft context", f"draft context {size}", f"-cd {size}", {"draft_context_length": size})
    if len(plan.models) > 1 and options.drafter not in SPECS:
        yield GivenUp("draft", "no draft model (drafters without one go on)", "--drafter ngram")
    yield from (_context(size) for size in contexts if size < COMFORTABLE_CONTEXT)


def _halves(context_length: int) -> list[int]:
    sizes = []
    while context_length // 2 >= LEAST_CONTEXT:
        context_length //= 2
        sizes.append(context_length)
    return sizes


def _context(size: int) -> GivenUp:
    return GivenUp("context", f"context {size}", f"-c {size}", {"context_length": size})


def _cache_step(whole: Fitted) -> Iterator[GivenUp]:
    """A smaller type of the target's keys and values, where the engine has one for this model."""
    options = whole.options
    if options.reproducible or options.cache_type_k is not None or options.cache_type_v is not None:
        return
    kind = "int8" if whole.pair.files["target"].engine == "onnx" else "q8_0"
    changes: dict[str, Any] = {"cache_type_k": kind, "cache_type_v": kind}
    try:
        planned(replace(options, **changes), whole.pair)
    except EdgespecError:  # the model has no cache of that type
        return
    yield GivenUp("cache", f"KV cache {kind}", f"-ctk {kind} -ctv {kind}", changes)


def _refusal(whole: Fitted, steps: tuple[GivenUp, ...], room: Room) -> str:
    """What is needed and left, and the smallest that would fit."""
    verdict = whole.verdict
    needs = (
        f"{whole.pair.name} needs about {as_size(verdict.needed_bytes)} more memory, {as_size(verdict.free_bytes)} are "
        f"left under {verdict.name}"
    )
    if room.budget_bytes is not None and verdict.free_bytes == room.budget_bytes:
        size, budget = as_size(verdict.needed_bytes), as_size(verdict.free_bytes)
        needs = f"{whole.pair.name} needs about {size}, the budget is {budget}"
    smallest = _fitted(whole.options, whole.pair, room, steps)
    given_up = smallest.given_up
    flags = " ".join(each.flags for each in given_up)
    size = as_size(smallest.verdict.needed_bytes)
    if not given_up:
        return f"{needs}. Use a smaller --ctx-size or model, or free memory"
    if smallest.verdict.fit == "refused":
        return f"{needs}. The smallest it can be ({flags}) needs {size}: use a smaller model, or free memory"
    found = _first(whole, steps, room) or smallest
    flags = " ".join(each.flags for each in found.given_up)
    return f"{needs}. This would fit: {flags}, which --memory auto chooses"
