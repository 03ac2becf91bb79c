"""The queue: in order, with a limit, cancelled at once; clients that leave; a server that stops."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from asgi_client import Client
from bench_table import table_model
from edgespec import GenerateOptions, Model, Sampling
from edgespec.contained import Containment
from edgespec.server import app
from edgespec.server.app import create_app
from edgespec.server.facts import health
from edgespec.server.http_errors import HttpError
from edgespec.server.metrics import Metrics
from edgespec.server.scheduler import Job, Scheduler, Ticket
from edgespec.server.service import Service, Services
from waiting import reached

LONG = GenerateOptions(max_tokens=1900, ignore_eos=True, logprobs=False)
SHORT = GenerateOptions(max_tokens=4, ignore_eos=True, logprobs=False)


def job(model: Model, options: GenerateOptions = SHORT, text: str = "Once") -> Job:
    return Job(model.encode(text), Sampling(seed=3), options)


async def text_of(ticket: Ticket) -> str:
    return "".join([event.text async for events in ticket for event in events])


async def begin(scheduler: Scheduler, model: Model) -> Ticket:
    """A long generation that has begun."""
    (ticket,) = await scheduler.submit([job(model, LONG)])
    await reached(lambda: ticket.generation.stats.new_tokens > 0)
    return ticket


async def test_jobs_are_run_in_order(scheduler: Scheduler, model: Model):
    tickets = [(await scheduler.submit([job(model, text=text)]))[0] for text in ("One", "Two", "Three")]
    last = await text_of(tickets[2])
    assert all(ticket.generation.stats.finish_reason for ticket in tickets)  # have ended, though nobody read them
    texts = [last, await text_of(tickets[1]), await text_of(tickets[0])]
    plain = [model.generate(text, Sampling(seed=3), SHORT).text for text in ("Three", "Two", "One")]
    assert texts == plain


async def test_a_full_queue_refuses_and_a_cancelled_job_makes_room(scheduler: Scheduler, model: Model):
    running = await begin(scheduler, model)
    waiting = await scheduler.submit([job(model)] * 4)
    with pytest.raises(HttpError) as caught:
        await scheduler.submit([job(model)])
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "1")
    waiting[1].cancel()
    assert scheduler.num_waiting == 3 and await text_of(waiting[1]) == ""
    (last,) = await scheduler.submit([job(model)])
    running.cancel()
    texts = [await text_of(each) for each in (waiting[0], waiting[2], waiting[3], last)]
    assert len(set(texts)) == 1 and texts[0]
    await text_of(running)
    stats = running.generation.stats
    assert stats.new_tokens < 1900 and stats.finish_reason == "cancelled"


async def test_stopping_refuses_the_waiting_and_finishes_the_running(scheduler: Scheduler, model: Model):
    options = GenerateOptions(max_tokens=60, ignore_eos=True)
    running, waiting = await scheduler.submit([job(model, options), job(model)])
    await reached(lambda: running.generation.stats.new_tokens > 0)
    scheduler.stop()
    with pytest.raises(HttpError, match="stopping"):
        await text_of(waiting)
    with pytest.raises(HttpError, match="stopping"):
        await scheduler.submit([job(model)])
    await text_of(running)
    assert running.generation.stats.new_tokens == 60


# -- several at once


async def test_a_caller_in_the_process_gets_the_model_between_answers(tmp_path: Path):
    """While clients keep the server busy, another thread's generation is not kept waiting for ever."""
    with table_model(tmp_path, pass_s=0.001, parallel=2) as model:
        scheduler = Scheduler(model, 64, Metrics())

        options = GenerateOptions(max_tokens=200, drafter="none")
        tickets = await scheduler.submit([Job([1, 2], Sampling(), options) for _ in range(12)])
        await reached(lambda: tickets[0].generation.stats.new_tokens > 0)
        result = await asyncio.to_thread(model.generate, [3, 4], Sampling(), GenerateOptions(max_tokens=5))
        assert result.stats.new_tokens == 5 and scheduler.num_waiting > 2
        for ticket in tickets:
            ticket.cancel()
        scheduler.close()


# -- clients that leave


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_leaves_ends_its_generation_and_no_other(service: Service, model: Model, is_stream: bool):
    scheduler, app = service.require().scheduler, create_app(Services(service))
    bias = {str(token_id): -100 for token_id in model.target.vocabulary.end_ids}
    running = Client(app, stream=is_stream, logit_bias=bias, max_tokens=None)
    await reached(lambda: scheduler.num_running == 1)
    waiting = Client(app, stream=is_stream, logit_bias=bias)
    await reached(lambda: scheduler.num_waiting == 1)
    last = Client(app, stream=is_stream, logit_bias=bias, max_tokens=5)
    await reached(lambda: scheduler.num_running == 1 and scheduler.num_waiting == 2)
    waiting.leave()
    await waiting.task
    assert scheduler.num_waiting == 1
    running.leave()
    await running.task
    await last.task
    assert last.sent[0]["status"] == 200 and b'"length"' in b"".join(part["body"] for part in last.sent[1:])
    await reached(lambda: scheduler.num_running == 0)
    assert service.metrics.finished == {"cancelled": 1, "length": 1}
    assert service.metrics.new_tokens < 1900


async def test_a_request_that_takes_long_to_prepare_holds_up_nobody(model: Model, monkeypatch: pytest.MonkeyPatch):
    """As a grammar may in native code, which nothing can interrupt."""
    held = threading.Event()
    chat = app.ENDPOINTS["/v1/chat/completions"]._replace(answer=lambda *_: held.wait())
    monkeypatch.setitem(app.ENDPOINTS, "/v1/chat/completions", chat)
    service = Service("demo")
    service.use(model)
    served = create_app(Services(service))
    left = Client(served, stream=True)
    await reached(lambda: health(Services(service))[0]["preparing"] == 1)
    beside = Client(served, "/v1/completions", messages=None, prompt="Once", max_tokens=2)
    await beside.task
    assert beside.sent[0]["status"] == 200
    left.leave()
    await left.task
    assert left.sent[0]["status"] == 499
    service.limits = replace(service.limits, timeout_s=0.25)
    late = Client(served)
    await late.task
    assert late.sent[0]["status"] == 504
    held.set()
    service.require().scheduler.close()


async def test_what_a_client_waited_for_in_a_child_ends_with_it(scheduler: Scheduler):
    children = Containment("time", most=1, limit_s=60)
    waiting = asyncio.ensure_future(scheduler.prepare(children.run, time.sleep, 600))
    await reached(lambda: scheduler.num_preparing == 1)
    waiting.cancel()
    await reached(lambda: scheduler.num_preparing == 0)
    assert children.run(len, "abc") == 3
    children.close()


def test_a_thread_that_is_stuck_does_not_keep_the_process():
    code = (
        "import threading; from edgespec.server.scheduler import in_thread; "
        "assert in_thread('x', lambda: 5).result() == 5; in_thread('x', threading.Event().wait)"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


async def test_an_answer_that_takes_too_long_is_an_error(model: Model):
    service = Service("demo")
    service.limits = type(service.limits)(timeout_s=0.25)
    service.use(model)
    app = create_app(Services(service))
    bias = {str(token_id): -100 for token_id in model.target.vocabulary.end_ids}
    whole = Client(app, logit_bias=bias)
    await whole.task
    assert whole.sent[0]["status"] == 504
    streamed = Client(app, logit_bias=bias, stream=True)
    await streamed.task
    assert b'"error":' in streamed.sent[-1]["body"] and not streamed.sent[-1]["more_body"]  # an event, if it began
    service.require().scheduler.close()
