"""Several generations on one engine: the text of each is the one that it has alone, whatever runs beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import numpy as np
import pytest

from bench_table import table_model
from edgespec import GenerateOptions, Generation, Model, Result, Sampling
from edgespec.engines.parked import ParkedStates
from edgespec.errors import EngineError
from edgespec.generation.batching import ContinuousBatch
from edgespec.reports import TokenEvent
from edgespec.types import Batch, Logits
from waiting import until

OPTIONS = GenerateOptions(max_tokens=30, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4, 5], [1, 2, 3, 4, 5, 6, 7] * 12, [3], [2, 2, 2], [9, 8, 7, 6], [0, 1], [5, 4, 3, 2, 1] * 7]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    with table_model(tmp_path, parallel=4) as opened:
        yield opened


def alone(model: Model, prompt: list[int], sampling: Sampling, options: GenerateOptions = OPTIONS) -> Result:
    model.forget()
    return model.generate(prompt, sampling, replace(options, drafter="none"))


def finish(batch: ContinuousBatch, *generations: Generation) -> None:
    """Begin these and run all to their end."""
    for generation in generations:
        batch.begin(generation)
    while batch.num_running:
        batch.step()


THREE = [[1, 2], [3, 4], [5, 6]]


@pytest.fixture
def expected(model: Model) -> list[Result]:
    """What each of `THREE` is answered alone; the model has forgotten it."""
    found = [alone(model, prompt, Sampling()) for prompt in THREE]
    model.forget()
    return found


def same(*results: Result) -> bool:
    found, expected = ((each.token_ids, each.logprobs, each.finish_reason) for each in results)
    return found == expected


@pytest.mark.parametrize("drafter", ["none", "auto", "model", "ngram", "suffix", "lookahead", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_text_is_the_one_that_it_has_alone(model: Model, drafter: Any, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=5)
    expected = [alone(model, prompt, sampling) for prompt in PROMPTS]
    model.forget()
    for length in ("auto", 3):
        options = replace(OPTIONS, drafter=drafter, draft_length=length)
        found = model.generate_all(PROMPTS, sampling, options)
        assert all(map(same, found, expected))
        if drafter not in ("none", "auto") and length == 3:
            assert sum(result.stats.accepted_tokens for result in found) > 0


def test_all_wait_for_one_pass(model: Model) -> None:
    """The passes of four answers at once are about as many as those of the longest."""
    options = replace(OPTIONS, drafter="none")
    counted = Counting(model.target)
    found = model.generate_all(PROMPTS[:2] + PROMPTS[3:5], Sampling(), options)
    assert all(result.stats.new_tokens == 30 for result in found)
    assert counted.widths[:8] and max(counted.widths) == 4
    assert len(counted.widths) < 40


@pytest.mark.parametrize("drafter", ["model", "tree"])
def test_drafts_of_all_take_one_pass_for_each_token(model: Model, drafter: Any) -> None:
    """The draft model's passes for four answers are about as many as those for one of them."""
    options = replace(OPTIONS, drafter=drafter, draft_length=3)
    counted = Counting(model.drafters.drafters["model"].engine)
    prompts = PROMPTS[:2] + PROMPTS[3:5]
    most_alone = 0
    for prompt in prompts:
        model.forget()
        counted.widths.clear()
        model.generate(prompt, Sampling(), options)
        most_alone = max(most_alone, len(counted.widths))
    model.forget()
    counted.widths.clear()
    found = model.generate_all(prompts, Sampling(), options)
    assert len(counted.widths) < 1.5 * most_alone
    assert counted.widths.count(4) > len(counted.widths) / 3
    assert all(result.stats.accepted_tokens for result in found)


def test_long_prompts_do_not_hold_up_answers(model: Model) -> None:
    """A prompt is read in parts beside the passes of an answer that has begun."""
    long = [1, 2, 3, 4, 5] * 40
    events: list[tuple[str, int]] = []
    short_one = model.stream([1], Sampling(), replace(OPTIONS, drafter="none"))
    long_one = model.stream(long, Sampling(), replace(OPTIONS, drafter="none"))
    with model.batch() as batch:
        batch.begin(short_one, lambda event: events.append(("short", event.position)))
        batch.step()
        batch.begin(long_one, lambda event: events.append(("long", event.position)))
        finish(batch)
    before = events.index(("long", len(long)))
    assert 3 <= before < 10, events


def test_a_shared_prefix_is_read_once(model: Model) -> None:
    system = [1, 2, 3, 4, 5, 6, 7, 8] * 8
    first, second = (model.stream([*system, last], Sampling(), OPTIONS) for last in (1, 2))
    with model.batch() as batch:
        batch.begin(first)
        while not first.stats.new_tokens:
            batch.step()
        finish(batch, second)
    assert first.stats.reused_tokens == 0
    assert second.stats.reused_tokens == len(system)
    found = second.result()
    assert same(found, alone(model, [*system, 2], Sampling()))


