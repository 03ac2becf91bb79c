"""The state of one generation while it is decoded: its text, its sampler, its limits, its counters and its clock.

`decode` is the loop that moves it on. What happens at one place only is there; this holds what several steps share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from edgespec.engines.parked import ParkedStates
from edgespec.engines.sequence import CachedSequence, Passes
from edgespec.engines.widths import ClassWatch
from edgespec.errors import Cancelled, PromptError, PromptTooLong
from edgespec.reports import PromptProgress, RoundRecord, Stats, TokenEvent
from edgespec.sampling.sampler import Sampler
from edgespec.sampling.stopping import StopRules, TextStream
from edgespec.types import Logits, TokenIds


@dataclass(slots=True)
class Run:
    """State of one generation. `stats` is updated while it runs; `on_round` is called after each round.

    `parked`: saved KV states of other texts, one of which may be a prefix of the prompt.
    `relieve`: frees memory where too much is in use, and says what it did; called between rounds.
    `watch`: checks that the passes stay reproducible. `share_s`: what whoever runs its passes charges it for the last
    one, seconds; None: nobody does, so that it takes the time itself.
    `predicted_ids`: what the caller expects the answer to be.
    `on_prompt`: told how much of the prompt is read, before its first pass and after each.
    `others_s`: seconds that it waited while passes worked for other sequences; `reading_s`: those that reading the
    prompt took without them.
    Raises PromptError for an empty prompt or one that does not fit the context.
    """

    target: CachedSequence
    prompt_ids: TokenIds
    sampler: Sampler
    stop: StopRules
    logprobs: bool = True
    top_logprobs: int = 0
    parked: ParkedStates | None = None
    on_round: Callable[[RoundRecord], None] | None = None
    on_prompt: Callable[[PromptProgress], None] | None = None
    predicted_ids: TokenIds | None = None
    watch: ClassWatch | None = None
    relieve: Callable[[], str] | None = None
    share_s: float | None = None
    others_s: float = 0.0
    stats: Stats = field(default_factory=Stats)
    text: TextStream = field(init=False)
    reading_s: float = field(init=False, default=0.0)
    _started_s: float = field(init=False, default=0.0)
    _paused_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        check_prompt(self.prompt_ids, self.target.engine.facts.context_length)
        self.text = TextStream(self.target.engine.vocabulary, self.stop)

    def clock(self) -> float:
        """Seconds of this generation, without the time in which others were served."""
        return perf_counter() - self.others_s

    def prefill(self) -> Passes[Logits]:
        """Feed the part of the prompt that is not cached; returns the logits [vocabulary] after its last token."""
        self._started_s, started_s = perf_counter(), self.clock()
        self.stats.prompt_tokens = self.prompt_ids.size
        if self.parked is not None:
            self.parked.make_way(self.target, self.prompt_ids)
        self.stats.reused_tokens = self.target.reuse(self.prompt_ids)
        self._tell_progress()
        logits = yield from self.target.feeding(self.prompt_ids[self.target.length :], self._tell_progress)
        self.stats.prefill_s, self.reading_s = perf_counter() - self._started_s, self.clock() - started_s
        self.stats.target_passes = self.target.num_fed
        return logits

    def _tell_progress(self) -> None:
        if self.on_prompt is not None:
            stats, seconds = self.stats, perf_counter() - self._started_s
            self.on_prompt(PromptProgress(stats.prompt_tokens, stats.reused_tokens, self.target.length, seconds))

    def emit(self, token_id: int, position: int, logits: Logits, drafter: str | None = None) -> Iterator[TokenEvent]:
        """Yield one event. The consumer's time is not counted."""
        shown, reason = self.text.push(token_id)
        if reason is None and position + 1 >= self.target.engine.facts.context_length:
            shown, reason = shown + self.text.finish(), "length"
        logprob = self.sampler.log_prob(logits, token_id) if self.logprobs else None
        likeliest = self.sampler.top_log_probs(logits, self.top_logprobs) if self.top_logprobs else ()
        self.stats.new_tokens += 1
        self.stats.accepted_tokens += drafter is not None  # counted here: an end or a stop string may cut a draft
        self.stats.finish_reason = reason
        self._tick()
        paused_s = perf_counter()
        try:
            yield TokenEvent(token_id, shown, position, drafter, logprob, reason, likeliest)
        finally:  # a consumer may end the generation here, long after it was given the event
            self._paused_s += perf_counter() - paused_s

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Finish normally on Cancelled; after any exception the cache holds only committed tokens."""
        try:
            yield
        except GeneratorExit:
            raise
        except Cancelled:
            self.target.restore()
            self.stats.finish_reason = "cancelled"
        except BaseException:
            self.target.restore()
            raise
        finally:
            self._tick()

    def count(self, record: RoundRecord) -> None:
        """Add a round to `stats` and tell `on_round`."""
        stats = self.stats
        stats.rounds += 1
        stats.target_passes += 1
        stats.drafted_tokens += record.drafted_tokens
        stats.draft_s += record.draft_s
        stats.verify_s += record.verify_s
        if self.on_round is not None:
            self.on_round(record)

    def keep_within_memory(self) -> None:
        """Free memory if that is needed, and say so."""
        if self.relieve is not None and (said := self.relieve()):
            self.stats.notes.append(said)

    def look_again(self, logits: Logits, accepted_nodes: tuple[int, ...] = ()) -> None:
        """Occasionally score a round's tokens again, to check that its `logits` [rows, vocabulary] are reproducible."""
        if self.watch is not None and self.watch.is_due(self.target):
            self.watch.look(self.target, logits[[0, *(node + 1 for node in accepted_nodes)]])

    def _tick(self) -> None:
        self.stats.wall_s = perf_counter() - self._started_s - self._paused_s


def check_prompt(prompt_ids: TokenIds, context_length: int) -> None:
    """Raise PromptError for an empty prompt [n], or one that leaves no room for an answer."""
    if prompt_ids.size == 0:
        raise PromptError("the prompt is empty: give at least one token")
    if prompt_ids.size >= context_length:
        raise PromptTooLong(
            f"the prompt has {prompt_ids.size} tokens but the context holds only {context_length}, answer included: "
            "shorten the prompt or give a larger --ctx-size",
            prompt_ids.size,
            context_length,
        )
