"""The chat's slash commands. What they print goes to stderr: stdout carries the model's text alone."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from edgespec.chat.conversation import Conversation
from edgespec.cli.answer import readable
from edgespec.cli.models import card
from edgespec.cli.options import show
from edgespec.cli.session import HERE, Chat, completed, open_session, require_chat_template, show_beginning, stats_lines
from edgespec.cli.terminal import counted, reply
from edgespec.config.options import BY_KEY, OF_ONE_MODEL, RANDOM_SEED, SETTINGS
from edgespec.config.sources import Settings, find
from edgespec.config.table import CALLED, Setting, did_you_mean
from edgespec.config.values import aligned
from edgespec.errors import ConfigError, EdgespecError
from edgespec.platform.files import exists, expanded, given_text
from edgespec.platform.machine import reset_peak

_SHOWN_CHARACTERS = 200  # of a message that is taken back
_SHOWN_TURNS = 20  # messages of a loaded conversation that are printed
_ALIASES = {"/bye": "/exit", "/quit": "/exit", "/?": "/help"}


class Command(NamedTuple):
    usage: str
    help: str
    run: Callable[[Chat, str], None]


def run_slash(chat: Chat, line: str) -> None:
    """Run one command line. Raises ConfigError, StateError, and EOFError for the one that leaves."""
    name, _, argument = line.partition(" ")
    name = _ALIASES.get(name, name)
    if name not in COMMANDS:
        hint = _nearest(name) or "; /help lists them"
        raise ConfigError(f"no such command {name}{hint} (a message may begin with a space)")
    command = COMMANDS[name]
    if not argument.strip() and " " in command.usage and "[" not in command.usage:
        raise ConfigError(f"{name} alone does nothing; {command.usage}: {command.help}")
    command.run(chat, argument.strip())


def _nearest(name: str) -> str:
    setting = BY_KEY.get(name[1:].replace("-", "_"))
    return did_you_mean(name, COMMANDS) if setting is None else f"; did you mean '/set {setting.key} VALUE'?"


def _help(chat: Chat, argument: str) -> None:
    rows: list[tuple[str, ...]] = [(command.usage, command.help) for command in COMMANDS.values()]
    new_line = ("Alt+Enter", "begin a new line in the message")
    _table([*rows, new_line, ('"""', 'a message of several lines, up to the next """')])


def _clear(chat: Chat, argument: str) -> None:
    chat.conversation.turns.clear()
    chat.attached.clear()
    reply("conversation cleared")


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.conversation.system = argument
    reply(f"system prompt: {chat.conversation.system or 'none'}")


def _save(chat: Chat, argument: str) -> None:
    path = expanded(argument)
    if exists(path):
        Conversation.load(path)  # refuses to overwrite anything but a conversation
    chat.conversation.save(path)
    reply(f"saved {counted(chat.conversation.num_exchanges, 'exchange')} to {path}")


def _load(chat: Chat, argument: str) -> None:
    path = expanded(argument)
    chat.conversation = Conversation.load(path)
    turns = chat.conversation.turns
    if earlier := max(len(turns) - _SHOWN_TURNS, 0):
        reply(f"({earlier} earlier messages)")
    for turn in turns[earlier:]:
        reply(f"{'> ' if turn['role'] == 'user' else ''}{readable(str(turn['content']))}")
    reply(f"loaded {counted(chat.conversation.num_exchanges, 'exchange')} from {path}")


def _undo(chat: Chat, argument: str) -> None:
    text = chat.conversation.undo()
    reply("nothing to undo" if text is None else f"removed: {textwrap.shorten(text, _SHOWN_CHARACTERS)}")


# What Ollama writes behind /set, besides "parameter NAME VALUE".
_OLLAMAS = {
    "verbose": "stats on",
    "quiet": "stats off",
    "think": "thinking on",
    "nothink": "thinking off",
    "wordwrap": "raw off",
    "nowordwrap": "raw on",
    "format json": 'json-schema {"type": "object"}',
}


def _set(chat: Chat, argument: str) -> None:
    if argument == "noformat":
        _unset(chat, "json-schema")
        return
    argument = _OLLAMAS.get(argument, argument.removeprefix("parameter ").strip())
    name, _, text = argument.partition(" ")
    if not name or not text.strip():
        raise ConfigError("/set needs a name and a value, such as: /set temp 0.5 (/unset takes a setting back)")
    setting = find(CALLED.get(name.lower().replace("_", "-"), name), "/set")
    value = setting.read(text.strip(), f"/set {setting.key}")
    if setting.name == "seed" and value == RANDOM_SEED:
        _unset(chat, name)
    else:
        _use(chat, setting, chat.session.settings.above({setting.name: value}, HERE))


def _model(chat: Chat, argument: str) -> None:
    if argument:
        _load_again(chat, chat.session.settings.above({"model": argument}, HERE))
    else:
        reply(f"model: {chat.session.model.pair.name}; /model NAME loads another one")


def _load_again(chat: Chat, settings: Settings) -> None:
    """Load with other settings of loading; the conversation goes on. What fails leaves the chat as it was."""
    before = chat.session
    if settings.values.get("model") != before.settings.values.get("model"):
        settings = settings.without(OF_ONE_MODEL)
    settings = settings.without(name for name, source in settings.sources.items() if "recommended" in source)
    require_chat_template(settings, is_chat=True)  # before the model that is loaded makes room
    before.model.close()
    reset_peak()  # the next answers tell that of their own model
    try:
        chat.session = open_session(settings, remembers=True)
    except EdgespecError:
        chat.session = open_session(before.settings, remembers=True)
        raise
    show_beginning(chat.session)


def _unset(chat: Chat, argument: str) -> None:
    setting = find(argument, "/unset")
    rest = chat.session.settings.without((setting.name,))
    _use(chat, setting, completed(rest, chat.session.model))


def _use(chat: Chat, setting: Setting, settings: Settings) -> None:
    """Use `settings` from the next answer on, and say what `setting` is then. Raises as `Session.use` and a load."""
    if setting.part == "serve":
        raise ConfigError(f"{setting.key} is a setting of edgespec serve: it changes nothing in a chat")
    if setting.name == "chat_template":
        raise ConfigError(f"{setting.key} is on in every chat: edgespec run --no-chat-template continues a text")
    if setting.part == "load":
        _load_again(chat, settings)
    else:
        chat.session.use(settings)
    if setting.name == "system":
        chat.conversation.system = settings.values.get("system")
        _system(chat, "")
        return
    value = _present(chat, setting)
    reply(f"{setting.key} = {_spelled(value)}" if value not in (None, ()) else f"{setting.key} is not set")


def _show(chat: Chat, argument: str) -> None:
    session = chat.session
    if argument == "system":
        _system(chat, "")
        return
    if argument == "template":
        reply(session.model.target.vocabulary.chat_template or "none")
        return
    if argument in ("info", "license", "modelfile"):
        _table([*card(session.model.options, session.model.pair)])
        return
    reply(session.configuration())
    present = [(setting, _present(chat, setting)) for setting in SETTINGS if setting.part != "serve"]
    sources = session.settings.sources
    _table([(s.key, _spelled(v), sources.get(s.name, "")) for s, v in present if v not in (None, ())])


def _present(chat: Chat, setting: Setting) -> Any:
    """A setting's present value; None when it is left to the model."""
    if setting.name == "system":
        return chat.conversation.system
    if setting.part == "load":
        return getattr(chat.session.model.options, setting.name)
    return chat.session.settings.values.get(setting.name, setting.default)


