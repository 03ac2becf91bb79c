"""`edgespec chat`: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from edgespec.chat.conversation import Conversation, fit_context
from edgespec.cli.interrupt import stops
from edgespec.cli.lines import is_interactive, line_reader, read_message
from edgespec.cli.main import exit_code
from edgespec.cli.options import resolve_settings, settings_options
from edgespec.cli.session import Session, open_session, tell_configuration
from edgespec.cli.slash import COMMANDS, run_slash
from edgespec.cli.terminal import EventPrinter, complain, note, stats_lines
from edgespec.errors import ConfigError, EdgespecError
from edgespec.generation.totals import Totals
from edgespec.types import Stats

LEAST_ANSWER = 256  # tokens kept free for an answer of unlimited length, where the context allows


@click.command(short_help="Talk to a model.")
@settings_options("load", "generate", "sampling", "session")
def command(model_name: str | None, config_file: Path | None, **given: Any) -> int:
    """Talk to a model. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.

    MODEL is a registry name or the path of a GGUF file.
    """
    settings = resolve_settings(given, model_name, config_file)
    if not settings.values.get("chat_template", True):
        raise ConfigError(
            "a chat needs the chat template; generate can do without: edgespec generate --no-chat-template"
        )
    session = open_session(settings, remembers=True)
    with session.model:
        return Chat(session).run()


class Chat:
    """The conversation, the session it runs in, and the loop that asks and answers."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.conversation = Conversation(session.shown.system)
        self.totals = Totals()
        self.last = Stats()  # of the last answer
        self._exit_code = 0

    def run(self) -> int:
        """Read and answer until the end. The exit code of a pipe is that of its last failed message."""
        tell_configuration(self.session)
        if is_interactive():
            note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
        read_line = line_reader(list(COMMANDS), note)
        while True:
            try:
                message = read_message(read_line)
                if message.startswith("/"):
                    if not run_slash(self, message):
                        return self._exit_code
                elif message.strip():
                    self.say(message)
            except EOFError:
                return self._exit_code
            except KeyboardInterrupt:
                if not is_interactive():
                    raise
                note("Ctrl-D or /exit leaves")
            except EdgespecError as exc:
                complain(str(exc))
                self._exit_code = 0 if is_interactive() else exit_code(exc)

    def say(self, text: str) -> None:
        """Ask `text` and print the answer; a failure leaves the conversation as it was."""
        before = list(self.conversation.turns)
        self.conversation.ask(text)
        self._answer(before)

    def say_again(self) -> None:
        """Answer the last message anew, with the next seed: the same seed would give the same text."""
        before = list(self.conversation.turns)
        if not self.conversation.regen():
            note("there is nothing to answer yet")
            return
        sampling = dataclasses.replace(self.session.sampling, seed=self.session.seed + 1)
        self.session.sampling = sampling
        note("temperature 0: the same again" if sampling.temperature == 0 else f"seed {sampling.seed}")
        self._answer(before)

    def _answer(self, before: list[dict[str, Any]]) -> None:
        """Fit, generate, print, remember. `before`: the turns to return to when there is no answer."""
        try:
            self._make_room()
            text, noise_end = self._generate()
        except BaseException:
            self.conversation.turns[:] = before
            raise
        if text:
            self.conversation.answer(text, noise_end)
        else:
            self.conversation.turns[:] = before
            note("no answer; the message is forgotten")
        self._tell_end()

    def _make_room(self) -> None:
        model, wanted = self.session.model, self.session.options.max_tokens
        reserve = min(wanted or LEAST_ANSWER, model.context_length // 4)
        dropped = fit_context(
            self.conversation, lambda messages: len(model.encode_chat(messages)), model.context_length, reserve
        )
        if dropped:
            note(f"the context of {model.context_length} tokens is full: dropped the oldest {dropped} exchange(s)")

    def _generate(self) -> tuple[str, int]:
        """(the answer, where its noise ended)."""
        session = self.session
        prompt_ids = session.model.encode_chat(self.conversation.messages)
        offset = self.conversation.noise_offset(len(prompt_ids))
        options = dataclasses.replace(session.options, noise_offset=offset)
        printer = EventPrinter(show_draft=session.shown.show_draft)
        with session.model.stream(prompt_ids, session.sampling, options) as answer:
            self.last = answer.stats
            with stops(answer.cancel) as interruption:
                for event in answer:
                    printer.push(event)
                    if interruption.happened:
                        break
        printer.end_line()
        if interruption.happened:
            note("stopped")
        return printer.text, offset + len(prompt_ids) + self.last.new_tokens

    def _tell_end(self) -> None:
        stats, options = self.last, self.session.options
        self.totals.add(stats)
        self.session.tell_notes(stats)
        if stats.finish_reason == "length":
            note(f"cut at {options.max_tokens} tokens" if stats.new_tokens == options.max_tokens else "context full")
        if self.session.shown.stats:
            for line in stats_lines(stats):
                note(line)
