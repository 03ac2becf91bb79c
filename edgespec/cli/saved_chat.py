"""`chat --session FILE`: the conversation in FILE, and the model's state beside it so that nothing is read again.

The conversation is written after every answer. The state, which may take megabytes, is written at the end; without it,
or with that of another model, the conversation goes on and its text is read again.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile

from edgespec.chat.conversation import Conversation
from edgespec.cli.dialogue import Chat
from edgespec.cli.terminal import counted, detail, note
from edgespec.errors import EdgespecError, StateError
from edgespec.platform.files import write_errors

STATE_SUFFIX = ".state"


class SavedChat:
    """The file of a conversation.

    Raises StateError, before a model is loaded, for a file that is something else, or where none can be written.
    """

    def __init__(self, path: Path) -> None:
        nearest = next(folder for folder in path.absolute().parents if folder.exists())
        with write_errors(path), TemporaryFile(dir=nearest):
            pass  # a missing folder is made with the first answer
        self._path = path
        self._state_path = path.with_name(path.name + STATE_SUFFIX)
        self._conversation = Conversation.load(path) if path.exists() else None
        self._stamp = self._found_stamp()
        self._is_changed = False

    def begin(self, chat: Chat, system: str | None) -> None:
        """Continue the conversation, with `system` in place of its system prompt where one is given."""
        if self._conversation is None:
            return
        if system is not None:
            self._conversation.system = system
        chat.conversation = self._conversation
        note(f"continuing {self._path}: {counted(chat.conversation.num_exchanges, 'exchange')}")
        if not self._state_path.exists():
            return
        try:
            chat.session.model.load_state(self._state_path)
        except EdgespecError as exc:
            detail(str(exc))

    def keep(self, chat: Chat) -> None:
        """Write the conversation. Raises StateError when it cannot be written, or another program changed the file."""
        if not chat.conversation.turns and self._stamp is None:
            return
        if self._found_stamp() != self._stamp:
            raise StateError(
                f"another program changed {self._path}: keep this conversation with /save and another name"
            )
        chat.conversation.save(self._path)
        self._stamp = self._found_stamp()
        self._is_changed = True

    def end(self, chat: Chat) -> None:
        """Write the state, if the conversation went on."""
        if self._is_changed:
            chat.session.model.save_state(self._state_path)

    def _found_stamp(self) -> tuple[int, int, int] | None:
        """What tells whether the file is still the one that was read or written here; None where there is none."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise StateError(f"the conversation {self._path} cannot be read: {exc.strerror}") from exc
        return found.st_ino, found.st_size, found.st_mtime_ns
