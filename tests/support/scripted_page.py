"""A server that has the chat page and answers with what a test says: all forms of events, errors, a lost connection."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from edgespec.server.answer import Exchange
from edgespec.server.app import page_routes
from waiting import until

PING = Exchange.ping
ABOUT: dict[str, Any] = {
    "model_alias": "scripted",
    "engine": "none",
    "device": "cpu",
    "drafter": "auto",
    "memory": None,
}
ABOUT |= {"default_generation_settings": {"params": {}, "n_ctx": 1000}}


def part(text: str, drafter: str | None = None, finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return {"choices": [choice], "tokens": [{"text": text, "drafter": drafter}]}


class Scripted:
    """A server with the page; `parts` are what it answers with: bytes, what to wait for, or None: it goes away.

    `later`: what the following requests get instead.
    """

    def __init__(self, *more: Route, **about: Any) -> None:
        self.parts: Sequence[bytes | threading.Event | None] = ()
        self.later: list[Sequence[bytes | threading.Event | None]] = []
        self.asked: list[dict[str, Any]] = []
        same = {"/props": ABOUT | about, "/api/tags": {"models": [{"name": "scripted"}]}, "/health": {"running": 0}}
        routes = [Route(path, self._fixed(value)) for path, value in same.items()]
        chat = Route("/v1/chat/completions", self._chat, methods=["POST"])
        app = Starlette(routes=[*more, *page_routes(), *routes, chat])
        config = uvicorn.Config(app, port=0, log_config=None, ws="none")
        self.server = uvicorn.Server(config)

    def _fixed(self, value: Any) -> Any:
        async def answer(_: Request) -> Response:
            return JSONResponse(value)

        return answer

    async def _chat(self, request: Request) -> Response:
        self.asked.append(await request.json())
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[bytes]:
        parts, self.parts = self.parts, self.later.pop(0) if self.later else self.parts
        for each in parts:
            if each is None:
                raise ConnectionAbortedError
            if isinstance(each, threading.Event):
                await asyncio.to_thread(each.wait, 60)
            else:
                yield each
                await asyncio.sleep(0.01)  # a packet of its own

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"


@contextmanager
def scripted_server(*more: Route, **about: Any) -> Iterator[Scripted]:
    """One that runs. `more`: routes that replace its own; `about`: what it says of itself."""
    found = Scripted(*more, **about)
    thread = threading.Thread(target=found.server.run)
    thread.start()
    until(lambda: found.server.started)
    yield found
    found.server.should_exit = True
    thread.join()
