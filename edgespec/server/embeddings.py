"""Embeddings in the protocols of OpenAI and Ollama. They are computed where a request is read: no queue decides."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from edgespec.contained import is_wanted
from edgespec.errors import CapabilityError
from edgespec.generation.embedding import Text, normalised
from edgespec.server.http_errors import HttpError, bad_request
from edgespec.server.requests import Fields, read, wrong
from edgespec.server.service import Loaded
from edgespec.types import TokenIds

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


def read_openai(loaded: Loaded, values: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Embeddings of texts (OpenAI); 501 for models that give none."""
    _require_embeddings(loaded)
    request = read(OpenAiEmbedding, values, notes)
    ids = loaded.model.embedder.encode(_texts(request.input), truncate=False)
    vectors = _embedded(loaded, ids, request.dimensions)
    is_base64 = request.encoding_format == "base64"
    shown = [_base64(vector) for vector in vectors] if is_base64 else vectors.tolist()
    data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(shown)]
    usage = {"prompt_tokens": _count(ids), "total_tokens": _count(ids)}
    return {"object": "list", "data": data, "model": loaded.name, "usage": usage}


def read_ollama(loaded: Loaded, values: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Embeddings of texts (Ollama)."""
    begun_s = monotonic()
    _require_embeddings(loaded)
    request = read(OllamaEmbedding, values, notes)
    texts = _texts(request.input) if request.input else []
    ids = loaded.model.embedder.encode(texts, truncate=request.truncate is not False)
    vectors = _embedded(loaded, ids, request.dimensions).tolist() if ids else []
    durations = {"total_duration": int(1e9 * (monotonic() - begun_s)), "load_duration": 0}
    return {"model": loaded.name, "embeddings": vectors} | durations | {"prompt_eval_count": _count(ids)}


def _require_embeddings(loaded: Loaded) -> None:
    try:
        loaded.model.embedder.pooling()
    except CapabilityError as exc:
        raise HttpError(501, f"embeddings are not supported here: {exc}", code="not_supported") from exc


def _embedded(loaded: Loaded, texts: Sequence[TokenIds], dimensions: int | None) -> NDArray[np.float32]:
    """Embeddings [n, size or `dimensions`] of encoded texts. Raises HttpError and EdgespecError."""
    vectors = loaded.model.embedder.embed(texts, is_wanted.get())
    if dimensions is None:
        return vectors
    if dimensions > vectors.shape[1]:
        raise bad_request(f"dimensions must be at most {vectors.shape[1]}, the size of an embedding", "dimensions")
    return normalised(vectors[:, :dimensions])


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


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _count(texts: Sequence[TokenIds]) -> int:
    return sum(map(len, texts))
