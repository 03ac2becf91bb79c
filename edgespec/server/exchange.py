"""A request that was read and checked, ready to run: its jobs, and how its answers are written in one protocol."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from edgespec.server.answer import Answer
from edgespec.server.fields import Fields
from edgespec.server.http_errors import HttpError
from edgespec.server.scheduler import Job, Ticket
from edgespec.server.service import Loaded, Names


class Exchange(ABC):
    """`jobs`: the generations that the request asks for; `is_stream`: whether its answers are sent as they come.

    `keep_loaded_s`: for how long the model is to stay loaded without a request; None: the client does not say.
    """

    media_type = "text/event-stream"
    ping = b": ping\n\n"  # sent while there is nothing to send; a comment, which readers of events skip
    streams_by_default = False
    keep_loaded_s: float | None = None

    def __init__(self, jobs: Sequence[Job], *, is_stream: bool) -> None:
        self.jobs, self.is_stream = jobs, is_stream

    @abstractmethod
    def answer(self, ticket: Ticket) -> Answer:
        """The answer of one of the tickets of `jobs`."""

    @abstractmethod
    def whole(self, answers: Sequence[Answer]) -> dict[str, Any] | list[dict[str, Any]]:
        """The body for answers that are complete."""

    @abstractmethod
    def stream(self, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        """The body, part by part; it reads the answers."""

    def failure(self, error: HttpError) -> bytes:
        """The last part of a stream that failed after it began."""
        return self.failed_early(error)

    @classmethod
    def failed_early(cls, error: HttpError) -> bytes:
        """The only part of a stream that failed before its request was read."""
        return sse(error.body(""))


Read = Callable[[Loaded, Fields], Exchange]
"""Checks a request and encodes its prompts; blocks meanwhile."""
AtRest = Callable[[Names, Fields], dict[str, Any] | None]
"""The body for a request that needs no model, while none is loaded; None for one that does."""
DONE = b"data: [DONE]\n\n"


def sse(value: Any, event: str = "") -> bytes:
    """One server-sent event."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {compact(value)}\n\n".encode()


def compact(value: Any) -> str:
    """JSON in one line."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which a model may write as an escape
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text
