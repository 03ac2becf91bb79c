"""The ASGI application: which path is answered by what, the page at `/`, and the API's description.

No name in a request becomes a path: the page's files are listed once, and each has its own route. The page needs no API
key; it asks for one when the server does, and sends it with its requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from edgespec import __version__
from edgespec.server import chat, completions, facts, messages, native, ollama, responses
from edgespec.server.answer import Endpoint, Exchange
from edgespec.server.chat import ChatRequest
from edgespec.server.completions import Completion
from edgespec.server.guard import LOCAL_ORIGINS, LOOPBACK, Guard
from edgespec.server.http_errors import HttpError
from edgespec.server.native import NativeCompletion
from edgespec.server.ollama import OllamaChat, OllamaExchange, OllamaGenerate
from edgespec.server.requests import Fields
from edgespec.server.responses import ResponseRequest
from edgespec.server.service import Services
from edgespec.server.web import CLIENT_LEFT, NOTES, Answering, Handler, error_response, json_response

Schema = dict[str, Any]


def create_app(services: Services, *, origins: Sequence[str] = (), hosts: Sequence[str] = LOOPBACK) -> Starlette:
    """The application. `origins`: web pages that may call it; `hosts`: allowed Host headers, empty for any. Pages and
    names of this machine are allowed besides.

    It does not load or close the models: the owner of `services` does.
    """
    routes = [Route(path, Answering(services, each), methods=["POST"]) for path, each in ENDPOINTS.items()]
    routes += [Route(path, _caught(_reading(services, each)), methods=["GET"]) for path, (_, each) in READABLE.items()]
    routes += [Route(path, _caught(partial(each, services)), methods=[how]) for path, (how, _, each) in OTHERS.items()]
    routes += [Route(path, _caught(partial(_refuse, why)), methods=["POST"]) for path, why in NOT_HERE.items()]
    shown = page_routes()
    paths = frozenset(route.path for route in (*routes, *shown))
    open_paths = frozenset(("/health", "/v1/health", *(route.path for route in shown)))
    names = {"hosts": frozenset(map(str.lower, hosts)), "origins": frozenset(origins)}
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_origin_regex=LOCAL_ORIGINS.pattern,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=[NOTES],
    )
    app = Starlette(
        routes=[*routes, *shown],
        middleware=[cors, Middleware(Guard, services=services, paths=paths, open_paths=open_paths, **names)],
        exception_handlers={HTTPException: _http_exception},
    )
    app.router.redirect_slashes = False
    return app


# -- how paths are answered


async def _show(services: Services, request: Request) -> Response:
    """Facts of the model (Ollama)."""
    asked = await ollama.read_named(services, request)
    service = services.named(asked.model or asked.name, request.url.path)
    return json_response(await asyncio.to_thread(facts.show, service))


async def _refuse(why: str, request: Request) -> Response:
    raise HttpError(501, why, code="not_supported")


def _caught(handler: Handler) -> Handler:
    """`handler`, whose exceptions become errors in the shape of the protocol."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:  # before the body was complete
            return Response(status_code=CLIENT_LEFT)
        except Exception as exc:
            return error_response(exc, request.url.path)

    return handle


async def _http_exception(request: Request, exc: Exception) -> Response:
    """Starlette's own errors: an unknown path, a wrong method."""
    assert isinstance(exc, HTTPException)
    said = {404: "no such path", 405: f"{request.method} is not allowed on this path"}
    answer = error_response(HttpError(exc.status_code, said.get(exc.status_code, exc.detail)), request.url.path)
    answer.headers.update(exc.headers or {})  # which methods are allowed
    return answer


# -- paths that are read with GET; `?model=` chooses one of several models, as in llama-server's router


def _reading(services: Services, read: Callable[[Services, Request], Response]) -> Handler:
    async def handle(request: Request) -> Response:
        return await asyncio.to_thread(read, services, request)  # which may read a model's header

    return handle


def _models(services: Services, _: Request) -> Response:
    served = [(service, name) for service in services.all for name in service.names]
    listed = [facts.model_object(*each, with_status=services.are_several) for each in served]
    pages = {"has_more": False, "first_id": listed[0]["id"], "last_id": listed[-1]["id"]}  # Anthropic's
    return json_response({"object": "list", "data": listed, **pages})


def _model(services: Services, request: Request) -> Response:
    name = request.path_params["name"]
    service = services.named(name)
    shown = name if name in service.names else service.name
    return json_response(facts.model_object(service, shown, with_status=services.are_several))


