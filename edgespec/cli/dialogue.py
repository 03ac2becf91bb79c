"""One conversation with a loaded model: asks, prints the answer and remembers it; keeps it in a file if wanted.

With `chat --session FILE` the conversation is in FILE, written after every answer, and the model's state beside it so
that nothing is read again. The state, which may take megabytes, is written at the end; without it, or with that of
another model, the conversation goes on and its text is read again.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from tempfile import TemporaryFile

from edgespec.chat.conversation import Conversation, fit_context
from edgespec.cli.session import HERE, Session
from edgespec.cli.terminal import counted, detail, note, reply
from edgespec.config.values import RANDOM_SEED
from edgespec.errors import EdgespecError, StateError
from edgespec.platform.files import write_errors
from edgespec.reports import Stats

STATE_SUFFIX = ".state"
LEAST_ANSWER = 256  # tokens kept free for an answer of unlimited length, where the context allows


class Chat:
    """The conversation, the session it runs in, and the counters of its last answer."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.conversation = Conversation(session.shown.system)
        self.last = Stats()  # of the last answer
        self.attached: list[str] = []  # texts that go behind the next message

    def say(self, text: str) -> None:
        """Ask `text` and print the answer; a failure leaves the conversation as it was."""
        before = self.conversation.copy()
        self.conversation.ask("\n\n".join((text, *self.attached)))
        self.attached = []  # first: with what no context holds, every message would be refused
        self._answer(before)

    def say_again(self) -> None:
        """Answer the last message again with the next seed; the same seed would give the same text."""
        before = self.conversation.copy()
        if not self.conversation.regen():
            reply("there is nothing to answer yet")
            return
        seed = self.session.seed + 1
        seed = seed if seed < 1 << 64 and seed != RANDOM_SEED else 0
        self.session.settings = self.session.settings.above({"seed": seed}, HERE)
        is_greedy = self.session.sampling.temperature == 0
        reply("temperature 0: the answer will be the same" if is_greedy else f"seed {seed}")
        self._answer(before)

    def go_on(self) -> None:
        """Go on with the last answer, which was cut or stopped."""
        before = self.conversation.copy()
        prefix = before.last_answer
        if not prefix.strip():
            reply("there is no answer to go on with")
            return
        self._answer(before, prefix)

    def _answer(self, before: Conversation, prefix: str = "") -> None:
        """Fit, generate, print, remember. `before`: what to return to when there is no answer; `prefix`: its begin."""
        try:
            self._make_room()
            reasoning, text = self._generate(prefix)
        except BaseException:
            self.conversation = before
            raise
        if prefix:
            self.conversation.continue_answer(text)
            if not text:
                note("the answer was complete: the model adds nothing")
        elif text:
            self.conversation.answer(text, reasoning)
        else:
            self.conversation = before
            note(f"no answer{' after the reasoning' if reasoning else ''}; the message is dropped")
        self.session.show_end(self.last, in_chat=True)

    def _make_room(self) -> None:
        model, wanted = self.session.model, self.session.options.max_tokens
        reserve = min(wanted or LEAST_ANSWER, model.context_length // 4)
        dropped = fit_context(
            self.conversation, lambda messages: len(self.session.encode(messages)), model.context_length, reserve
        )
        if dropped:
            oldest = counted(dropped, "exchange")
            note(f"the context of {model.context_length} tokens is full: dropped the oldest {oldest}")

    def _generate(self, prefix: str) -> tuple[str, str]:
        """(the reasoning, the answer behind `prefix`)."""
        session = self.session
        prompt_ids = session.encode(self.conversation.messages)
        options = dataclasses.replace(session.options, logprobs=False)
        printer = session.printer(prompt_ids, prefix)
        answer = session.model.stream(prompt_ids, session.sampling, options)
        self.last = answer.stats
        if printer.print_all(answer):
            note("stopped")
        return printer.parts


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
