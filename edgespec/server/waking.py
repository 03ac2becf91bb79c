"""Streams of requests that wait until the model is loaded again: they begin meanwhile, as they do for a long prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgespec.server import web
from edgespec.server.exchange import Exchange
from edgespec.server.http_errors import as_http_error


class WakingStream(Response):
    """`answer` becomes the response, which in the first seconds may be any; then it has begun as a stream of `form`."""

    def __init__(self, answer: Awaitable[Response], form: type[Exchange]) -> None:
        super().__init__(headers=web.STREAM_HEADERS, media_type=form.media_type)
        del self.headers["content-length"]
        self._answer, self._form = answer, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.ensure_future(self._answer)
        has_begun = False
        try:
            await asyncio.wait({task}, timeout=web.BEGINS_AFTER_S)
            while not task.done():
                if not has_begun:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                elif self._form.ping:
                    await send({"type": "http.response.body", "body": self._form.ping, "more_body": True})
                has_begun = True
                await asyncio.wait({task}, timeout=web.PING_EVERY_S)
            response = task.result()
        except ClientDisconnect:
            return
        except Exception as exc:
            error = as_http_error(exc)
            if has_begun:
                await send({"type": "http.response.body", "body": self._form.failed_early(error), "more_body": False})
            else:
                await web.error_response(error, scope["path"])(scope, receive, send)
            return
        finally:
            task.cancel()
        if has_begun and not isinstance(response, web.EventStream):  # Ollama's answer to a request without a text
            await send({"type": "http.response.body", "body": bytes(response.body) + b"\n", "more_body": False})
            return
        if isinstance(response, web.EventStream):
            response.has_begun = has_begun
        await response(scope, receive, send)