def test_clients_that_take_turns_have_a_place_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A beginning that all prompts share is no reason to give up another client's text while places are empty."""
    monkeypatch.setattr(ParkedStates, "park", lambda *_: None)
    with table_model(tmp_path, parallel=3) as model:
        system = [1, 2, 3]
        texts = {name: [*system, *(ids * 20)] for name, ids in (("a", [4, 5]), ("b", [6, 7]), ("c", [8, 9]))}
        for turn in range(3):
            for name, ids in texts.items():
                (found,) = model.generate_all([ids], Sampling(), replace(OPTIONS, max_tokens=2))
                assert not turn or found.stats.reused_tokens >= len(ids) - 2, name
                texts[name] = [*ids, *found.token_ids, 1]


def test_a_text_that_gives_way_to_a_copy_is_parked(tmp_path: Path) -> None:
    """The only free place holds another conversation, and the new one shares its beginning with one that runs."""
    system, other = [1, 2, 3, 4, 5, 6, 7, 8] * 8, [8, 7, 6, 5] * 24
    with table_model(tmp_path, parallel=2) as model, model.batch() as batch:

        def run(prompt: list[int], options: GenerateOptions) -> Generation:
            generation = model.stream(prompt, Sampling(), options)
            batch.begin(generation)
            return generation

        run(other, replace(OPTIONS, max_tokens=2))
        finish(batch)
        running = run([*system, 1], OPTIONS)
        while not running.stats.new_tokens:
            batch.step()
        run([*system, 2], replace(OPTIONS, max_tokens=2))
        finish(batch)
        again = run([*other, 3], replace(OPTIONS, max_tokens=2))
        finish(batch)
    assert again.stats.reused_tokens == len(other)


def test_a_failing_pass_ends_its_own_generation_only(model: Model, expected: list[Result]) -> None:
    generations = [model.stream(prompt, Sampling(), OPTIONS) for prompt in THREE]
    Counting(model.target).broken_sequence = 1
    with model.batch() as batch:
        finish(batch, *generations)
    assert isinstance(generations[1].failure, EngineError)
    assert same(generations[0].result(), expected[0]) and same(generations[2].result(), expected[2])


@pytest.mark.parametrize("drafter", ["model", "tree"])
def test_a_failing_draft_is_left_out_of_its_own_generation_only(
    model: Model, expected: list[Result], drafter: Any
) -> None:
    Counting(model.drafters.drafters["model"].engine).broken_sequence = 1
    found = model.generate_all(THREE, Sampling(), replace(OPTIONS, drafter=drafter, draft_length=3))
    assert all(map(same, found, expected))
    assert [any("broken" in note for note in result.stats.notes) for result in found] == [False, True, False]
    assert found[0].stats.accepted_tokens and found[2].stats.accepted_tokens and not found[1].stats.drafted_tokens


@pytest.mark.parametrize("releases", [False, True])
def test_what_happens_in_the_midst_of_drafts_changes_no_text(
    model: Model, expected: list[Result], releases: bool
) -> None:
    """One is cancelled, or the draft model is released, as when the memory budget is exceeded between two rounds."""
    options = replace(OPTIONS, drafter="model", draft_length=6)
    generations = [model.stream(prompt, Sampling(), options) for prompt in THREE]
    counted = Counting(model.drafters.drafters["model"].engine)
    with model.batch() as batch:
        for generation in generations:
            batch.begin(generation)
        while len(counted.widths) < 9:
            batch.step()
        if releases:
            model._executor._drop_models()
        else:
            generations[1].cancel()
        finish(batch)
    assert (generations[1].finish_reason == "cancelled") != releases
    results = [generation.result() for generation in generations]
    assert all(same(results[place], expected[place]) for place in ((0, 1, 2) if releases else (0, 2)))
    assert same(model.generate(THREE[1], Sampling(), options), expected[1])  # its place is as good as before


def test_a_draft_is_no_longer_than_the_rows_that_may_have_logits(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.target, "_max_outputs", 4)
    options = replace(OPTIONS, drafter="ngram", draft_length=12)
    prompt = [1, 2, 3, 4, 5, 6, 7] * 12
    found = model.generate(prompt, Sampling(temperature=0.0), options)
    assert same(found, alone(model, prompt, Sampling(temperature=0.0))) and found.stats.drafted_tokens


