"""The decoding loop: limits, counters, early ends, stop rules, and consistent caches after interruptions."""

from __future__ import annotations

import math
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from edgespec.config.options import Sampling
from edgespec.control.base import FixedLength, Proposal
from edgespec.drafters.base import Drafter
from edgespec.drafters.model import ModelDrafter
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import PromptError, VocabularyMismatch
from edgespec.generation import run_state
from edgespec.generation.run_state import Run
from edgespec.reports import RoundRecord
from edgespec.sampling.acceptance import RULES, Rule, coupled
from edgespec.sampling.sampler import NoTokenLeft, Sampler
from edgespec.sampling.stopping import StopRules, TextStream
from edgespec.types import TokenIds, Verdict
from edgespec.vocabulary import check_same_vocabulary
from lossless import autoregressive, speculative
from table_engine import Struck, TableEngine, Words

PROMPT = np.array([0, 1, 2], np.int32)


def make_run(target: CachedSequence, prompt: TokenIds = PROMPT, seed: int = 0, **stop: object) -> Run:
    rules = StopRules(**{"end_ids": frozenset(), "max_tokens": 20, **stop})  # type: ignore[arg-type]
    return Run(target, prompt, Sampler(Sampling(temperature=1.0, seed=seed), target.engine.vocabulary.size), rules)


@pytest.fixture
def target() -> CachedSequence:
    return CachedSequence(TableEngine.random(10, context_length=64, max_batch=16))


def related(target: CachedSequence, sigma: float) -> TableEngine:
    assert isinstance(target.engine, TableEngine)
    return target.engine.related(sigma)


@pytest.fixture
def drafter(target: CachedSequence) -> ModelDrafter:
    return ModelDrafter(related(target, 0.5))


class Recorder(FixedLength):
    """A fixed length that keeps the records."""

    def __init__(self, drafter: Drafter, draft_length: int) -> None:
        super().__init__(drafter, draft_length)
        self.records: list[RoundRecord] = []

    def observe(self, proposal: Proposal, verdict: Verdict, record: RoundRecord) -> None:
        super().observe(proposal, verdict, record)
        self.records.append(record)


def test_counters_add_up(target: CachedSequence, drafter: ModelDrafter) -> None:
    run, recorder = make_run(target, max_tokens=40), Recorder(drafter, 3)
    heard: list[RoundRecord] = []
    run.on_round = heard.append
    events = list(speculative(run, recorder, coupled))
    stats = run.stats
    assert heard == recorder.records
    assert stats.new_tokens == len(events) == 40
    assert stats.prompt_tokens == 3
    assert stats.rounds == len(recorder.records) == stats.target_passes - 1
    assert stats.drafted_tokens == sum(record.drafted_tokens for record in recorder.records)
    assert stats.accepted_tokens == sum(event.drafter == drafter.name for event in events)
    assert stats.new_tokens == 1 + stats.rounds + stats.accepted_tokens
    assert stats.mean_accepted_length == pytest.approx(39 / stats.rounds)
    assert 0 < stats.acceptance_rate < 1
    assert stats.finish_reason == "length"
    assert all(event.finish_reason is None for event in events[:-1])
    assert stats.wall_s >= stats.prefill_s + stats.draft_s + stats.verify_s > 0


