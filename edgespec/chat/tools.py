"""Tool calls: parsed out of the text as it comes, in the form in which a model writes them.

`tool_forms` has the forms and chooses one by the chat template. What does not parse as a call stays text, so that
nothing is lost, and a call is one as soon as its name and its arguments are complete: models leave out the marks
behind them.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgespec.chat.arguments import ValueReader, as_json, as_typed, behind_blanks, dumped, loaded, properties_of
from edgespec.chat.marks import begun

if TYPE_CHECKING:
    from edgespec.chat.tool_forms import ToolForm

_HEAD = 300  # letters in which a text shows whether it is a call, so that other text is not held back for long
_BARE = re.compile(r"\s*(```(?:json)?)?\s*(?=\{)")
_FENCE = "```"
_LETTERS = string.ascii_letters + string.digits
_FENCES = (f"{_FENCE}json", _FENCE, "")
_ARGUMENTS = "arguments", "parameters"
_ANY_BARE = ('{"name":"', '{"type":"function","name":"')
_BARE_KEYS = {"name", "type", "id", *_ARGUMENTS}
_PAIRS = {"]": "[", "}": "{"}
_FENCED, _BRACE = re.compile(_FENCE), re.compile("}")


def _new_id() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(9))  # Mistral's templates take no others


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `arguments`: a JSON object as the model spelled it, perhaps empty."""

    name: str
    arguments: str
    id: str = field(default_factory=_new_id)

    @property
    def input(self) -> dict[str, Any]:
        """The arguments as an object."""
        return dict(loaded(self.arguments or "{}"))

    def as_openai(self) -> dict[str, Any]:
        """The call as a message in OpenAI's form holds it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolParser:
    """Splits an answer into text and calls. `is_over`: the calls are complete and the model goes on with other text.

    `tools`: those of the request, in OpenAI's form; their parameters say what an argument is that a form writes without
    its type. Between calls there may be blanks and marks, also such as are missing elsewhere.
    """

    def __init__(self, form: ToolForm, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        functions = [tool.get("function") or {} for tool in tools]
        self.form, self.tools = form, tools
        self.is_over = False
        self._parameters = {str(each.get("name")): each.get("parameters") or {} for each in functions}
        self._held = ""
        self._searched = 0  # of what is held, for closing marks
        self._has_called = False
        self._may_be_bare = bool(form.bare and self._parameters)
        self._fence: str | None = None  # that an object without marks stands in, while one is read
        self._names: Collection[str] | None = None  # that a call may have, where it has no mark before it

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text and the calls that are certain after `text`."""
        self._held += text
        return self._split()

    def finish(self, *, is_cut: bool = False) -> tuple[str, list[ToolCall]]:
        """The rest, at the end of the answer; where a limit `is_cut` it, no mark behind a call is taken for granted."""
        shown, calls = self._split(is_end=True, is_cut=is_cut)
        return "" if self.is_over else shown, calls

    def _split(self, *, is_end: bool = False, is_cut: bool = False) -> tuple[str, list[ToolCall]]:
        shown, calls = "", list[ToolCall]()
        while self._held and not self.is_over:
            self._fence, self._names = self._bare_beginning(), None
            found = None if self._fence is not None else self.form.opening.search(self._held)
            if self._fence is None and found is None and self._has_called:
                rest = self._held[self.form.skipped(self._held, 0) :]
                self.is_over = not any(mark.startswith(rest) for mark in (*self.form.opens, *self.form.skips))
                self._held = "" if is_end else self._held
                break
            if self._fence is None and found is None:
                num_begun = begun(self._held, *self.form.opens)
                shown += self._passed(len(self._held) - (0 if is_end else num_begun))
                break
            shown += self._passed(found.start() if found else 0)
            if self.is_over:
                break
            is_unmarked = found is not None and bool(self.form.own_marks) and found[0] not in self.form.own_marks
            if is_unmarked or (self._fence is not None and self.form.bare == "known"):
                self._names = self._parameters
            end, more = self._block(is_end=is_end, is_cut=is_cut)
            if end < 0:
                break
            if end == 0 and self._fence is not None:
                self._may_be_bare = False
            elif end == 0:
                shown += self._passed(len(found[0]) if found else 0)
            else:
                self._held, self._searched, self._has_called = self._held[end:], 0, True
                calls += more
        if is_end and not self.is_over:
            is_rest = self._has_called and self.form.skipped(self._held, 0) == len(self._held)
            shown, self._held = shown + ("" if is_rest else self._held), ""
        return shown, calls

    def _passed(self, count: int) -> str:
        """The first `count` held characters; after a call only blanks and marks, which are dropped, are no end."""
        if not count:
            return ""
        text, self._held, self._searched = self._held[:count], self._held[count:], 0
        if not self._has_called:
            self._may_be_bare = False
            return text
        self.is_over = self.is_over or self.form.skipped(text, 0) < len(text)
        return ""

    def _block(self, *, is_end: bool, is_cut: bool) -> tuple[int, list[ToolCall]]:
        """(where the calls at the beginning of what is held end, these); 0 if there are none, -1 if they may come."""
        held, begin, closing = self._held, 0, self.form.closing
        if self._fence is not None:
            closing = _FENCED if self._fence else _BRACE
            bare = _BARE.match(held)
            if bare is None:
                return -1, []
            begin = bare.end()
        elif not self._may_begin(held):
            return 0, []
        for found in closing.finditer(held, max(begin, self._searched)):
            end, last = found.end(), held[found.end() - 1]
            if last in _PAIRS and held.count(_PAIRS[last], begin, end) != held.count(last, begin, end):
                continue  # which is cheaper than to read it
            with suppress(ValueError):
                return end, self._calls(held[begin:end])
        self._searched = max(self._searched, len(held) - self.form.longest_mark)
        if not is_end:
            return -1, []
        with suppress(ValueError):
            return len(held), self._calls(held[begin:], is_end=not is_cut, is_cut=is_cut)
        return 0, []

    def _may_begin(self, held: str) -> bool:
        """Whether what stands behind the marks may be a call, so that other text is not held back."""
        at = self.form.skipped(held, 0)
        heads = (each for pair in self.form.heads_read for each in pair)
        return held.startswith("{", at) or self._may_be_mark(held, at) or any(each.match(held, at) for each in heads)

    def _bare_beginning(self) -> str | None:
        """The fence of an object without marks that the answer may begin with: perhaps empty; None if it does not.

        Small models forget the marks (Qwen2.5-Coder 1.5B writes a block of JSON): an object of a tool that was given is
        a call too, as in llama.cpp.
        """
        if not self._may_be_bare:
            return None
        held = "".join(self._held[:_HEAD].split())
        known = tuple(f'{{"name":"{name}"' for name in self._parameters)
        begins = known if self.form.bare == "known" else _ANY_BARE
        starts = ((fence, fence + begin) for fence in _FENCES for begin in begins)
        return next((fence for fence, start in starts if held.startswith(start[: len(held)])), None)

    def _calls(self, text: str, *, is_end: bool = False, is_cut: bool = False) -> list[ToolCall]:
        """The calls that `text` is, with marks around them. Raises ValueError for anything else; the last one of
        several may be cut.
        """
        at, calls = 0, list[ToolCall]()
        while True:
            at = self.form.skipped(text, at)
            if calls and self._may_be_mark(text, at):
                return calls
            try:
                call, at = self._call(text, at, is_end=is_end)
            except ValueError:
                if calls and is_cut:
                    return calls
                raise
            calls.append(call)

    def _call(self, text: str, at: int, *, is_end: bool) -> tuple[ToolCall, int]:
        """One call, and where it ends."""
        found = next((head for each, _ in self.form.heads_read if (head := each.match(text, at)) is not None), None)
        if found is None:
            return self._object(text, at, is_end=is_end)
        if self._names is not None and found["name"] not in self._names:
            raise ValueError("no tool")
        arguments, at = self._arguments(text, found.end(), found["name"], is_end=is_end)
        return ToolCall(found["name"], arguments), at

    def _arguments(self, text: str, at: int, name: str, *, is_end: bool) -> tuple[str, int]:
        """JSON of the arguments that begin at `at`, and where they end."""
        form = self.form
        if form.closed:
            return self._bare_arguments(text, at, self._parameters.get(name, {}), is_end=is_end)
        reader = ValueReader(text, form.quote, is_json=not form.argument, doubles=not form.argument)
        if form.argument == "{key}=":
            return reader.object(at, ")", "=")
        if not reader.is_over("{", at):
            raise ValueError("no object")
        return reader.value(at)

    def _bare_arguments(self, text: str, at: int, parameters: Mapping[str, Any], *, is_end: bool) -> tuple[str, int]:
        """The same of arguments that stand one after another, their values without quotation marks."""
        members = dict[str, str]()
        while (opened := self.form.argument_read[0].match(text, at)) is not None:
            key, begin = opened["key"].strip(), opened.end()
            others = properties_of(parameters).keys() - {key} - {loaded(each) for each in members}
            end, at = self._end_of_value(text, begin, others, is_end=is_end)
            if end < 0:
                raise ValueError("no end of a value")
            members[dumped(key)] = as_typed(self._value(text[begin:end]), key, parameters)
        behind = self.form.skipped(text, at)
        required = parameters.get("required")
        names = required if isinstance(required, list) else []
        is_whole = bool(members) and all(dumped(name) in members for name in names)
        is_closed = bool(text[at:behind].strip()) or (is_end and is_whole)
        may_go_on = self.form.argument_read[1].match(text, at) is not None
        if (behind == len(text) or may_go_on) and not is_closed:
            raise ValueError("no end")
        return "{" + ", ".join(f"{key}: {value}" for key, value in members.items()) + "}", at

    def _end_of_value(self, text: str, begin: int, others: Collection[str], *, is_end: bool) -> tuple[int, int]:
        """(where a value ends, where its mark ends); -1 if it goes on.

        A value may hold the mark that ends one: the real one is before another argument, or before what ends the call.
        It may be missing before one of the `others` that the tool has.
        """
        mark = self.form.closed.strip()
        end = text.find(mark, begin)
        while end >= 0 and not self._ends_value(text, end + len(mark)):
            end = text.find(mark, end + 1)
        for opened in self.form.argument_read[0].finditer(text, begin, end if end >= 0 else len(text)):
            if opened["key"].strip() in others:
                return opened.start(), opened.start()
        if end >= 0:
            return end, end + len(mark)
        if is_end:  # where the marks behind the whole call are there, that of its last value may be missing
            end = len(text.rstrip())
            while mark := next((each for each in self.form.closes if text.endswith(each, begin, end)), ""):
                end = len(text[: end - len(mark)].rstrip())
            if text[end:].strip():
                return max(begin, end), end
        return -1, len(text)

    def _may_be_mark(self, text: str, at: int) -> bool:
        """Whether what is left of the text is the beginning of a mark behind calls, or nothing."""
        rest = text[at : at + self.form.longest_mark]
        return any(mark.startswith(rest) for mark in self.form.skips)

    def _ends_value(self, text: str, at: int) -> bool:
        """Whether what ends a value, or begins to, stands at `at`."""
        if any(each.match(text, at) for each in self.form.argument_read):
            return True
        at = self.form.skipped(text, at)
        heads = (each for pair in self.form.heads_read for each in pair)
        return self._may_be_mark(text, at) or any(each.match(text, at) for each in heads)

    def _value(self, raw: str) -> str:
        """A bare value without what stands around it."""
        raw = raw.removeprefix("\n") if self.form.argument.endswith("\n") else raw
        return raw.removesuffix("\n") if self.form.closed.startswith("\n") else raw

    def _object(self, text: str, at: int, *, is_end: bool) -> tuple[ToolCall, int]:
        """A call that is a JSON object, with its name and arguments as members."""
        if not text.startswith("{", at):
            raise ValueError("no call")
        if text.startswith("{", doubled := behind_blanks(text, at + 1)):
            call, end = self._object(text, doubled, is_end=is_end)
            behind = behind_blanks(text, end)
            return call, behind + 1 if text.startswith("}", behind) else end
        reader, members, end = ValueReader(text, doubles=True), dict[str, str](), at + 1
        try:
            for key, value, behind in reader.members(end):
                members[loaded(key)], end = value, behind
        except ValueError:  # only the last brace may be missing
            begun, behind = self._called(members), self.form.skipped(text, end)
            if begun is not None and (text[end:behind].strip(" \n,") or (is_end and behind == len(text))):
                return begun, end
            raise
        found = self._called(members, "{}" if self._fence is None else None)
        is_other = self._fence is not None and members.keys() - _BARE_KEYS
        if found is None or is_other or (self._names is not None and found.name not in self._names):
            raise ValueError("no call")
        return found, reader.end

    def _called(self, members: Mapping[str, str], otherwise: str | None = None) -> ToolCall | None:
        """The call of the members, with `otherwise` where its arguments are missing; None if they are none."""
        name = members.get("name", "")
        arguments = next((members[key] for key in _ARGUMENTS if key in members), otherwise)
        if not name.startswith('"') or arguments is None:
            return None
        if arguments.startswith('"'):  # some models write them as a text
            arguments = as_json(loaded(arguments))
        if arguments and not arguments.startswith("{"):
            raise ValueError("no object")
        return ToolCall(loaded(name), arguments)
