"""Generation handles: queueing, cancelling, closing, threads and asyncio tasks; on fast table engines."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench_table import table_model
from demo import ROOT, heed_interrupts
from edgespec import Busy, GenerateOptions, Generation, Model, Sampling
from edgespec.errors import EngineError, StateError
from edgespec.generation import turn
from edgespec.reports import RoundRecord
from edgespec.types import Batch
from waiting import reached, until

SUPPORT = ROOT / "tests" / "support"
LONG = GenerateOptions(max_tokens=200, ignore_eos=True)
SHORT = GenerateOptions(max_tokens=24, ignore_eos=True)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    """Drafts four tokens a round, so that a request leaves two caches behind."""
    with table_model(tmp_path, drafter="model", draft_length=4) as made:
        yield made


@pytest.fixture
def expected(tmp_path: Path) -> Callable[..., str]:
    """The text of a request by itself on a fresh model."""

    def text(prompt: str, seed: int, options: GenerateOptions = SHORT) -> str:
        with table_model(tmp_path, drafter="none") as fresh:
            return fresh.generate(prompt, Sampling(seed=seed), options).text

    return text


def at_pass(model: Model, number: int, action: Callable[[], None]) -> None:
    """Call `action` in the middle of the target's pass `number` from now on."""
    forward, count = model.target.forward, iter(range(1, sys.maxsize))

    def watched(batch: Batch) -> Any:
        if next(count) == number:
            action()
        return forward(batch)

    model.target.forward = watched  # type: ignore[method-assign]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a generation that is not read is told so soon."""
    monkeypatch.setattr(turn, "IDLE_S", 0.1)


def test_the_model_is_not_used_before_the_first_event(model: Model, expected: Callable[..., str]) -> None:
    first = model.stream("abc", Sampling(seed=1), SHORT)
    text = next(first).text
    lengths = model.target.length(), model._sequence.length
    others = [model.stream("cab", Sampling(seed=2), SHORT), model.chat([{"role": "user", "content": "abba"}])]
    _ = model.notes, model.drafters.draft_name, model.encode("abc"), repr(model), repr(others[0])
    assert (model.target.length(), model._sequence.length) == lengths
    assert text + "".join(event.text for event in first) == first.result().text == expected("abc", 1)
    assert others[0].result().text == expected("cab", 2)


@pytest.mark.parametrize("fails", [False, True])
def test_readers_of_one_generation_share_its_events_and_leave_the_queue(model: Model, fails: bool) -> None:
    def on_round(record: RoundRecord) -> None:
        if fails and record.position > 12:
            raise RuntimeError("from the callback")

    for _ in range(20):
        generation = model.stream("abc", Sampling(seed=1), SHORT, on_round=on_round)

        def read(source: Generation = generation) -> int:
            with suppress(RuntimeError):
                return sum(1 for _ in source)
            return 0

        with ThreadPoolExecutor(3) as pool:
            counts = list(pool.map(lambda _, read=read: read(), range(3)))
        assert fails or sum(counts) == SHORT.max_tokens
        assert model._executor.turn.num_queued == 0
    assert model.generate("abc", options=replace(SHORT, max_wait_s=1.0)).finish_reason == "length"


def test_turns_are_first_come_first_served(model: Model) -> None:
    running, order, waiting = model.stream("abc", Sampling(seed=1), SHORT), [], []
    next(running)
    for number in range(5):
        generation = model.stream("abc", options=SHORT)
        waiting.append(threading.Thread(target=lambda g=generation, n=number: (next(g), order.append(n), g.close())))
        waiting[-1].start()
        until(lambda g=generation: g.claim in model._executor.turn._queue)
    assert order == []
    running.close()
    for thread in waiting:
        thread.join()
    assert order == [0, 1, 2, 3, 4]


def test_who_waits_for_what_nobody_reads_is_refused_and_loses_nothing(
    model: Model, expected: Callable[..., str], impatient: None
) -> None:
    first, second = (model.stream("abc", Sampling(seed=seed), SHORT) for seed in (1, 2))
    text = next(first).text
    with pytest.raises(Busy, match="an unfinished generation of this model is not read"):
        next(second)
    for clears in (model.forget, model.prepare):
        with pytest.raises(Busy, match="read it to its end, close"):
            clears()
    assert text + "".join(event.text for event in first) == expected("abc", 1)
    assert second.result().text == expected("abc", 2), "refused, not ended: it may be asked again"


def test_the_wait_can_be_limited(model: Model) -> None:
    running = model.stream("abc", options=SHORT)
    next(running)
    found: list[object] = []

    def ask(max_wait_s: float) -> None:
        try:
            model.generate("abc", options=GenerateOptions(max_tokens=2, max_wait_s=max_wait_s))
        except Busy as exc:
            found.append(str(exc))

    for limit in (0, 0.05):
        thread = threading.Thread(target=ask, args=(limit,))
        thread.start()
        thread.join(60)
    assert len(found) == 2 and all("wait limit of" in str(each) for each in found)
    assert running.result().finish_reason == "length"