def _spelled(value: Any) -> str:
    return ", ".join(map(repr, value)) if isinstance(value, tuple) else show(value)


def _stats(chat: Chat, argument: str) -> None:
    for line in stats_lines(chat.last) if chat.last.new_tokens else ("no answer yet",):
        reply(line)


def file_text(name: str, source: str) -> str:
    """The text of a file for a message, without the end of its last line. Raises ConfigError naming `source`."""
    text = given_text(name, source).removesuffix("\n")
    if not text.strip():
        raise ConfigError(f"{source}: the file {name!r} holds no text")
    return text


def _exit(chat: Chat, argument: str) -> None:
    raise EOFError


def _table(rows: list[tuple[str, ...]]) -> None:
    for line in aligned(rows):
        reply(line)


def _read(chat: Chat, argument: str) -> None:
    """Raises ConfigError for a file that cannot be read."""
    text = file_text(argument, "/read")
    chat.attached.append(text)
    reply(f"{counted(len(text), 'character')} of {argument} go behind the next message (/clear takes them back)")


COMMANDS: dict[str, Command] = {
    "/help": Command("/help", "show this list", _help),
    "/clear": Command("/clear", "start a new conversation, keep the system prompt", _clear),
    "/system": Command("/system [TEXT]", "set or show the system prompt", _system),
    "/save": Command("/save FILE", "save the conversation to a file", _save),
    "/load": Command("/load FILE", "load a saved conversation and show it", _load),
    "/read": Command("/read FILE", "put the text of a file behind the next message", _read),
    "/regen": Command("/regen", "answer the last message again with another seed", lambda chat, _: chat.say_again()),
    "/continue": Command("/continue", "go on with an answer that was cut or stopped", lambda chat, _: chat.go_on()),
    "/undo": Command("/undo", "remove the last message and its answer", _undo),
    "/set": Command("/set NAME VALUE", "change a setting, such as: /set temp 0.5", _set),
    "/unset": Command("/unset NAME", "take a setting back to its default, such as: /unset json-schema", _unset),
    "/show": Command("/show [info|template]", "list all settings and where they come from; what the model is", _show),
    "/model": Command("/model [NAME]", "go on with another model", _model),
    "/stats": Command("/stats", "show speed and acceptance of the last answer", _stats),
    "/exit": Command("/exit", "leave; also /bye, or Ctrl-D", _exit),
}
