"""What a user can do about an answer that was slow: one line with one command, from what was measured.

`advice` judges the evidence of one answer; it reads nothing itself. What the runtime corrects by itself, such as drafts
that do not pay under `--draft-length auto`, is mentioned only if it wastes memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

# Chosen so that none is said of an ordinary run; a user must gain something that can be felt.
MOST_DISK_READS = 4.0  # per pass; one read brings up to 16 pages
MOST_STALLED = 0.2  # share of time in which programs waited for memory, together with LEAST_DISK_READS
LEAST_DISK_READS = 0.5
LEAST_CLOCK = 0.8  # share of the CPU's full clock
MOST_SLOWDOWN = 1.3  # over earlier passes of the same width
LEAST_CEILING = 1.1  # speedup if every token of the draft model were accepted
LEAST_PASSES = 64  # of an answer, before a draft model that the user named should have been tried
LEAST_DRAFTED = 96  # tokens, before an acceptance rate says anything
LEAST_ACCEPTED = 0.3  # share of drafted tokens with a fixed draft length; of a draft model half of it
MOST_LOSS = 1.05  # time per token over that of plain decoding
LEAST_ENGINE_GAIN = 1.25  # speedup of a plain pass on another engine


class Advice(NamedTuple):
    """`cause` names it in the cache; `text` is for people and ends in the command or flag."""

    cause: str
    text: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was measured in one answer, and with its model since it was loaded. None: not known.

    `model`: as written in a command; `passes`, `disk_reads`, `throttled`: during the answer;
    `stalled`, `clock`, `on_battery`, `saves_power`: as in Conditions; `slowdown`: seconds of its passes over those of
    equal ones before, 1 if other programs ran; `threads`: in use, `cores`: of the machine; `gives_threads`,
    `gives_memory`: whether the user chose them; `context_length` in tokens.
    `fixed_length`: draft length that the user chose; `drafted`, `accepted`: tokens with it in this answer; `loss`: time
    per token over that of plain decoding. `model_drafted`, `model_accepted`: tokens of the draft model since the load;
    `draft_share`: its time per token over that of a plain pass; `ceiling`: speedup if all its tokens were accepted;
    `idle_share`: the same share where the user named the draft model, guessed until it has drafted.
    `other_engine`: another engine that has the model, `other_gain`: seconds of a plain pass here over its own.
    """

    model: str
    passes: int = 0
    disk_reads: int = 0
    stalled: float | None = None
    throttled: int = 0
    clock: float | None = None
    on_battery: bool = False
    saves_power: bool = False
    slowdown: float = 1.0
    threads: int = 1
    cores: int = 1
    gives_threads: bool = False
    gives_memory: bool = False
    context_length: int = 0
    fixed_length: int | None = None
    drafted: int = 0
    accepted: int = 0
    loss: float | None = None
    model_drafted: int = 0
    model_accepted: int = 0
    draft_share: float | None = None
    idle_share: float | None = None
    ceiling: float | None = None
    other_engine: str | None = None
    other_gain: float = 1.0


def advice(evidence: Evidence, was_given: Callable[[str], bool] = lambda cause: False) -> Advice | None:
    """The most useful advice; None where nothing went badly. `was_given(cause)`: it was given before."""
    for cause, judge in _CAUSES.items():
        text = judge(evidence)
        if text and not was_given(cause):
            return Advice(cause, text)
    return None


def _paging(found: Evidence) -> str:
    reads = found.disk_reads / max(found.passes, 1)
    if reads < (LEAST_DISK_READS if (found.stalled or 0.0) > MOST_STALLED else MOST_DISK_READS):
        return ""
    smaller = f"-c {max(found.context_length // 2, 512)}" if found.gives_memory else "--memory auto"
    return f"weights are read from the disk again in every pass, as memory is short: {smaller}"


def _threads(found: Evidence) -> str:
    if not found.gives_threads or found.threads <= found.cores:
        return ""
    return f"{found.threads} threads on {found.cores} cores wait for one another: -t {found.cores}"


def _clock(found: Evidence) -> str:
    is_low = found.clock is not None and found.clock < LEAST_CLOCK
    if not is_low and not (found.on_battery and found.saves_power):
        return ""
    where = "on battery " if found.on_battery else ""
    limit = f"limited to {found.clock:.0%} of its clock" if is_low else "set to save power"
    return f"{where}the processor is {limit}: powerprofilesctl set performance"


def _heat(found: Evidence) -> str:
    if found.threads < 2 or not (found.throttled or found.slowdown > MOST_SLOWDOWN):
        return ""
    fewer = f"fewer threads make less heat: -t {max(found.threads // 2, 1)}"
    if found.throttled:
        return f"heat slowed the processor down {found.throttled} times in this answer; {fewer}"
    return f"passes take {found.slowdown:.1f} times as long as before, although nothing else runs; {fewer}"


def _slow_draft(found: Evidence) -> str:
    if found.ceiling is None or found.draft_share is None or found.ceiling >= LEAST_CEILING:
        return ""
    return (
        f"a token of the draft model takes {found.draft_share:.0%} of a pass of the target, which cannot pay off; to "
        f"rank others: edgespec pair {found.model}"
    )


def _idle_draft(found: Evidence) -> str:
    if found.idle_share is None or found.passes < LEAST_PASSES or found.model_drafted > found.passes // 10:
        return ""
    return (
        f"the draft model has drafted {found.model_drafted} tokens so far: one takes about {found.idle_share:.0%} of a "
        f"pass, and trying it may cost more than was won so far; edgespec pair "
        f"{found.model} ranks others, and this one drafts all the same with --draft-length 4"
    )


def _fixed_length(found: Evidence) -> str:
    if found.fixed_length is None or found.drafted < LEAST_DRAFTED:
        return ""
    rate = found.accepted / found.drafted
    is_loss = found.loss > MOST_LOSS if found.loss is not None else found.accepted < found.passes / 2
    if rate >= LEAST_ACCEPTED or not is_loss:
        return ""
    return f"{rate:.0%} of the drafted tokens were accepted, too few for a fixed length: --draft-length auto"


def _poor_draft(found: Evidence) -> str:
    if found.model_drafted < LEAST_DRAFTED or found.model_accepted >= LEAST_ACCEPTED / 2 * found.model_drafted:
        return ""
    rate = found.model_accepted / found.model_drafted
    return f"{rate:.0%} of the draft model's tokens were accepted, so it only costs memory: --drafter ngram"


def _engine(found: Evidence) -> str:
    if found.other_engine is None or found.other_gain < LEAST_ENGINE_GAIN:
        return ""
    return f"{found.other_engine} ran this model {found.other_gain:.1f} times as fast: --engine {found.other_engine}"


# What slows everything down first, then what is wrong with the draft, then what is merely better.
_CAUSES: dict[str, Callable[[Evidence], str]] = {
    "paging": _paging,
    "threads": _threads,
    "clock": _clock,
    "heat": _heat,
    "slow draft": _slow_draft,
    "idle draft": _idle_draft,
    "fixed length": _fixed_length,
    "poor draft": _poor_draft,
    "engine": _engine,
}