@pytest.mark.parametrize("taken", [1, 3, 20])
def test_the_time_of_whoever_reads_the_events_does_not_count(
    target: CachedSequence, drafter: ModelDrafter, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused_s = 0.0
    monkeypatch.setattr(run_state, "perf_counter", lambda: perf_counter() + paused_s)
    for run in make_run(target), make_run(target):
        events = autoregressive(run) if paused_s else speculative(run, FixedLength(drafter, 3), coupled)
        for _ in range(taken):
            next(events)
            paused_s += 100.0
        events.close()
        assert 0 < run.stats.wall_s < 50


@pytest.mark.parametrize("stop", [{"end_ids": frozenset({3, 4})}, {"strings": ("bd", "c")}])
def test_what_was_drafted_behind_the_end_of_an_answer_is_no_part_of_it(target: CachedSequence, stop: Any) -> None:
    behind = 0
    for seed in range(20):
        recorder = Recorder(ModelDrafter(related(target, 0.1)), 6)
        run = make_run(target, seed=seed, **{"max_tokens": None} | stop)
        events = list(speculative(run, recorder, coupled))
        assert run.stats.accepted_tokens == sum(event.drafter is not None for event in events)
        behind += sum(record.accepted_tokens for record in recorder.records) - run.stats.accepted_tokens
    assert behind > 0


def test_never_drafts_more_than_may_be_emitted_or_scored(target: CachedSequence, drafter: ModelDrafter) -> None:
    run, recorder = make_run(target, max_tokens=6), Recorder(drafter, 50)
    events = list(speculative(run, recorder, coupled))
    assert len(events) == 6
    assert max(record.width for record in recorder.records) <= 5
    wide = Recorder(drafter, 50)
    list(speculative(make_run(target, max_tokens=50), wide, coupled))
    assert max(record.width for record in wide.records) <= 16


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stop", ["", "e"])
def test_a_row_that_nothing_can_be_sampled_from_counts_only_if_the_answer_goes_on(rule: str, stop: str) -> None:
    table = np.full((11, 10), -20, np.float32)
    table[np.arange(11), np.arange(11) % 10] = 20  # after token n comes n + 1
    table[5] = -math.inf  # but nothing after "e"
    engine = TableEngine(table, order=1)

    def events(*rules: Rule) -> tuple[list[str], bool]:
        run = make_run(CachedSequence(engine), strings=(stop,) if stop else ())
        controller = FixedLength(ModelDrafter(engine.related(0)), 6)
        found = []
        try:
            for event in speculative(run, controller, *rules) if rules else autoregressive(run):
                found.append(event.text)
        except NoTokenLeft:
            return found, True
        return found, False

    assert events() == events(RULES[rule]) == ((["d", ""], False) if stop else (["d", "e"], True))


@pytest.mark.parametrize("prompt, message", [([], "empty"), ([1] * 64, "64 tokens but the context holds only 64")])
def test_empty_and_too_long_prompts_are_refused_before_work(
    target: CachedSequence, prompt: list[int], message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        make_run(target, np.array(prompt, np.int32))


@pytest.mark.parametrize("taken", range(1, 12))
def test_closing_early_leaves_a_consistent_cache(target: CachedSequence, drafter: ModelDrafter, taken: int) -> None:
    expected = [event.token_id for event in autoregressive(make_run(target))]
    events = speculative(make_run(target), FixedLength(drafter, 4), coupled)
    begun = [next(events).token_id for _ in range(taken)]
    events.close()
    assert begun == expected[:taken]
    assert target.engine.length() == target.length
    text = np.concatenate((PROMPT, np.array(begun, np.int32)))
    rest = list(speculative(make_run(target, text, max_tokens=20 - taken), FixedLength(drafter, 4), coupled))
    assert begun + [event.token_id for event in rest] == expected


@pytest.mark.parametrize("strikes_at", [1, 2, 5])
def test_an_interrupted_pass_that_cannot_be_rolled_back_is_read_again(strikes_at: int) -> None:
    engine = Struck.random(10, context_length=64, can_rollback=False)
    target = CachedSequence(engine)
    expected = [event.token_id for event in autoregressive(make_run(target))]
    again = make_run(target)
    assert [event.token_id for event in autoregressive(again)] == expected and again.stats.reused_tokens == 0
    target.rollback(0)
    engine.strike(strikes_at)
    with pytest.raises(KeyboardInterrupt):
        list(autoregressive(make_run(target)))
    assert target.length == engine.length() == 0
    text = np.concatenate((PROMPT, np.array(expected[:6], np.int32)))
    assert [event.token_id for event in autoregressive(make_run(target, text, max_tokens=14))] == expected[6:]


@pytest.mark.parametrize("strikes_at", [1, 2, 3, 5])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_pass_leaves_only_committed_tokens(strikes_at: int, error: type[BaseException]) -> None:
    engine = Struck.random(10, context_length=64)
    target, drafter = CachedSequence(engine), ModelDrafter(TableEngine.random(10, context_length=64).related(0.5))
    expected = [event.token_id for event in autoregressive(make_run(target))]
    target.rollback(0)
    engine.strike(strikes_at, error)
    with pytest.raises(error):
        list(speculative(make_run(target), FixedLength(drafter, 4), coupled))
    assert engine.length() == target.length
    assert [e.token_id for e in speculative(make_run(target), FixedLength(drafter, 4), coupled)] == expected


@pytest.mark.parametrize("cancel_draft", [False, True])
def test_cancel_raises_nothing_and_the_next_run_is_exact(target: CachedSequence, cancel_draft: bool) -> None:
    draft_engine = related(target, 0.5)
    drafter = ModelDrafter(draft_engine)
    expected = [event.token_id for event in autoregressive(make_run(target))]
    run = make_run(target)
    events = speculative(run, FixedLength(drafter, 4), coupled)
    begun = [next(events).token_id for _ in range(3)]
    (draft_engine if cancel_draft else target.engine).cancel()
    begun += [event.token_id for event in events]
    assert run.stats.finish_reason == "cancelled"
    assert begun == expected[: len(begun)]
    assert len(begun) < len(expected)
    again = speculative(make_run(target), FixedLength(drafter, 4), coupled)
    assert [event.token_id for event in again] == expected


# -- stop rules, and the text that can be shown before a stop string is complete


BYTES = [*(bytes([value]) for value in range(256)), b""]  # and one end token


def shown(text: str | bytes | list[int], *stops: str, max_tokens: int | None = None) -> tuple[list[str], str | None]:
    stream = TextStream(Words(BYTES, ends=(256,)), StopRules(frozenset({256}), stops, max_tokens))
    pieces, reason = [], None
    for token_id in text.encode() if isinstance(text, str) else text:
        piece, reason = stream.push(token_id)
        pieces.append(piece)
        if reason:
            break
    return pieces, reason


@pytest.mark.parametrize(
    ("text", "stops", "most", "before", "reason"),
    [
        ("one STOP two", ("STOP", "OP"), None, "one ", "stop"),
        ("aabaac", ("aabaac",), None, "", "stop"),
        ("aabaab", ("aabaac",), None, "aab", None),
        ("ab<", ("<stop>",), 3, "ab<", "length"),
        ("🦊".encode()[:2], (), 2, "\ufffd", "length"),
        ([ord("z"), 256], ("zz",), None, "z", "stop"),  # the end token prints nothing
    ],
)
def test_where_a_text_ends(text: Any, stops: tuple[str, ...], most: int | None, before: str, reason: Any) -> None:
    pieces, found = shown(text, *stops, max_tokens=most)
    assert ("".join(pieces), found) == (before, reason)


def test_what_may_become_a_stop_string_or_a_character_is_held_back() -> None:
    assert shown("a<<b", "<<<") == (["a", "", "", "<<b"], None)
    assert shown("é")[0] == ["", "é"]


def test_vocabulary_mismatch_names_the_first_token_that_differs() -> None:
    other = [b"seven" if place in (7, 9) else piece for place, piece in enumerate(BYTES)]
    with pytest.raises(VocabularyMismatch, match=r"token 7 is .*x07.* in the target and .*seven.* in the draft"):
        check_same_vocabulary(Words(BYTES), Words(other))
    check_same_vocabulary(Words(BYTES), Words([*BYTES, b"padding"]))
