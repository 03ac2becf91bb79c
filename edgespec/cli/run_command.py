"""The command that runs a model, as other commands name it: a base model continues text, all others chat."""

from __future__ import annotations

import re

from edgespec.formats.manifest import ModelFile
from edgespec.installation import quoted
from edgespec.loading.opening import has_chat_template


def run_command(name: str, target: ModelFile | None) -> str:
    """`name`: how the user names the model of the file `target`; without a file it is taken for one that chats."""
    chats = target is None or has_chat_template(target)
    return f"edgespec chat {_quoted(name)}" if chats else continue_command(name)


def continue_command(name: str) -> str:
    """The command that continues a text without a chat template."""
    return f"edgespec generate {_quoted(name)} --no-chat-template -p {quoted('Once upon a time')}"


def _quoted(name: str) -> str:
    """As a shell takes it; letters of any language need no quotation marks, which `shlex` puts around them."""
    return name if re.fullmatch(r"[\w./:-]+", name) else quoted(name)
