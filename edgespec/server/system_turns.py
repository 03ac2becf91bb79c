"""System messages behind the first: agents send them in mid-conversation, and many chat templates cannot show them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from edgespec.chat.template import render_chat
from edgespec.errors import EdgespecError
from edgespec.server.fields import Fields

_PROBE = "Answer in one line."


def placed(template: str, messages: list[Any], fields: Fields) -> list[Any]:
    """`messages` with each system message where the chat template shows it.

    Where it shows only one, those that follow it at once join it, and later ones become texts of the user.
    """
    if not any(_is_system(message) for message in messages[1:]) or _shows_late_ones(template):
        return messages
    found: list[Any] = []
    is_moved = False
    for message in messages:
        was_moved, is_moved = is_moved, _is_system(message) and not all(map(_is_system, found))
        given = {**message, "role": "user"} if is_moved else message
        belongs = is_moved or was_moved or _is_system(given)
        text = _joined(found[-1], given) if found and belongs else None
        if text is None:
            found.append(given)
        else:
            found[-1] = {**found[-1], "content": text}
        if is_moved:
            fields.note("messages", "this model shows one system message only: later ones are read as the user's")
    return found


def _joined(one: Any, other: Any) -> str | None:
    """The text of two messages of one role; None where they are not."""
    first, second = _text(one), _text(other)
    if first is None or second is None or one["role"] != other["role"]:
        return None
    return "\n\n".join(text for text in (first, second) if text)


def _is_system(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "system"


def _text(message: Any) -> str | None:
    content = message.get("content") if isinstance(message, dict) and "role" in message else None
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    known = [text for text in texts if isinstance(text, str)]
    return "".join(known) if len(known) == len(parts) else None


@lru_cache(maxsize=8)
def _shows_late_ones(template: str) -> bool:
    """Whether a template shows two system messages at the beginning, and one in the middle."""
    first, asked, said = ({"role": role, "content": "Hello."} for role in ("system", "user", "assistant"))
    probe = {"role": "system", "content": _PROBE}
    try:
        return all(
            _PROBE in render_chat(template, messages)
            for messages in ([first, probe, asked], [first, asked, said, probe, asked])
        )
    except EdgespecError:
        return False
