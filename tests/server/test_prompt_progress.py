"""`return_progress`: how much of the prompt is read, told in a stream while it is."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise
from typing import Any

import pytest
from starlette.testclient import TestClient

from asgi_client import Client
from edgespec import Model
from edgespec.server.app import create_app
from edgespec.server.service import Service
from waiting import reached

LONG = "one two three four five six seven eight nine ten " * 100
CHAT = {"messages": [{"role": "user", "content": LONG}]}


def parts(client: TestClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    answered = client.post(path, json={"max_tokens": 4, "temperature": 0, "stream": True} | fields)
    assert answered.status_code == 200, answered.text
    *events, _done, _rest = answered.text.split("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(part: dict[str, Any]) -> str:
    choice = part["choices"][0]
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "A list: " + LONG}),
    ],
)
def test_the_passes_of_a_prompt_are_told(client: TestClient, path: str, fields: dict[str, Any]):
    found = parts(client, path, return_progress=True, **fields)
    told = [part["prompt_progress"] for part in found if "prompt_progress" in part]
    total, cached = found[-1]["timings"]["prompt_n"] + told[0]["cache"], told[0]["cache"]
    assert [(each["total"], each["cache"]) for each in told] == [(total, cached)] * len(told)
    assert told[-1]["processed"] == total and len(told) > 1
    assert all(one["processed"] < other["processed"] for one, other in pairwise(told))
    assert all(one["time_ms"] <= other["time_ms"] for one, other in pairwise(told))
    assert not any(text_of(part) for part in found if "prompt_progress" in part) and any(map(text_of, found))
    again = parts(client, path, return_progress=True, **fields)
    told = [part["prompt_progress"] for part in again if "prompt_progress" in part]
    assert told[-1]["cache"] == total - 1 and told[-1]["processed"] == total  # nearly all of it is cached now
    plain = parts(client, path, **fields)
    assert not any("prompt_progress" in part for part in plain)
    assert "".join(map(text_of, plain)) == "".join(map(text_of, again))


def test_without_a_stream_it_has_no_effect(client: TestClient):
    answered = client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 4, "return_progress": True})
    assert answered.status_code == 200 and "prompt_progress" not in answered.json()


def test_it_is_sent_while_the_prompt_is_read(service: Service, model: Model, monkeypatch: pytest.MonkeyPatch):
    """And a client that leaves then ends its generation."""

    async def main() -> None:
        client = Client(create_app(service), messages=CHAT["messages"], return_progress=True, stream=True)
        await reached(lambda: b"prompt_progress" in client.body)
        client.leave()
        await client.task
        await reached(lambda: service.require().scheduler.num_running == 0)
        assert service.metrics.finished == {"cancelled": 1} and service.metrics.new_tokens == 0

    forward = model.target.forward

    def slow(*given: Any) -> Any:
        time.sleep(0.3)
        return forward(*given)

    monkeypatch.setattr(model.target, "forward", slow)
    asyncio.run(main())
