"""The loop: prefill, then rounds of draft, verify, accept; a generator of token events.

`speculative` reads as DESIGN.md's data flow says it. `autoregressive` is its slow twin: one pass per token, no draft,
no rule; under the coupled rule both emit the same tokens. Both leave the cache consistent at every `yield`, so a
caller may stop listening at any time. What this file does not know: which engine or drafter it runs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from edgespec.controller import Controller, RoundReport
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import Cancelled, PromptError
from edgespec.sampling import Sampler
from edgespec.stopping import StopRules, TextStream
from edgespec.types import EMPTY_DRAFT, Distribution, Draft, Logits, Stats, TokenEvent, TokenIds
from edgespec.verify import Rule, TargetAt, rejection


@dataclass(slots=True)
class Run:
    """Everything one generation shares between its steps. `stats` fills while it runs."""

    target: CachedSequence
    prompt_ids: TokenIds
    sampler: Sampler
    stop: StopRules
    logprobs: bool = True
    stats: Stats = field(default_factory=Stats)
    text: TextStream = field(init=False)
    _started_s: float = field(init=False, default=0.0)
    _paused_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        context_length = self.target.engine.facts.context_length
        if self.prompt_ids.size == 0:
            raise PromptError("the prompt is empty: give at least one token of text")
        if self.prompt_ids.size >= context_length:
            raise PromptError(
                f"the prompt has {self.prompt_ids.size} tokens and the context holds {context_length}, answer "
                "included: shorten the prompt or give a larger --ctx-size"
            )
        self.text = TextStream(self.target.engine.vocabulary, self.stop)

    def prefill(self) -> Logits:
        """Feed the part of the prompt that is not cached yet; the logits row that follows it."""
        self._started_s = perf_counter()
        self.stats.prompt_tokens = self.prompt_ids.size
        self.stats.reused_tokens = self.target.reuse(self.prompt_ids)
        logits = self.target.feed(self.prompt_ids[self.target.length :])
        self.stats.prefill_s = perf_counter() - self._started_s
        self.stats.target_passes = self.target.passes_for(self.prompt_ids.size - self.stats.reused_tokens)
        return logits

    def emit(self, token_id: int, position: int, logits: Logits, *, from_draft: bool) -> Iterator[TokenEvent]:
        """One event; the time that the listener takes is not ours."""
        shown, reason = self.text.push(token_id)
        if reason is None and position + 1 > self.target.engine.facts.context_length:
            shown, reason = shown + self.text.finish(), "length"
        logprob = self.sampler.log_prob(logits, token_id) if self.logprobs else None
        self.stats.new_tokens += 1
        self.stats.finish_reason = reason
        self._tick()
        paused_s = perf_counter()
        yield TokenEvent(token_id, shown, position, from_draft, logprob, reason)
        self._paused_s += perf_counter() - paused_s

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """End quietly when cancelled; whatever interrupts a pass, the cache holds only what was committed."""
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

    def _tick(self) -> None:
        self.stats.wall_s = perf_counter() - self._started_s - self._paused_s


def autoregressive(run: Run) -> Generator[TokenEvent, None, None]:
    """Plain decoding: one token per target pass."""
    with run.guarded():
        logits = run.prefill()
        while True:
            position = run.target.length
            token_id = run.sampler.pick(run.sampler.distribution(logits, run.target.token_ids), position)
            yield from run.emit(token_id, position, logits, from_draft=False)
            if run.stats.finish_reason is not None:
                return
            started_s = perf_counter()
            logits = run.target.feed(np.array([token_id], np.int32))
            run.stats.verify_s += perf_counter() - started_s
            run.stats.target_passes += 1
            run.stats.rounds += 1


def speculative(run: Run, drafter: Drafter, controller: Controller, rule: Rule) -> Generator[TokenEvent, None, None]:
    """Rounds of draft, verify, accept; emits what `autoregressive` would, in law or (coupled) token by token."""
    with run.guarded():
        logits = run.prefill()
        drafter.begin(run.prompt_ids)
        pending_id = run.sampler.pick(run.sampler.distribution(logits, run.prompt_ids), run.target.length)
        yield from run.emit(pending_id, run.target.length, logits, from_draft=False)
        while run.stats.finish_reason is None:
            context_ids = run.target.with_pending(pending_id)
            position = context_ids.size
            draft, draft_s = _propose(run, drafter, controller, context_ids, needs_distributions=rule is rejection)
            logits, verify_s = _score(run, pending_id, draft)
            verdict = rule(draft, _target_at(run, draft, context_ids, logits), run.sampler, position)
            run.target.keep(pending_id, draft, verdict.accepted_nodes)
            drafter.observe(draft, verdict)
            controller.observe(
                RoundReport(draft.num_tokens + 1, draft.num_tokens, len(verdict.accepted_nodes), draft_s, verify_s)
            )
            _count(run.stats, draft, len(verdict.accepted_nodes), draft_s, verify_s)
            row = 0
            for node in verdict.accepted_nodes:
                yield from run.emit(int(draft.token_ids[node]), position, logits[row], from_draft=True)
                if run.stats.finish_reason is not None:
                    return
                row, position = node + 1, position + 1
            pending_id = verdict.next_token_id
            yield from run.emit(pending_id, position, logits[row], from_draft=False)


def _propose(
    run: Run, drafter: Drafter, controller: Controller, context_ids: TokenIds, *, needs_distributions: bool
) -> tuple[Draft, float]:
    """The round's draft and the seconds it took; never longer than what may still be emitted, cached or scored."""
    most = min(
        controller.max_draft_tokens(context_ids.size),
        run.target.engine.widest_pass - 1,
        run.target.room - 1,
    )
    if run.stop.max_tokens is not None:
        most = min(most, run.stop.max_tokens - run.stats.new_tokens - 1)
    if most <= 0:
        return EMPTY_DRAFT, 0.0
    started_s = perf_counter()
    draft = drafter.draft(DraftRequest(context_ids, most, run.sampler, needs_distributions, controller.worth_going_on))
    return draft, perf_counter() - started_s


def _score(run: Run, pending_id: int, draft: Draft) -> tuple[Logits, float]:
    started_s = perf_counter()
    logits = run.target.score(pending_id, draft)
    return logits, perf_counter() - started_s


def _target_at(run: Run, draft: Draft, context_ids: TokenIds, logits: Logits) -> TargetAt:
    """The target's distribution after a node, computed only when a rule asks for it."""

    def target_at(node: int, path: tuple[int, ...]) -> Distribution:
        history = context_ids
        if path and run.sampler.sampling.uses_history:
            history = np.concatenate((context_ids, draft.token_ids[list(path)]))
        return run.sampler.distribution(logits[node + 1], history)

    return target_at


def _count(stats: Stats, draft: Draft, num_accepted: int, draft_s: float, verify_s: float) -> None:
    stats.rounds += 1
    stats.target_passes += 1
    stats.drafted_tokens += draft.num_tokens
    stats.accepted_tokens += num_accepted
    stats.draft_s += draft_s
    stats.verify_s += verify_s
