"""Endpoints that generate nothing: models, health, properties, metrics, tokenising, embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from time import monotonic, time
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from edgespec import __version__
from edgespec.contained import is_wanted
from edgespec.errors import CapabilityError
from edgespec.generation.embedding import Text, normalised
from edgespec.loading.model_facts import ModelFacts, size_label
from edgespec.memory.watch import plan_object
from edgespec.server.http_errors import HttpError, bad_request
from edgespec.server.options import NAMED_ALIKE
from edgespec.server.requests import Fields, wrong
from edgespec.server.service import Loaded, Service, Services

MOST_TOKENS = 1 << 20  # of a list: writing a longer one holds up everybody


def model_object(service: Service, name: str, *, with_status: bool = False) -> dict[str, Any]:
    """A served model under one of its names. `with_status`: whether it is loaded, as llama-server's router says it."""
    found = {"id": name, "object": "model", "created": service.created, "owned_by": "edgespec"}
    found |= {"type": "model", "display_name": name, "created_at": written(service.created)}  # Anthropic's names
    if with_status:
        status = "loaded" if service.loaded is not None else "loading" if service.is_loading else "unloaded"
        found["status"] = {"value": status}
    return found | {"meta": {"n_ctx": service.context_length}}


def health(services: Services) -> tuple[dict[str, Any], int]:
    """Body and status of `/health`: 200 once the first model answers, and while it is unloaded: a request loads it."""
    if not services.default.loaded_s:
        return {"status": "loading"}, 503
    schedulers = [loaded.scheduler for service in services.all if (loaded := service.loaded) is not None]
    running, waiting = sum(s.num_running for s in schedulers), sum(s.num_waiting for s in schedulers)
    waiting += sum(service.num_waiting for service in services.all)  # for their model
    preparing = sum(s.num_preparing for s in schedulers)
    return {"status": "ok", "running": running, "waiting": waiting, "preparing": preparing}, 200


def properties(service: Service) -> dict[str, Any]:
    """`/props`: what the server runs, under llama.cpp's names where it has one. Holds no path."""
    known = service.known
    params = {name: getattr(known.sampling, name) for name in NAMED_ALIKE} | {"max_tokens": known.max_tokens}
    found: dict[str, Any] = {
        "model_alias": service.name,
        "build_info": f"edgespec {__version__}",
        "is_sleeping": True,
        "chat_template": known.facts.chat_template,
        "default_generation_settings": {"n_ctx": service.context_length, "params": params},
        **known.settings,
        "memory": None,
    }
    if (loaded := service.loaded) is not None:
        model, engine, memory = loaded.model, loaded.model.target.facts, loaded.model.memory
        found |= {"is_sleeping": False, "total_slots": engine.max_sequences, "device": engine.device}
        found |= {"drafter": model.drafter_name, "reproducible": model.reproducible}
        if memory is not None:  # the plan that was made before loading, and what the process takes now, in bytes
            used = {"used_own_bytes": memory.own_bytes, "peak_rss_bytes": memory.peak_rss_bytes}
            found["memory"] = plan_object(memory) | used
    return found


def metrics_text(services: Services) -> str:
    """`/metrics` for Prometheus. Of several models each has its own gauges; counters are those of all."""
    rows: dict[str, list[tuple[str, float]]] = {"model_loaded": [], "requests_running": [], "requests_waiting": []}
    for service in services.all:
        loaded = service.loaded
        name = service.name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        labels = f'{{model="{name}"}}' if services.are_several else ""
        counts = (1, loaded.scheduler.num_running, loaded.scheduler.num_waiting) if loaded is not None else (0, 0, 0)
        for gauge, count in zip(rows, (*counts[:2], counts[2] + service.num_waiting), strict=True):
            rows[gauge].append((labels, count))
    helps = ("Whether the model is loaded", "Generations that run", "Generations that wait")
    return services.metrics.text({name: (text, rows[name]) for name, text in zip(rows, helps, strict=True)})


class TokenizeRequest(Fields, kw_only=True):
    """A request to `/tokenize`. `parse_special`: control tokens that the text spells out are read as such."""

    content: str
    model: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None


class DetokenizeRequest(Fields, kw_only=True):
    """A request to `/detokenize`."""

    tokens: Annotated[list[Any], Meta(max_length=MOST_TOKENS)]
    model: str | None = None


def tokenize(loaded: Loaded, request: TokenizeRequest, _: list[str]) -> dict[str, Any]:
    """Text to token ids."""
    model, vocabulary = loaded.model, loaded.model.target.vocabulary
    ids = model.encode(request.content, parse_special=bool(request.parse_special))
    if len(ids) > MOST_TOKENS:
        raise bad_request(f"content has {len(ids)} tokens; at most {MOST_TOKENS} are listed at once", "content")
    if not request.add_special and vocabulary.adds_bos and ids[:1] == [vocabulary.bos_id]:
        del ids[0]
    return {"tokens": ids}


def detokenize(loaded: Loaded, request: DetokenizeRequest, _: list[str]) -> dict[str, Any]:
    """Token ids to text."""
    return {"content": loaded.model.decode(request.tokens)}


# -- embeddings (OpenAI's and Ollama's); they are computed where a request is read: no queue decides


MOST_TEXTS = 2048  # OpenAI's limit


Texts = str | Annotated[list[Any], Meta(description="texts, token ids, or lists of token ids")]
Dimensions = Annotated[int, Meta(ge=1, le=1 << 20)]


