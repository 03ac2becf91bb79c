"""Reproducible mode of kernels that are not ours, for whoever asks for it: all passes have widths of one class.

Within a class a token's logits are bitwise equal whatever the number of rows in its pass. Where the class does not
include single-token passes, each of them is padded, which costs time.
Libraries choose a matrix kernel by the number of rows, and another kernel adds in another order. The difference often
disappears when logits are rounded, so the new keys and values of every layer are compared as well. Random token ids
prove nothing: most of a padded vocabulary is untrained, and its rows agree whichever kernel computes them.
The test at load compares a few hundred rows; `ClassWatch` goes on with it on the user's own text: now and then it
scores the last tokens again at another width, and drops a class whose passes turn out to give different bits.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field, replace

import numpy as np

from edgespec.engines.base import EVERY_WIDTH_TO, Engine, EngineFacts
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import CapabilityError, UsageError
from edgespec.platform import disk_cache
from edgespec.platform.disk_cache import key_of
from edgespec.types import Batch, Logits, TokenIds

# From 512 cells on llama.cpp's attention has a path of its own for one row; cells are counted in steps of 256.
PREFIX = 272
FEW_ROWS, CONFIRM_ROWS = 16, 128
BEGINNING, EARLY_ROWS = 48, 36  # attention may have other kernels for short texts, in ONNX Runtime up to 64 cells
EMITTED = 12  # of these few rows, those whose tokens the model chose itself
WidthClass = tuple[int, int]
# Typical input: prose, code, JSON, several languages. It is tokenised with the model's own vocabulary.
TEXT = """The committee met on Tuesday, 14 March 1989, to discuss the bridge over the Severn; nobody had expected rain.
"Why not wait until spring?" asked Dr. Alvarez. She had measured 3.75 m of water at the north pier, up 12% in a week.
def moving_average(values: list[float], window: int = 5) -> list[float]:
    \"\"\"Mean of the last `window` values.\"\"\"
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]
{"name": "find_train", "arguments": {"from": "Lyon", "to": "Torino", "day": "2024-05-17", "seats": 2}}
1. Preheat the oven to 220 degrees. 2. Chop two onions, a clove of garlic and 300 g of mushrooms. 3. Fry them gently.
Der Zug nach Köln fährt um 7:42 Uhr ab. ¿Dónde está la biblioteca? Il pleut depuis trois jours. 今日は天気がいいですね。
SELECT city, COUNT(*) AS visits FROM trips WHERE year >= 2020 GROUP BY city ORDER BY visits DESC LIMIT 10;
If 7 apples cost $2.10, how much do 12 apples cost? One apple costs $2.10 / 7 = $0.30, so 12 cost 12 * 0.30 = $3.60.
User: my laptop no longer starts after the update, can you help?
Assistant: I am sorry to hear that. Please hold the power button for ten seconds, then tell me what you see on screen.
Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. It happens in the chloroplasts of plants.
Once upon a time a fox lived at the edge of a dark forest, and every evening it walked to the river to look at the moon.
"""


@dataclass(slots=True)
class Bits:
    """Results of passes of one width: a digest of each row of logits by position, and one of the whole KV cache."""

    rows: dict[int, bytes] = field(default_factory=dict)
    cache: bytes = b""

    def agrees(self, other: Bits) -> bool:
        """Whether the caches are equal, and the logits at all positions that both have."""
        return self.cache == other.cache and all(
            self.rows[position] == other.rows[position] for position in self.rows.keys() & other.rows.keys()
        )


def find_class(engine: Engine, widest: int, most_low: int) -> WidthClass | None:
    """The first class of several widths, of at most `widest` rows, that begins at 1..`most_low`; None without.

    Sequence 0 is empty before and after. Every width up to EVERY_WIDTH_TO is tested, of the wider ones only a few.
    """
    some = {*range(1, min(EVERY_WIDTH_TO, widest) + 1), *(width for width in (40, 48, 56) if width < widest), widest}
    try:
        ids = proving_text(engine, widest)
        for low in range(1, most_low + 1):
            high = _highest(engine, ids, sorted(width for width in some if width >= low))
            if high > low and confirm(engine, low, (low, high)):
                return low, high
    finally:
        engine.rollback(0)
    return None


def _highest(engine: Engine, ids: TokenIds, widths: list[int]) -> int:
    """Up to which of the ascending `widths` all give the same bits."""
    engine.rollback(0)
    _read(engine, ids)
    # All cells that wider passes will write are of the lowest width before.
    known = passes_of(engine, ids, max(ids.size - max(widths[-1], FEW_ROWS), 0), widths[0])
    highest = widths[0]
    for width in widths[1:]:
        found = passes_of(engine, ids, max(ids.size - max(width, FEW_ROWS), 0), width)
        if not known.agrees(found):
            break
        known.rows |= found.rows
        highest = width
    return highest


def confirm(engine: Engine, width: int, pair: WidthClass) -> bool:
    """Whether `width` gives the same bits as the widest pass of its class `pair`, over CONFIRM_ROWS rows of text and
    over EARLY_ROWS rows near its beginning.

    If n rows do not differ, at most 3/n of all rows do, at 95% confidence (rule of three).
    """
    high = min(pair[1], EVERY_WIDTH_TO)
    if width == high:
        return True
    ids = sample_text(engine, PREFIX + CONFIRM_ROWS)
    parts = [(max(ids.size - CONFIRM_ROWS, 0), ids.size)]
    if ids.size >= BEGINNING + EARLY_ROWS:
        parts.append((BEGINNING, BEGINNING + EARLY_ROWS))
    try:
        for start, stop in parts:
            engine.rollback(0)
            _read(engine, ids[:start])
            one, other = (passes_of(engine, ids[:stop], start, each) for each in (high, width))
            if not one.agrees(other):
                return False
        return True
    finally:
        engine.rollback(0)


def passes_of(engine: Engine, ids: TokenIds, start: int, width: int) -> Bits:
    """Score the tokens from `start` on in passes of exactly `width` rows; the last one may repeat rows."""
    found = Bits()
    for end in (*range(start + width, ids.size, width), ids.size):
        if engine.length() > end - width:
            engine.rollback(end - width)
        logits = engine.forward(Batch.chain(ids[end - width : end]))
        for position, row in enumerate(logits, start=end - width):
            found.rows[position] = hashlib.blake2b(row.tobytes(), digest_size=16).digest()
    found.cache = _cache_digest(engine)
    return found


def _cache_digest(engine: Engine) -> bytes:
    """A digest of the keys and values of every layer; empty where the engine cannot give them."""
    try:
        return hashlib.blake2b(engine.save_state(), digest_size=16).digest()
    except CapabilityError:
        return b""


def proving_text(engine: Engine, widest: int) -> TokenIds:
    """Token ids of real text, followed by EMITTED tokens that the model chose; all are in the cache afterwards."""
    ids = sample_text(engine, PREFIX + max(widest, FEW_ROWS))
    start = max(ids.size - EMITTED, 1)
    _read(engine, ids[: start - 1])
    for place in range(start, ids.size + 1):
        logits = engine.forward(Batch.chain(ids[place - 1 : place]))
        if place < ids.size:
            ids[place] = logits[-1].argmax()
    return ids


def _read(engine: Engine, ids: TokenIds) -> None:
    step = engine.facts.max_batch
    for start in range(0, ids.size, step):
        engine.forward(Batch.chain(ids[start : start + step], last_only=True))


def sample_text(engine: Engine, wanted: int) -> TokenIds:
    """Token ids [at most `wanted` and the context length] of real text in the model's own vocabulary."""
    try:
        ids = np.array(engine.vocabulary.encode(TEXT), np.int32)
    except UsageError:  # a vocabulary of a few letters, in which any tokens are text
        ids = np.arange(engine.vocabulary.size, dtype=np.int32)
    return np.resize(ids, min(wanted, engine.facts.context_length))


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
        when = ", as was seen when it ran before" if found.refuted else ""
        raise CapabilityError(
            f"this model cannot be reproducible on this machine: passes of different widths give different bits{when}. "
            f"{advice}"
        )
    max_batch = engine.facts.max_batch
    if pinned[1] >= WIDE_ENOUGH_FOR_PROMPTS:
        # Prompts are read at these widths too, so that a cache's bits depend on its tokens alone.
        max_batch = min(max_batch, pinned[1])
    is_narrow = pinned[1] < min(WIDE_ENOUGH_FOR_PROMPTS, max_batch)
    block = min(BLOCK, max_batch)
    block = block if is_narrow and reads_alike(engine, key, block) else 0
    return replace(
        engine.facts,
        pinned_class=pinned,
        class_key=key,
        max_batch=max_batch,
        can_pack=False,
        splits_passes=False,
        prompt_block=block,
    )