def test_steps_may_run_in_different_threads(model: Model, expected: Callable[..., str]) -> None:
    """As a web server's pool does it: the thread that read last is asked for another request meanwhile."""
    first, second = (model.stream("abc", Sampling(seed=seed), SHORT) for seed in (1, 2))
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        texts = [one.submit(next, first).result().text]
        waiting = one.submit(lambda: second.result().text)
        texts += [other.submit(lambda: "".join(event.text for event in first)).result()]
        assert waiting.result(60) == expected("abc", 2)
    assert "".join(texts) == expected("abc", 1)


def test_an_abandoned_handle_gives_its_turn_back(model: Model, expected: Callable[..., str]) -> None:
    for event in model.stream("abc", Sampling(seed=1), LONG):
        if event.position > 8:
            break
    del event
    gc.collect()
    assert model.generate("abc", Sampling(seed=2), SHORT).text == expected("abc", 2)


def test_a_cancelled_generation_ends_with_its_pass(model: Model, expected: Callable[..., str]) -> None:
    generation = model.stream("abc", Sampling(seed=1), LONG)
    at_pass(model, 5, generation.cancel)
    result = generation.result()
    assert result.finish_reason == "cancelled" and 0 < len(result.token_ids) < 200
    assert expected("abc", 1, LONG).startswith(result.text)
    assert model.generate("abc", Sampling(seed=2), SHORT).text == expected("abc", 2)


def test_a_generation_cancelled_while_waiting_stops_waiting(model: Model) -> None:
    running, waiting = model.stream("abc", options=SHORT), model.stream("abc", options=SHORT)
    next(running)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(waiting.result)
        until(lambda: waiting.claim in model._executor.turn._queue)
        waiting.cancel()
        assert found.result(60).finish_reason == "cancelled"
    assert running.result().finish_reason == "length"


def test_model_cancel_ends_the_running_generation_only(model: Model) -> None:
    running = model.stream("abc", options=LONG)
    next(running)
    model.cancel()
    assert list(running) == [] and running.finish_reason == "cancelled"
    model.cancel()
    assert model.generate("abc", options=SHORT).finish_reason == "length"


def test_the_turn_ends_with_the_last_event(model: Model) -> None:
    """A caller that reads just as many events as it asked for never asks for the end."""
    generation = model.stream("abc", options=GenerateOptions(max_tokens=3, ignore_eos=True))
    for _ in range(3):
        next(generation)
    assert generation.is_over
    assert model.generate("abc", options=SHORT).finish_reason == "length"


def test_on_round_cannot_call_the_model_but_may_cancel(model: Model) -> None:
    failures: list[str] = []
    generation: list[Generation] = []

    def on_round(record: RoundRecord) -> None:
        for ask in (lambda: model.generate("abc"), lambda: next(generation[0]), model.forget, model.close):
            try:
                ask()
            except Busy as exc:
                failures.append(str(exc))
        generation[0].close()

    generation.append(model.stream("abc", options=LONG, on_round=on_round))
    result = generation[0].result()
    assert len(failures) == 4
    assert result.finish_reason == "cancelled" and len(result.token_ids) < 12
    assert model.generate("abc", options=SHORT).finish_reason == "length"


def test_a_failed_generation_raises_and_the_next_one_runs(model: Model, expected: Callable[..., str]) -> None:
    generation = model.stream("abc", Sampling(seed=1), SHORT)
    at_pass(model, 3, lambda: (_ for _ in ()).throw(EngineError("burnt")))
    with pytest.raises(EngineError, match="burnt"):
        list(generation)
    with pytest.raises(EngineError, match="burnt"):
        generation.result()
    assert "failed: burnt" in repr(generation)
    assert model.generate("abc", Sampling(seed=1), SHORT).text == expected("abc", 1)


# -- closing the model


def test_closing_waits_for_the_pass_of_another_thread(tmp_path: Path) -> None:
    model = table_model(tmp_path, drafter="none")
    inside, go_on, is_closed = threading.Event(), threading.Event(), threading.Event()
    generation = model.stream("abc", options=LONG)
    at_pass(model, 4, lambda: (inside.set(), go_on.wait(60)))
    with ThreadPoolExecutor(3) as pool:
        found = pool.submit(generation.result)
        inside.wait(60)
        waiting = pool.submit(model.generate, "abc")
        closing = pool.submit(lambda: (model.close(), is_closed.set()))
        until(lambda: model._executor.turn.is_shut)
        assert not is_closed.wait(0.3), "the pass is not over"
        assert model.target._cancel.is_set(), "but it is told to end"  # type: ignore[attr-defined]
        go_on.set()
        assert found.result(60).finish_reason == "cancelled"
        closing.result(60)
        with pytest.raises(StateError, match="closed"):
            waiting.result(60)


