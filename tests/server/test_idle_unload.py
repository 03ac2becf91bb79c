"""A model that is unloaded when nobody needs it and loaded again when somebody does, by time and by `keep_alive`."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from starlette.testclient import TestClient

from asgi_client import FIELDS as FIELDS_OF
from asgi_client import PATHS, PINGS, Client
from edgespec import Model
from edgespec.errors import CapabilityError, EngineError
from edgespec.server.app import create_app
from edgespec.server.service import Service, Services
from serving import BASE_URL
from several import FIELDS, GGUF, Served
from waiting import reached, until


class Host(Served):
    """The demo in this process, and a client of its server."""

    def __init__(self, idle_s: float | None = None) -> None:
        super().__init__(GGUF, Service(GGUF, idle_unload_s=idle_s))
        self.service.begin(self)
        self.load()
        self.client = TestClient(create_app(Services(self.service)), base_url=BASE_URL)

    def ask(self) -> str:
        answer = self.client.post("/v1/chat/completions", json=FIELDS)
        assert answer.status_code == 200
        return answer.json()["choices"][0]["message"]["content"]

    def ollama(self, path: str = "/api/generate", **fields: Any) -> dict[str, Any]:
        stream = {} if path == "/api/show" else {"stream": False}
        answer = self.client.post(path, json={"model": "demo"} | stream | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def unload(self) -> None:
        """As a client asks for it, and wait until it is done."""
        assert self.ollama(keep_alive=0)["done_reason"] == "unload"
        until(lambda: self.is_closed)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Closed with the test."""
    made: list[Host] = []
    yield made
    for host in made:
        host.gate.set()
        host.service.close()


@pytest.fixture
def host(hosts: list[Host]) -> Host:
    hosts.append(Host())
    return hosts[0]


def test_an_unused_model_is_unloaded_and_the_next_request_loads_it(hosts: list[Host]):
    host = Host(idle_s=0.3)
    hosts.append(host)
    first = host.ask()
    until(lambda: host.is_closed)
    assert host.ask() == first and host.num_loads == 2
    until(lambda: host.is_closed)


def test_what_needs_no_model_tells_the_truth_and_loads_none(host: Host):
    paths = ("/health", "/v1/models", "/v1/models/demo", "/api/tags", "/api/version", "/openapi.json")
    before = {path: host.client.get(path).json() for path in paths}
    shown, properties = host.ollama("/api/show"), host.client.get("/props").json()
    assert properties["is_sleeping"] is False and properties["memory"]
    host.unload()
    assert {path: host.client.get(path).json() for path in paths} == before
    assert host.ollama("/api/show") == shown
    assert host.client.post("/api/show", json={"model": "other"}).json() == shown
    assert host.client.get("/props").json() == properties | {"is_sleeping": True, "memory": None}
    assert host.client.get("/api/ps").json() == {"models": []}
    assert "\nedgespec_model_loaded 0\n" in host.client.get("/metrics").text
    assert host.num_loads == 1


async def test_requests_at_once_load_it_once_and_wait(host: Host):
    host.unload()
    host.gate.clear()
    app = create_app(Services(host.service))
    clients = [Client(app, max_tokens=4, stream=is_stream) for is_stream in (True, False)]
    clients.append(Client(app, "/tokenize", messages=None, max_tokens=None, content="hi"))
    await reached(lambda: host.num_loads == 2)
    await asyncio.sleep(0.1)
    assert not any(client.sent for client in clients) and host.client.get("/health").status_code == 200
    host.gate.set()
    for client in clients:
        await client.task
        assert client.sent[0]["status"] == 200 and b'"error"' not in client.body
    assert host.num_loads == 2


async def test_a_load_that_fails_is_told_to_all_who_wait_and_tried_again(host: Host, caplog: pytest.LogCaptureFixture):
    first = host.ask()
    host.unload()
    host.gate.clear()
    host.failure = CapabilityError("demo needs 9 GiB, /secret/path")
    app = create_app(Services(host.service))
    clients = [Client(app, stream=True), Client(app), Client(app, "/api/chat", max_tokens=None)]
    await reached(lambda: host.num_loads == 2)
    await asyncio.sleep(0.1)
    host.gate.set()
    for client in clients:
        await client.task
        assert client.sent[0]["status"] == 503 and b"cannot be loaded" in client.body
        assert b"secret" not in client.body
    assert host.num_loads == 2 and "9 GiB" in caplog.text
    host.failure = None
    assert host.ask() == first and host.num_loads == 3


