"""One request as an ASGI server hands it to the application, for tests in which clients leave or wait."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.applications import Starlette

_MESSAGES = [{"role": "user", "content": "hi"}]

# The protocols by path: the fields with which each asks for a short answer, and its pings where they are its own.
PATHS = ("/v1/chat/completions", "/v1/completions", "/completion", "/v1/responses", "/v1/messages", "/api/chat")
FIELDS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once", "messages": None, "max_tokens": 4},
    "/completion": {"prompt": "Once", "messages": None, "max_tokens": None, "n_predict": 4},
    "/v1/responses": {"input": "hi", "messages": None, "max_tokens": None, "max_output_tokens": 4},
    "/v1/messages": {"max_tokens": 4},
    "/api/chat": {"model": "demo", "max_tokens": None, "options": {"num_predict": 4}},
}
PINGS = {"/v1/messages": b'event: ping\ndata: {"type":"ping"}\n\n', "/api/chat": b""}


class Client:
    """Sends a chat of at most 1,900 tokens, changed by `fields` (None: without it); `leave` closes the connection."""

    def __init__(self, app: Starlette, path: str = "/v1/chat/completions", **fields: Any) -> None:
        given = {"messages": _MESSAGES, "max_tokens": 1900} | fields
        body = json.dumps({name: value for name, value in given.items() if value is not None}).encode()
        self._received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._received.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.sent: list[dict[str, Any]] = []
        headers = [(b"host", b"127.0.0.1")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        self.task = asyncio.ensure_future(app(scope, self._received.get, self._send))

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        """What has arrived so far."""
        return b"".join(part.get("body", b"") for part in self.sent)

    def leave(self) -> None:
        """Close the connection."""
        self._received.put_nowait({"type": "http.disconnect"})