class OpenAiEmbedding(Fields, kw_only=True):
    """A request to `/v1/embeddings`."""

    ignored: ClassVar[frozenset[str]] = frozenset({"user"})
    input: Texts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None


class OllamaEmbedding(Fields):
    """A request to `/api/embed`. Without a text, which loads the model in Ollama, it answers with no embeddings."""

    # nothing of sampling or of a context's size changes an embedding
    ignored: ClassVar[frozenset[str]] = frozenset({"keep_alive", "options"})
    model: str | None = None
    truncate: bool | None = None
    input: Texts | None = None
    dimensions: Dimensions | None = None


def embed_openai(loaded: Loaded, request: OpenAiEmbedding, _: list[str]) -> dict[str, Any]:
    """Embeddings of texts (OpenAI); 501 for models that give none."""
    vectors, num_tokens = _embedded(loaded, _texts(request.input), request.dimensions, truncate=False)
    shown = vectors.tolist()
    if request.encoding_format == "base64":
        shown = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(shown)]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": loaded.service.name, "usage": usage}


def embed_ollama(loaded: Loaded, request: OllamaEmbedding, _: list[str]) -> dict[str, Any]:
    """Embeddings of texts (Ollama)."""
    begun_s = monotonic()
    texts = _texts(request.input) if request.input else []
    vectors, num_tokens = _embedded(loaded, texts, request.dimensions, truncate=request.truncate is not False)
    durations = {"total_duration": int(1e9 * (monotonic() - begun_s)), "load_duration": 0}
    found = {"model": loaded.service.name, "embeddings": vectors.tolist()}
    return found | durations | {"prompt_eval_count": num_tokens}


def _embedded(
    loaded: Loaded, texts: Sequence[Text], dimensions: int | None, *, truncate: bool
) -> tuple[NDArray[np.float32], int]:
    """(embeddings [n, size or `dimensions`] of texts, the number of their tokens). Raises HttpError, EdgespecError."""
    embedder = loaded.model.embedder
    try:
        embedder.pooling()
    except CapabilityError as exc:
        raise HttpError(501, f"embeddings are not supported here: {exc}", code="not_supported") from exc
    ids = embedder.encode(texts, truncate=truncate)
    vectors = embedder.embed(ids, is_wanted.get()) if ids else np.empty((0, dimensions or 0), np.float32)
    if dimensions is not None and dimensions > vectors.shape[1]:
        raise bad_request(f"dimensions must be at most {vectors.shape[1]}, the size of an embedding", "dimensions")
    return vectors if dimensions is None else normalised(vectors[:, :dimensions]), sum(map(len, ids))


def _texts(given: str | list[Any]) -> list[Text]:
    """A text, a list of texts or of token ids, or one of lists of token ids."""
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(each, int) for each in given):
        return [given]
    if len(given) > MOST_TEXTS:
        raise bad_request(f"input has {len(given)} entries; at most {MOST_TEXTS} are allowed", "input")
    if not given or not all(isinstance(each, str | list) for each in given):
        raise wrong("input", "must be a text, a list of texts, or token ids", given)
    return given


# -- Ollama


PROTOCOL_VERSION = "0.12.11"  # of Ollama, whose requests are understood; VS Code wants 0.6.4 or more
_NEVER = "9999-12-31T23:59:59Z"


def version() -> dict[str, Any]:
    return {"version": PROTOCOL_VERSION, "edgespec": __version__}


def listed(services: Services) -> dict[str, Any]:
    return {"models": [entry(each) | {"modified_at": written(each.created)} for each in services.all]}


def running(services: Services) -> dict[str, Any]:
    """`/api/ps`: those that are loaded, with the memory and the context that they have, and when they go."""
    found = list[dict[str, Any]]()
    for service in services.all:
        if (loaded := service.loaded) is None:
            continue
        model, expires_at = loaded.model, _NEVER
        with suppress(OverflowError, ValueError):
            expires_at = written(time() + service.left_s)
        on_device = 0 if model.memory is None else model.memory.plan.device_bytes
        more = {"size_vram": on_device, "context_length": model.context_length, "expires_at": expires_at}
        found.append(entry(service) | more)
    return {"models": found}


def written(seconds: float) -> str:
    """A time of the system's clock."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def entry(service: Service) -> dict[str, Any]:
    facts = service.known.facts
    name, size = service.name, facts.weight_bytes
    return {"name": name, "model": name, "size": size, "digest": facts.digest, "details": _details(facts)}


def _details(facts: ModelFacts) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf" if facts.quantization else "onnx",  # only a header says the former
        "family": facts.architecture,
        "families": [facts.architecture],
        "parameter_size": size_label(facts.num_parameters),
        "quantization_level": facts.quantization,
    }


def show(service: Service) -> dict[str, Any]:
    """`/api/show`."""
    known, facts = service.known, service.known.facts
    info = {
        **facts.metadata,
        "general.architecture": facts.architecture,
        f"{facts.architecture}.context_length": service.context_length,  # what a request may use
    }
    info |= {"general.parameter_count": facts.num_parameters} if facts.num_parameters else {}
    return {
        "template": facts.chat_template,
        "details": _details(facts),
        "model_info": info,
        "capabilities": [
            *(["embedding"] if known.embeds else []),
            *([] if facts.pooling else ["completion"]),
            *facts.capabilities,
        ],
    }