def test_64_clients_with_random_cancels(model: Model) -> None:
    """No slot stays taken, no text is wrong: also those of cancelled ones are right as far as they got."""
    random = Random(1)
    prompts = [[random.randrange(10) for _ in range(random.choice([1, 5, 40, 150]))] for _ in range(64)]
    sampling = Sampling(temperature=1.0, seed=2)
    drafters = ["none", "auto", "model", "tree", "suffix"]
    jobs = [
        model.stream(
            prompt, sampling, replace(OPTIONS, drafter=random.choice(drafters), max_tokens=random.randrange(1, 60))
        )
        for prompt in prompts
    ]
    cancelled_at = {index: random.randrange(20) for index in random.sample(range(64), 20)}
    waiting = list(enumerate(jobs))
    begun: dict[int, int] = {}
    with model.batch() as batch:
        while waiting or batch.num_running:
            while waiting and batch.has_room(waiting[0][1]):
                index, job = waiting.pop(0)
                begun[index] = 0
                batch.begin(job)
            batch.step()
            for index in begun:
                begun[index] += 1
                if begun[index] == cancelled_at.get(index):
                    jobs[index].cancel()
        assert batch.num_running == 0 and batch.has_room(jobs[0])
    ended = [job.result() for job in jobs]
    assert sum(result.finish_reason == "cancelled" for result in ended) > 5
    for prompt, job, result in zip(prompts, jobs, ended, strict=True):
        whole = alone(model, prompt, sampling, job.request.options)
        if result.finish_reason == "cancelled":
            assert result.token_ids == whole.token_ids[: len(result.token_ids)]
        else:
            assert same(result, whole)


def test_a_callback_that_raises_ends_all(model: Model) -> None:
    """The second's rows are in the engine, and its loop never saw them: they must not be run again."""
    first, second = (model.stream(prompt, Sampling(), OPTIONS) for prompt in THREE[:2])

    def failing(event: TokenEvent) -> None:
        raise OSError("the client is gone")

    with model.batch() as batch:
        batch.begin(first, failing)
        batch.begin(second)
        with pytest.raises(OSError, match="gone"):
            while batch.num_running:
                batch.step()
        assert not batch.num_running
    assert same(alone(model, THREE[1], Sampling()), alone(model, THREE[1], Sampling()))


@pytest.mark.parametrize("drafter", ["none", "model", "tree"])
@pytest.mark.parametrize("count", [3, 5, 8])
def test_an_interrupt_between_two_answers_of_one_pass_spoils_neither_cache(
    model: Model, drafter: Any, count: int
) -> None:
    """Ctrl-C while the first takes its tokens: the second's rows are in the engine, and its loop never saw them."""
    options, prompts = replace(OPTIONS, drafter=drafter, draft_length=3), PROMPTS[:2]
    expected = [alone(model, prompt, Sampling()) for prompt in prompts]
    model.forget()
    first, second = (model.stream(prompt, Sampling(), options) for prompt in prompts)
    seen = []

    def interrupted(event: TokenEvent) -> None:
        seen.append(event)
        if len(seen) == count:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), model.batch() as batch:
        batch.begin(first, interrupted)
        finish(batch, second)
    for slot in model._executor.slots.all:
        assert model.target.length(slot.sequence.sequence) == slot.sequence.length
    begun = [prompt + list(result.token_ids[:9]) for prompt, result in zip(prompts, expected, strict=True)]
    found = model.generate_all(begun, Sampling(), replace(options, max_tokens=21))
    for result, whole in zip(found, expected, strict=True):
        assert result.stats.reused_tokens > 2
        assert (result.token_ids, result.logprobs) == (whole.token_ids[9:], whole.logprobs[9:])


def test_engines_that_cannot_pack_take_passes_in_turn(model: Model) -> None:
    expected = [alone(model, prompt, Sampling()) for prompt in PROMPTS]
    model.forget()
    model.target.facts = replace(model.target.facts, can_pack=False)
    counted = Counting(model.target)
    found = model.generate_all(PROMPTS, Sampling(), OPTIONS)
    assert all(map(same, found, expected))
    assert set(counted.widths) == {1}
    # in turn: between two passes of one sequence at most three of others
    order = counted.sequences
    gaps = [b - a for k in range(4) for a, b in pairwise([i for i, s in enumerate(order) if s == k])]
    assert max(gaps) <= 5


class Counting:
    """Notes the sequences of every pass; a pass with rows of `broken_sequence` fails."""

    def __init__(self, engine: Any) -> None:
        self.widths: list[int] = []
        self.sequences: list[int] = []
        self.broken_sequence = -1
        self._forward = engine.forward
        engine.forward = self.forward

    def forward(self, batch: Batch) -> Logits:
        found = np.unique(batch.sequences).tolist()
        self.widths.append(len(found))
        self.sequences.append(found[0])
        if self.broken_sequence in found:
            raise EngineError("broken")
        logits: Logits = self._forward(batch)
        return logits


def test_who_reads_a_generation_that_a_batch_runs_leaves_the_model_free(model: Model) -> None:
    generation = model.stream([1, 2, 3], options=OPTIONS)
    found: list[str] = []
    reader = Thread(target=lambda: found.append(generation.result().finish_reason), daemon=True)
    with model.batch() as batch:
        batch.begin(generation)
        reader.start()
        until(lambda: model._executor.turn.num_queued == 2)  # it waits behind the batch
        finish(batch)
    reader.join(60)
    assert found == ["length"]
    assert len(model.generate([1, 2], options=GenerateOptions(max_tokens=2, max_wait_s=0)).token_ids) == 2
