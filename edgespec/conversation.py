"""The state of one conversation: its turns, how much of them fits the context, saving and loading."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from edgespec.chat import Message, checked_messages
from edgespec.errors import PromptError, StateError
from edgespec.paths import read_text

_FORMAT, _VERSION = "edgespec-conversation", 1


@dataclass(slots=True)
class Conversation:
    """A system prompt and the turns since: the only owner of both. A turn is a user message and what answered it."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.turns

    @property
    def num_exchanges(self) -> int:
        return sum(turn["role"] == "user" for turn in self.turns)

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self.turns.append({"role": "assistant", "content": text})

    def clear(self) -> None:
        """Forget all turns; the system prompt stays."""
        self.turns.clear()

    def undo(self) -> str | None:
        """Drop the last user message and all that answered it; returns its text, or None when there is none."""
        last = self._last_question()
        if last is None:
            return None
        text = str(self.turns[last]["content"])
        del self.turns[last:]
        return text

    def regen(self) -> bool:
        """Drop the last answer so that it can be made again; False when nothing was asked."""
        last = self._last_question()
        if last is None:
            return False
        del self.turns[last + 1 :]
        return True

    def _last_question(self) -> int | None:
        return next((i for i in reversed(range(len(self.turns))) if self.turns[i]["role"] == "user"), None)

    def drop_oldest(self) -> bool:
        """Drop the oldest exchange, never the last one; False when only that is left."""
        questions = [i for i, turn in enumerate(self.turns) if turn["role"] == "user"]
        if len(questions) < 2:
            return False
        del self.turns[: questions[1]]
        return True

    def save(self, path: Path) -> None:
        """Write as JSON: complete or not at all. Raises StateError when the file cannot be written."""
        content = {"format": _FORMAT, "version": _VERSION, "messages": self.messages}
        write_atomically(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Conversation:
        """Read what `save` wrote. Raises StateError when the file is missing or something else."""
        try:
            content = json.loads(read_text(path))
        except OSError as exc:
            raise StateError(f"conversation {path} cannot be read: {exc.strerror}") from exc
        except (ValueError, RecursionError) as exc:  # ValueError: JSON, UTF-8, an integer without end
            raise StateError(f"{path} is not a saved conversation: {exc}") from exc
        if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("version") != _VERSION:
            raise StateError(f"{path} is not a conversation saved by this version; /save writes one")
        messages = content.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise StateError(f"{path} holds no list of messages")
        try:
            messages = checked_messages(messages) if messages else []
        except PromptError as exc:
            raise StateError(f"{path} holds a message that cannot be used: {exc}") from exc
        has_system = bool(messages) and messages[0]["role"] == "system"
        return Conversation(messages[0]["content"] if has_system else None, messages[has_system:])


def fit_context(
    conversation: Conversation, count_tokens: Callable[[list[Message]], int], context_length: int, reserve: int
) -> int:
    """Drop the oldest exchanges until `reserve` tokens are free for the answer; returns how many were dropped.

    Dropping moves every later token and so empties the cached prefix. Once it must be, a quarter of the context is
    freed, so that the next turns can reuse the cache again. Raises PromptError when the last message alone is too
    long; the conversation is then unchanged.
    """
    num_tokens = count_tokens(conversation.messages)
    if num_tokens + reserve <= context_length:
        return 0
    kept = Conversation(conversation.system, list(conversation.turns))
    dropped = 0
    while num_tokens + reserve > context_length * 3 // 4 and kept.drop_oldest():
        dropped += 1
        num_tokens = count_tokens(kept.messages)
    if num_tokens >= context_length:
        raise PromptError(
            f"the message alone makes a prompt of {num_tokens} tokens and the context holds {context_length}, answer "
            "included: shorten it, or start with a larger --ctx-size"
        )
    conversation.turns[:] = kept.turns
    return dropped


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by a file with `text` in one step. Raises StateError when that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as exc:
        raise StateError(f"{path} cannot be written: {exc.strerror}") from exc
