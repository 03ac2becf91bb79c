"""A conversation: its turns, trimming to the context length, saving and loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgespec.chat.messages import Message, checked_messages
from edgespec.errors import PromptError, StateError
from edgespec.platform.files import read_text, write_atomically

_FORMAT, _VERSION = "edgespec-conversation", 1
_REASONING = "reasoning_content"  # field of an answer, as chat templates call it


@dataclass(slots=True)
class Conversation:
    """A system prompt and the messages since."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """System prompt and turns, as `Model.chat` takes them."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.turns

    def copy(self) -> Conversation:
        """Another conversation with the same messages."""
        return replace(self, turns=list(self.turns))

    @property
    def num_exchanges(self) -> int:
        """Number of user messages."""
        return len(self._questions())

    def ask(self, text: str) -> None:
        """Add a user message."""
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str, reasoning: str = "") -> None:
        """Add an answer. `reasoning`: what the model wrote before it, which later prompts hold only where the chat
        template asks for it.
        """
        self.turns.append({"role": "assistant", "content": text} | ({_REASONING: reasoning} if reasoning else {}))

    @property
    def last_answer(self) -> str:
        """The answer at the end, which can be continued; "" if there is none."""
        last = self.turns[-1] if self.turns else {"role": "user"}
        return str(last["content"]) if last["role"] == "assistant" and not last.get("tool_calls") else ""

    def continue_answer(self, text: str) -> None:
        """Add `text` to the answer at the end."""
        last = self.turns[-1]
        self.turns[-1] = last | {"content": last["content"] + text}

    def undo(self) -> str | None:
        """Remove the last user message and the answers to it; returns its text, or None if there is none."""
        questions = self._questions()
        if not questions:
            return None
        text = str(self.turns[questions[-1]]["content"])
        del self.turns[questions[-1] :]
        return text

    def _questions(self) -> list[int]:
        return [index for index, turn in enumerate(self.turns) if turn["role"] == "user"]

    def drop_oldest(self) -> bool:
        """Remove the oldest exchange; returns False if only one is left, which is kept."""
        questions = self._questions()
        if len(questions) < 2:
            return False
        del self.turns[: questions[1]]
        return True

    def save(self, path: Path) -> None:
        """Write atomically as JSON. Raises StateError if the file cannot be written."""
        content = {"format": _FORMAT, "version": _VERSION, "messages": self.messages}
        text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        write_atomically(path, text, parents=True, private=True)

    @staticmethod
    def load(path: Path) -> Conversation:
        """Read a file written by `save`. Raises StateError if it is missing or not a saved conversation."""
        try:
            content = json.loads(read_text(path))
        except OSError as exc:
            raise StateError(f"conversation {path} cannot be read: {exc.strerror}") from exc
        except (ValueError, RecursionError) as exc:  # ValueError: JSON, UTF-8, an integer without end
            raise StateError(f"{path} is not a saved conversation: {exc}") from exc
        if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("version") != _VERSION:
            raise StateError(f"{path} is not a conversation saved by this version of edgespec; /save writes one")
        found = content.get("messages")
        if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
            raise StateError(f"{path} has no list of messages")
        try:
            messages = checked_messages(found) if found else []
        except PromptError as exc:
            raise StateError(f"{path} has a message that is not valid: {exc}") from exc
        has_system = bool(messages) and messages[0]["role"] == "system"
        return Conversation(messages[0]["content"] if has_system else None, messages[has_system:])


def fit_context(
    conversation: Conversation, count_tokens: Callable[[list[Message]], int], context_length: int, reserve: int
) -> int:
    """Remove the oldest exchanges until `reserve` tokens are free for the answer; returns the number removed.

    Removing a turn moves all later tokens, so the KV cache after the system prompt is lost. A quarter of the context is
    therefore freed at once, so that the next turns can reuse the cache. Raises PromptError if the last message alone is
    too long; the conversation is then unchanged.
    """
    num_tokens = count_tokens(conversation.messages)
    if num_tokens + reserve <= context_length:
        return 0
    kept = conversation.copy()
    dropped = 0
    while num_tokens + reserve > context_length * 3 // 4 and kept.drop_oldest():
        dropped += 1
        num_tokens = count_tokens(kept.messages)
    if num_tokens >= context_length:
        raise PromptError(
            f"the message alone makes a prompt of {num_tokens} tokens but the context holds only {context_length}, "
            "answer included: shorten it, or start with a larger --ctx-size"
        )
    conversation.turns = kept.turns
    return dropped
