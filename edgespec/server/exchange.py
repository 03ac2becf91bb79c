"""A request that was read and checked, ready to run: its jobs, and how its answers are written in one protocol."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.chat.reasoning import Reasoning
from edgespec.chat.tool_forms import Form
from edgespec.chat.tools import ToolParser
from edgespec.reports import PromptProgress
from edgespec.server.answer import Answer
from edgespec.server.http_errors import HttpError
from edgespec.server.scheduler import Job, Ticket
from edgespec.server.service import Loaded

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Work:
    """What a request asks for, whatever its protocol. `tools`: those that the model may call, in `form`; `parallel`:
    several at once. `reasoning`: how the answer reasons, to be split from it; None leaves the text as it is.
    """

    loaded: Loaded
    jobs: Sequence[Job]
    tools: Sequence[dict[str, Any]] = ()
    form: Form | None = None
    parallel: bool = True
    reasoning: Reasoning | None = None


class Exchange(ABC):
    """`is_stream`: whether the answers are sent as they come.

    `keep_loaded_s`: for how long the model is to stay loaded without a request; None: the client does not say.
    """

    media_type = "text/event-stream"
    ping = b": ping\n\n"  # sent while there is nothing to send; a comment, which readers of events skip
    streams_by_default = False
    keep_loaded_s: float | None = None

    def __init__(self, work: Work, *, is_stream: bool) -> None:
        self.work, self.jobs, self.is_stream = work, work.jobs, is_stream
        self.name, self.vocabulary = work.loaded.name, work.loaded.model.target.vocabulary

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.jobs[0].prompt_ids)

    def answer(self, ticket: Ticket) -> Answer:
        """The answer of one of the tickets of `jobs`."""
        work = self.work
        parser = None if work.form is None else ToolParser(work.form, work.tools)
        return Answer(ticket, self.vocabulary, parser, parallel=work.parallel, reasoning=work.reasoning)

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


def sse(value: Any, event: str = "") -> bytes:
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {compact(value)}\n\n".encode()


def compact(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which a model may write as an escape
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text


def prompt_progress(progress: PromptProgress) -> dict[str, Any]:
    """How much of the prompt is read, under llama.cpp's names."""
    return {
        "total": progress.total,
        "cache": progress.reused,
        "processed": progress.processed,
        "time_ms": int(1000 * progress.seconds),
    }
