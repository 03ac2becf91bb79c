"""The messages of a conversation, checked and in the forms that chat templates expect.

What a conversation holds from earlier turns is evidence and no input to validate: an agent sends it again with every
request. Broken tool arguments, results without a text, refusals, and parts that no text model reads are shown as far as
they have a text. Only a question that still waits for its answer must be readable.

Some templates take other forms of the same messages: content as parts, arguments as text, ids of calls of nine letters
and digits, which is Mistral's own form ("Tool call IDs should be alphanumeric strings with length 9!").
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from edgespec.errors import PromptError, shown

_MOST_DEPTH = 64  # levels of arguments that templates can show


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)
"""Reads what is JSON, which Python's own infinite numbers are not."""


def read_arguments(given: Any) -> Mapping[str, Any]:
    """The arguments of an earlier tool call; what is no object that can be shown is one argument, as it was written."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    if isinstance(given, Mapping):
        return given
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    try:
        value = JSON.decode(text)
        json.dumps(value, ensure_ascii=False).encode()  # not of half a surrogate pair, which an escape can write
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) and not _is_deep(value) else {"arguments": text}


def _is_deep(value: Any, levels: int = _MOST_DEPTH) -> bool:
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_deep(each, levels - 1) for each in below)


Message = dict[str, Any]


def other_forms(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What a template may have meant that fails over the type of one of its `values`."""
    if not values["tools"]:
        yield {**values, "tools": []}  # Hermes' templates go through tools that nobody gave
    if any(message.get("tool_calls") for message in values["messages"]):  # DeepSeek R1's joins arguments to a text
        yield {**values, "messages": [_with_text_arguments(message) for message in values["messages"]]}


def _with_text_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    functions = [call.get("function") or call for call in message["tool_calls"]]
    texts = [{**each, "arguments": json.dumps(each.get("arguments"), ensure_ascii=False)} for each in functions]
    called = [{**call, "function": text} for call, text in zip(message["tool_calls"], texts, strict=True)]
    return {**message, "tool_calls": called}


def in_parts(message: Message) -> Message:
    """A message whose content is a list of typed parts."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]} if message.get("content") else message


ROLES = ("system", "user", "assistant", "tool")
_TEXTS = dict.fromkeys(("text", "input_text", "output_text", "reasoning_text", "summary_text"), "text")
_TEXTS |= {"refusal": "refusal"}
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")  # of earlier answers, which templates leave out


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """`messages` as templates expect them: content as text, tool arguments as objects where they are any.

    Raises PromptError for an empty list, an unknown role or a content that is not text.
    """
    given: object = messages
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise PromptError(f"a conversation must be a list of messages with role and content, got {shown(given)}")
    if not messages:
        raise PromptError("the conversation is empty: give at least one message")
    answered = num_answered(messages)
    return [_checked(message, index, is_old=index < answered) for index, message in enumerate(messages)]


def num_answered(messages: Sequence[Any]) -> int:
    """How many messages stand before the last answer. One at the very end has only begun."""
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages[:-1]]
    return next((index for index in reversed(range(len(roles))) if roles[index] == "assistant"), 0)


def unread_kinds(messages: Sequence[Any]) -> list[str]:
    """The kinds of parts in `messages` that a text model cannot read, such as `image_url`."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    found = [_kind(part) for part in parts if part_text(part) is None]
    return list(dict.fromkeys(found))


def part_text(part: object) -> str | None:
    """The text of one part of a content, in the form of any protocol; None for one that has none, such as an image."""
    if not isinstance(part, Mapping):
        return part if isinstance(part, str) else None
    kind = _kind(part)
    if kind in _THOUGHTS:
        return ""
    if kind == "document":  # Anthropic's
        source = part.get("source")
        source = source if isinstance(source, Mapping) else {}
        inner = source.get("data") if source.get("type") == "text" else source.get("content")
        texts = [part_text(each) for each in inner] if isinstance(inner, list) else [inner]
        known = [each for each in (part.get("title"), *texts) if isinstance(each, str)]
        return "\n".join(known) if all(isinstance(text, str) for text in texts) else None
    text = part.get(_TEXTS.get(kind, ""))
    return text if isinstance(text, str) else None


