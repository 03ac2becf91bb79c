"""Embeddings in the protocols of OpenAI, Ollama and llama-server: each reads a request and writes its answer."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from edgespec.errors import CapabilityError
from edgespec.generation.embedding import Text, normalised
from edgespec.server.facts import require_served
from edgespec.server.fields import Fields, parse_object
from edgespec.server.http_errors import HttpError, bad_request
from edgespec.server.options import require_model
from edgespec.server.service import Loaded
from edgespec.server.web import Body, json_response, while_connected
from edgespec.types import TokenIds

MOST_TEXTS = 2048  # OpenAI's limit
Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Encoded texts, and `answer`: the body for their vectors [n, size] and the seconds that they took.

    `dimensions`: of each vector, None: all.
    """

    texts: list[TokenIds]
    answer: Callable[[Vectors, float], Any]
    dimensions: int | None = None


Read = Callable[[Loaded, Fields], EmbeddingRequest]


async def respond_embeddings(request: Request, loaded: Loaded, read: Read, body: Body) -> Response:
    """Answer a request with the `body`. Raises HttpError, EdgespecError, and ClientDisconnect if the client leaves."""
    begun_s = monotonic()
    preparing = loaded.scheduler.prepare(lambda: _checked(loaded, read, body.data))
    async with asyncio.timeout(loaded.limits.timeout_s):
        asked = await while_connected(request.receive, preparing)
    body.close()
    vectors = np.zeros((0, 0), np.float32)
    if asked.texts:
        async with asyncio.timeout(loaded.limits.timeout_s):
            vectors = await while_connected(request.receive, loaded.scheduler.embeddings.embed(asked.texts))
    if asked.dimensions is not None and asked.texts:
        if asked.dimensions > vectors.shape[1]:
            raise bad_request(f"dimensions must be at most {vectors.shape[1]}, the size of an embedding", "dimensions")
        vectors = normalised(vectors[:, : asked.dimensions])
    return json_response(await asyncio.to_thread(asked.answer, vectors, monotonic() - begun_s))


def _checked(loaded: Loaded, read: Read, body: bytes) -> EmbeddingRequest:
    try:
        loaded.model.embedder.pooling()
    except CapabilityError as exc:
        raise HttpError(501, f"embeddings are not supported here: {exc}", code="not_supported") from exc
    return read(loaded, Fields(parse_object(body)))


def read_openai(loaded: Loaded, fields: Fields) -> EmbeddingRequest:
    """`/v1/embeddings`."""
    require_model(loaded.names, fields)
    texts = _texts(fields, "input")
    is_base64 = fields.choice("encoding_format", ("float", "base64")) == "base64"
    dimensions = fields.whole("dimensions", 1, 1 << 20)
    fields.ignore("user")
    fields.finish()
    ids = loaded.model.embedder.encode(texts, truncate=False)

    def answer(vectors: Vectors, _: float) -> dict[str, Any]:
        shown = [_base64(vector) for vector in vectors] if is_base64 else vectors.tolist()
        data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(shown)]
        usage = {"prompt_tokens": _count(ids), "total_tokens": _count(ids)}
        return {"object": "list", "data": data, "model": loaded.name, "usage": usage}

    return EmbeddingRequest(ids, answer, dimensions)


def read_ollama(loaded: Loaded, fields: Fields) -> EmbeddingRequest:
    """`/api/embed`. Without a text, which loads the model in Ollama, it answers with no embeddings."""
    truncate, texts = _read_common(loaded, fields), fields.given("input")
    texts = [] if texts in (None, "", []) else _texts(fields, "input")
    dimensions = fields.whole("dimensions", 1, 1 << 20)
    fields.finish()
    ids = loaded.model.embedder.encode(texts, truncate=truncate)

    def answer(vectors: Vectors, took_s: float) -> dict[str, Any]:
        durations = {"total_duration": int(took_s * 1e9), "load_duration": 0}
        return {"model": loaded.name, "embeddings": vectors.tolist()} | durations | {"prompt_eval_count": _count(ids)}

    return EmbeddingRequest(ids, answer, dimensions)


def read_ollama_prompt(loaded: Loaded, fields: Fields) -> EmbeddingRequest:
    """`/api/embeddings`: one text, Ollama's older form."""
    truncate, prompt = _read_common(loaded, fields), fields.text("prompt")
    fields.finish()
    ids = loaded.model.embedder.encode([prompt] if prompt else [], truncate=truncate)
    return EmbeddingRequest(ids, lambda vectors, _: {"embedding": vectors[0].tolist() if prompt else []})


def _read_common(loaded: Loaded, fields: Fields) -> bool:
    """Checks what both of Ollama's forms have; whether to cut what is too long."""
    require_served(loaded.names, fields)
    fields.ignore("keep_alive", "options")  # nothing of sampling or of a context's size changes an embedding
    return fields.flag("truncate", True)


def read_llamacpp(loaded: Loaded, fields: Fields) -> EmbeddingRequest:
    """`/embedding` and `/embeddings` of llama-server, where a text's embeddings are a list of one."""
    require_model(loaded.names, fields)
    name = "input" if fields.given("content") is None else "content"
    texts = _texts(fields, name)
    fields.refuse("embd_normalize", "embeddings have length 1 here", (2,))
    fields.finish()
    ids = loaded.model.embedder.encode(texts, truncate=False)
    return EmbeddingRequest(
        ids, lambda vectors, _: [{"index": i, "embedding": [each]} for i, each in enumerate(vectors.tolist())]
    )


def _texts(fields: Fields, name: str) -> list[Text]:
    """A text, a list of texts or of token ids, or one of lists of token ids."""
    given = fields.given(name)
    if given is None:
        raise bad_request(f"{fields.path(name)} is missing: give a text or a list of texts", fields.path(name))
    if isinstance(given, str):
        return [given]
    listed = fields.listed(name, _most(given)) or []
    if listed and all(isinstance(each, int) for each in listed):
        return [listed]
    if not listed or not all(isinstance(each, str | list) for each in listed):
        raise fields.wrong(name, "must be a text, a list of texts, or token ids", given)
    return listed


def _most(given: Any) -> int:
    """Most entries of a list of texts; one of token ids may be as long as the context, which is checked later."""
    is_ids = isinstance(given, list) and bool(given) and isinstance(given[0], int)
    return 1 << 24 if is_ids else MOST_TEXTS


def _base64(vector: Vectors) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _count(texts: Sequence[TokenIds]) -> int:
    return sum(map(len, texts))
