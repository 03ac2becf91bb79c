"""`/v1/messages`: Anthropic's protocol. `messages_input` translates requests to those of `chat_request`, which checks
them; answers are written here.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from edgespec.chat.tools import ToolCall
from edgespec.server.answer import Answer, Piece
from edgespec.server.chat_completions import ChatExchange
from edgespec.server.chat_request import read_chat
from edgespec.server.exchange import Exchange, sse
from edgespec.server.fields import Fields
from edgespec.server.http_errors import HttpError
from edgespec.server.messages_input import as_chat, as_counted_chat
from edgespec.server.scheduler import Ticket
from edgespec.server.service import Loaded

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
        calls = [_call_block(call) | {"input": call.input} for call in answer.calls]
        counts = self._input_counts(answer) | {"output_tokens": answer.stats.new_tokens}
        return self._message([*thinking, *text, *calls], counts) | self._end(answer) | {"seed": answer.ticket.seed}

    async def stream(self, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        (answer,) = answers
        blocks, has_begun = _Blocks(), False
        async for piece in answer.pieces():
            if not has_begun:
                yield self._begin(answer)
                has_begun = True
            for event in blocks.push(piece):
                yield event
        if not has_begun:
            yield self._begin(answer)
        for event in blocks.close():
            yield event
        usage = self._input_counts(answer) | {"output_tokens": answer.stats.new_tokens}
        yield _event("message_delta", delta=self._end(answer), usage=usage, seed=answer.ticket.seed)
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


class _Blocks:
    """The content blocks of a stream, of which one is open at a time: `push` and `close` return their events."""

    def __init__(self) -> None:
        self._index = 0
        self._open = ""  # kind of the open block

    def push(self, piece: Piece) -> Iterator[bytes]:
        if piece.reasoning:
            yield from self._add("thinking", _thinking_block(""), piece.reasoning)
        if piece.text:
            yield from self._add("text", {"type": "text", "text": ""}, piece.text)
        for call in piece.calls:
            yield from self.close()
            yield self._start(_call_block(call))
            yield self._delta(type="input_json_delta", partial_json=call.arguments)
            yield self._stop()

    def close(self) -> Iterator[bytes]:
        """End the open block, if there is one."""
        if self._open == "thinking":
            yield self._delta(type="signature_delta", signature="")
        if self._open:
            self._open = ""
            yield self._stop()

    def _add(self, kind: str, block: dict[str, Any], text: str) -> Iterator[bytes]:
        if self._open != kind:
            yield from self.close()
            self._open = kind
            yield self._start(block)
        yield self._delta(type=f"{kind}_delta", **{kind: text})

    def _start(self, block: dict[str, Any]) -> bytes:
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> bytes:
        self._index += 1
        return _event("content_block_stop", index=self._index - 1)


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)


def _thinking_block(text: str) -> dict[str, Any]:
    """Anthropic signs reasoning so that it comes back unchanged; there is no such check here."""
    return {"type": "thinking", "thinking": text, "signature": ""}


def _call_block(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def read_messages(loaded: Loaded, fields: Fields) -> MessagesExchange:
    """Check a request and render its prompt. Blocks while it encodes. Raises HttpError and EdgespecError."""
    body = as_chat(loaded, fields)
    return MessagesExchange(loaded, read_chat(loaded, Fields(body, names=_SENT_AS, notes=fields.notes)))


def count_tokens(loaded: Loaded, fields: Fields) -> dict[str, Any]:
    """`/v1/messages/count_tokens`: the tokens of a prompt, nothing is generated."""
    body = as_counted_chat(loaded, fields)
    (job,) = read_chat(loaded, Fields(body, names=_SENT_AS, notes=fields.notes)).jobs
    return {"input_tokens": len(job.prompt_ids)}
