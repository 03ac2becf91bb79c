"""An assistant's message at the end of a conversation: the answer has begun there, and goes on behind its text.

Templates render only finished messages. So a mark is put behind the text, and what a template writes from there on, as
its end of the turn, is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from edgespec.chat.message_forms import Message
from edgespec.errors import PromptError


class Ending(NamedTuple):
    """How a prompt ends. `opens`: with the beginning of the assistant's turn, unless it goes on from a text.

    `continues`: whether it goes on from the last message, an assistant's text; None: if it is one. Requests call them
    `add_generation_prompt` and `continue_final_message`.
    """

    opens: bool = True
    continues: bool | None = None

    def is_begun(self, last: Message) -> bool:
        """Whether the answer goes on from the `last` message. Raises PromptError where it must and cannot."""
        has_begun = bool(begun_answer(last))
        if self.continues and not has_begun:
            raise PromptError("continue_final_message needs a conversation that ends with a text of the assistant")
        return has_begun and self.continues is not False


USUAL_ENDING = Ending()


def begun_answer(message: Message) -> str:
    """The text of a checked message that the answer goes on from; "" if it is no assistant's, or only holds calls."""
    is_answer = message["role"] == "assistant" and not message.get("tool_calls")
    text = message["content"] if is_answer else ""
    return text if text.strip() else ""


def without_empty_end(messages: Sequence[Message]) -> list[Message]:
    """Checked messages without an assistant's at the end that holds nothing: some clients send one to be filled."""
    last = messages[-1]
    has_more = last["content"].strip() or last.get("tool_calls") or last.get("reasoning_content")
    is_empty = last["role"] == "assistant" and not has_more
    return [*messages[:-1]] if is_empty and len(messages) > 1 else [*messages]


def marked(messages: Sequence[Message], end: str) -> list[Message]:
    """`messages` with the mark `end` behind the last one's text; it also keeps templates from cutting blanks there."""
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + end}]


def cut_at(rendered: str, end: str) -> str:
    """The rendered conversation up to the last mark `end`. Raises PromptError where the template left the text out."""
    text, found, _ = rendered.rpartition(end)
    if not found:
        raise PromptError(
            "the conversation ends with an assistant's message, which the model is to go on from, but its chat "
            "template leaves that message out: end with another message, or give another template with "
            "--chat-template-file"
        )
    return text.replace(end, "")  # templates may show a text more than once
