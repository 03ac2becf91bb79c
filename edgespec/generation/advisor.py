"""One line after a slow answer that says what would make the model faster, with the flag or command for it.

Each is given once per model on a machine: what was said is kept in the cache folder. What the runtime corrects by
itself, such as drafts that do not pay under `--draft-length auto`, is not mentioned. Missing memory is seen on Linux
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgespec.config.options import GenerateOptions, LoadOptions
from edgespec.control.pool import DrafterPool
from edgespec.control.prices import ceiling
from edgespec.engines.base import Engine
from edgespec.formats.manifest import ModelPair
from edgespec.platform import disk_cache
from edgespec.platform.machine import physical_cores
from edgespec.reports import Stats

# Chosen so that nothing is said of an ordinary run; a user must gain something that can be felt.
LEAST_S = 5.0  # shortest decoding that gets advice: nobody waited for shorter answers
MOST_DISK_READS = 4.0  # per pass; one read brings up to 16 pages
MOST_STALLED, LEAST_DISK_READS = 0.2, 0.5  # share of time in which programs waited for memory; then fewer reads are bad
LEAST_CEILING = 1.1  # speedup if every token of the draft model were accepted
LEAST_DRAFTED, LEAST_ACCEPTED = 96, 0.3  # tokens with a fixed draft length, and the share accepted
MOST_LOSS = 1.05  # time per token over that of plain decoding
_LONGEST_DRAFT = 16


@dataclass(frozen=True, slots=True)
class Conditions:
    """The machine's memory at one moment; None: not known."""

    disk_reads: int | None = None  # times until now that this process waited for pages, from a file or from swap
    stalled: float | None = None  # share of the last ten seconds in which some program waited for memory

    @classmethod
    def now(cls, root: Path = Path("/")) -> Conditions:
        """The present conditions; `root`: where /proc is found."""
        fields = _word(root / "proc/self/stat").rpartition(")")[2].split()  # the program's name may hold spaces
        stalled = _word(root / "proc/pressure/memory").partition("some avg10=")[2].partition(" ")[0]
        return cls(
            disk_reads=int(fields[9]) if len(fields) > 9 and fields[9].isdigit() else None,
            stalled=float(stalled) / 100 if stalled.replace(".", "", 1).isdigit() else None,
        )


def _word(path: Path) -> str:
    """The text of a small file; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


class Advisor:
    """Judges the answers of one loaded model. `conditions`: reads the machine's state."""

    def __init__(
        self,
        options: LoadOptions,
        pair: ModelPair,
        target: Engine,
        pool: DrafterPool,
        conditions: Callable[[], Conditions] = Conditions.now,
    ) -> None:
        self.least_s = LEAST_S
        self._options, self._pair, self._target, self._pool = options, pair, target, pool
        self._read = conditions
        self._before = conditions()
        self._is_done = False
        self._is_fixed = False

    def begin(self, request: GenerateOptions) -> None:
        """A new answer begins."""
        length = self._options.draft_length if request.draft_length is None else request.draft_length
        self._is_fixed = isinstance(length, int) and length > 0

    def judged(self, stats: Stats) -> str:
        """One line of advice on a finished answer; empty where there is none, or where it was given before."""
        if self._is_done or stats.decode_s < self.least_s:
            return ""
        before, self._before = self._before, self._read()
        try:
            for cause, text in self._found(stats, before, self._before):
                key = disk_cache.key_of("advice", cause, disk_cache.file_key(self._pair.target))
                if not disk_cache.is_marked("advice", key):
                    self._is_done = True
                    disk_cache.mark("advice", key, self._pair.target)
                    return text
        except OSError:  # a model file was deleted meanwhile, and its identity is the key
            pass
        return ""

    def _found(self, stats: Stats, before: Conditions, now: Conditions) -> Iterator[tuple[str, str]]:
        """(cause, advice): what slows everything down first, then what is wrong with the draft."""
        options, threads, cores = self._options, self._target.facts.threads, physical_cores()
        reads = _risen(before.disk_reads, now.disk_reads) / max(stats.target_passes, 1)
        if reads >= (LEAST_DISK_READS if (now.stalled or 0.0) > MOST_STALLED else MOST_DISK_READS):
            context = max(self._target.facts.context_length // 2, 512)
            smaller = "--memory auto" if options.memory is None else f"-c {context}"
            yield "paging", f"weights are read from the disk again in every pass, as memory is short: {smaller}"
        if options.threads is not None and threads > cores:
            yield "threads", f"{threads} threads on {cores} cores wait for one another: -t {cores}"
        share, most = self._draft_cost()
        if most < LEAST_CEILING:
            yield (
                "slow draft",
                f"a draft token takes {share:.0%} of a target pass, which cannot pay off: --drafter suffix",
            )
        if self._is_fixed and stats.drafted_tokens >= LEAST_DRAFTED and self._loses(stats):
            rate = stats.accepted_tokens / stats.drafted_tokens
            if rate < LEAST_ACCEPTED:
                yield (
                    "fixed length",
                    f"{rate:.0%} of the drafted tokens were accepted, too few for a fixed length: --draft-length auto",
                )

    def _draft_cost(self) -> tuple[float, float]:
        """(a drafted token's time over a plain pass, the speedup if all tokens were accepted); (0, inf): not timed."""
        curve, name = self._pool.costs.curve, self._pool.draft_name
        cost = self._pool.costs.drafts.get(name) if name else None
        if cost is None or not cost.is_observed or cost.is_relative or not curve.is_sure_of_plain:
            return 0.0, float("inf")
        most = min(_LONGEST_DRAFT, self._target.most_draft_tokens)
        pass_s = [0.0, *(curve.at(width) for width in range(1, most + 2))]
        return cost.token_s / pass_s[1], ceiling(pass_s, cost.token_s, most)[1]

    def _loses(self, stats: Stats) -> bool:
        """Whether a token took longer than plain decoding, or, where that was not timed, few drafts were accepted."""
        curve = self._pool.costs.curve
        if not curve.is_scaled or stats.new_tokens < 2:
            return stats.accepted_tokens < stats.target_passes / 2
        return stats.decode_s / (stats.new_tokens - 1) / curve.at(1) > MOST_LOSS


def _risen(before: int | None, now: int | None) -> int:
    return 0 if before is None or now is None else max(now - before, 0)
