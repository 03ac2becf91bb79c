"""The paths that are read with GET: models, health, figures, settings.

`?model=` chooses one of several models, as in llama-server's router.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from edgespec.server import facts, native
from edgespec.server.openapi import document
from edgespec.server.service import Service, Services, unknown_model
from edgespec.server.web import json_response

ReadPath = Callable[[Services, Request], Response]


def _chosen(services: Services, request: Request) -> Service:
    return services.named(request.query_params.get("model"))


def _models(services: Services, _: Request) -> Response:
    listed = facts.model_objects(services)
    pages = {"has_more": False, "first_id": listed[0]["id"], "last_id": listed[-1]["id"]}  # Anthropic's
    return json_response({"object": "list", "data": listed, **pages})


def _model(services: Services, request: Request) -> Response:
    name = request.path_params["name"]
    service = services.named(name)
    if not service.names.include(name):
        raise unknown_model(service.names)
    shown = name if name in service.names.all else service.name
    return json_response(facts.model_object(service, shown, with_status=services.are_several))


def _health(services: Services, _: Request) -> Response:
    status, body = facts.health(services)
    return json_response(body, status)


def _metrics(services: Services, _: Request) -> Response:
    return PlainTextResponse(facts.metrics_text(services), media_type="text/plain; version=0.0.4")


def _properties(services: Services, request: Request) -> Response:
    return json_response(facts.properties(_chosen(services, request)))


def _described(services: Services, _: Request) -> Response:
    return json_response(document(services.names))


def _slots(services: Services, request: Request) -> Response:
    must_have_room, service = request.query_params.get("fail_on_no_slot") == "1", _chosen(services, request)
    loaded, unloaded = service.loaded, service.unloaded
    if loaded is None and unloaded is not None:
        return json_response(unloaded.slots)
    return json_response(native.slots(loaded or service.require(), must_have_room=must_have_room))


def _version(_services: Services, _: Request) -> Response:
    return json_response(facts.version())


def _listed(services: Services, _: Request) -> Response:
    return json_response(facts.listed(services))


def _running(services: Services, _: Request) -> Response:
    return json_response(facts.running(services))


AT_ONCE: Mapping[str, ReadPath] = {
    "/v1/models": _models,
    "/models": _models,
    "/v1/models/{name:path}": _model,  # hub ids have slashes
    "/health": _health,
    "/v1/health": _health,
    "/slots": _slots,
    "/metrics": _metrics,
    "/props": _properties,
    "/openapi.json": _described,
    "/api/version": _version,
}
FROM_DISK: Mapping[str, ReadPath] = {"/api/tags": _listed, "/api/ps": _running}  # they look at files