async def test_a_stream_begins_while_it_is_loaded(host: Host, hasty: None):
    host.unload()
    for failure in (CapabilityError("no room"), None):
        host.gate.clear()
        client = Client(create_app(Services(host.service)), max_tokens=4, stream=True)
        await reached(lambda client=client: client.body.count(b": ping\n\n") > 1)
        host.failure = failure
        host.gate.set()
        await client.task
        rest = client.body.replace(b": ping\n\n", b"")
        assert client.sent[0]["status"] == 200 and not client.sent[-1]["more_body"]
        assert (b"cannot be loaded" in rest) == (b"error" in rest) == (failure is not None) and rest.count(b"\n") > 1


async def test_a_stop_during_a_load_ends_it(host: Host):
    host.unload()
    host.gate.clear()
    app = create_app(Services(host.service))
    client = Client(app)
    await reached(lambda: host.num_loads == 2)
    host.service.stop()
    await client.task
    assert client.sent[0]["status"] == 503 and b"stopping" in client.body
    late = Client(app)
    await late.task
    assert late.sent[0]["status"] == 503
    host.service.close()  # does not wait for the load
    assert host.service.is_loading
    host.gate.set()
    until(lambda: len(host.opened) == 2 and host.is_closed)


async def test_nothing_is_unloaded_under_an_answer(hosts: list[Host]):
    host = Host(idle_s=0.02)
    hosts.append(host)
    bias = {str(id): -100 for id in host.service.require().model.target.vocabulary.end_ids}
    client = Client(create_app(Services(host.service)), stream=True, max_tokens=600, logit_bias=bias, speculative=False)
    await reached(lambda: client.sent)
    assert host.num_loads <= 2
    await client.task
    assert client.body.endswith(b"data: [DONE]\n\n")
    until(lambda: host.is_closed)
    assert host.num_loads <= 2


def test_ollamas_keep_alive_of_an_answer(host: Host):
    def expires_in_s() -> float:
        (model,) = host.client.get("/api/ps").json()["models"]
        return (datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)).total_seconds()

    options = {"num_predict": 4}
    assert expires_in_s() > 1e9
    host.ollama("/api/chat", messages=FIELDS["messages"], options=options, keep_alive="1.5h")
    assert 5300 < expires_in_s() <= 5400
    host.ask()  # the time holds from then on
    assert 5300 < expires_in_s() <= 5400
    assert host.ollama(keep_alive=-1)["done_reason"] == "load"
    assert expires_in_s() > 1e9
    assert host.ollama(prompt="hi", options=options, keep_alive=0)["done_reason"] in ("stop", "length")
    until(lambda: host.is_closed)
    assert host.ollama()["done_reason"] == "load" and host.num_loads == 2
    assert expires_in_s() > 1e9  # and ends when the model is loaded again


# -- Streams while a long prompt is read: the response begins, pings follow, and clients may leave at any time


class Gate:
    """Holds up every pass of the target until it is opened; `failure`: what the passes raise then."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self._opened = threading.Event()

    def open(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self._opened.set()

    def shut(self) -> None:
        self._opened.clear()

    def wait(self) -> None:
        assert self._opened.wait(60)
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def gate(model: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made, forward = Gate(), model.target.forward

    def held_up(*given: Any) -> Any:
        made.wait()
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
    gate.shut()
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


async def test_a_client_that_leaves_while_it_gets_pings_ends_its_generation(service: Service, gate: Gate, hasty):
    client = streamed(service, PATHS[0])
    await reached(lambda: b": ping" in client.body)
    client.leave()
    await client.task
    before = len(client.sent)
    gate.open()
    scheduler = service.require().scheduler
    await reached(lambda: scheduler.num_running == 0)
    await asyncio.sleep(0.3)
    assert service.metrics.finished == {"cancelled": 1} and len(client.sent) == before
    assert len(asyncio.all_tasks()) == 1
