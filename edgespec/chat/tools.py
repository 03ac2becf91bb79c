"""Tool calls: what a model's form of them says, and the calls parsed out of the text as it comes.

`tool_forms` has the forms of JSON and chooses one by the chat template, `argument_forms` those that write argument by
argument. A call that does not parse stays text, so that nothing is lost.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from edgespec.chat.literals import dumped
from edgespec.chat.marks import begun
from edgespec.chat.spelling import DECODER

OPEN, CLOSE = "<tool_call>", "</tool_call>"  # around calls of several forms


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `arguments`: a JSON object as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class ToolParser(ABC):
    """Splits an answer into text and calls. `is_over`: the calls are complete and the model goes on with other text.

    `tools`: those of the request, in OpenAI's form; their parameters say what an argument is that a form writes without
    its type. The class also says how its model writes calls, for grammars that force one and for templates that do not
    show those of earlier turns.
    """

    marks: ClassVar[tuple[str, ...]] = ()  # that may be control tokens, which have no text of their own
    around_all: ClassVar[tuple[str, str]] = ("", "")
    between: ClassVar[str] = ""
    takes_several: ClassVar[bool] = True  # whether one answer may hold several calls, when they are forced
    after: ClassVar[str] = ""
    arguments: ClassVar[str] = "arguments"  # the key of a call's arguments; empty: its JSON is the arguments alone
    before_answer: ClassVar[str] = ""  # what an answer that is no call begins with, where it is forced

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        functions = [tool.get("function") or {} for tool in tools]
        self._parameters = {str(each.get("name")): each.get("parameters") or {} for each in functions}
        self._held = ""
        self.is_over = False

    @abstractmethod
    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text and the calls that are certain after `text`."""

    @abstractmethod
    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest, at the end of the answer."""

    @classmethod
    def before(cls, name: str) -> tuple[str, ...]:
        """What a call of `name` begins with, up to its arguments: texts, and between slashes regular expressions."""
        return ("",)

    @classmethod
    def schema(cls, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The schema of a call's JSON."""
        if not cls.arguments:
            return dict(parameters)
        fields = {"name": {"const": name}, cls.arguments: parameters}
        return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}

    @classmethod
    def value(cls, name: str, arguments: object) -> Any:
        """A call's JSON."""
        return {"name": name, cls.arguments: arguments} if cls.arguments else arguments

    @classmethod
    def written(cls, calls: Iterable[tuple[str, object]]) -> str:
        """Calls, (name, arguments) each, as the model writes them."""
        start, end = cls.around_all
        return start + cls.between.join(cls.written_call(name, arguments) for name, arguments in calls) + end

    @classmethod
    def written_call(cls, name: str, arguments: object) -> str:
        """One call as the model writes it."""
        return "".join(cls.before(name)) + json.dumps(cls.value(name, arguments), ensure_ascii=False) + cls.after


_QUOTE = re.compile(r'(?<!\\)(?:\\\\)*"')  # one that begins or ends a text in JSON


class Enclosed(ToolParser):
    """Calls between two marks, with blanks between them; other text after a call ends the answer."""

    opening = closing = ""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._has_called = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        shown, calls = "", list[ToolCall]()
        while True:
            start = self._held.find(self.opening)
            if start < 0:
                end = len(self._held) - begun(self._held, self.opening)
                shown += self._passed(end)
                break
            shown += self._passed(start)
            end, found = self._end_and_calls()
            if self.is_over or end < 0:
                break
            whole, self._held = self._held[:end], self._held[end:]
            if not found:
                shown += whole
            self._has_called = self._has_called or bool(found)
            calls += found
        return shown, calls

    def _end_and_calls(self) -> tuple[int, list[ToolCall]]:
        """Where the held text between two marks ends, and its calls; -1 where the closing mark is still to come."""
        begin, end = len(self.opening), self._held.find(self.closing)
        while end >= 0:
            inside = self._held[begin:end]
            found = self._calls(inside)
            if found or not self._goes_on(inside):
                return end + len(self.closing), found
            end = self._held.find(self.closing, end + 1)
        return -1, []

    def _calls(self, text: str) -> list[ToolCall]:
        """The calls between two marks; none if it is anything else."""
        call = as_call(loaded(text))
        return [] if call is None else [call]

    def _goes_on(self, text: str) -> bool:
        """Whether `text`, which is no call, may end at a later closing mark: this one stands inside a value."""
        return text.lstrip()[:1] in ("{", "[") and len(_QUOTE.findall(text)) % 2 == 1

    def _passed(self, count: int) -> str:
        """The first `count` held characters; after a call only blanks, which are dropped, do not end the answer."""
        text, self._held = self._held[:count], self._held[count:]
        if not self._has_called:
            return text
        self.is_over = self.is_over or bool(text.strip())
        return ""

    def finish(self) -> tuple[str, list[ToolCall]]:
        held, self._held = self._held, ""
        return ("" if self.is_over or (self._has_called and not held.strip()) else held), []


def loaded(text: str) -> Any:
    """The JSON value that `text` is; None if it is none."""
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def first_json(text: str) -> tuple[Any, int]:
    """The JSON value at the beginning of `text`, and where it ends."""
    try:
        return DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None, len(text)


def as_call(value: Any) -> ToolCall | None:
    """A call from {"name": ..., "arguments" or "parameters": {...}}; None if it is no such object."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = loaded(arguments)
    if not isinstance(arguments, dict):
        return None
    try:
        return ToolCall(value["name"], dumped(arguments))
    except ValueError:
        return None


def as_calls(value: Any) -> list[ToolCall]:
    """The calls of a list of such objects; none if any of it is something else."""
    found = [as_call(each) for each in value] if isinstance(value, list) else []
    calls = [call for call in found if call is not None]
    return calls if len(calls) == len(found) else []
