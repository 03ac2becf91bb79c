"""The forms of tool calls that are known, one parser each, and which of them a chat template teaches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from edgespec.chat.argument_forms import Gemma, Glm, Lfm, MiniCpm, QwenXml
from edgespec.chat.channels import ANSWER_HEADER, CALL_OPENING, call_header
from edgespec.chat.marks import CALL, CHANNEL, CHANNELS, MESSAGE, begun
from edgespec.chat.tools import CLOSE, OPEN, Enclosed, ToolCall, ToolParser, as_call, as_calls, first_json, loaded

# What calls of MiniMax, functionary and others have in or around them, which are not known.
_OTHERS = ("<invoke", "<function=", "<arg_key>", "<tool_calls>")
_MISTRAL, _CALL_ID, _ARGS, _LLAMA = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>"
_PHI_TOOLS, _PHI_OPEN, _PHI_CLOSE = ("<|tool|>", "<|/tool|>"), "<|tool_call|>", "<|/tool_call|>"
_FENCE = "```"
_FENCES = (f"{_FENCE}json", _FENCE, "")
_HEAD = 4096  # letters, blanks among them, in which an answer shows whether it is a call without marks
_KEYS = ({"name", "arguments"}, {"name", "parameters"})
_BARE = re.compile(r"\s*(```(?:json)?)?\s*(?=\{)")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAMED = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})\s*(?:\[CALL_ID\]\s*([A-Za-z0-9_-]{1,64})\s*)?\[ARGS\]\s*")


def tool_parser(template: str | None) -> type[ToolParser] | None:
    """The parser for a model's chat template; None if it renders no tools, or calls in a form that is not known."""
    if template is None or "tools" not in template:
        return None
    named = next((form for marks, form in _BY_MARKS if all(mark in template for mark in marks)), None)
    if named is not None or any(other in template for other in _OTHERS):
        return named
    if OPEN in template:
        return Hermes
    if _MISTRAL in template:
        named = MistralNamedWithId if _CALL_ID in template else MistralNamed
        return named if _ARGS in template else Mistral
    if all(mark in template for mark in _PHI_TOOLS):
        return PhiSingle if _PHI_OPEN + "{" in template else Phi
    return Llama if "ipython" in template or _LLAMA in template else None


class Hermes(Enclosed):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one after another.

    Small models forget the marks (Qwen2.5-Coder 1.5B writes a block of JSON): an answer that begins with the object of
    a tool that was given is a call too, as in llama.cpp.
    """

    opening, closing = OPEN, CLOSE
    marks = (OPEN, CLOSE)
    between = "\n"
    after = f"\n{CLOSE}"

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._may_be_bare = bool(self._parameters)

    @classmethod
    def before(cls, name: str) -> tuple[str, ...]:
        return (f"{OPEN}\n",)

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        if not self._may_be_bare:
            return super().push(text)
        self._held += text
        calls = self._bare_calls() if "}" in text or _FENCE[0] in text else []  # where a call may be complete
        if self._is_bare_so_far():
            return "", calls
        self._may_be_bare = False
        shown, more = super().push("")
        return shown, calls + more

    def finish(self) -> tuple[str, list[ToolCall]]:
        if not self._may_be_bare:
            return super().finish()
        self._held += _FENCE  # which the end of an answer may stand for
        calls = self._bare_calls()
        self._held = self._held.removesuffix(_FENCE)
        self._may_be_bare = False
        shown, more = super().push("")
        rest, last = super().finish()
        return shown + rest, [*calls, *more, *last]

    def _is_bare_so_far(self) -> bool:
        """Whether what is held may become the object of a known tool."""
        held = "".join(self._held[:_HEAD].split())
        starts = (f'{fence}{{"name":"{name}"' for fence in _FENCES for name in self._parameters)
        return any(held.startswith(start) or start.startswith(held) for start in starts)

    def _bare_calls(self) -> list[ToolCall]:
        """Takes the complete objects of calls from the beginning of what is held."""
        calls = []
        while self._is_bare_so_far() and (found := _BARE.match(self._held)):
            value, end = first_json(self._held[found.end() :])
            rest = self._held[found.end() + end :].lstrip()
            is_call = isinstance(value, dict) and value.get("name") in self._parameters and set(value) in _KEYS
            call = as_call(value) if is_call else None
            if call is None or (found[1] and not rest.startswith(_FENCE)):
                break
            calls.append(call)
            self._held = rest.removeprefix(_FENCE) if found[1] else rest
            self._has_called = True
        return calls


class Phi(Enclosed):
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
        if self._held.startswith(self.opening) and (calls := self._calls(self._held.removeprefix(self.opening))):
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


class Nemotron(Phi):
    """`<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>`: Nemotron Nano v2."""

    opening, closing = "<TOOLCALL>", "</TOOLCALL>"
    marks = (opening, closing)
    around_all = (f"{opening}[", f"]{closing}")


class Apriel(Phi):
    """`<tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>`: Apriel."""

    opening, closing = "<tool_calls>", "</tool_calls>"
    marks = (opening, closing)
    around_all = (f"{opening}[", f"]{closing}")


class Llama(ToolParser):
    """The whole answer is calls or text, which its first character tells."""

    marks = (_LLAMA,)
    arguments = "parameters"
    takes_several = False
    _is_text = False  # once anything was shown

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        if self._is_text:
            return text, []
        self._held += text
        begin = self._held.lstrip()
        if not begin or begin.startswith("{") or _LLAMA.startswith(begin[: len(_LLAMA)]):
            return "", []
        shown, self._held, self._is_text = self._held, "", True
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
    arguments = ""
    around_all = ("", "")
    between = ""

    @classmethod
    def before(cls, name: str) -> tuple[str, ...]:
        return (f"{_MISTRAL}{name}{_ARGS}",)

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


class Channels(Enclosed):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`, which gpt-oss writes.

    The model ends its answer with a call, and its last mark is the token that ends it.
    """

    opening, closing = CALL_OPENING, CALL
    marks = CHANNELS.names
    arguments = ""
    takes_several = False
    before_answer = ANSWER_HEADER

    @classmethod
    def before(cls, name: str) -> tuple[str, ...]:
        return (call_header(name),)

    def _calls(self, text: str) -> list[ToolCall]:
        header, _, arguments = text.partition(MESSAGE)
        name, value = _NAME.match(header), loaded(arguments)
        call = as_call({"name": name[0], "arguments": value}) if name and isinstance(value, dict) else None
        return [] if call is None else [call]

    def finish(self) -> tuple[str, list[ToolCall]]:
        """A call whose JSON is complete needs no mark at its end: the token that it is ends the answer."""
        if self._held.startswith(self.opening) and (calls := self._calls(self._held.removeprefix(self.opening))):
            self._held, self._has_called = "", True
            return "", calls
        return super().finish()


_BY_MARKS: tuple[tuple[tuple[str, ...], type[ToolParser]], ...] = (
    ((CHANNEL, MESSAGE, "functions."), Channels),
    ((OPEN, "<function=", "<parameter="), QwenXml),
    ((OPEN, "<arg_key>", "<arg_value>"), Glm),
    (("<|tool_call>", "call:"), Gemma),
    (("List of tools: ", "<|im_start|>"), Lfm),
    (('<function name="', '<param name="'), MiniCpm),
    (("<TOOLCALL>[",), Nemotron),
    (("<tool_calls>[", '"arguments"'), Apriel),
)
