"""Tool calls: which format a model's chat template teaches, and the calls parsed out of the text as it comes.

Formats: Hermes and Qwen (`<tool_call>{...}</tool_call>`), Llama 3 (`{"name": ..., "parameters": ...}` as the whole
answer), Mistral (`[TOOL_CALLS][{...}, ...]`). A call that does not parse stays text, so that nothing is lost.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_NO_JSON = ("<function=", "<arg_key>", "<invoke")  # what calls of Qwen3-Coder, GLM and MiniMax have between the marks
_MISTRAL, _LLAMA = "[TOOL_CALLS]", "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `arguments`: a JSON object as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class ToolParser(ABC):
    """Splits an answer into text and calls. `is_over`: the calls are complete and the model goes on with other text."""

    mark = ""  # a control token that begins calls; it has no text of its own
    # How a model writes calls: text around all of them, around each and between two ("": one call only).
    around_all = around_each = ("", "")
    between = ""
    arguments = "arguments"  # the key of a call's arguments

    def __init__(self) -> None:
        self._held = ""
        self.is_over = False

    @abstractmethod
    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text and the calls that are certain after `text`."""

    @abstractmethod
    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest, at the end of the answer."""


class _Hermes(ToolParser):
    around_each = (f"{_OPEN}\n", f"\n{_CLOSE}")
    between = "\n"

    def __init__(self) -> None:
        super().__init__()
        self._has_called = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        shown, calls = "", list[ToolCall]()
        while True:
            start = self._held.find(_OPEN)
            if start < 0:
                end = len(self._held) - _begun(self._held, _OPEN)
                shown += self._passed(end)
                break
            shown += self._passed(start)
            end = self._held.find(_CLOSE)
            if self.is_over or end < 0:
                break
            whole, self._held = self._held[: end + len(_CLOSE)], self._held[end + len(_CLOSE) :]
            call = _as_call(_loaded(whole[len(_OPEN) : -len(_CLOSE)]))
            if call is None:
                shown += whole
            else:
                self._has_called = True
                calls.append(call)
        return shown, calls

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


class _Llama(ToolParser):
    """The whole answer is calls or text, which its first character tells."""

    mark = _LLAMA
    arguments = "parameters"

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
            value, end = _first_json(rest)
            call = _as_call(value)
            if call is None:
                return held, []
            calls.append(call)
            rest = rest[end:].lstrip(" ;\n\t")
        return ("" if calls else held), calls


class _Mistral(ToolParser):
    mark = _MISTRAL
    around_all = (f"{_MISTRAL}[", "]")
    between = ", "

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        start = self._held.find(_MISTRAL)
        end = start if start >= 0 else len(self._held) - _begun(self._held, _MISTRAL)
        shown, self._held = self._held[:end], self._held[end:]
        return shown, []

    def finish(self) -> tuple[str, list[ToolCall]]:
        held, self._held = self._held, ""
        values = _loaded(held.removeprefix(_MISTRAL)) if held.startswith(_MISTRAL) else None
        calls = [_as_call(value) for value in values] if isinstance(values, list) else []
        found = [call for call in calls if call is not None]
        return ("", found) if found and len(found) == len(calls) else (held, [])


def tool_parser(template: str | None) -> type[ToolParser] | None:
    """The parser for a model's chat template; None if it renders no tools, or calls in a format that is not known."""
    if template is None or "tools" not in template:
        return None
    if _OPEN in template:
        return None if any(other in template for other in _NO_JSON) else _Hermes
    if _MISTRAL in template and "[ARGS]" not in template:
        return _Mistral
    return _Llama if "ipython" in template or _LLAMA in template else None


def _begun(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _first_json(text: str) -> tuple[Any, int]:
    """The JSON value at the beginning of `text`, and where it ends."""
    try:
        return json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None, len(text)


def _as_call(value: Any) -> ToolCall | None:
    """A call from {"name": ..., "arguments" or "parameters": {...}}; None if it is no such object."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loaded(arguments)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))
