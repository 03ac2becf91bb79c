"""What a conversation holds that a text model cannot read: refused in a question, left out of what came before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.chat.messages import num_answered, unread_kinds
from edgespec.server.fields import Fields
from edgespec.server.http_errors import bad_request


def check_question(messages: Sequence[Any], places: Sequence[str]) -> None:
    """Raises HttpError for a part that is no text in what is to be answered. `places`: of the contents."""
    for message, place in [*zip(messages, places, strict=True)][num_answered(messages) :]:
        asks = isinstance(message, dict) and message.get("role") in ("user", "system")
        if asks and (kinds := unread_kinds([message])):
            raise bad_request(f"{place} has a part of type {kinds[0]}: this server reads text only", place)


def note_left_out(messages: Sequence[Any], fields: Fields) -> None:
    """Say what is left out of earlier turns and of tool results."""
    if kinds := unread_kinds(messages):
        fields.note("messages", f"{', '.join(kinds)} left out of what was said before: this server reads text only")
