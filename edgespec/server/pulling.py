"""Ollama's `/api/pull` and `/api/delete`: models of the user's own folder, and not those that this server serves.

What is pulled is served when the server is started with it. Both need somebody who may use this machine's disk and
network: a program on it, or one with the API key, and no web page but the server's own.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from edgespec.errors import ConfigError, EdgespecError, ModelNotFound, StateError, shown
from edgespec.loading.catalogue import parse
from edgespec.loading.own_models import remove
from edgespec.loading.pull import pull
from edgespec.server.answer import compact
from edgespec.server.http_errors import HttpError, bad_request
from edgespec.server.requests import Fields, parse_object, read
from edgespec.server.service import Services, without_tag
from edgespec.server.web import STREAM_HEADERS, json_response, read_body

_EVERY_S = 0.2  # between two looks at how far a pull is
_SUCCESS = {"status": "success"}


class ModelName(Fields):
    """A request to `/api/pull` or `/api/delete`. Ollama's client for JavaScript calls the model `name`."""

    model: str | None = None
    name: str | None = None
    insecure: bool | None = None
    stream: bool | None = None


class _ClientLeft(BaseException):
    """Ends a download, whose files are kept for the next one; no `Exception`, after which it would be tried again."""


async def _asked(services: Services, request: Request) -> tuple[ModelName, str, bool]:
    """A request, the name in it, and whether it is that of a served model. Raises HttpError."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise HttpError(403, "other web pages may not change the models of this machine", code="wrong_origin")
    try:
        is_near = request.client is None or ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:  # a test's client
        is_near = True
    if not is_near and services.api_key is None:
        raise HttpError(403, "other machines may change models only with an API key: start the server with one")
    asked = read(ModelName, parse_object(await read_body(request, services.limits)), [])
    if not (name := asked.model or asked.name):
        raise bad_request("model is missing: give the name of one", "model")
    served = {without_tag(each) for service in services.all for each in service.names}
    return asked, name, without_tag(name) in served


async def respond_pull(services: Services, request: Request) -> Response:
    """Get a model into the user's folder, as `edgespec pull` does (Ollama). Lines of JSON tell how far it is."""
    asked, name, is_served = await _asked(services, request)
    try:
        lines = _lines_of(name, is_here=is_served or parse(name) is None)
    except ModelNotFound as exc:
        raise HttpError(404, str(exc), param="model", code="model_not_found") from exc
    if asked.stream is not False:
        encoded = (compact(line).encode() + b"\n" async for line in lines)
        return StreamingResponse(encoded, headers=STREAM_HEADERS, media_type="application/x-ndjson")
    *_, last = [line async for line in lines]
    return json_response(last, 200 if last == _SUCCESS else 500)


async def _lines_of(name: str, *, is_here: bool) -> AsyncIterator[Mapping[str, Any]]:
    """What Ollama says of a pull."""
    yield {"status": "pulling manifest"}
    if is_here:
        yield _SUCCESS
        return
    said, has_left = deque[Mapping[str, Any]](), False

    def on_bytes(file: str, done: int, total: int) -> None:
        if has_left:
            raise _ClientLeft
        said.append({"status": f"pulling {file}", "digest": file, "total": total, "completed": done})

    def work() -> None:
        try:
            pull(name, on_bytes, lambda text: said.append({"status": text}))
            said.append({"status": f"{name} is here: this server serves it when it is started with it"})
            said.append(_SUCCESS)
        except EdgespecError as exc:
            said.append({"error": exc.on_the_command_line})

    pulling = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        while said or not pulling.done():
            lines = [said.popleft() for _ in range(len(said))]
            for line, after in zip(lines, [*lines, {}][1:], strict=True):
                if "digest" not in line or line["digest"] != after.get("digest"):  # the latest about a file
                    yield line
            await asyncio.wait({pulling}, timeout=_EVERY_S)
        await pulling
    finally:
        has_left = True


async def respond_delete(services: Services, request: Request) -> Response:
    """Remove a model that was pulled or added, as `edgespec rm` does (Ollama)."""
    _, name, is_served = await _asked(services, request)
    if is_served:
        raise HttpError(409, f"{shown(name)} is being served: stop the server first", code="in_use")
    try:
        await asyncio.to_thread(remove, name)
    except ModelNotFound as exc:
        raise HttpError(404, f"no model {shown(name)} was pulled or added here", code="model_not_found") from exc
    except (ConfigError, StateError) as exc:  # whose messages hold paths
        raise bad_request(f"{shown(name)} cannot be removed here: edgespec rm says why", "model") from exc
    return Response()
