"""A model that is unloaded when nobody needs it and loaded again when somebody does, by time and by `keep_alive`."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from asgi_client import FIELDS as FIELDS_OF
from asgi_client import PATHS, PINGS, Client
from edgespec import Model
from edgespec.errors import CapabilityError, EngineError
from edgespec.server.app import create_app
from edgespec.server.service import Service, Services
from several import FIELDS, GGUF, Host, MakeHost, Served
from waiting import reached, until


@pytest.fixture
def host(hosts: MakeHost) -> Host:
    return hosts((GGUF,))


@pytest.fixture
def served(host: Host) -> Served:
    """The demo of `host`."""
    return host[GGUF]


def unload(host: Host) -> None:
    """As a client asks for it, and wait until it is done."""
    assert host.ollama(keep_alive=0)["done_reason"] == "unload"
    until(lambda: host[GGUF].is_closed)


def test_an_unused_model_is_unloaded_and_the_next_request_loads_it(hosts: MakeHost):
    host = hosts((GGUF,), idle_unload_s=0.3)
    served = host[GGUF]
    first = host.ask(None)
    until(lambda: served.is_closed)
    assert host.ask(None) == first and served.num_loads == 2
    until(lambda: served.is_closed)


def test_what_needs_no_model_tells_the_truth_and_loads_none(host: Host, served: Served):
    paths = ("/health", "/v1/models", "/v1/models/demo", "/api/tags", "/api/version", "/openapi.json")
    before = {path: host.client.get(path).json() for path in paths}
    shown, properties = host.ollama("/api/show"), host.client.get("/props").json()
    assert properties["is_sleeping"] is False and properties["memory"]
    unload(host)
    assert {path: host.client.get(path).json() for path in paths} == before
    assert host.ollama("/api/show") == shown
    assert host.client.post("/api/show", json={"model": "other"}).json() == shown
    asleep = {"is_sleeping": True, "memory": None, "total_slots": 0, "device": None, "reproducible": None}
    assert host.client.get("/props").json() == properties | asleep
    assert host.client.get("/api/ps").json() == {"models": []}
    assert "\nedgespec_model_loaded 0\n" in host.client.get("/metrics").text
    assert served.num_loads == 1


async def test_requests_at_once_load_it_once_and_wait(host: Host, served: Served):
    unload(host)
    served.gate.clear()
    clients = [Client(host.app, max_tokens=4, stream=is_stream) for is_stream in (True, False)]
    clients.append(Client(host.app, "/tokenize", messages=None, max_tokens=None, content="hi"))
    await reached(lambda: served.num_loads == 2)
    await asyncio.sleep(0.1)
    assert not any(client.sent for client in clients) and host.client.get("/health").status_code == 200
    served.gate.set()
    for client in clients:
        await client.task
        assert client.sent[0]["status"] == 200 and b'"error"' not in client.body
    assert served.num_loads == 2


async def test_a_load_that_fails_is_told_to_all_who_wait_and_tried_again(
    host: Host, served: Served, caplog: pytest.LogCaptureFixture
):
    first = host.ask(None)
    unload(host)
    served.gate.clear()
    served.failure = CapabilityError("demo needs 9 GiB, /secret/path")
    clients = [Client(host.app, stream=True), Client(host.app), Client(host.app, "/api/chat", max_tokens=None)]
    await reached(lambda: served.num_loads == 2)
    await asyncio.sleep(0.1)
    served.gate.set()
    for client in clients:
        await client.task
        assert client.sent[0]["status"] == 503 and b"cannot be loaded" in client.body
        assert b"secret" not in client.body
    assert served.num_loads == 2 and "9 GiB" in caplog.text
    served.failure = None
    assert host.ask(None) == first and served.num_loads == 3


async def test_a_stream_begins_while_it_is_loaded(host: Host, served: Served, hasty: None):
    unload(host)
    for failure in (CapabilityError("no room"), None):
        served.gate.clear()
        client = Client(host.app, max_tokens=4, stream=True)
        await reached(lambda client=client: client.body.count(b": ping\n\n") > 1)
        served.failure = failure
        served.gate.set()
        await client.task
        rest = client.body.replace(b": ping\n\n", b"")
        assert client.sent[0]["status"] == 200 and not client.sent[-1]["more_body"]
        assert (b"cannot be loaded" in rest) == (b"error" in rest) == (failure is not None) and rest.count(b"\n") > 1


async def test_a_stop_during_a_load_ends_it(host: Host, served: Served):
    unload(host)
    served.gate.clear()
    client = Client(host.app)
    await reached(lambda: served.num_loads == 2)
    served.service.stop()
    await client.task
    assert client.sent[0]["status"] == 503 and b"stopping" in client.body
    late = Client(host.app)
    await late.task
    assert late.sent[0]["status"] == 503 and (b"retry-after", b"1") in late.sent[0]["headers"]
    served.service.close()  # does not wait for the load
    assert served.service.is_loading
    served.gate.set()
    until(lambda: len(served.opened) == 2 and served.is_closed)


async def test_nothing_is_unloaded_under_an_answer(hosts: MakeHost):
    host = hosts((GGUF,), idle_unload_s=0.02)
    served = host[GGUF]
    bias = {str(id): -100 for id in served.service.require().model.target.vocabulary.end_ids}
    client = Client(host.app, stream=True, max_tokens=600, logit_bias=bias, speculative=False)
    await reached(lambda: client.sent)
    assert served.num_loads <= 2
    await client.task
    assert client.body.endswith(b"data: [DONE]\n\n")
    until(lambda: served.is_closed)
    assert served.num_loads <= 2


def test_ollamas_keep_alive_of_an_answer(host: Host, served: Served):
    def expires_in_s() -> float:
        (model,) = host.client.get("/api/ps").json()["models"]
        return (datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)).total_seconds()

    options = {"num_predict": 4}
    assert expires_in_s() > 1e9
    host.ollama("/api/chat", messages=FIELDS["messages"], options=options, keep_alive="1.5h")
    assert 5300 < expires_in_s() <= 5400
    host.ask(None)  # the time holds from then on
    assert 5300 < expires_in_s() <= 5400
    assert host.ollama(keep_alive=-1)["done_reason"] == "load"
    assert expires_in_s() > 1e9
    assert host.ollama(prompt="hi", options=options, keep_alive=0)["done_reason"] in ("stop", "length")
    until(lambda: served.is_closed)
    loaded = host.ollama("/api/chat", messages=[])
    assert (loaded["done_reason"], loaded["message"]["content"], served.num_loads) == ("load", "", 2)
    assert expires_in_s() > 1e9  # and ends when the model is loaded again


# -- Streams while a long prompt is read: the response begins, pings follow, and clients may leave at any time


class Gate(threading.Event):
    """Holds up every pass of the target until it is opened; `failure`: what the passes raise then."""

    failure: Exception | None = None

    def open(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.set()


@pytest.fixture
def gate(model: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made, forward = Gate(), model.target.forward

    def held_up(*given: Any) -> Any:
        assert made.wait(60)
        if made.failure is not None:
            raise made.failure
        return forward(*given)

    monkeypatch.setattr(model.target, "forward", held_up)
    yield made
    made.open()


def streamed(service: Service, path: str) -> Client:
    return Client(create_app(Services(service)), path, **{"max_tokens": 4} | FIELDS_OF.get(path, {}), stream=True)


@pytest.mark.parametrize("path", PATHS)
async def test_pings_are_sent_until_the_first_part_and_the_stream_is_whole(
    service: Service, gate: Gate, hasty, path: str
):
    client, ping = streamed(service, path), PINGS.get(path, b": ping\n\n")
    await reached(lambda: len(client.sent) > 2 if ping else client.sent)
    assert client.sent[0]["status"] == 200 and client.body == ping * (len(client.sent) - 1)
    if not ping:
        await asyncio.sleep(0.3)
        assert len(client.sent) == 1
    gate.open()
    await client.task
    rest = client.body.replace(ping, b"") if ping else client.body
    assert b"error" not in rest.replace(b'"error":null', b"") and not client.sent[-1]["more_body"]
    assert rest.count(b"\n") >= 2


async def test_a_silence_in_the_middle_is_interrupted_too(service: Service, gate: Gate, hasty):
    """An answer that turns out to be a tool call has nothing to send until the call is complete."""
    gate.open()
    client = Client(create_app(Services(service)), ignore_eos=True, speculative=False, max_tokens=400, stream=True)
    await reached(lambda: client.sent)
    gate.clear()
    await reached(lambda: b": ping" in client.body)
    gate.open()
    await client.task
    parts = [part for part in client.body.decode().split("\n\n") if part != ": ping"]
    assert len(parts) > 100 and parts[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(part.removeprefix("data: "))["choices"] for part in parts[:-2])


@pytest.mark.parametrize("path", PATHS)
async def test_a_failure_after_the_beginning_has_the_form_of_the_protocol(
    service: Service, gate: Gate, hasty, path: str
):
    client = streamed(service, path)
    await reached(lambda: client.sent)
    gate.open(EngineError("it broke"))
    await client.task
    assert client.sent[0]["status"] == 200 and not client.sent[-1]["more_body"]
    last = client.sent[-1]["body"].decode()
    if path == "/api/chat":
        assert "failed" in json.loads(last)["error"]
        return
    event, _, data = last.rpartition("data: ")
    body = json.loads(data)
    assert event == {"/v1/messages": "event: error\n", "/v1/responses": "event: error\n"}.get(path, "")
    assert (body["type"] == "error") if event else body["error"]["code"] == "internal_error"


async def test_a_response_that_has_begun_ends_as_failed(service: Service, gate: Gate):
    gate.open()
    path = "/v1/responses"
    client = Client(
        create_app(Services(service)),
        path,
        **FIELDS_OF[path] | {"max_output_tokens": 400, "temperature": 5, "seed": 1},
        stream=True,
    )
    await reached(lambda: b"response.created" in client.body)
    gate.open(EngineError("it broke"))
    await client.task
    *_, error, failed = [json.loads(part.split("data: ")[1]) for part in client.body.decode().split("\n\n")[:-1]]
    assert (error["type"], failed["type"]) == ("error", "response.failed")
    assert failed["sequence_number"] == error["sequence_number"] + 1
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": error["code"], "message": error["message"]}