def reads_alike(engine: Engine, key: str, width: int) -> bool:
    """Whether text read in passes of `width` rows, the last one narrower, has the same bits each time.

    In an empty cache, after another text was in it, and on as few threads as there may be. Sequence 0 is empty before
    and after. The result is cached under `key`.
    """
    key = key_of(METHOD, key, width)
    known: bool | None = disk_cache.get("blocks", key, bool)
    if known is not None:
        return known
    ids, steps, found = sample_text(engine, width + width // 3), engine.thread_steps(), set[bytes]()
    other = ids[::-1].copy()
    try:
        for threads, before in ((steps[0], None), (steps[0], other), (steps[-1], None)):
            engine.set_threads(threads)
            engine.rollback(0)
            if before is not None:
                _read(engine, before)
                engine.rollback(0)
            starts = range(0, ids.size, width)
            logits = [engine.forward(Batch.chain(ids[at : at + width], last_only=True)).tobytes() for at in starts]
            found.add(b"".join(logits) + _cache_digest(engine))
    finally:
        engine.set_threads(steps[0])
        engine.rollback(0)
    disk_cache.put("blocks", key, len(found) == 1)
    return len(found) == 1


def _proved(engine: Engine, key: str, widest: int) -> Proved:
    """From the cache, or tested now."""
    kept: Proved | None = disk_cache.get("widths", key, Proved)
    if kept is not None and (kept.pinned is None or 1 <= kept.pinned[0] < kept.pinned[1] <= widest):
        return kept
    logger.info("testing which pass widths give equal bits with this model, once")
    found = Proved(find_class(engine, widest, MAX_PADDED_WIDTH))
    disk_cache.put("widths", key, found)
    return found


# -- while it is in use


class ClassWatch:
    """The checks of one engine. `rows_compared` so far."""

    def __init__(self) -> None:
        self.rows_compared = 0
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
        """Drop the class, now and in later runs."""
        disk_cache.put("widths", sequence.engine.facts.class_key, Proved(None, refuted=True))
        sequence.engine.drop_class()
        logger.warning(
            "reproducible mode is off from here on: on this model a pass of %d rows gave different bits from one "
            "of %d, so texts may differ with and without drafting. Later runs remember this; use --no-reproducible, "
            "or other weights",
            width,
            count,
        )
