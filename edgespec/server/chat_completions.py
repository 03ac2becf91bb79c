"""`/v1/chat/completions`: OpenAI's chat protocol, with `speculative` in requests and `timings` in answers."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec import __version__
from edgespec.chat.reasoning import Reasoning
from edgespec.chat.tool_forms import Form
from edgespec.chat.tools import ToolCall, ToolParser
from edgespec.reports import TokenEvent
from edgespec.server.answer import Answer, Piece, logprobs_of, usage
from edgespec.server.exchange import DONE, Exchange, sse
from edgespec.server.llamacpp_fields import prompt_progress
from edgespec.server.scheduler import Job, Ticket
from edgespec.server.service import Loaded

FINGERPRINT = f"edgespec-{__version__}"


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request. `form` None: there are none, or the model must not call any."""

    shown: list[dict[str, Any]] | None = None
    form: Form | None = None
    parallel: bool = True


class ChatExchange(Exchange):
    """A request to `/v1/chat/completions`."""

    def __init__(
        self,
        loaded: Loaded,
        jobs: Sequence[Job],
        tools: Tools,
        reasoning: Reasoning | None,
        *,
        is_stream: bool,
        includes_usage: bool = False,
        per_token: bool = False,
    ) -> None:
        super().__init__(jobs, is_stream=is_stream)
        self._loaded, self._tools, self._includes_usage, self._per_token = loaded, tools, includes_usage, per_token
        self._reasoning = reasoning
        self._vocabulary = loaded.model.target.vocabulary
        self._has_logprobs = jobs[0].options.logprobs
        self._id, self._created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())

    def answer(self, ticket: Ticket) -> Answer:
        form = self._tools.form
        parser = None if form is None else ToolParser(form, self._tools.shown or ())
        return Answer(ticket, self._vocabulary, parser, parallel=self._tools.parallel, reasoning=self._reasoning)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            calls = [_call_object(call) for call in answer.calls]
            content = None if calls and not answer.text.strip() else answer.text
            message = {"role": "assistant", "content": content, "refusal": None}
            message |= {"reasoning_content": answer.reasoning} if answer.reasoning else {}
            choices.append(
                {
                    "index": index,
                    "message": message | ({"tool_calls": calls} if calls else {}),
                    "logprobs": self._logprobs(answer.tokens, answer.reasoning_tokens),
                    "finish_reason": answer.finish_reason,
                }
            )
        last = {
            "usage": usage(answers),
            "timings": answers[0].timings,
            "seed": answers[0].ticket.seed,
        }
        return self._object("chat.completion", choices) | last

    async def stream(self, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        for index, answer in enumerate(answers):
            begins, num_calls = {"role": "assistant", "content": ""}, 0
            async for piece in answer.pieces():
                if begins:
                    yield self._chunk(index, begins)
                    begins = {}
                if piece.progress is not None:
                    yield self._chunk(index, {}, extra={"prompt_progress": prompt_progress(piece.progress)})
                if piece.reasoning or piece.reasoning_tokens:
                    logprobs = self._logprobs([], piece.reasoning_tokens)
                    extra = self._progress(answer, piece.reasoning_shares)
                    yield self._chunk(index, {"reasoning_content": piece.reasoning}, logprobs, extra=extra)
                for delta in _deltas(piece, num_calls):
                    has_text = "content" in delta
                    logprobs = self._logprobs(piece.tokens) if has_text else None
                    extra = self._progress(answer, piece.shares) if has_text else None
                    yield self._chunk(index, delta, logprobs, extra=extra)
                num_calls += len(piece.calls)
            if begins:
                yield self._chunk(index, begins)
            ending = {"timings": answer.timings, "seed": answer.ticket.seed}
            yield self._chunk(index, {}, reason=answer.finish_reason, extra=ending)
        if self._includes_usage:
            yield sse(self._object("chat.completion.chunk", []) | {"usage": usage(answers)})
        yield DONE

    def _progress(self, answer: Answer, shares: Sequence[tuple[str, str | None]]) -> dict[str, Any] | None:
        """With `timings_per_token`: the timings so far, and each token's text with the drafter that proposed it."""
        if not self._per_token:
            return None
        tokens = [{"text": text, "drafter": drafter} for text, drafter in shares]
        return {"timings": answer.timings, "tokens": tokens}

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._loaded.name,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        empty_usage = {"usage": None} if self._includes_usage else {}
        return sse(self._object("chat.completion.chunk", [choice]) | empty_usage | (extra or {}))

    def _logprobs(
        self, tokens: Sequence[TokenEvent], reasoning_tokens: Sequence[TokenEvent] = ()
    ) -> dict[str, Any] | None:
        """Those of the answer as `content`; those of its reasoning apart, so that `content` joins to the text."""
        if not self._has_logprobs:
            return None
        found: dict[str, Any] = {"content": logprobs_of(self._vocabulary, tokens), "refusal": None}
        reasoned = logprobs_of(self._vocabulary, reasoning_tokens)
        return found | ({"reasoning_content": reasoned} if reasoned else {})


def _deltas(piece: Piece, num_calls: int) -> list[dict[str, Any]]:
    """A call's first delta has its id and name, the second its arguments; both have its index."""
    deltas: list[dict[str, Any]] = [{"content": piece.text}] if piece.text or piece.tokens else []
    for index, call in enumerate(piece.calls, num_calls):
        first = _call_object(ToolCall(call.name, "", call.id))
        deltas.append({"tool_calls": [{"index": index} | first]})
        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]})
    return deltas


def _call_object(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
