"""Tool calls whose arguments are not one JSON object: each stands by itself, with or without a word on its type.

Qwen3-Coder and Qwen3.5, GLM 4.5 and later, Gemma 4, LFM2, MiniCPM5. Where a form writes texts without quotation marks,
the parameters of the tool say which arguments are texts.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from edgespec.chat.argument_types import as_typed
from edgespec.chat.literals import ValueReader, behind_blanks, dumped, parsed, written_value
from edgespec.chat.tools import CLOSE, OPEN, Enclosed, ToolCall, as_calls, loaded

_NAME = r"[A-Za-z0-9_.-]{1,64}"
_KEY = r"[^<>=\"\n]{1,200}"
_CDATA_OPEN, _CDATA_CLOSE = "<![CDATA[", "]]>"


class ArgumentForm(Enclosed):
    """Calls with one argument after another: `opened(key)`, the value, `closed`.

    `texts_are_bare`: texts stand without quotation marks, up to `closed`. `quote`: the mark around texts, where it is
    none of JSON's; `is_json`: texts are written as in JSON, too. Other values are JSON.
    """

    closed: ClassVar[str] = ""
    between_arguments: ClassVar[str] = ""
    texts_are_bare: ClassVar[bool] = False
    quote: ClassVar[str] = ""
    is_json: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def opened(cls, key: str) -> str:
        """What the argument `key` begins with."""

    @classmethod
    def written_value(cls, value: object) -> str:
        """A value as the model writes it."""
        return value if cls.texts_are_bare and isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    @classmethod
    def written_call(cls, name: str, arguments: object) -> str:
        given = arguments if isinstance(arguments, Mapping) else {"arguments": arguments}
        each = (f"{cls.opened(str(key))}{cls.written_value(value)}{cls.closed}" for key, value in given.items())
        return "".join(cls.before(name)) + cls.between_arguments.join(each) + cls.after

    def _calls(self, text: str) -> list[ToolCall]:
        try:
            return [ToolCall(name, dumped(arguments)) for name, arguments in self._read(text)]
        except (ValueError, RecursionError):
            return []

    @abstractmethod
    def _read(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        """(name, arguments) of each call between two marks. Raises ValueError for anything else."""


class BareForm(ArgumentForm):
    """Calls whose arguments stand between `_argument`, a pattern with the key, and `_end`."""

    texts_are_bare = True
    _begin: ClassVar[re.Pattern[str]]  # of a call, with its name
    _argument: ClassVar[re.Pattern[str]]
    _end: ClassVar[str]
    _next: ClassVar[str]  # what another argument begins with
    _finally: ClassVar[str] = ""  # what may stand behind the last one

    def _read(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        begin = self._begin.match(text)
        if begin is None:
            raise ValueError("no call")
        parameters = self._parameters.get(begin[1], {})
        rest = text[begin.end() :].rstrip().removesuffix(self._finally) if self._finally else text[begin.end() :]
        found = {key: as_typed(self._value(raw), key, parameters) for key, raw in self._arguments(rest).items()}
        return [(begin[1], found)]

    def _arguments(self, text: str) -> dict[str, str]:
        """Each argument as it stands. A value may hold the mark that ends one: the real one is before another, or last.

        Raises ValueError for anything between them.
        """
        found, at = dict[str, str](), 0
        while (opened := self._argument.match(text, at)) is not None:
            end = text.index(self._end, opened.end())
            while not self._is_last(text, at := end + len(self._end)):
                end = text.index(self._end, at)
            found[opened[1].strip()] = text[opened.end() : end]
        if text[at:].strip():
            raise ValueError("something else than arguments")
        return found

    def _is_last(self, text: str, at: int) -> bool:
        at = behind_blanks(text, at)
        return at == len(text) or text.startswith(self._next, at)

    def _value(self, raw: str) -> str:
        return raw

    def _goes_on(self, text: str) -> bool:
        return text.rfind(self._next) > text.rfind(self._end)


class QwenXml(BareForm):
    """`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`, each on its own line."""

    opening, closing = OPEN, CLOSE
    marks = (OPEN, CLOSE)
    between = "\n"
    after = f"</function>\n{CLOSE}"
    closed = "\n</parameter>\n"
    _begin = re.compile(rf"\s*<function=({_NAME})>")
    _argument = re.compile(rf"\s*<parameter=({_KEY})>")
    _end, _next, _finally = "</parameter>", "<parameter=", "</function>"

    @classmethod
    def before(cls, name: str) -> tuple[str, ...]:
        return (f"{OPEN}\n<function={name}>\n",)

    @classmethod
    def opened(cls, key: str) -> str:
        return f"<parameter={key}>\n"

    def _value(self, raw: str) -> str:
        return raw.removeprefix("\n").removesuffix("\n")


class MiniCpm(BareForm):
    """`<function name="NAME"><param name="KEY">value</param></function>`: MiniCPM5. A value may be in CDATA marks."""

    opening, closing = "<function name=", "</function>"
    marks = (closing,)
    after = closing
    closed = "</param>"
    _begin = re.compile(rf'"({_NAME})"\s*>')
    _argument = re.compile(rf'\s*<param name="({_KEY})"\s*>')
    _end, _next = "</param>", "<param name="

    @classmethod
    def before(cls, name: str) -> tuple[str, ...]:
        return (f'<function name="{name}">',)

    @classmethod
    def opened(cls, key: str) -> str:
        return f'<param name="{key}">'

    @classmethod
    def written_value(cls, value: object) -> str:
        has_marks = isinstance(value, str) and any(mark in value for mark in "<&\n")
        return f"{_CDATA_OPEN}{value}{_CDATA_CLOSE}" if has_marks else super().written_value(value)

    def _value(self, raw: str) -> str:
        inner = raw.strip()
        is_marked = inner.startswith(_CDATA_OPEN) and inner.endswith(_CDATA_CLOSE)
        return inner[len(_CDATA_OPEN) : -len(_CDATA_CLOSE)] if is_marked else raw


class Glm(BareForm):
    """`<tool_call>NAME`, then `<arg_key>KEY</arg_key>` and `<arg_value>value</arg_value>` by turns, `</tool_call>`."""

    opening, closing = OPEN, CLOSE
    marks = (OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    between = "\n"
    after = CLOSE
    closed = "</arg_value>\n"
    _begin = re.compile(rf"\s*({_NAME})\s*(?=<arg_key>|\Z)")
    _argument = re.compile(rf"\s*<arg_key>({_KEY})</arg_key>\s*<arg_value>")
    _end, _next = "</arg_value>", "<arg_key>"

    @classmethod
    def before(cls, name: str) -> tuple[str, ...]:
        return (f"{OPEN}{name}\n",)

    @classmethod
    def opened(cls, key: str) -> str:
        return f"<arg_key>{key}</arg_key>\n<arg_value>"


class Gemma(ArgumentForm):
    """`<|tool_call>call:NAME{KEY:value,...}<tool_call|>`, with the mark <|"|> around texts: Gemma 4."""

    quote = '<|"|>'
    opening, closing = "<|tool_call>", "<tool_call|>"
    marks = (opening, closing, quote)
    after = f"}}{closing}"
    between_arguments = ","
    _begin = re.compile(rf"\s*call:({_NAME})(?=\{{)")

    @classmethod
    def before(cls, name: str) -> tuple[str, ...]:
        return (f"{cls.opening}call:{name}{{",)

    @classmethod
    def opened(cls, key: str) -> str:
        return f"{key}:"

    @classmethod
    def written_value(cls, value: object) -> str:
        return written_value(value, cls.quote)

    def _read(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        begin = self._begin.match(text)
        if begin is None:
            raise ValueError("no call")
        return [(begin[1], parsed(text[begin.end() :], self.quote))]

    def _goes_on(self, text: str) -> bool:
        return text.count(self.quote) % 2 == 1


class Lfm(ArgumentForm):
    """`<|tool_call_start|>[NAME(KEY=value, ...), ...]<|tool_call_end|>`: LFM2, which may write a JSON list instead."""

    opening, closing = "<|tool_call_start|>", "<|tool_call_end|>"
    marks = (opening, closing)
    around_all = (f"{opening}[", f"]{closing}")
    between = ", "
    after = ")"
    between_arguments = ", "
    is_json = True
    _begin = re.compile(rf"\s*({_NAME})\s*\(")
    _key = re.compile(r"\s*([^\s=(),\[\]{}'\"](?:[^=(),\[\]{}'\"]{0,198}[^\s=(),\[\]{}'\"])?)\s*=")

    @classmethod
    def before(cls, name: str) -> tuple[str, ...]:
        return (f"{name}(",)

    @classmethod
    def opened(cls, key: str) -> str:
        return f"{key}="

    def _calls(self, text: str) -> list[ToolCall]:
        value = loaded(text)
        return super()._calls(text) if value is None else as_calls([value] if isinstance(value, dict) else value)

    def _read(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        reader, found = ValueReader(text), list[tuple[str, dict[str, Any]]]()
        at = behind_blanks(text, 0)
        is_list = text.startswith("[", at)
        at += is_list
        while not (is_list and reader.is_over("]", at)):
            name, arguments, at = self._read_call(text, reader, at)
            found.append((name, arguments))
            if not is_list:
                break
            at = reader.behind_comma("]", at)
        if text[behind_blanks(text, at) + is_list :].strip():
            raise ValueError("more than calls")
        return found

    def _read_call(self, text: str, reader: ValueReader, at: int) -> tuple[str, dict[str, Any], int]:
        begin = self._begin.match(text, at)
        if begin is None:
            raise ValueError("no call")
        arguments, at = dict[str, Any](), begin.end()
        while not reader.is_over(")", at):
            key = self._key.match(text, at)
            if key is None:
                raise ValueError("no argument with a name")
            arguments[key[1]], at = reader.value(key.end())
            at = reader.behind_comma(")", at)
        return begin[1], arguments, behind_blanks(text, at) + 1