_PROMETHEUS = "text/plain; version=0.0.4"
READABLE: dict[str, tuple[str, Callable[[Services, Request], Response]]] = {
    "/v1/models": ("The served models", _models),
    "/models": ("The same as /v1/models", _models),
    "/v1/models/{name:path}": ("One model by name", _model),  # hub ids have slashes
    "/health": ("200 once the model answers, 503 before", lambda services, _: json_response(*facts.health(services))),
    "/v1/health": ("The same as /health", lambda services, _: json_response(*facts.health(services))),
    "/metrics": (
        "Counters for Prometheus",
        lambda services, _: PlainTextResponse(facts.metrics_text(services), media_type=_PROMETHEUS),
    ),
    "/props": (
        "Model, engine, drafter, default settings, memory plan",
        lambda services, request: json_response(facts.properties(services.named(request.query_params.get("model")))),
    ),
    "/openapi.json": ("This document", lambda services, _: json_response(document(services))),
    "/api/version": ("The version (Ollama)", lambda *_: json_response(facts.version())),
    "/api/tags": ("The served models (Ollama)", lambda services, _: json_response(facts.listed(services))),
    "/api/ps": ("Those that are loaded (Ollama)", lambda services, _: json_response(facts.running(services))),
}
_CHAT = Endpoint(ChatRequest, chat.answer_chat, chat.ChatExchange)
_NATIVE = Endpoint(NativeCompletion, native.answer_native, native.NativeExchange)
_RESPONSES = Endpoint(ResponseRequest, responses.answer_responses, responses.ResponsesExchange)
ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": Endpoint(Completion, completions.answer_completion, completions.CompletionExchange),
    "/v1/responses": _RESPONSES,
    "/v1/messages": Endpoint(messages.MessagesRequest, messages.answer_messages, messages.MessagesExchange),
    "/v1/messages/count_tokens": Endpoint(messages.CountRequest, messages.count_tokens),
    "/v1/embeddings": Endpoint(facts.OpenAiEmbedding, facts.embed_openai),
    # llama-server's
    "/chat/completions": _CHAT,
    "/responses": _RESPONSES,
    "/completion": _NATIVE,
    "/completions": _NATIVE,
    "/infill": Endpoint(native.Infill, native.answer_infill, native.NativeExchange),
    "/tokenize": Endpoint(facts.TokenizeRequest, facts.tokenize),
    "/detokenize": Endpoint(facts.DetokenizeRequest, facts.detokenize),
    # Ollama's
    "/api/chat": Endpoint(OllamaChat, ollama.answer_chat, OllamaExchange),
    "/api/generate": Endpoint(OllamaGenerate, ollama.answer_generate, OllamaExchange),
    "/api/embed": Endpoint(facts.OllamaEmbedding, facts.embed_ollama),
}
# Those that no model has to be loaded for: (method, what their bodies are, the handler).
OTHERS: dict[str, tuple[str, type[Fields], Callable[[Services, Request], Awaitable[Response]]]] = {
    "/api/show": ("POST", ollama.Named, _show),
    "/api/pull": ("POST", ollama.Named, ollama.respond_pull),
    "/api/delete": ("DELETE", ollama.Named, ollama.respond_delete),
}
_NO_RERANKING = "this server does not rerank: compare texts by the cosine of their /v1/embeddings"
_NO_MAKING = "models are made and named on the command line: edgespec add, edgespec export"
# What clients of other servers may ask for.
NOT_HERE = {
    **dict.fromkeys(("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"), _NO_RERANKING),
    **dict.fromkeys(("/api/create", "/api/copy", "/api/push"), _NO_MAKING),
    "/api/embeddings": "Ollama's path of 2023: use /api/embed, with input in place of prompt",
}


# -- the API's description


def document(services: Services) -> Schema:
    """`/openapi.json`, an OpenAPI 3.1 document. Schemas are those that check."""
    asked: list[tuple[str, str, type[Fields], str | None, type[Exchange] | None]] = [
        *((path, "post", each.request, each.answer.__doc__, each.form) for path, each in ENDPOINTS.items()),
        *((path, how.lower(), request, each.__doc__, None) for path, (how, request, each) in OTHERS.items()),
    ]
    requests = list(dict.fromkeys(request for _, _, request, _, _ in asked))
    found, schemas = msgspec.json.schema_components(requests, ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"$ref": "#/components/schemas/Model"}
    names = [name for service in services.all for name in service.names]
    known: Schema = {"enum": [*names, None]} if services.are_several else {"type": ["string", "null"]}
    schemas["Model"] = {**known, "description": "The served model; null or absent too"}
    bodies = dict(zip(requests, found, strict=True))
    paths: Schema = {}
    for path, (summary, _) in READABLE.items():
        kind = "text/plain" if path == "/metrics" else "application/json"
        paths[path.replace(":path", "")] = {"get": _described(summary, {kind: {}})}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{name}"]["get"]["parameters"] = [name]
    for path, method, request, about, form in asked:
        kinds: Schema = {"application/json": {"schema": {"type": "object"}}}
        kinds |= {} if form is None else {form.media_type: {}}
        body = {"required": True, "content": {"application/json": {"schema": bodies[request]}}}
        paths[path] = {method: _described((about or "").partition(".")[0], kinds) | {"requestBody": body}}
    info = {"title": "edgespec", "version": __version__, "description": "Local text generation, drafted and verified"}
    key = {"key": {"type": "http", "scheme": "bearer"}}
    components = {"schemas": schemas, "securitySchemes": key}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components, "security": [{}, {"key": []}]}


def _described(summary: str, content: Schema) -> Schema:
    error = {"description": "What is wrong and what is allowed", "content": {"application/json": {}}}
    answers = {"200": {"description": "The answer", "content": content}, "4XX": error, "5XX": error}
    return {"summary": summary, "responses": answers}


# -- the page, under a content security policy that allows nothing else

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_TYPES |= {"woff2": "font/woff2"}  # the letters of formulas
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"  # no code can turn a text into HTML
)
_PAGE_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """The page, and the libraries that scripts/vendor_page.py fetched: which, `static/libraries.js` says."""
    static, found = Path(__file__).with_name("static"), []
    for file in sorted(static.rglob("*")):
        if kind := _TYPES.get(file.suffix[1:]):
            path = "/" if file.name == "index.html" else f"/static/{file.relative_to(static).as_posix()}"
            found.append(_file_route(path, file.read_bytes(), kind))
    libraries = msgspec.json.encode(sorted(file.stem for file in static.glob("vendor/*.js")))
    return [*found, _file_route("/static/libraries.js", b"export const libraries = " + libraries, _TYPES["js"])]


def _file_route(path: str, content: bytes, kind: str) -> Route:
    async def handle(_: Request) -> Response:
        return Response(content, headers=_PAGE_HEADERS, media_type=kind)

    return Route(path, handle, methods=["GET"])
