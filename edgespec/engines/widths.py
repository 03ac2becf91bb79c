"""Reproducible mode of kernels that are not ours, for whoever asks for it: all passes have widths of one class.

Within a class a token's logits are bitwise equal whatever the number of rows in its pass. Where the class does not
include single-token passes, each of them is padded, which costs time.
The test at load compares a few hundred rows; `ClassWatch` goes on with it on the user's own text: now and then it
scores the last tokens again at another width, and drops a class whose passes turn out to give different bits.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np

from edgespec.engines import proof
from edgespec.engines.base import Engine, EngineFacts
from edgespec.engines.proof import EVERY_WIDTH_TO, WidthClass
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import CapabilityError
from edgespec.platform import disk_cache
from edgespec.platform.disk_cache import key_of
from edgespec.types import Logits

logger = logging.getLogger("edgespec")
METHOD = 6  # increase it when the test changes, so that older results are not used
MAX_PADDED_WIDTH = 4
WIDE_ENOUGH_FOR_PROMPTS = 32
SHARE = 0.004  # rows that ClassWatch scores again, for each pass
BLOCK = 128  # rows of a pass that reads a prompt beside a narrow class; on CPUs as fast as one of 512


@dataclass(frozen=True, slots=True)
class Proved:
    """The class of a model, and whether it was later found to be wrong."""

    pinned: WidthClass | None
    refuted: bool = False


def pinned_facts(engine: Engine, key: str, *, widest: int, advice: str) -> EngineFacts:
    """The facts of an empty engine with the class to use, in which each text has passes of its own; it is left empty.

    `key` names everything that the bits depend on; results are cached under it. Raises CapabilityError, with `advice`,
    where there is no class.
    """
    found = _proved(engine, key, widest) if engine.facts.can_rollback else Proved(None)
    pinned = found.pinned
    if pinned is None:
        raise CapabilityError(_why_none(found, advice))
    max_batch = engine.facts.max_batch
    if pinned[1] >= WIDE_ENOUGH_FOR_PROMPTS:
        # Prompts are read at these widths too, so that a cache's bits depend on its tokens alone.
        max_batch = min(max_batch, pinned[1])
    is_narrow = pinned[1] < min(WIDE_ENOUGH_FOR_PROMPTS, max_batch)
    block = min(BLOCK, max_batch) if is_narrow and _reads_alike(engine, key) else 0
    return replace(
        engine.facts,
        pinned_class=pinned,
        class_key=key,
        max_batch=max_batch,
        can_pack=False,
        splits_passes=False,
        prompt_block=block,
    )


def _reads_alike(engine: Engine, key: str) -> bool:
    """Whether a prompt that is read again in the same wide passes gets the same bits: cached, or tested now."""
    width = min(BLOCK, engine.facts.max_batch)
    key = key_of(METHOD, key, width)
    known: bool | None = disk_cache.get("blocks", key, bool)
    if known is None:
        known = proof.reads_alike(engine, width)
        disk_cache.put("blocks", key, known)
    return known


def refute(engine: Engine) -> None:
    """Drop the class of an engine, now and in later runs, because a pass gave other bits than its class requires."""
    disk_cache.put("widths", engine.facts.class_key, Proved(None, refuted=True))
    engine.drop_class()


def _proved(engine: Engine, key: str, widest: int) -> Proved:
    """From the cache, or tested now."""
    kept: Proved | None = disk_cache.get("widths", key, Proved)
    if kept is not None and (kept.pinned is None or 1 <= kept.pinned[0] < kept.pinned[1] <= widest):
        return kept
    logger.info("testing which pass widths give equal bits with this model, once")
    found = Proved(proof.find_class(engine, widest, MAX_PADDED_WIDTH))
    disk_cache.put("widths", key, found)
    return found


def _why_none(found: Proved, advice: str) -> str:
    if found.refuted:
        return (
            "this model cannot be reproducible on this machine: when it ran before, passes of different widths gave "
            f"different bits. {advice}"
        )
    return (
        f"this model cannot be reproducible on this machine: narrow passes give different bits at every width. {advice}"
    )


# -- while it is in use


class ClassWatch:
    """The checks of one engine. `rows_compared` so far; `has_failed` once any of them differed."""

    def __init__(self) -> None:
        self.rows_compared = 0
        self.has_failed = False
        self._passes, self._width = 0, 2  # since the last check, and rows of that
        self._turn = 0

    def is_due(self, sequence: CachedSequence) -> bool:
        """Whether to check the pass that just ended: there is a class to check, and the last check is long ago."""
        self._passes += 1
        pinned = sequence.engine.facts.pinned_class if sequence.engine.facts.class_key else None
        return pinned is not None and pinned[0] < pinned[1] and self._width <= SHARE * self._passes

    def look(self, sequence: CachedSequence, logits: Logits) -> None:
        """Score the last n cached tokens again in a pass of another width; compare with their `logits` [n, vocabulary].

        The cache is as before afterwards; logits given out earlier are overwritten. A difference drops the class.
        Raises what a pass raises; the sequence is then shorter by the tokens that were to be scored again.
        """
        count = min(len(logits), sequence.length)
        width = self._other_width(sequence, count)
        if width is None:
            return
        start = sequence.length - width
        if sequence.engine.reachable(start, sequence.sequence) != start:  # within a loaded state of a window
            return
        expected = logits[len(logits) - min(count, width) :].copy()
        again = sequence.score_again(width)
        if not np.array_equal(again[width - len(expected) :], expected, equal_nan=True):
            self._fail(sequence, count, width)
        self.rows_compared += len(expected)
        self._passes, self._width = 0, width

    def _other_width(self, sequence: CachedSequence, used: int) -> int | None:
        """A width of the class other than the one in use; all of them are used in turn.

        It reaches only over tokens that were read in such passes.
        """
        pinned = sequence.engine.facts.pinned_class
        assert pinned is not None
        low, high = pinned[0], sequence.latest_in_class(min(pinned[1], EVERY_WIDTH_TO))
        found = [width for width in range(low, high + 1) if width != max(used, low)]
        self._turn += 1
        # Steps of 7 alternate between narrow and wide ones and reach all unless their number is a multiple of 7.
        return found[(self._turn * 7) % len(found)] if found else None

    def _fail(self, sequence: CachedSequence, count: int, width: int) -> None:
        self.has_failed = True
        refute(sequence.engine)
        logger.warning(
            "reproducible mode is off from here on: on this model a pass of %d rows gave different bits from one "
            "of %d, so texts may differ with and without drafting. Later runs remember this; use --no-reproducible, "
            "or other weights",
            width,
            count,
        )
