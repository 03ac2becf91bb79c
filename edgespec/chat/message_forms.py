"""Other forms of the same messages, for templates that fail on, or leave out, the usual one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from edgespec.errors import EdgespecError

Message = dict[str, Any]
_TYPE = re.compile(r"""\[['"]type['"]\]|\.type\b""")
_PROBE = "What is it?"


def other_forms(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What a template may have meant that fails over the type of one of its `values`."""
    if not values["tools"]:
        yield {**values, "tools": []}  # Hermes' templates go through tools that nobody gave
    if any(message.get("tool_calls") for message in values["messages"]):  # DeepSeek R1's joins arguments to a text
        yield {**values, "messages": [_with_text_arguments(message) for message in values["messages"]]}


def _with_text_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}


def _with_text(call: Any) -> Any:
    function = call.get("function") or call
    text = json.dumps(function.get("arguments"), ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def in_parts(message: Message) -> Message:
    """A message whose content is a list of typed parts."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]} if message.get("content") else message


def takes_parts_only(source: str, render: Callable[[Message], str]) -> bool:
    """Whether a template leaves out content that is no list of parts, as those of models that see pictures may.

    `render`: what it makes of a message.
    """
    if _TYPE.search(source) is None:
        return False

    def says(message: Message) -> bool:
        with suppress(EdgespecError):  # said where a conversation is rendered
            return _PROBE in render(message)
        return False

    probe: Message = {"role": "user", "content": _PROBE}
    return not says(probe) and says(in_parts(probe))