def _kind(part: object) -> str:
    return str(part.get("type") or "unknown") if isinstance(part, Mapping) else shown(part)


def _checked(message: object, index: int, *, is_old: bool) -> Message:
    if not isinstance(message, Mapping):
        raise PromptError(f"message {index} must be an object with role and content, got {shown(message)}")
    checked = dict(message)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        given = "no role" if role is None else f"the role {shown(role)}"
        raise PromptError(f"message {index} has {given}; allowed: {', '.join(ROLES)}")
    checked["content"] = content = _content(checked, index, is_strict=role in ("system", "user") and not is_old)
    if not isinstance(content, str):
        raise PromptError(f"message {index} has no text content: give a text, or a list of parts with a type")
    if checked.get("tool_calls"):
        if not isinstance(checked["tool_calls"], list):
            raise PromptError(f"message {index} has tool_calls that are not a list: {shown(checked['tool_calls'])}")
        checked["tool_calls"] = [_call(call, index) for call in checked["tool_calls"]]
    return checked


def _content(message: Message, index: int, *, is_strict: bool) -> Any:
    """The content as text where it can be. Raises PromptError for a part that is none, if `is_strict`."""
    role, content = message["role"], message.get("content")
    if content is None and role == "assistant":
        refusal = message.get("refusal")
        return refusal if isinstance(refusal, str) else ""
    if content is None and role == "tool":
        return ""
    if role == "tool" and not isinstance(content, str):
        parts = content if isinstance(content, list) else [content]
        content = parts if all(isinstance(part, Mapping) and "type" in part for part in parts) else _as_json(content)
    return _joined(content, index, is_strict=is_strict) if isinstance(content, list) else content


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise PromptError(f"a tool result can be text or JSON, got {shown(value)}") from exc


def _joined(parts: list[Any], index: int, *, is_strict: bool) -> str:
    found, others = list[str](), set[str]()
    for part in parts:
        text, kind = part_text(part), _kind(part)
        if text is None and kind in _TEXTS:
            raise PromptError(f"message {index} has a part of type {kind} without the field {_TEXTS[kind]}, a text")
        if text is None:
            others.add(kind)
        found.append(f"[{kind} left out: this model reads text only]" if text is None else text)
    if others and is_strict:
        raise PromptError(f"message {index} has parts of type {', '.join(sorted(others))}; only text is supported")
    return "".join(found)


def _call(call: Any, index: int) -> Any:
    """A tool call with its arguments as an object, which templates expect; OpenAI's API sends a JSON string."""
    if not isinstance(call, Mapping):
        raise PromptError(f"message {index} has a tool call that is not an object")
    if "function" not in call:
        return call
    function = call["function"]
    if not isinstance(function, Mapping):
        raise PromptError(f"message {index} has a tool call whose function is {shown(function)}; allowed: an object")
    return {**call, "function": {**function, "arguments": read_arguments(function.get("arguments"))}}


_WANTS_NINE = re.compile(r"\.id\s*\|\s*length\s*!=\s*9|\[.id.\]\s*\|\s*length\s*!=\s*9")
_NINE = re.compile(r"[0-9A-Za-z]{9}")


def with_short_ids(template: str, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """`messages` in which calls, and the results that answer them, have ids of nine letters and digits, if `template`
    takes no others.

    Equal ids stay equal, and a call has the same one in every turn; a call without an id is named by its place.
    """
    if _WANTS_NINE.search(template) is None:
        return messages
    found = list[dict[str, Any]]()
    for place, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            named = [{**call, "id": _short(call.get("id") or f"{place} {n}")} for n, call in enumerate(calls)]
            message = message | {"tool_calls": named}
        elif message.get("role") == "tool":
            message = message | {"tool_call_id": _short(message.get("tool_call_id"))}
        found.append(message)
    return found


def _short(given: object) -> str:
    text = str(given)
    return text if _NINE.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]
