"""The decoding loop (`steps`): prefill, then rounds of draft, verify and accept, or plain ones.

Under the coupled rule speculation emits the same tokens as plain decoding, under the rejection and block rules the same
distribution. A drafter that fails is disabled for the rest of the answer. The cache is consistent at every `yield`, so
a caller may stop at any time. This file does not depend on a specific engine or drafter.

The loop asks for each pass, of the target or of a draft model, and is given its logits: `batching` packs those of
several sequences into one. `run_state` holds the state.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from dataclasses import replace
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from edgespec.control.base import NOTHING, Controller, Proposal
from edgespec.drafters.base import DraftRequest
from edgespec.engines.sequence import PassRequest
from edgespec.errors import Cancelled, CapabilityError, EdgespecError, EngineError
from edgespec.generation.run_state import Run
from edgespec.reports import RoundRecord, TokenEvent
from edgespec.sampling.acceptance import COMPARING, ROOT, Rule
from edgespec.types import EMPTY_DRAFT, Distribution, Draft, Logits, TokenIds, Verdict

Returned = TypeVar("Returned")
Steps = Generator[TokenEvent | PassRequest, Any, Returned]
"""Events, and passes to be run: each of these is answered with its logits."""


def steps(run: Run, controller: Controller | None = None, rule: Rule | None = None) -> Steps[None]:
    """The loop: speculative with a controller and a rule, plain without."""
    with run.guarded():
        logits = yield from run.prefill()
        pending_id = run.sampler.pick(run.sampler.distribution(logits, run.prompt_ids), run.target.length)
        yield from run.emit(pending_id, run.target.length, logits)
        if controller is None or rule is None:
            yield from _plain_rounds(run, pending_id)
        else:
            yield from _speculative_rounds(run, controller, rule, pending_id)


def _plain_rounds(run: Run, pending_id: int, most: int = sys.maxsize) -> Steps[int]:
    """One pass per token, until the end or `most` times; the token that comes next."""
    while most and run.stats.finish_reason is None:
        most -= 1
        run.keep_within_memory()
        logits, pass_s = yield from _score(run, pending_id, EMPTY_DRAFT)
        run.target.keep(pending_id, EMPTY_DRAFT, ())
        position = run.target.length
        run.count(RoundRecord(position, None, 0, 0, (), 0.0, pass_s))
        pending_id = run.sampler.pick(run.sampler.distribution(logits[0], run.target.token_ids), position)
        yield from run.emit(pending_id, position, logits[0])
        run.look_again(logits)
    return pending_id


def _speculative_rounds(run: Run, controller: Controller, rule: Rule, pending_id: int) -> Steps[None]:
    """Draft, verify, accept, until the end."""
    controller.begin(run.prompt_ids, run.reading_s, run.clock)
    while run.stats.finish_reason is None:
        run.keep_within_memory()
        context_ids = run.target.with_pending(pending_id)
        position = context_ids.size
        proposal, draft_s = yield from _propose(run, controller, context_ids, rule)
        draft = proposal.draft
        logits, verify_s = yield from _score(run, pending_id, draft)
        started_s = run.clock()
        verdict = _judge(run, rule, draft, context_ids, logits)
        run.target.keep(pending_id, draft, verdict.accepted_nodes)
        seconds = draft_s, verify_s, run.clock() - started_s
        record = _record(proposal, verdict, position, seconds)
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
        run.look_again(logits, verdict.accepted_nodes)
        if resting := controller.rest():
            pending_id = yield from _plain_rounds(run, pending_id, resting)


def _propose(run: Run, controller: Controller, context_ids: TokenIds, rule: Rule) -> Steps[tuple[Proposal, float]]:
    """The round's draft and the seconds it took. Limited to what can still be emitted, cached and scored."""
    most = min(run.target.engine.most_draft_tokens, run.target.room - 1)
    if run.stop.max_tokens is not None:
        most = min(most, run.stop.max_tokens - run.stats.new_tokens - 1)
    if most <= 0:
        return NOTHING, 0.0
    started_s = run.clock()
    target = run.target
    request = DraftRequest(
        context_ids,
        most,
        run.sampler,
        needs_distributions=rule in COMPARING,
        max_branches=0 if rule in COMPARING else target.engine.facts.max_branches,
        features=target.features,
        predicted_ids=run.predicted_ids,
    )
    try:
        proposal = yield from controller.proposing(request)
        draft = run.sampler.permitted(proposal.draft, context_ids)
        proposal = Proposal(draft, proposal.drafter) if draft.num_tokens else NOTHING
    except Cancelled:
        raise
    except (EngineError, CapabilityError, MemoryError) as exc:
        name = controller.leave_out()
        run.stats.notes.append(f"drafter {name} failed and is disabled for the rest of this answer: {exc}")
        proposal = NOTHING
    return proposal, run.clock() - started_s


def _score(run: Run, pending_id: int, draft: Draft) -> Steps[tuple[Logits, float]]:
    """Logits [rows, vocabulary] of the draft, and the seconds of the pass."""
    started_s = perf_counter()
    logits = yield from run.target.scoring(pending_id, draft)
    return logits, perf_counter() - started_s if run.share_s is None else run.share_s


def _judge(run: Run, rule: Rule, draft: Draft, context_ids: TokenIds, logits: Logits) -> Verdict:
    """Apply the acceptance rule; without a draft, choose the next token as plain decoding does.

    A token behind which nothing can be sampled is not accepted, but under `coupled` it comes next, as undrafted. The
    answer may end with it; if it goes on, the next round fails as plain decoding does, with all before it emitted.
    """
    sampler, latest = run.sampler, ROOT

    def target_at(node: int, path: tuple[int, ...]) -> Distribution:
        nonlocal latest
        latest, history = node, context_ids
        if path and sampler.uses_history:
            history = np.concatenate((context_ids, draft.token_ids[list(path)]))
        return sampler.distribution(logits[node + 1], history)

    if not draft.num_tokens:
        return Verdict((), sampler.pick(target_at(ROOT, ()), context_ids.size))
    row_choices = tuple(logits.argmax(axis=1).tolist()) if draft.wants_rows else None
    while True:
        try:
            verdict = rule(draft, target_at, sampler, context_ids.size)
        except EdgespecError:
            if latest == ROOT:
                raise
            draft = draft.first(latest)
        else:
            return verdict if row_choices is None else replace(verdict, row_choices=row_choices)


def _record(proposal: Proposal, verdict: Verdict, position: int, seconds: tuple[float, float, float]) -> RoundRecord:
    draft, accepted = proposal.draft, len(verdict.accepted_nodes)
    confidences = tuple(draft.confidences.tolist()) if draft.num_tokens else ()
    depth = None if draft.is_chain else max(draft.depths()) + 1
    counts = (position, proposal.drafter, draft.num_tokens, accepted, confidences)
    return RoundRecord(*counts, *seconds, tree_depth=depth)
