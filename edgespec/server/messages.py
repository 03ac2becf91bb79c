"""`/v1/messages`: Anthropic's protocol. `messages_input` translates requests to those of `chat_request`, which checks
them; answers are written here.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

from edgespec.chat.tools import ToolCall
from edgespec.server.answer import Answer, Piece
from edgespec.server.chat_completions import ChatExchange
from edgespec.server.chat_request import read_chat
from edgespec.server.exchange import Exchange, sse
from edgespec.server.fields import Fields
from edgespec.server.http_errors import HttpError
from edgespec.server.messages_input import as_chat, as_counted_chat
from edgespec.server.service import Loaded
from edgespec.server.ticket import Ticket

PATH = "/v1/messages"
_SENT_AS = {
    "stop": "stop_sequences",
    "reasoning_effort": "thinking",
    "response_format.json_schema": "output_config.format",
}
_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}


class MessagesExchange(Exchange):
    """A request to `/v1/messages`, around the chat that it was translated to."""

    ping = sse({"type": "ping"}, "ping")

    def __init__(self, loaded: Loaded, chat: ChatExchange) -> None:
        super().__init__(chat.jobs, is_stream=chat.is_stream)
        self._name, self._chat = loaded.name, chat
        self._id = f"msg_{secrets.token_hex(12)}"

    def answer(self, ticket: Ticket) -> Answer:
        return self._chat.answer(ticket)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        thinking = [_thinking_block(answer.reasoning)] if answer.reasoning else []
        text = [{"type": "text", "text": answer.text}] if answer.text.strip() or not answer.calls else []
        calls = [_call_block(call) | {"input": json.loads(call.arguments)} for call in answer.calls]
        counts = self._input_counts(answer) | {"output_tokens": answer.stats.new_tokens}
        return self._message([*thinking, *text, *calls], counts) | self._end(answer)

    async def stream(self, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        (answer,) = answers
        index, has_begun, text_is_open, is_thinking = 0, False, False, False
        async for piece in answer.pieces():
            if not has_begun:
                yield self._begin(answer)
                has_begun = True
            if piece.reasoning and text_is_open:
                yield _event("content_block_stop", index=index)
                index, text_is_open = index + 1, False
            if piece.reasoning and not is_thinking:
                yield _event("content_block_start", index=index, content_block=_thinking_block(""))
                is_thinking = True
            if piece.reasoning:
                delta = {"type": "thinking_delta", "thinking": piece.reasoning}
                yield _event("content_block_delta", index=index, delta=delta)
            if is_thinking and (piece.text or piece.calls):
                for part in _thinking_end(index):
                    yield part
                index, is_thinking = index + 1, False
            if piece.text and not text_is_open:
                yield _event("content_block_start", index=index, content_block={"type": "text", "text": ""})
                text_is_open = True
            if piece.text:
                yield _event("content_block_delta", index=index, delta={"type": "text_delta", "text": piece.text})
            if piece.calls and text_is_open:
                yield _event("content_block_stop", index=index)
                index, text_is_open = index + 1, False
            for part in _call_events(piece, index):
                yield part
            index += len(piece.calls)
        if not has_begun:
            yield self._begin(answer)
        if is_thinking:
            for part in _thinking_end(index):
                yield part
        if text_is_open:
            yield _event("content_block_stop", index=index)
        usage = self._input_counts(answer) | {"output_tokens": answer.stats.new_tokens}
        yield _event("message_delta", delta=self._end(answer), usage=usage)
        yield _event("message_stop")

    @classmethod
    def failed_early(cls, error: HttpError) -> bytes:
        return sse(error.body(PATH), "error")

    def _begin(self, answer: Answer) -> bytes:
        counts = self._input_counts(answer) | {"output_tokens": 0}
        message = self._message([], counts) | {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message=message)

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._name}
        return head | {"content": content, "usage": usage}

    def _end(self, answer: Answer) -> dict[str, Any]:
        matched = answer.matched_stop(self.jobs[0].options.stop)
        reason = "stop_sequence" if matched is not None else _STOP_REASONS[answer.finish_reason]
        return {"stop_reason": reason, "stop_sequence": matched}

    def _input_counts(self, answer: Answer) -> dict[str, int]:
        """Anthropic counts cached tokens apart."""
        stats = answer.stats
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": stats.reused_tokens}
        return {"input_tokens": stats.prompt_tokens - stats.reused_tokens} | cached


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)


def _thinking_block(text: str) -> dict[str, Any]:
    """Anthropic signs reasoning so that it comes back unchanged; there is no such check here."""
    return {"type": "thinking", "thinking": text, "signature": ""}


def _thinking_end(index: int) -> list[bytes]:
    signature = {"type": "signature_delta", "signature": ""}
    return [
        _event("content_block_delta", index=index, delta=signature),
        _event("content_block_stop", index=index),
    ]


def _call_block(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def _call_events(piece: Piece, first_index: int) -> list[bytes]:
    events = []
    for index, call in enumerate(piece.calls, first_index):
        arguments = {"type": "input_json_delta", "partial_json": call.arguments}
        events.append(_event("content_block_start", index=index, content_block=_call_block(call)))
        events.append(_event("content_block_delta", index=index, delta=arguments))
        events.append(_event("content_block_stop", index=index))
    return events


def read_messages(loaded: Loaded, fields: Fields) -> MessagesExchange:
    """Check a request and render its prompt. Blocks while it encodes. Raises HttpError and EdgespecError."""
    body = as_chat(loaded, fields)
    return MessagesExchange(loaded, read_chat(loaded, Fields(body, names=_SENT_AS, notes=fields.notes)))


def count_tokens(loaded: Loaded, fields: Fields) -> dict[str, Any]:
    """`/v1/messages/count_tokens`: the tokens of a prompt, nothing is generated."""
    body = as_counted_chat(loaded, fields)
    (job,) = read_chat(loaded, Fields(body, names=_SENT_AS, notes=fields.notes)).jobs
    return {"input_tokens": len(job.prompt_ids)}
