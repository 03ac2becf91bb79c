"""Ids of tool calls for chat templates that take only ids of nine letters and digits, which is Mistral's own form.

Such a template refuses the conversation otherwise: "Tool call IDs should be alphanumeric strings with length 9!". Ids
of OpenAI's form (`call_...`) and Anthropic's (`toolu_...`) are longer, and Ollama's protocol has none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

_WANTS_NINE = re.compile(r"\.id\s*\|\s*length\s*!=\s*9|\[.id.\]\s*\|\s*length\s*!=\s*9")
_NINE = re.compile(r"[0-9A-Za-z]{9}")


def wants_short_ids(template: str) -> bool:
    """Whether a template takes ids of nine letters and digits only."""
    return _WANTS_NINE.search(template) is not None


def with_short_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` in which calls, and the results that answer them, have ids of nine letters and digits.

    Equal ids stay equal, and a call has the same one in every turn. A result without an id answers the first call that
    has no answer yet.
    """
    found, open_ids, count = list[dict[str, Any]](), list[str](), 0
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            names = [_short(call.get("id"), count + index) for index, call in enumerate(calls)]
            count += len(calls)
            open_ids += names
            message = message | {"tool_calls": [{**call, "id": name} for call, name in zip(calls, names, strict=True)]}
        elif message.get("role") == "tool":
            given = message.get("tool_call_id")
            name = _short(given, count) if given or not open_ids else open_ids[0]
            if name in open_ids:
                open_ids.remove(name)
            message = message | {"tool_call_id": name}
        found.append(message)
    return found


def _short(given: object, place: int) -> str:
    text = given if isinstance(given, str) and given else f"call {place}"
    return text if _NINE.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]
