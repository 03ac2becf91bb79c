"""Endpoints that generate nothing: models, health, properties, metrics, tokenising."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from edgespec import __version__
from edgespec.sampling import Sampling
from edgespec.server.fields import Fields
from edgespec.server.http_errors import bad_request
from edgespec.server.native import slots
from edgespec.server.ollama_facts import Known, entry, shown
from edgespec.server.options import require_model
from edgespec.server.service import Described, Loaded, Service
from edgespec.server.services import Services
from edgespec.vocabulary import Vocabulary

MOST_TOKENS, MOST_PIECES = 1 << 20, 1 << 17  # of a list: writing a longer one holds up everybody


def model_objects(services: Services) -> list[dict[str, Any]]:
    """The served models, as `/v1/models` lists them under each of their names."""
    listed = [(service, name) for service in services.all for name in service.names.all]
    return [model_object(service, name, with_status=services.are_several) for service, name in listed]


def model_object(service: Service, name: str, *, with_status: bool = False) -> dict[str, Any]:
    """A served model under one of its names. `with_status`: whether it is loaded, as llama-server's router says it."""
    found = {"id": name, "object": "model", "created": service.created, "owned_by": "edgespec"}
    made = datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
    found |= {"type": "model", "display_name": name, "created_at": made}  # Anthropic's names
    loaded, unloaded = service.loaded, service.unloaded
    if with_status:
        status = "loaded" if loaded is not None else "loading" if service.is_loading else "unloaded"
        found["status"] = {"value": status}
    if loaded is not None:
        return found | {"meta": {"n_ctx": loaded.model.context_length}}
    return found if unloaded is None else found | {"meta": {"n_ctx": unloaded.context_length}}


def health(services: Services) -> tuple[int, dict[str, Any]]:
    """Status and body of `/health`: 200 once the first model answers, and while it is unloaded: a request loads it."""
    if services.default.is_new:
        return 503, {"status": "loading"}
    schedulers = [loaded.scheduler for service in services.all if (loaded := service.loaded) is not None]
    running, waiting = sum(s.num_running for s in schedulers), sum(s.num_waiting for s in schedulers)
    if services.are_several:
        waiting += sum(service.num_waiting for service in services.all)  # for their model's turn
    preparing = sum(s.num_preparing for s in schedulers)
    return 200, {"status": "ok", "running": running, "waiting": waiting, "preparing": preparing}


def described(loaded: Loaded) -> Described:
    """What is told of a model while it is unloaded. It takes no memory then."""
    return Described(
        loaded.model.context_length,
        _properties(loaded) | {"is_sleeping": True, "memory": None},
        slots(loaded, must_have_room=False),
        shown(Known.of(loaded)),
        entry(Known.of(loaded)),
    )


def properties(service: Service) -> dict[str, Any]:
    """`/props`: what the server runs, under llama.cpp's names where it has one. Holds no path."""
    loaded, unloaded = service.loaded, service.unloaded
    return unloaded.properties if loaded is None and unloaded is not None else _properties(loaded or service.require())


def shared_properties(
    name: str, template: str, context_length: int, sampling: Sampling, max_tokens: int | None
) -> dict[str, Any]:
    """The part of `/props` that needs no model."""
    shown = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
    return {
        "model_alias": name,
        "build_info": f"edgespec {__version__}",
        "is_sleeping": False,
        "total_slots": 0,
        "chat_template": template,
        "default_generation_settings": {
            "n_ctx": context_length,
            "params": {name: getattr(sampling, name) for name in shown} | {"max_tokens": max_tokens},
        },
    }


def _properties(loaded: Loaded) -> dict[str, Any]:
    model, template = loaded.model, loaded.model.target.vocabulary.chat_template or ""
    known = shared_properties(loaded.name, template, model.context_length, loaded.sampling, loaded.options.max_tokens)
    return known | {
        "total_slots": model.target.facts.max_sequences,
        "engine": model.target.facts.name,
        "device": model.target.facts.device,
        "drafter": model.drafter_name,
        "verify": model.options.verify,
        "reproducible": model.reproducible,
        "memory": _memory(loaded),
    }


