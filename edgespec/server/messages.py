"""`/v1/messages`: Anthropic's protocol. Requests are translated to those of `chat_request`, which checks them."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

from edgespec.chat.marks import reasoning_marks
from edgespec.chat.tools import ToolCall
from edgespec.server.answer import Answer, Piece
from edgespec.server.chat_completions import ChatExchange
from edgespec.server.chat_request import read_chat
from edgespec.server.exchange import Exchange, sse
from edgespec.server.fields import Fields
from edgespec.server.http_errors import HttpError, bad_request
from edgespec.server.options import MOST_TOKENS
from edgespec.server.scheduler import Ticket
from edgespec.server.service import Loaded

PATH = "/v1/messages"
_SAME = ("model", "temperature", "top_p", "top_k", "stream", "speculative", "seed")
_SENT_AS = {
    "stop": "stop_sequences",
    "reasoning_effort": "thinking",
    "response_format.json_schema": "output_config.format",
}
_MOST_BLOCKS = 4096
_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}


class MessagesExchange(Exchange):
    """A request to `/v1/messages`, around the chat that it was translated to."""

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

    def failure(self, error: HttpError) -> bytes:
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
    if fields.whole("max_tokens", 1, MOST_TOKENS) is None:
        raise bad_request("max_tokens is missing: give the maximum number of tokens of the answer", "max_tokens")
    given = {name: fields.given(name) for name in (*_SAME, "max_tokens")}
    given |= {"stop": fields.listed("stop_sequences", loaded.limits.max_stops)}
    fields.ignore("metadata", "service_tier")
    given |= {"reasoning_effort": _effort(loaded, fields), "response_format": _format(fields)}
    body = given | _read_conversation(loaded, fields)
    fields.finish()
    return MessagesExchange(loaded, read_chat(loaded, Fields(body, names=_SENT_AS)))


def _format(fields: Fields) -> dict[str, Any] | None:
    """`output_config.format` as a `response_format`; None for free text."""
    config = fields.fields("output_config")
    if config is None:
        return None
    form = config.fields("format")
    config.ignore("effort")
    config.finish()
    if form is None:
        return None
    if form.choice("type", ("json_schema",)) is None or form.fields("schema") is None:
        raise bad_request('output_config.format must be {"type": "json_schema", "schema": {...}}', "output_config")
    schema = form.given("schema")
    form.finish()
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _effort(loaded: Loaded, fields: Fields) -> str | None:
    """`thinking` as a `reasoning_effort`. A budget limits nothing: the answer has `max_tokens` for both."""
    thinking = fields.fields("thinking")
    kind = None if thinking is None else thinking.choice("type", ("enabled", "adaptive", "disabled"))
    if kind in (None, "disabled"):
        return None if thinking is None else "none"
    if reasoning_marks(loaded.model.target.vocabulary.chat_template) is None:
        raise bad_request("thinking is not supported: this model does not reason before it answers", "thinking")
    return "medium"


def count_tokens(loaded: Loaded, fields: Fields) -> dict[str, Any]:
    """`/v1/messages/count_tokens`: the tokens of a prompt, nothing is generated."""
    body = {"model": fields.given("model")} | _read_conversation(loaded, fields)
    body |= {"reasoning_effort": _effort(loaded, fields), "response_format": _format(fields)}
    fields.finish()
    (job,) = read_chat(loaded, Fields(body, names=_SENT_AS)).jobs
    return {"input_tokens": len(job.prompt_ids)}


def _read_conversation(loaded: Loaded, fields: Fields) -> dict[str, Any]:
    """System text, messages and tools under OpenAI's names."""
    messages = fields.listed("messages", _MOST_BLOCKS)
    if messages is None:
        raise bad_request("messages is missing: give a list of messages", "messages")
    system = fields.given("system")
    found = [] if system is None else [{"role": "system", "content": _joined(system, "system")}]
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
            raise bad_request(f"messages.{index}.role must be user or assistant", "messages")
        found += _translated(message, f"messages.{index}.content")
    return {"messages": found} | _read_tools(loaded, fields)


def _translated(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """One message as those that OpenAI makes of it: tool results are messages of their own there."""
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results, calls, texts = list[dict[str, Any]](), list[dict[str, Any]](), list[Any]()
    thoughts = list[str]()
    blocks: list[Any] = content if isinstance(content, list) else [content]
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind in ("thinking", "redacted_thinking") and role == "assistant":
            thoughts += [block["thinking"]] if isinstance(block.get("thinking"), str) else []
        elif kind == "tool_result" and role == "user":
            text = _joined(block.get("content") or "", where)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            texts.append(block)
    found = results
    if texts or calls or thoughts:
        own: dict[str, Any] = {"role": role, "content": _joined(texts, where)}
        own |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
        found.append(own | ({"tool_calls": calls} if calls else {}))
    return found


def _joined(content: Any, where: str) -> str:
    """The text of a content that may be a list of text blocks. Raises HttpError for other blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(
        isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)
        for block in content
    ):
        raise bad_request(f"{where} must be a text or a list of text blocks: this server reads text only", where)
    return "".join(block["text"] for block in content)


def _read_tools(loaded: Loaded, fields: Fields) -> dict[str, Any]:
    tools = fields.listed("tools", loaded.limits.max_tools)
    choice = fields.fields("tool_choice")
    found: dict[str, Any] = {}
    if choice is not None:
        kind = choice.choice("type", ("auto", "none", "any", "tool"))
        named = {"type": "function", "function": {"name": choice.text("name")}}
        forced = {"any": "required", "tool": named}.get(kind or "", kind)
        found = {"tool_choice": forced, "parallel_tool_calls": not choice.flag("disable_parallel_tool_use")}
        choice.finish()
    if tools is None:
        return found
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or not isinstance(tool.get("input_schema"), dict):
            raise bad_request(f"tools.{index} must have name and input_schema", f"tools.{index}")
    functions = [
        {"name": tool.get("name"), "description": tool.get("description") or "", "parameters": tool["input_schema"]}
        for tool in tools
    ]
    return found | {"tools": [{"type": "function", "function": function} for function in functions]}
