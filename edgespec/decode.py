"""The decoding loop: prefill, then rounds of draft, verify and accept. A generator of token events.

`autoregressive` is the non-speculative baseline: one pass per token. `speculative` emits the same tokens under the
coupled rule, and the same distribution under the rejection and block rules. Both leave the cache consistent at every
`yield`, so a caller may stop at any time. This file does not depend on a specific engine or drafter.

The loop itself (`steps`) asks for each pass of the target and is given its logits. `alone` runs these passes at once;
`generation.batching` packs those of several sequences into one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from time import perf_counter, thread_time
from typing import Any, NamedTuple, TypeVar

import numpy as np

from edgespec.acceptance import CHAINS_ONLY, COMPARING, Rule, TargetAt
from edgespec.control.base import NOTHING, Controller, Proposal
from edgespec.control.threads import ThreadControl
from edgespec.drafters.base import DraftRequest
from edgespec.engines.parked import ParkedStates
from edgespec.engines.sequence import CachedSequence, Passes, PassRequest
from edgespec.engines.watch import ClassWatch
from edgespec.errors import Cancelled, EngineError, PromptError
from edgespec.sampling import Sampler
from edgespec.stopping import StopRules, TextStream
from edgespec.types import Distribution, Draft, Logits, RoundRecord, Stats, TokenEvent, TokenIds, Verdict

Returned = TypeVar("Returned")
Steps = Generator[TokenEvent | PassRequest, Any, Returned]
"""Events, and passes to be run: each of these is answered with its logits."""


class PassShare(NamedTuple):
    """One sequence's part of a pass that several shared: its seconds, and whether other load disturbed these."""

    seconds: float
    is_disturbed: bool


@dataclass(slots=True)
class Run:
    """State of one generation. `stats` is updated while it runs; `on_round` is called after each round.

    `parked`: saved KV states of other texts, one of which may be a prefix of the prompt.
    `relieve`: frees memory where too much is in use, and says what it did; called between rounds.
    `threads`: chooses the number of threads; None: unchanged. `watch`: checks that the passes stay reproducible.
    `share`: its part of the last pass, where passes are shared with other sequences; None: they are its own.
    Raises PromptError for an empty prompt or one that does not fit the context.
    """

    target: CachedSequence
    prompt_ids: TokenIds
    sampler: Sampler
    stop: StopRules
    logprobs: bool = True
    top_logprobs: int = 0
    parked: ParkedStates | None = None
    threads: ThreadControl | None = None
    on_round: Callable[[RoundRecord], None] | None = None
    watch: ClassWatch | None = None
    relieve: Callable[[], str] | None = None
    share: PassShare | None = None
    stats: Stats = field(default_factory=Stats)
    text: TextStream = field(init=False)
    _started_s: float = field(init=False, default=0.0)
    _paused_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        check_prompt(self.prompt_ids, self.target.engine.facts.context_length)
        self.text = TextStream(self.target.engine.vocabulary, self.stop)

    def prefill(self) -> Passes:
        """Feed the part of the prompt that is not cached; returns the logits [vocabulary] after its last token."""
        self._started_s = perf_counter()
        self.stats.prompt_tokens = self.prompt_ids.size
        if self.parked is not None:
            self.parked.make_way(self.target, self.prompt_ids)
        self.stats.reused_tokens = self.target.reuse(self.prompt_ids)
        logits = yield from self.target.feeding(self.prompt_ids[self.target.length :])
        self.stats.prefill_s = perf_counter() - self._started_s
        self.stats.target_passes = self.target.passes_for(self.prompt_ids.size - self.stats.reused_tokens)
        if self.threads is not None:
            self.threads.begin()
        return logits

    def timed(self, rows: int, started_s: float, started_cpu_s: float) -> PassShare:
        """The time of the pass over `rows` rows that has just ended, which is reported to thread control."""
        if self.share is not None:
            return self.share
        seconds = perf_counter() - started_s
        if self.threads is None:
            return PassShare(seconds, is_disturbed=False)
        cpu_s = seconds if os.name == "nt" else thread_time() - started_cpu_s  # its resolution on Windows is 16 ms
        return PassShare(seconds, self.threads.passed(rows, seconds, cpu_s))

    def emit(self, token_id: int, position: int, logits: Logits, drafter: str | None = None) -> Iterator[TokenEvent]:
        """Yield one event. The consumer's time is not counted."""
        shown, reason = self.text.push(token_id)
        if reason is None and position + 1 > self.target.engine.facts.context_length:
            shown, reason = shown + self.text.finish(), "length"
        logprob = self.sampler.log_prob(logits, token_id) if self.logprobs else None
        likeliest = self.sampler.top_log_probs(logits, self.top_logprobs) if self.top_logprobs else ()
        self.stats.new_tokens += 1
        self.stats.finish_reason = reason
        self._tick()
        paused_s = perf_counter()
        yield TokenEvent(token_id, shown, position, drafter, logprob, reason, likeliest)
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

    def is_forced(self, pending_id: int) -> bool:
        """Whether a grammar forces what follows the pending token."""
        return self.sampler.constraint is not None and bool(self.sampler.forced(self.target.with_pending(pending_id)))

    def count(self, record: RoundRecord) -> None:
        """Add a round to `stats` and report it to `on_round`."""
        stats = self.stats
        stats.rounds += 1
        stats.target_passes += 1
        stats.drafted_tokens += record.drafted_tokens
        stats.accepted_tokens += record.accepted_tokens
        stats.draft_s += record.draft_s
        stats.verify_s += record.verify_s
        if self.on_round is not None:
            self.on_round(record)

    def keep_within_memory(self) -> None:
        """Free memory if that is needed, and say so."""
        if self.relieve is not None and (said := self.relieve()):
            self.stats.notes.append(said)

    def look_again(self, logits: Logits, pass_s: float, accepted_nodes: tuple[int, ...] = ()) -> None:
        """Occasionally score a round's tokens again, to check that its `logits` [rows, vocabulary] are reproducible."""
        if self.watch is not None:
            self.watch.spent(pass_s)
            if self.watch.is_due(self.target):
                self.watch.look(self.target, logits[[0, *(node + 1 for node in accepted_nodes)]])

    def _tick(self) -> None:
        self.stats.wall_s = perf_counter() - self._started_s - self._paused_s


