"""The chat's slash commands on the text of messages: a file in the next one, the last one again, an answer copied."""

from __future__ import annotations

from edgespec.cli.clipboard import copy
from edgespec.cli.dialogue import Chat
from edgespec.cli.lines import file_text, is_interactive
from edgespec.cli.terminal import counted, reply
from edgespec.errors import StateError


def read(chat: Chat, argument: str) -> None:
    """Raises ConfigError for a file that cannot be read, StateError for one that no context would hold."""
    if not argument:
        raise StateError("/read needs a file name")
    text = file_text(argument, "/read")
    model = chat.session.model
    num_tokens = len(model.encode("\n\n".join((*chat.attached, text))))
    if num_tokens >= model.context_length:  # else every message would be refused until it is taken back
        what = f"{argument} has {num_tokens} tokens{' with what was read before' if chat.attached else ''}"
        raise StateError(f"{what}, but the context holds only {model.context_length}: read less of it")
    chat.attached.append(text)
    reply(f"{counted(len(text), 'character')} of {argument} go behind the next message (/clear takes them back)")


def edit(chat: Chat, argument: str) -> None:
    text = chat.begin_edit()
    if text is None:
        reply("there is no message to edit")
    elif is_interactive():
        reply("the line below replaces the last message and its answer; Ctrl-C leaves them")
    else:
        reply("the next message replaces the last one and its answer")


def copy_answer(chat: Chat, argument: str) -> None:
    last = next((turn for turn in reversed(chat.conversation.turns) if turn["role"] == "assistant"), None)
    if last is None:
        reply("no answer yet")
        return
    text = str(last["content"])
    how = copy(text)
    reply(f"copied {counted(len(text), 'character')} {how}")