def _memory(loaded: Loaded) -> dict[str, Any] | None:
    """The plan that was made before loading, and what the process takes now, in bytes; None without a plan."""
    report = loaded.model.memory
    if report is None:
        return None
    plan, verdict = report.plan, report.verdict
    return {
        "own_bytes": plan.own_bytes,
        "mapped_bytes": plan.mapped_bytes,
        "total_bytes": plan.total_bytes,
        "device_bytes": plan.device_bytes,
        "free_bytes": verdict.free_bytes,
        "verdict": verdict.fit,
        "limit": verdict.name,
        "parts": [{"name": part.name, "own_bytes": part.own, "mapped_bytes": part.mapped} for part in plan.parts],
        "given_up": [each.text for each in report.given_up],
        "used_own_bytes": report.own_bytes,
        "peak_rss_bytes": report.peak_rss_bytes,
    }


def metrics_text(services: Services) -> str:
    """`/metrics` for Prometheus. Of several models each has its own gauges; counters are those of all."""
    rows: dict[str, list[tuple[str, float]]] = {"model_loaded": [], "requests_running": [], "requests_waiting": []}
    for service in services.all:
        loaded = service.loaded
        labels = f'{{model="{_escaped(service.name)}"}}' if services.are_several else ""
        waiting = service.num_waiting if services.are_several else 0
        counts = (1, loaded.scheduler.num_running, loaded.scheduler.num_waiting) if loaded is not None else (0, 0, 0)
        for name, count in zip(rows, (*counts[:2], counts[2] + waiting), strict=True):
            rows[name].append((labels, count))
    helps = ("Whether the model is loaded", "Generations that run", "Generations that wait")
    return services.metrics.text({name: (text, rows[name]) for name, text in zip(rows, helps, strict=True)})


def _escaped(name: str) -> str:
    """A name as the value of a label."""
    return name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def tokenize(loaded: Loaded, fields: Fields) -> dict[str, Any]:
    """`/tokenize`: {"content": TEXT} becomes token ids; `parse_special` reads control tokens that TEXT spells out."""
    require_model(loaded.names, fields)
    content = fields.text("content")
    if content is None:
        raise bad_request("content is missing: give a text", "content")
    adds_bos, parse_special = fields.flag("add_special"), fields.flag("parse_special")
    with_pieces = fields.flag("with_pieces")
    fields.finish()
    model, vocabulary = loaded.model, loaded.model.target.vocabulary
    ids = model.encode(content, parse_special=parse_special)
    most = MOST_PIECES if with_pieces else MOST_TOKENS
    if len(ids) > most:
        raise bad_request(f"content has {len(ids)} tokens; at most {most} are listed at once", "content")
    if not adds_bos and vocabulary.adds_bos and ids[:1] == [vocabulary.bos_id]:
        del ids[0]
    if not with_pieces:
        return {"tokens": ids}
    return {"tokens": [{"id": token_id, "piece": _piece(vocabulary, token_id)} for token_id in ids]}


def _piece(vocabulary: Vocabulary, token_id: int) -> str | list[int]:
    """The text of a token, its bytes where these are none alone, and a control token's name."""
    piece = vocabulary.piece(token_id)
    try:
        return piece.decode() if piece else vocabulary.token_name(token_id)
    except UnicodeDecodeError:
        return list(piece)


def detokenize(loaded: Loaded, fields: Fields) -> dict[str, Any]:
    """`/detokenize`: {"tokens": [IDS]} becomes text."""
    require_model(loaded.names, fields)
    tokens = fields.listed("tokens", MOST_TOKENS)
    if tokens is None:
        raise bad_request("tokens is missing: give a list of token ids", "tokens")
    fields.finish()
    return {"content": loaded.model.decode(tokens)}