def check_prompt(prompt_ids: TokenIds, context_length: int) -> None:
    """Raise PromptError for an empty prompt [n], or one that leaves no room for an answer."""
    if prompt_ids.size == 0:
        raise PromptError("the prompt is empty: give at least one token")
    if prompt_ids.size >= context_length:
        raise PromptError(
            f"the prompt has {prompt_ids.size} tokens and the context holds {context_length}, answer included: "
            "shorten the prompt or give a larger --ctx-size"
        )


def autoregressive(run: Run) -> Generator[TokenEvent, None, None]:
    """Plain decoding: one token per target pass."""
    return alone(steps(run))


def speculative(run: Run, controller: Controller, rule: Rule) -> Generator[TokenEvent, None, None]:
    """Rounds of draft, verify, accept. Under rule coupled it emits the same tokens as `autoregressive`.

    Under the other lossless rules it samples from the same distribution. A drafter that fails is disabled for the rest
    of the answer; decoding continues without it.
    """
    return alone(steps(run, controller, rule))


def alone(steps: Steps[None]) -> Generator[TokenEvent, None, None]:
    """The events of a sequence that has the engine to itself: each pass is run as soon as it is asked for."""
    try:
        while True:
            step = next(steps)
            while isinstance(step, PassRequest):
                step = steps.send(step.run())
            yield step
    except StopIteration:
        return
    except GeneratorExit:
        steps.close()
        raise
    except BaseException as exc:  # a pass failed, or was interrupted: the loop restores its cache
        with suppress(StopIteration):  # it ends normally when cancelled
            steps.throw(exc)


def steps(run: Run, controller: Controller | None = None, rule: Rule | None = None) -> Steps[None]:
    """The loop: speculative with a controller and a rule, plain without."""
    with run.guarded():
        pending_id = yield from _first_token(run)
        if controller is None or rule is None:
            yield from _plain_rounds(run, pending_id)
        else:
            yield from _speculative_rounds(run, controller, rule, pending_id)


def _first_token(run: Run) -> Steps[int]:
    """Prefill and emit the first token; returns it as the pending token."""
    logits = yield from run.prefill()
    pending_id = run.sampler.pick(run.sampler.distribution(logits, run.prompt_ids), run.target.length)
    yield from run.emit(pending_id, run.target.length, logits)
    return pending_id


def _plain_rounds(run: Run, pending_id: int, most: int | None = None, *, wakes: bool = False) -> Steps[int]:
    """One pass per token, for `most` rounds (None: until the end); returns the pending token.

    With `wakes` it ends earlier where a grammar forces what comes next.
    """
    done = 0
    while run.stats.finish_reason is None and done != most:
        if wakes and run.is_forced(pending_id):
            break  # a draft that is nearly certain is worth a decision
        run.keep_within_memory()
        started_s, started_cpu_s = perf_counter(), thread_time()
        logits = yield from run.target.feeding(np.array([pending_id], np.int32))
        pass_s, is_disturbed = run.timed(1, started_s, started_cpu_s)
        position = run.target.length
        run.count(RoundRecord(position, None, 0, 0, (), 0.0, pass_s, is_disturbed=is_disturbed))
        pending_id = run.sampler.pick(run.sampler.distribution(logits, run.target.token_ids), position)
        yield from run.emit(pending_id, position, logits)
        run.look_again(logits[None], pass_s)
        done += 1
    return pending_id


