"""Streams while a long prompt is read: the response begins, pings follow, and clients may leave at any time."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from asgi_client import FIELDS, PATHS, PINGS, Client
from edgespec import Model
from edgespec.errors import EngineError
from edgespec.server import web
from edgespec.server.app import create_app
from edgespec.server.service import Service
from waiting import reached


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


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds become hundredths."""
    monkeypatch.setattr(web, "BEGINS_AFTER_S", 0.05)
    monkeypatch.setattr(web, "PING_EVERY_S", 0.1)


def streamed(service: Service, path: str) -> Client:
    return Client(create_app(service), path, **{"max_tokens": 4} | FIELDS.get(path, {}), stream=True)


@pytest.mark.parametrize("path", PATHS)
def test_pings_are_sent_until_the_first_part_and_the_stream_is_whole(service: Service, gate: Gate, hasty, path: str):
    async def main() -> None:
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
        assert rest.count(b"\n") > 2

    asyncio.run(main())


def test_a_silence_in_the_middle_is_interrupted_too(service: Service, gate: Gate, hasty):
    """An answer that turns out to be a tool call has nothing to send until the call is complete."""

    async def main() -> None:
        gate.open()
        client = Client(create_app(service), ignore_eos=True, speculative=False, max_tokens=400, stream=True)
        await reached(lambda: client.sent)
        gate.shut()
        await reached(lambda: b": ping" in client.body)
        gate.open()
        await client.task
        parts = [part for part in client.body.decode().split("\n\n") if part != ": ping"]
        assert len(parts) > 100 and parts[-2:] == ["data: [DONE]", ""]
        assert all(json.loads(part.removeprefix("data: "))["choices"] for part in parts[:-2])

    asyncio.run(main())


@pytest.mark.parametrize("path", PATHS)
def test_a_failure_after_the_beginning_has_the_form_of_the_protocol(service: Service, gate: Gate, hasty, path: str):
    async def main() -> None:
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

    asyncio.run(main())


def test_a_response_that_has_begun_ends_as_failed(service: Service, gate: Gate):
    async def main() -> None:
        gate.open()
        path = "/v1/responses"
        client = Client(
            create_app(service),
            path,
            **FIELDS[path] | {"max_output_tokens": 400, "temperature": 5, "seed": 1},
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

    asyncio.run(main())


def test_a_failure_in_the_first_seconds_has_a_status(service: Service, gate: Gate):
    async def main() -> None:
        client = streamed(service, PATHS[0])
        await asyncio.sleep(0.2)
        assert not client.sent
        gate.open(EngineError("it broke"))
        await client.task
        assert client.sent[0]["status"] == 500

    asyncio.run(main())


def test_what_is_known_before_the_prompt_is_read_has_a_status(service: Service, gate: Gate, hasty):
    async def main() -> None:
        too_long = [{"role": "user", "content": "x " * 5000}]
        client = Client(create_app(service), messages=too_long, stream=True)
        await client.task
        assert client.sent[0]["status"] == 400
        waiting = [streamed(service, PATHS[0]) for _ in range(5)]
        await reached(lambda: all(each.sent for each in waiting))
        refused = streamed(service, PATHS[0])
        await refused.task
        assert refused.sent[0]["status"] == 429
        for each in waiting:
            each.leave()
        gate.open()
        await asyncio.gather(*(each.task for each in waiting))

    asyncio.run(main())


def test_a_client_that_leaves_while_it_gets_pings_ends_its_generation(service: Service, gate: Gate, hasty):
    async def main() -> None:
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

    asyncio.run(main())
