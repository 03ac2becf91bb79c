"""The forms of tool calls that are known, one parser each, and which of them a chat template teaches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from edgespec.chat.reasoning import begun
from edgespec.chat.tools import ToolCall, ToolParser, as_call, as_calls, first_json, loaded

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# What other calls have in or around them: those of Qwen3-Coder, GLM, MiniMax, functionary, Apriel.
_OTHERS = ("<function=", "<arg_key>", "<invoke", "<tool_calls>")
_MISTRAL, _CALL_ID, _ARGS, _LLAMA = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>"
_PHI_TOOLS, _PHI_OPEN, _PHI_CLOSE = ("<|tool|>", "<|/tool|>"), "<|tool_call|>", "<|/tool_call|>"
_NAMED = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})\s*(?:\[CALL_ID\]\s*([A-Za-z0-9_-]{1,64})\s*)?\[ARGS\]\s*")


def tool_parser(template: str | None) -> type[ToolParser] | None:
    """The parser for a model's chat template; None if it renders no tools, or calls in a form that is not known."""
    if template is None or "tools" not in template or any(other in template for other in _OTHERS):
        return None
    if _OPEN in template:
        return Hermes
    if _MISTRAL in template:
        named = MistralNamedWithId if _CALL_ID in template else MistralNamed
        return named if _ARGS in template else Mistral
    if all(mark in template for mark in _PHI_TOOLS):
        return PhiSingle if _PHI_OPEN + "{" in template else Phi
    return Llama if "ipython" in template or _LLAMA in template else None


class _Enclosed(ToolParser):
    """Calls between two marks, with blanks between them; other text after a call ends the answer."""

    opening = closing = ""

    def __init__(self) -> None:
        super().__init__()
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
            end = self._held.find(self.closing)
            if self.is_over or end < 0:
                break
            whole, self._held = self._held[: end + len(self.closing)], self._held[end + len(self.closing) :]
            found = self._calls(whole[len(self.opening) : end])
            if not found:
                shown += whole
            self._has_called = self._has_called or bool(found)
            calls += found
        return shown, calls

    def _calls(self, text: str) -> list[ToolCall]:
        """The calls between two marks; none if it is anything else."""
        call = as_call(loaded(text))
        return [] if call is None else [call]

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


class Hermes(_Enclosed):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one after another."""

    opening, closing = _OPEN, _CLOSE
    marks = (_OPEN, _CLOSE)
    between = "\n"
    after = f"\n{_CLOSE}"

    @classmethod
    def before(cls, name: str) -> tuple[str, ...]:
        return (f"{_OPEN}\n",)


class Phi(_Enclosed):
    """`<|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>`, which Phi-4-mini is trained on."""

    opening, closing = _PHI_OPEN, _PHI_CLOSE
    marks = (_PHI_OPEN, _PHI_CLOSE)
    around_all = (f"{_PHI_OPEN}[", f"]{_PHI_CLOSE}")
    between = ", "

    def _calls(self, text: str) -> list[ToolCall]:
        value = loaded(text)
        return as_calls([value] if isinstance(value, dict) else value)

    def finish(self) -> tuple[str, list[ToolCall]]:
        """A list that is complete needs no mark at its end: the model may end its answer instead."""
        if self._held.startswith(_PHI_OPEN) and (calls := self._calls(self._held.removeprefix(_PHI_OPEN))):
            self._held, self._has_called = "", True
            return "", calls
        return super().finish()


class PhiSingle(Phi):
    """The same with one call between the marks, as llama.cpp's template for Phi-4-mini teaches it."""

    around_all = ("", "")
    between = ""
    after = _PHI_CLOSE

    @classmethod
    def before(cls, name: str) -> tuple[str, ...]:
        return (_PHI_OPEN,)


class Llama(ToolParser):
    """The whole answer is calls or text, which its first character tells."""

    marks = (_LLAMA,)
    arguments = "parameters"
    takes_several = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        begin = self._held.lstrip()
        if not begin or begin.startswith("{") or _LLAMA.startswith(begin[: len(_LLAMA)]):
            return "", []
        shown, self._held = self._held, ""
        return shown, []

    def finish(self) -> tuple[str, list[ToolCall]]:
        held, self._held = self._held, ""
        rest, calls = held.strip().removeprefix(_LLAMA).strip(), list[ToolCall]()
        while rest:
            value, end = first_json(rest)
            call = as_call(value)
            if call is None:
                return held, []
            calls.append(call)
            rest = rest[end:].lstrip(" ;\n\t")
        return ("" if calls else held), calls


class Mistral(ToolParser):
    """`[TOOL_CALLS][{...}, ...]` at the end of the answer."""

    marks: ClassVar[tuple[str, ...]] = (_MISTRAL,)
    around_all = (f"{_MISTRAL}[", "]")
    between = ", "

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        start = self._held.find(_MISTRAL)
        end = start if start >= 0 else len(self._held) - begun(self._held, _MISTRAL)
        shown, self._held = self._held[:end], self._held[end:]
        return shown, []

    def finish(self) -> tuple[str, list[ToolCall]]:
        held, self._held = self._held, ""
        calls = self._calls(held) if held.startswith(_MISTRAL) else []
        return ("", calls) if calls else (held, [])

    def _calls(self, text: str) -> list[ToolCall]:
        """All calls of the end of an answer; none if any of it is something else."""
        return as_calls(loaded(text.removeprefix(_MISTRAL)))


class MistralNamed(Mistral):
    """`[TOOL_CALLS]name[ARGS]{...}`, one after another: Mistral Small 3, Ministral 3, Devstral."""

    marks = (_MISTRAL, _ARGS, _CALL_ID)
    around_all = ("", "")
    between = ""

    @classmethod
    def before(cls, name: str) -> tuple[str, ...]:
        return (f"{_MISTRAL}{name}{_ARGS}",)

    @classmethod
    def schema(cls, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        return dict(parameters)

    @classmethod
    def value(cls, name: str, arguments: object) -> Any:
        return arguments

    def _calls(self, text: str) -> list[ToolCall]:
        calls = []
        while text:
            named = _NAMED.match(text.removeprefix(_MISTRAL)) if text.startswith(_MISTRAL) else None
            if named is None:
                return []
            rest = text[len(_MISTRAL) + named.end() :]
            value, end = first_json(rest)
            call = as_call({"name": named[1], "arguments": value})
            if call is None or not isinstance(value, dict):
                return []
            calls.append(call if named[2] is None else ToolCall(call.name, call.arguments, named[2]))
            text = rest[end:].lstrip()
        return calls


class MistralNamedWithId(MistralNamed):
    """The same with an id, `[TOOL_CALLS]name[CALL_ID]abc123XYZ[ARGS]{...}`: Mistral Small 3.2."""

    @classmethod
    def before(cls, name: str) -> tuple[str, ...]:
        return f"{_MISTRAL}{name}{_CALL_ID}", "/[a-zA-Z0-9]{9}/", _ARGS