def test_every_call_after_closing_raises_state_error(tmp_path: Path) -> None:
    model = table_model(tmp_path, drafter="model", draft_length=4)
    paused, early = model.stream("abc", options=LONG), model.stream("abc", options=SHORT)
    next(paused)
    model.close()
    model.close()
    for ask in (
        lambda: next(paused), early.result, lambda: model.stream("abc"), lambda: model.generate([1]), model.forget,
        lambda: model.chat([{"role": "user", "content": "a"}]), lambda: model.encode("abc"), lambda: model.decode([1]),
        model.prepare,
    ):  # fmt: skip
        with pytest.raises(StateError, match="closed: load it again"):
            ask()
    paused.close()
    model.cancel()
    assert "closed" in repr(model)


def output_of(folder: Path, code: str, pass_s: float = 0.0) -> tuple[str, str]:
    """What a program prints; it has a `model` of table engines, which drafts four tokens a round."""
    begun = (
        f"import os, signal, sys, threading, warnings; sys.path.insert(0, {str(SUPPORT)!r})\n"
        "from pathlib import Path\nfrom bench_table import table_model\n"
        "from edgespec import GenerateOptions, Sampling\nfrom edgespec.errors import StateError\n"
        f"model = table_model(Path({str(folder)!r}), {pass_s}, drafter='model', draft_length=4)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", begun + textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False,
        preexec_fn=heed_interrupts,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("where", ["main", "daemon"])
def test_an_open_stream_at_exit_ends_without_errors(where: str, tmp_path: Path) -> None:
    code = f"""
    stream = model.stream('abc')
    next(stream)
    keep = [stream]; keep.append(keep)
    if {where!r} == 'daemon':
        begun = threading.Event()
        read = lambda: [begun.set() for _ in stream] + [model.generate('abc')]
        threading.Thread(target=read, daemon=True).start()
        assert begun.wait(60)
    """
    assert output_of(tmp_path, code, 0.001) == ("", "")


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_an_interrupt_at_any_time_leaves_a_usable_model(tmp_path: Path) -> None:
    """KeyboardInterrupt wherever it strikes, in the queue and the loop too: the turn is free and the text right."""
    code = """
    options, sampling = GenerateOptions(max_tokens=60), Sampling(seed=1)
    wanted = model.generate('abc', sampling, options).text
    def strike(number, frame):
        raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, strike)
    struck = 0
    for turn in range(120):
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.00002 * (turn % 40 * 2.5 + 1))
                model.generate('abc' + 'b' * (turn % 5), options=options)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            struck += 1
        assert model.generate('abc', sampling, options).text == wanted, turn
    print(struck > 20)
    """
    assert output_of(tmp_path, code) == ("True\n", "")


# -- tasks


def test_asyncio_tasks_queue_without_blocking_the_loop(model: Model, expected: Callable[..., str]) -> None:
    async def read(seed: int) -> str:
        return "".join([event.text async for event in model.stream("abc", Sampling(seed=seed), SHORT)])

    async def everything() -> list[str]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.ensure_future(tick())
        texts = await asyncio.gather(*(read(seed) for seed in range(40)))
        ticking.cancel()
        assert ticks > 40
        return texts

    assert asyncio.run(everything()) == [expected("abc", seed) for seed in range(40)]


def test_a_task_waiting_for_its_own_generation_raises_busy(
    model: Model, expected: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nested() -> str:
        first, second = (model.stream("abc", Sampling(seed=seed), SHORT) for seed in (1, 2))
        text = (await anext(first)).text
        with monkeypatch.context() as patch:
            patch.setattr(turn, "IDLE_S", 0.1)
            with pytest.raises(Busy, match="an unfinished generation"):
                await second.aresult()
            with pytest.raises(Busy, match="an unfinished generation"):
                model.generate("abc")
        other = asyncio.ensure_future(model.stream("abc", Sampling(seed=3), SHORT).aresult())
        text += "".join([event.text async for event in first])
        assert (await other).text == expected("abc", 3)
        return text

    assert asyncio.run(nested()) == expected("abc", 1)


def test_a_cancelled_task_ends_its_generation(tmp_path: Path) -> None:
    async def stopped(model: Model) -> None:
        generation = model.stream("abc", options=LONG)
        reading = asyncio.ensure_future(generation.aresult())
        await reached(lambda: generation.stats.new_tokens)
        second = model.stream("abc", options=LONG)
        waiting = asyncio.ensure_future(second.aresult())
        await reached(lambda: second.claim in model._executor.turn._queue)
        for task in (waiting, reading):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        result = await asyncio.wait_for(model.stream("abc", options=SHORT).aresult(), 60)
        assert result.finish_reason == "length"
        assert generation.finish_reason == "cancelled" and generation.stats.new_tokens < 200

    with table_model(tmp_path, 0.005, drafter="none") as model:
        asyncio.run(stopped(model))
