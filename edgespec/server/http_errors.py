"""Errors as HTTP answers: a status and a body in the shape that the client's protocol prescribes.

Messages of errors inside the engine are not sent: they may hold paths. Those of bad input are; they quote the input.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.errors import (
    Busy,
    CapabilityError,
    ConfigError,
    EdgespecError,
    ModelFileError,
    ModelNotFound,
    PromptError,
    PromptTooLong,
    SamplingError,
    StateError,
    Unreachable,
    UsageError,
    VocabularyMismatch,
)

logger = logging.getLogger("edgespec")
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "unavailable_error",
    504: "timeout_error",
}


class HttpError(EdgespecError):
    """A request that is answered with an HTTP error. `param`: the field at fault; `code`: a name for programs.

    `sizes`: of a prompt that does not fit, and of the context, under llama-server's names.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.sizes = dict(sizes or {})
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def kind(self) -> str:
        """`type` of the error in OpenAI's shape."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    def body(self, path: str) -> dict[str, Any]:
        """The body for a request to `path`: Anthropic's or Ollama's shape for their paths, else OpenAI's."""
        if path.startswith("/api/"):
            return {"error": self.message}
        if path.startswith("/v1/messages"):
            kind = {503: "overloaded_error", 500: "api_error", 413: "request_too_large"}.get(self.status, self.kind)
            # Anthropic's words, at which agents shorten the conversation
            begins = "prompt is too long: " if self.code == "context_length_exceeded" else ""
            error: dict[str, Any] = {"type": kind, "message": begins + self.message}
            if self.param == "thread":  # at which Anthropic's SDK sends whole conversations instead
                error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            return {"type": "error", "error": error}
        kind = "exceed_context_size_error" if self.sizes else self.kind  # llama-server's, with numbers to cut by
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error | self.sizes}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> HttpError:
    return HttpError(400, message, param=param, code=code)


def queue_full(num_waiting: int) -> HttpError:
    return HttpError(429, f"{num_waiting} requests are waiting, the limit: try again later", code="queue_full")


def stopping() -> HttpError:
    return HttpError(503, "the server is stopping", code="stopping")


def as_http_error(error: Exception) -> HttpError:
    """The HTTP error for any exception; what the client cannot change is logged, without its message."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, ModelFileError | ModelNotFound):  # of a drafter's file: the message holds its path
        return bad_request(
            "a file that this request needs is missing or cannot be used: see the server's configuration"
        )
    if isinstance(error, PromptError):
        sizes = {}
        if isinstance(error, PromptTooLong):
            sizes = {"n_prompt_tokens": error.num_tokens, "n_ctx": error.context_length}
        return HttpError(400, error.on_the_command_line, code="context_length_exceeded" if sizes else None, sizes=sizes)
    if isinstance(error, UsageError | CapabilityError | VocabularyMismatch):
        said, has_field = error.on_the_command_line, isinstance(error, SamplingError | ConfigError)
        return bad_request(said, _named_field(said) if has_field else None)
    if isinstance(error, Busy):
        return HttpError(503, "the model is busy: try again", code="busy")
    if isinstance(error, StateError):
        return HttpError(503, "the model is not loaded: try again later", code="unavailable")
    if isinstance(error, Unreachable):
        logger.warning("%s", error.on_the_command_line)
        return HttpError(503, "a machine that the model runs on does not respond: try again later", code="unavailable")
    if isinstance(error, TimeoutError):
        return HttpError(504, "the answer took longer than the server allows (--timeout)", code="timeout")
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in last)
    logger.warning("a request failed inside the server: %s (%s)", type(error).__name__, place or "no traceback")
    return HttpError(500, "the server failed to answer this request; its log names the place", code="internal_error")


def _named_field(message: str) -> str | None:
    """The field that a message of `Sampling` or `GenerateOptions` begins with."""
    name = message.split(" ", 1)[0].replace("-", "_").lower()
    return name if (name.isidentifier() and "_" in name) or name in ("temperature", "seed", "stop") else None