def _speculative_rounds(run: Run, controller: Controller, rule: Rule, pending_id: int) -> Steps[None]:
    """Draft, verify, accept, until the end."""
    controller.begin(run.prompt_ids, run.stats.prefill_s)
    while run.stats.finish_reason is None:
        rest, begun = controller.rest(), run.stats.rounds
        pending_id = yield from _plain_rounds(run, pending_id, rest, wakes=controller.wakes)
        if run.stats.finish_reason is not None:
            return
        controller.wake(rest - (run.stats.rounds - begun))
        run.keep_within_memory()
        context_ids = run.target.with_pending(pending_id)
        position = context_ids.size
        proposal, draft_s = _propose(run, controller, context_ids, rule)
        draft = proposal.draft
        logits, verify_s, is_disturbed = yield from _score(run, pending_id, draft)
        started_s = perf_counter()
        verdict = _judge(run, rule, draft, context_ids, logits)
        run.target.keep(pending_id, draft, verdict.accepted_nodes)
        seconds = draft_s, verify_s, perf_counter() - started_s
        record = _record(proposal, verdict, position, seconds, is_disturbed)
        controller.observe(proposal, verdict, record)
        run.count(record)
        row = 0
        for node in verdict.accepted_nodes:
            yield from run.emit(int(draft.token_ids[node]), position, logits[row], proposal.drafter)
            if run.stats.finish_reason is not None:
                return
            row, position = node + 1, position + 1
        pending_id = verdict.next_token_id
        yield from run.emit(pending_id, position, logits[row])
        run.look_again(logits, verify_s, verdict.accepted_nodes)


def _propose(run: Run, controller: Controller, context_ids: TokenIds, rule: Rule) -> tuple[Proposal, float]:
    """The round's draft and the seconds it took. Limited to what can still be emitted, cached and scored."""
    most = min(run.target.engine.widest_pass - 1, run.target.room - 1)
    if run.stop.max_tokens is not None:
        most = min(most, run.stop.max_tokens - run.stats.new_tokens - 1)
    if most <= 0:
        return NOTHING, 0.0
    started_s = perf_counter()
    target = run.target
    request = DraftRequest(
        context_ids,
        most,
        run.sampler,
        needs_distributions=rule in COMPARING,
        max_branches=0 if rule in CHAINS_ONLY else target.engine.most_branches,
        features=target.features,
        layer_inputs=target.layer_inputs,
    )
    try:
        proposal = controller.propose(request)
        draft = run.sampler.permitted(proposal.draft, context_ids)
        proposal = Proposal(draft, proposal.drafter) if draft.num_tokens else NOTHING
    except Cancelled:
        raise
    except (EngineError, MemoryError) as exc:
        name = controller.leave_out()
        run.stats.notes.append(f"drafter {name} failed and is disabled for the rest of this answer: {exc}")
        proposal = NOTHING
    return proposal, perf_counter() - started_s


def _score(run: Run, pending_id: int, draft: Draft) -> Steps[tuple[Logits, float, bool]]:
    """Logits [rows, vocabulary] of the draft, the seconds of the pass, and whether other load disturbed that time."""
    started_s, started_cpu_s = perf_counter(), thread_time()
    logits = yield from run.target.scoring(pending_id, draft)
    return logits, *run.timed(draft.num_tokens + 1, started_s, started_cpu_s)


def _judge(run: Run, rule: Rule, draft: Draft, context_ids: TokenIds, logits: Logits) -> Verdict:
    """Apply the acceptance rule; without a draft, choose the next token as plain decoding does."""
    position = context_ids.size
    if not draft.num_tokens:
        return Verdict((), run.sampler.pick(run.sampler.distribution(logits[0], context_ids), position))
    verdict = rule(draft, _target_at(run, draft, context_ids, logits), run.sampler, position)
    return replace(verdict, row_choices=tuple(logits.argmax(axis=1).tolist())) if draft.wants_rows else verdict


def _target_at(run: Run, draft: Draft, context_ids: TokenIds, logits: Logits) -> TargetAt:
    """A function that computes the target's distribution after a node, for the nodes that a rule reaches."""

    def target_at(node: int, path: tuple[int, ...]) -> Distribution:
        history = context_ids
        if path and run.sampler.uses_history:
            history = np.concatenate((context_ids, draft.token_ids[list(path)]))
        return run.sampler.distribution(logits[node + 1], history)

    return target_at


def _record(
    proposal: Proposal, verdict: Verdict, position: int, seconds: tuple[float, float, float], is_disturbed: bool
) -> RoundRecord:
    draft, accepted = proposal.draft, len(verdict.accepted_nodes)
    confidences = tuple(draft.confidences.tolist()) if draft.num_tokens else ()
    return RoundRecord(position, proposal.drafter, draft.num_tokens, accepted, confidences, *seconds, is_disturbed)
