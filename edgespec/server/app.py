"""The ASGI application: which path is answered by what."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from edgespec.server import embeddings, facts, messages, native, ollama, page, readable, responses
from edgespec.server.chat_completions import ChatExchange
from edgespec.server.chat_request import apply_template, count_input_tokens, read_chat
from edgespec.server.completions import read_completion
from edgespec.server.exchange import AtRest, Exchange, Read
from edgespec.server.fields import Fields, parse_object
from edgespec.server.guard import LOCAL_ORIGINS, LOOPBACK, Guard
from edgespec.server.http_errors import HttpError
from edgespec.server.infill import read_infill
from edgespec.server.service import Loaded, Service, Services
from edgespec.server.web import (
    CLIENT_LEFT,
    NOTES,
    Bodies,
    Body,
    WakingStream,
    error_response,
    json_response,
    respond,
    use_model,
    while_connected,
)

Handler = Callable[[Request], Awaitable[Response]]
_GENERATING: dict[str, Read] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
    "/chat/completions": read_chat,  # llama-server's own paths
    "/completion": native.read_native,
    "/completions": native.read_native,
    "/v1/responses": responses.read_responses,
    "/responses": responses.read_responses,
    "/v1/messages": messages.read_messages,
    "/api/chat": ollama.read_chat_request,
    "/api/generate": ollama.read_generate_request,
    "/infill": read_infill,
}
# The form of streams, where it is not OpenAI's.
_FORMS: dict[str, type[Exchange]] = {
    "/v1/responses": responses.ResponsesExchange,
    "/responses": responses.ResponsesExchange,
    "/v1/messages": messages.MessagesExchange,
    "/api/chat": ollama.OllamaExchange,
    "/api/generate": ollama.OllamaExchange,
}
# What is answered while the model is unloaded, without loading it.
_AT_REST: dict[str, AtRest] = {
    "/api/chat": partial(ollama.unload_at_rest, is_chat=True),
    "/api/generate": partial(ollama.unload_at_rest, is_chat=False),
}
_REPLYING: dict[str, Callable[[Loaded, Fields], dict[str, Any]]] = {
    "/tokenize": facts.tokenize,
    "/detokenize": facts.detokenize,
    "/apply-template": apply_template,
    "/v1/responses/input_tokens": responses.count_input_tokens,
    "/responses/input_tokens": responses.count_input_tokens,
    "/v1/chat/completions/input_tokens": count_input_tokens,
    "/chat/completions/input_tokens": count_input_tokens,
    "/v1/messages/count_tokens": messages.count_tokens,
}
_TELLING: dict[str, Callable[[Service, Fields], dict[str, Any]]] = {  # no model has to be loaded for these
    "/api/show": facts.show,
}
_EMBEDDING: dict[str, embeddings.Read] = {
    "/v1/embeddings": embeddings.read_openai,
    "/api/embed": embeddings.read_ollama,
    "/api/embeddings": embeddings.read_ollama_prompt,
    "/embedding": embeddings.read_llamacpp,
    "/embeddings": embeddings.read_llamacpp,
}


def create_app(
    served: Service | Services, *, origins: Sequence[str] = (), hosts: Sequence[str] = LOOPBACK
) -> Starlette:
    """The application. `origins`: web pages that may call it; `hosts`: allowed Host headers, empty for any. Pages and
    names of this machine are allowed besides.

    It does not load or close the models: the owner of `served` does.
    """
    services = Services.of(served)
    bodies = Bodies(services.limits)
    handlers = {path: _generating(services, bodies, path, read) for path, read in _GENERATING.items()}
    routes = [Route(path, _caught(handle), methods=["POST"]) for path, handle in handlers.items()]
    routes += [
        Route(path, _caught(_replying(services, bodies, reply)), methods=["POST"]) for path, reply in _REPLYING.items()
    ]
    routes += [
        Route(path, _caught(_telling(services, bodies, tell)), methods=["POST"]) for path, tell in _TELLING.items()
    ]
    routes += [
        Route(path, _caught(_embedding(services, bodies, read)), methods=["POST"]) for path, read in _EMBEDDING.items()
    ]
    reading = {path: _reading(services, read) for path, read in readable.AT_ONCE.items()}
    reading |= {path: _reading(services, read, in_thread=True) for path, read in readable.FROM_DISK.items()}
    routes += [Route(path, _caught(handle), methods=["GET"]) for path, handle in reading.items()]
    shown = page.routes()
    paths = [route.path for route in (*routes, *shown)]
    open_paths = ["/health", "/v1/health", *(route.path for route in shown)]  # the page asks for the key itself
    rules: dict[str, Any] = {"paths": paths, "open_paths": open_paths, "hosts": hosts, "origins": origins}
    middleware = [Middleware(Guard, services=services, **rules)]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_origin_regex=LOCAL_ORIGINS.pattern,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[NOTES],
    )
    middleware.insert(0, cors)
    app = Starlette(
        routes=[*routes, *shown], middleware=middleware, exception_handlers={HTTPException: _http_exception}
    )
    app.router.redirect_slashes = False
    return app


def _generating(services: Services, bodies: Bodies, path: str, read: Read) -> Handler:
    form, at_rest = _FORMS.get(path, ChatExchange), _AT_REST.get(path)

    async def handle(request: Request) -> Response:
        async with bodies.read(request) as body:
            service = services.asked_by(body.data, path)
            if service.is_new or (service.answers_at_once and not services.are_several):
                return await respond(request, service, read, body)
            given = parse_object(body.data)
            found = None if at_rest is None or service.answers_at_once else at_rest(service.names, Fields(given))
            if found is not None:
                return json_response(found)
            # Of several models the one that answers at once may have to make way for another before the stream begins.
            is_stream = given.get("stream", form.streams_by_default) is True
            if not is_stream:
                return await respond(request, service, read, body)
            kept = Body(bodies, 0, body.data)  # it waits for a model, which may take long: others need not wait for it
            return WakingStream(respond(request, service, read, kept), form)

    return handle


def _embedding(services: Services, bodies: Bodies, read: embeddings.Read) -> Handler:
    async def handle(request: Request) -> Response:
        async with bodies.read(request) as body, AsyncExitStack() as use:
            loaded = await use_model(request, services.asked_by(body.data, request.url.path), use)
            return await embeddings.respond_embeddings(request, loaded, read, body)

    return handle


def _replying(services: Services, bodies: Bodies, reply: Callable[[Loaded, Fields], dict[str, Any]]) -> Handler:
    async def handle(request: Request) -> Response:
        async with bodies.read(request) as body, AsyncExitStack() as use:
            loaded = await use_model(request, services.asked_by(body.data, request.url.path), use)
            work = loaded.scheduler.prepare(lambda: reply(loaded, Fields(parse_object(body.data))))
            async with asyncio.timeout(services.limits.timeout_s):
                return json_response(await while_connected(request.receive, work))

    return handle


def _telling(services: Services, bodies: Bodies, tell: Callable[[Service, Fields], dict[str, Any]]) -> Handler:
    async def handle(request: Request) -> Response:
        async with bodies.read(request) as body:
            service = services.asked_by(body.data, request.url.path)
            return json_response(await asyncio.to_thread(lambda: tell(service, Fields(parse_object(body.data)))))

    return handle


def _reading(services: Services, read: readable.ReadPath, *, in_thread: bool = False) -> Handler:
    async def handle(request: Request) -> Response:
        return await asyncio.to_thread(read, services, request) if in_thread else read(services, request)

    return handle


def _caught(handler: Handler) -> Handler:
    """`handler`, whose exceptions become errors in the shape of the protocol."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:  # before the body was complete
            return Response(status_code=CLIENT_LEFT)
        except Exception as exc:
            answer = error_response(exc, request.url.path)
            _forget_frames(exc)
            return answer

    return handle


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what a failed request has read: its frames hold its error, and its error them."""
    while error is not None:
        error.__traceback__, error = None, error.__context__


async def _http_exception(request: Request, exc: Exception) -> Response:
    """Starlette's own errors: an unknown path, a wrong method."""
    assert isinstance(exc, HTTPException)
    messages = {404: "no such path", 405: f"{request.method} is not allowed on this path"}
    error = HttpError(exc.status_code, messages.get(exc.status_code, exc.detail))
    answer = error_response(error, request.url.path)
    answer.headers.update(exc.headers or {})  # which methods are allowed
    return answer
