"""`/v1/responses`: OpenAI's newer protocol, without stored state. `responses_input` translates requests to those of
`chat_request`, which checks them; answers are written here.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, ClassVar

from edgespec.chat.tools import ToolCall
from edgespec.server.answer import Answer, Piece, usage
from edgespec.server.chat_completions import ChatExchange
from edgespec.server.chat_request import read_chat
from edgespec.server.exchange import Exchange, sse
from edgespec.server.fields import Fields
from edgespec.server.http_errors import HttpError
from edgespec.server.responses_input import SENT_AS, as_chat
from edgespec.server.responses_tools import freeform_input, freeform_names
from edgespec.server.scheduler import Ticket
from edgespec.server.service import Loaded


class ResponsesExchange(Exchange):
    """A request to `/v1/responses`, around the chat that it was translated to. `echoed`: what the answer repeats."""

    def __init__(self, loaded: Loaded, chat: ChatExchange, echoed: dict[str, Any]) -> None:
        super().__init__(chat.jobs, is_stream=chat.is_stream)
        self._name, self._chat, self._echoed = loaded.name, chat, echoed
        self._id, self._created = f"resp_{secrets.token_hex(12)}", int(time.time())
        self._sequence = 0
        self._freeform = freeform_names(echoed.get("tools", ()))

    def answer(self, ticket: Ticket) -> Answer:
        return self._chat.answer(ticket)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        status = _status(answer)
        text = [_message(status, answer.text)] if answer.text.strip() or not answer.calls else []
        reasoning = [_reasoning("completed", answer.reasoning)] if answer.reasoning else []
        return self.ended(answer, [*reasoning, *text, *(self._call(call) for call in answer.calls)])

    async def stream(self, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        (answer,) = answers
        items = _Items(self)
        async for piece in answer.pieces():
            for event in items.push(piece):
                yield event
        for event in items.end(answer):
            yield event

    def failure(self, error: HttpError) -> bytes:
        told = self.event("error", **_error(error))
        if self._sequence == 1:
            return told
        # Clients read until the response that has begun ends, and take the reason from there.
        reason = {name: value for name, value in _error(error).items() if name != "param"}
        return told + self.event("response.failed", response=self._object("failed", []) | {"error": reason})

    @classmethod
    def failed_early(cls, error: HttpError) -> bytes:
        return sse({"type": "error", "sequence_number": 0, **_error(error)}, "error")

    def event(self, kind: str, **fields: Any) -> bytes:
        """The next event of the stream."""
        self._sequence += 1
        return sse({"type": kind, "sequence_number": self._sequence - 1, **fields}, kind)

    def beginning(self) -> Iterator[bytes]:
        """The first events of a stream."""
        begun = self._object("in_progress", [])
        yield self.event("response.created", response=begun)
        yield self.event("response.in_progress", response=begun)

    def call_events(self, call: ToolCall, output: list[dict[str, Any]]) -> Iterator[bytes]:
        """Those of one call, which is then added to `output`."""
        item, at = self._call(call), {"output_index": len(output)}
        place = at | {"item_id": item["id"]}
        if call.name in self._freeform:
            kind, name, about = "custom_tool_call_input", "input", {}
        else:
            kind, name, about = "function_call_arguments", "arguments", {"name": call.name}
        yield self.event("response.output_item.added", item=item | {name: "", "status": "in_progress"}, **at)
        yield self.event(f"response.{kind}.delta", delta=item[name], **place)
        yield self.event(f"response.{kind}.done", **about, **{name: item[name]}, **place)
        yield self.event("response.output_item.done", item=item, **at)
        output.append(item)

    def _call(self, call: ToolCall) -> dict[str, Any]:
        is_freeform = call.name in self._freeform
        given = {"input": freeform_input(call)} if is_freeform else {"arguments": call.arguments}
        return {
            "id": f"{'ctc' if is_freeform else 'fc'}_{secrets.token_hex(12)}",
            "type": "custom_tool_call" if is_freeform else "function_call",
            "call_id": call.id,
            "name": call.name,
            **given,
            "status": "incomplete" if call.is_cut else "completed",
        }

    def ended(self, answer: Answer, output: list[dict[str, Any]]) -> dict[str, Any]:
        """The whole response."""
        counts = usage([answer])
        details = {"reason": "max_output_tokens"} if _status(answer) == "incomplete" else None
        return self._object(_status(answer), output) | {
            "incomplete_details": details,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": answer.num_reasoning_tokens},
                "total_tokens": counts["total_tokens"],
            },
            "timings": answer.timings,
            "seed": answer.ticket.seed,
        }

    def _object(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        sampling = self.jobs[0].sampling
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._name,
            "output": output,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
        } | self._echoed


class _Items:
    """The items of a stream that is being written: `push` and `end` return its events."""

    def __init__(self, exchange: ResponsesExchange) -> None:
        self._exchange = exchange
        self._output: list[dict[str, Any]] = []
        self._reasoning, self._text = _ReasoningText(exchange, self._output), _Text(exchange, self._output)
        self._has_begun = False

    def push(self, piece: Piece) -> Iterator[bytes]:
        yield from self._begin()
        if piece.reasoning:
            yield from self._text.close("completed")
            yield from self._reasoning.push(piece.reasoning)
        if piece.text or piece.calls:
            yield from self._reasoning.close("completed")
        if piece.text:
            yield from self._text.push(piece.text)
        if piece.calls:
            yield from self._text.close("completed")
        for call in piece.calls:
            yield from self._exchange.call_events(call, self._output)

    def end(self, answer: Answer) -> Iterator[bytes]:
        status = _status(answer)
        yield from self._begin()
        yield from self._reasoning.close(status)
        if not (answer.text.strip() or answer.calls or self._text.is_open):  # an empty answer is a message too
            yield from self._text.push("")
        yield from self._text.close(status)
        yield self._exchange.event(f"response.{status}", response=self._exchange.ended(answer, self._output))

    def _begin(self) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            yield from self._exchange.beginning()


class _Text:
    """The message of a stream that is being written: `push` and `close` return its events."""

    kind = "output_text"  # of the events with text
    _extra: ClassVar[dict[str, Any]] = {"logprobs": []}  # further fields of these events

    def __init__(self, exchange: ResponsesExchange, output: list[dict[str, Any]]) -> None:
        self._exchange, self._output = exchange, output
        self._item: dict[str, Any] | None = None
        self._text = ""

    @property
    def is_open(self) -> bool:
        """Whether the item has begun and not ended."""
        return self._item is not None

    def push(self, text: str) -> Iterator[bytes]:
        event = self._exchange.event
        if self._item is None:
            self._item, self._text = self._made("in_progress", None), ""
            yield event("response.output_item.added", item=self._item, output_index=len(self._output))
            yield event("response.content_part.added", part=self._part(""), **self._place(self._item))
        self._text += text
        yield event(f"response.{self.kind}.delta", delta=text, **self._extra, **self._place(self._item))

    def close(self, status: str) -> Iterator[bytes]:
        item, event = self._item, self._exchange.event
        if item is None:
            return
        self._item = None
        place = self._place(item)
        done = item | {"status": status, "content": [self._part(self._text)]}
        yield event(f"response.{self.kind}.done", text=self._text, **self._extra, **place)
        yield event("response.content_part.done", part=self._part(self._text), **place)
        yield event("response.output_item.done", item=done, output_index=len(self._output))
        self._output.append(done)

    def _made(self, status: str, text: str | None) -> dict[str, Any]:
        return _message(status, text)

    def _part(self, text: str) -> dict[str, Any]:
        return _part(text)

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self._output), "content_index": 0}


class _ReasoningText(_Text):
    """The same of the reasoning before it."""

    kind = "reasoning_text"
    _extra: ClassVar[dict[str, Any]] = {}

    def _made(self, status: str, text: str | None) -> dict[str, Any]:
        return _reasoning(status, text)

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _message(status: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [_part(text)]
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _reasoning(status: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    head = {"id": f"rs_{secrets.token_hex(12)}", "type": "reasoning", "summary": []}
    return head | {"content": content, "status": status}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def count_input_tokens(loaded: Loaded, fields: Fields) -> dict[str, Any]:
    """`/v1/responses/input_tokens`: the tokens of a prompt, nothing is generated. Raises as `read_responses`."""
    (job,) = read_responses(loaded, fields).jobs
    return {"object": "response.input_tokens", "input_tokens": len(job.prompt_ids)}


def read_responses(loaded: Loaded, fields: Fields) -> ResponsesExchange:
    """Check a request and render its prompt. Blocks while it encodes. Raises HttpError and EdgespecError."""
    body, echoed = as_chat(fields, loaded)
    return ResponsesExchange(loaded, read_chat(loaded, Fields(body, names=SENT_AS, notes=fields.notes)), echoed)


def _error(error: HttpError) -> dict[str, Any]:
    return {"code": error.code or error.kind, "message": error.message, "param": error.param}
