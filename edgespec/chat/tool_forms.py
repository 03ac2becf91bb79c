"""The forms of tool calls that are known, as data; which of them a chat template teaches; and tools for templates that
take them in another place than OpenAI's API, or not at all.

Templates of Hermes, Qwen, Llama and Mistral read `tools` and each message's `tool_calls`. SmolLM3's calls the tools
`xml_tools`, Phi-4-mini's reads them from the system message, and neither shows the calls of earlier turns, as LFM2's
does not: these are put into the message's text as the model writes them, so that no part of a conversation is lost.
DeepSeek's show calls and no tools, which the system message tells then. Gemma 4's first template reads results from the
message with the calls; gpt-oss's and Llama's show one call of a message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from edgespec.chat.arguments import written_value
from edgespec.chat.marks import ANSWER_HEADER, CALL, CALL_HEADER, CALL_OPENING, CHANNEL, CHANNELS, MESSAGE
from edgespec.errors import PromptError

OPEN, CLOSE = "<tool_call>", "</tool_call>"  # around calls of several forms
_OBJECT, _OBJECT_END = '{"name": "{name}", "arguments": ', "}"
# What calls of MiniMax, functionary and others have in or around them, which are not known.
_OTHERS = ("<invoke", "<function=", "<arg_key>", "<tool_calls>")
_MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
# What stands for more in the data below. Where a form is read, a blank stands for any, and so for none.
_SLOTS = {
    "{name}": r"(?P<name>[A-Za-z0-9_.-]{1,128})",
    "{id}": r"[A-Za-z0-9_-]{0,64}",
    "{key}": r'(?P<key>[^<>="\n]{1,200})',
    " ": r"\s*",
}


@dataclass(frozen=True)
class ToolForm:
    """How a model writes calls: a `head` with the name, the arguments, a `tail`.

    The arguments are a JSON object, or stand one after another, each between `argument` and `closed`, texts without
    quotation marks, or with `quote` around them.
    """

    name: str
    told_by: tuple[str, ...]  # what its chat templates hold
    head: str
    tail: str
    opens: tuple[str, ...]  # marks that calls begin with, any of them
    closes: tuple[str, ...] = ()  # marks that end calls: any may be missing
    heads: tuple[str, ...] = ()  # how calls begin when read, without `opens` that are marks alone; {...} is read always
    around: tuple[str, str] = ("", "")  # all calls of an answer
    between: str = ""
    argument: str = ""
    closed: str = ""
    between_arguments: str = ""
    quote: str = ""
    takes_several: bool = True  # whether one answer may hold several calls, when they are forced
    before_answer: str = ""  # what an answer that is no call begins with, where it is forced
    bare: str = ""  # whether an answer may begin with an object without marks: of a "known" tool, or "any"
    other_marks: tuple[str, ...] = ()

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """Its marks that may be control tokens, which have no text of their own."""
        texts = (*self.around, self.head, self.argument, self.quote, self.closed, self.tail, *self.heads)
        found = (mark for text in texts for mark in _MARK.findall(text))
        return tuple(dict.fromkeys([*found, *self.opens, *self.closes, *self.other_marks]))

    @cached_property
    def own_marks(self) -> tuple[str, ...]:
        """The marks before calls: without the others of `opens`, with which calls themselves begin."""
        return tuple(mark for mark in self.opens if not any(head.startswith(mark) for head in self.heads))

    @cached_property
    def skips(self) -> tuple[str, ...]:
        """The marks that may stand between calls and behind them, those of a block of code among them."""
        return (*self.own_marks, *self.closes, "```")

    @cached_property
    def opening(self) -> re.Pattern[str]:
        """What calls begin with."""
        return re.compile("|".join(map(re.escape, self.opens)))

    @cached_property
    def closing(self) -> re.Pattern[str]:
        """What a call may end with; nothing, where only the end of the answer does."""
        return re.compile("|".join(map(re.escape, self.closes)) or r"(?!)")

    @cached_property
    def longest_mark(self) -> int:
        """Letters of the longest mark."""
        return max(map(len, (*self.opens, *self.skips)))

    @cached_property
    def heads_read(self) -> tuple[tuple[re.Pattern[str], re.Pattern[str]], ...]:
        """(a head, any beginning of it up to the end of the text) for each head."""
        return tuple(map(_patterns, self.heads))

    @cached_property
    def argument_read(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """The same for an argument."""
        return _patterns(" " + self.argument.strip().replace('">', '" >').replace("\n", " "))

    @cached_property
    def _skipped(self) -> re.Pattern[str]:
        return re.compile(rf"(?:```[a-z]*|{'|'.join(map(re.escape, self.skips))}|[\s,;\[\]])*+")

    def skipped(self, text: str, at: int) -> int:
        """The place behind blanks, marks, commas and brackets from `at` on, before what may become a mark."""
        found = self._skipped.match(text, at)
        end = at if found is None else found.end()
        for place in range(max(at, len(text) - self.longest_mark), end):
            rest = text[place:]
            if any(mark.startswith(rest) and mark != rest for mark in self.skips):
                return place
        return end

    @cached_property
    def forced(self) -> ToolForm:
        """The form in which calls are forced: where arguments stand one by one, JSON between the same marks, which is
        read as well, and which a schema describes whole.
        """
        if not self.argument:
            return self
        mark = next((mark for mark in self.own_marks if mark not in self.around[0]), "")
        tail = _OBJECT_END + (self.closes[0] if mark else "")
        return replace(self, head=mark + _OBJECT, tail=tail, argument="")

    def written(self, calls: Iterable[tuple[str, object]]) -> str:
        """Calls, (name, arguments) each, as the model writes them."""
        start, end = self.around
        return start + self.between.join(self._call(*call) for call in calls) + end

    def _call(self, name: str, arguments: object) -> str:
        head = self.head.replace("{name}", name)
        if not self.argument:
            return head + json.dumps(arguments, ensure_ascii=False) + self.tail
        given = arguments if isinstance(arguments, Mapping) else {"arguments": arguments}
        each = (self.argument.replace("{key}", str(key)) + self._value(given[key]) + self.closed for key in given)
        return head + self.between_arguments.join(each) + self.tail

    def _value(self, value: object) -> str:
        if self.quote:
            return written_value(value, self.quote)
        return value if self.closed and isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _patterns(spec: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """(what `spec` describes, any beginning of it up to the end of the text)."""
    parts = [_SLOTS.get(part) or re.escape(part) for part in re.findall(r"\{[a-z]+\}| |.", spec, re.DOTALL)]
    begun = ""
    for part in reversed(parts):
        begun = rf"{part}(?:\Z|{begun})" if begun else rf"{part}\Z"
    return re.compile("".join(parts)), re.compile(begun)


def _objects(name: str, told_by: tuple[str, ...], opening: str, closing: str) -> ToolForm:
    """A list of JSON objects between two marks."""
    return ToolForm(
        name, told_by, _OBJECT, _OBJECT_END, (opening,), (closing or "]",),
        around=(f"{opening}[", f"]{closing}"), between=", ",
    )  # fmt: skip


def _xml(name: str, open_mark: str, close_mark: str, argument: str, closed: str) -> ToolForm:
    """Calls of `<function=NAME>`, with `<parameter=KEY>` for each argument."""
    return ToolForm(
        name, (open_mark, "<function=", "<parameter="), f"{open_mark}\n<function={{name}}>\n",
        f"</function>\n{close_mark}", (open_mark, "<function="), (close_mark, "</function>"), ("<function={name}>",),
        between="\n", argument=argument, closed=closed,
    )  # fmt: skip


_MISTRAL, _ARGS, _LLAMA = "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"
_PHI_TOOLS, _PHI_OPEN, _PHI_CLOSE = ("<|tool|>", "<|/tool|>"), "<|tool_call|>", "<|/tool_call|>"
_DEEPSEEK_PARTS = ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
_BEGIN, _ONE, _SEP, _ONE_END, _END = (f"<\uff5ctool▁{part}\uff5c>" for part in _DEEPSEEK_PARTS)

_LLAMA_FORM = ToolForm(
    "llama", ("ipython",), _OBJECT.replace("arguments", "parameters"), "}", (_LLAMA,), takes_several=False, bare="any"
)

# The first of which a template holds all marks is its form; the plain ones only where no mark of an unknown one is.
FORMS = (
    ToolForm(
        "channels", (CHANNEL, MESSAGE, "functions."), CALL_HEADER, "",
        (CALL_OPENING,), (CALL,), (f"{{name}} <|constrain|> json {MESSAGE}", f"{{name}} {MESSAGE}"),
        takes_several=False, before_answer=ANSWER_HEADER, other_marks=CHANNELS.names,
    ),
    _xml("seed", "<seed:tool_call>", "</seed:tool_call>", "<parameter={key}>", "</parameter>\n"),
    _xml("qwen_xml", OPEN, CLOSE, "<parameter={key}>\n", "\n</parameter>\n"),
    ToolForm(
        "glm", (OPEN, "<arg_key>", "<arg_value>"), f"{OPEN}{{name}}\n", CLOSE, (OPEN,), (CLOSE,), ("{name}",),
        between="\n", argument="<arg_key>{key}</arg_key>\n<arg_value>", closed="</arg_value>\n",
    ),
    ToolForm(
        "gemma", ("<|tool_call>", "call:"), "<|tool_call>call:{name}{", "}<tool_call|>",
        ("<|tool_call>", "call:"), ("<tool_call|>",), ("call:{name}", ":call:{name}"), argument="{key}:",
        between_arguments=",", quote='<|"|>',
    ),
    ToolForm(
        "lfm", ("List of tools: ", "<|im_start|>"), "{name}(", ")", ("<|tool_call_start|>",), ("<|tool_call_end|>",),
        ("{name} (",), ("<|tool_call_start|>[", "]<|tool_call_end|>"), ", ", "{key}=", between_arguments=", ",
    ),
    replace(_objects("granite", (_PHI_OPEN, "available_tools"), _PHI_OPEN, ""), opens=(_PHI_OPEN, OPEN)),
    ToolForm(
        "deepseek", (_SEP,), f"{_ONE}{{name}}{_SEP}", _ONE_END, (_BEGIN, _ONE), (_ONE_END, _END),
        heads=(f"function {_SEP} {{name}} ```json", f"{{name}} {_SEP}"), around=(_BEGIN, _END),
    ),
)  # fmt: skip
PLAIN_FORMS = (
    ToolForm("hermes", (OPEN,), f"{OPEN}\n{_OBJECT}", f"}}\n{CLOSE}", (OPEN,), (CLOSE,), between="\n", bare="known"),
    ToolForm(
        "mistral_named", (_MISTRAL, _ARGS), f"{_MISTRAL}{{name}}{_ARGS}", "", (_MISTRAL,),
        heads=("{name} [ARGS]", "{name} [CALL_ID] {id} [ARGS]", "{name}"),
    ),
    _objects("mistral", (_MISTRAL,), _MISTRAL, ""),
    _objects("phi", _PHI_TOOLS, _PHI_OPEN, _PHI_CLOSE),
    _LLAMA_FORM,
    replace(_LLAMA_FORM, told_by=(_LLAMA,)),
)  # fmt: skip


def call_form(template: str | None) -> ToolForm | None:
    """The form of a model's chat template; None if it renders neither tools nor calls, or these in an unknown form."""
    source = template or ""
    if "tools" not in source and "tool_calls" not in source:
        return None
    known = FORMS if any(other in source for other in _OTHERS) else (*FORMS, *PLAIN_FORMS)
    return next((form for form in known if all(mark in source for mark in form.told_by)), None)


_OWN_NAME = re.compile(r"(?<![.'\"\w])tools\b")
_RESULTS = "tool_responses"
_TOOL_ROLE = re.compile(r"[=!]=\s*['\"]tool['\"]")
_TOLD = "You can call these functions:\n{functions}\n\nA call is written like this:\n{call}"
_OF_MESSAGE = re.compile(r"message(?:\.tools\b|\[.tools.\])")


def with_tools(
    template: str, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(the messages, names for the template besides `tools`) in which every tool and call is where `template` looks.

    Raises PromptError for tools that it would leave out.
    """
    shown = [_with_calls(template, message) for message in messages]
    if "tool" not in template:  # it may leave out roles that it does not know
        shown = [message | ({"role": "user"} if message["role"] == "tool" else {}) for message in shown]
    if CHANNEL in template or "single tool-calls" in template:
        shown = _one_call_each(shown)
    if _RESULTS in template and _TOOL_ROLE.search(template) is None:
        shown = _with_results(shown)
    if not tools or _OWN_NAME.search(template):
        return shown, {}
    if "xml_tools" in template:
        return shown, {"xml_tools": list(tools)}
    form, is_of_message = call_form(template), _OF_MESSAGE.search(template) is not None
    if form is None and not is_of_message:
        raise PromptError("the chat template of this model does not support tools: leave them out")
    functions = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    if shown[0]["role"] != "system":
        shown.insert(0, {"role": "system", "content": ""})
    if is_of_message or form is None:
        shown[0] = shown[0] | {"tools": functions}
    else:
        told = _TOLD.format(functions=functions, call=form.written([("function_name", {"argument": "value"})]))
        shown[0] = shown[0] | {"content": f"{shown[0]['content']}\n\n{told}".strip()}
    return shown, {}


def _with_calls(template: str, message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls or "tool_calls" in template:
        shows_empty = calls and not message.get("content") and _SEP in template and " none" in template
        return message | {"content": None} if shows_empty else message
    form = call_form(template) or PLAIN_FORMS[0]  # of another model, which this conversation began with
    functions = [call.get("function") or {} for call in calls]
    written = form.written((str(each.get("name")), each.get("arguments") or {}) for each in functions)
    text = message.get("content") or ""
    return message | {"content": f"{text}\n{written}" if text else written}


def _one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with one call at most, each with its result behind it."""
    found, rest = list[dict[str, Any]](), list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            found.append(message)
            continue
        results = list[dict[str, Any]]()
        while rest and rest[0]["role"] == "tool":
            results.append(rest.pop(0))
        for place, call in enumerate(calls):
            own = next((each for each in results if _is_of(each, call)), results[0] if results else None)
            text = {} if not place else {"content": ""}
            found += [message | {"tool_calls": [call]} | text, *([own] if own is not None else ())]
            results = [each for each in results if each is not own]
        found += results
    return found


def _is_of(result: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
    """Whether a result names the call that it is of."""
    return isinstance(call.get("id"), str) and call["id"] == result.get("tool_call_id")


def _with_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which calls, their results and the answer behind them are one, as in one turn of the model.

    A text before the calls is a message of its own: the template would put it behind the results.
    """
    found = list[dict[str, Any]]()
    for message in messages:
        turn = found[-1] if found else {}
        is_answer = message["role"] == "assistant" and not message.get("tool_calls")
        if message["role"] == "tool" and turn.get("tool_calls"):
            turn[_RESULTS] = [*turn.get(_RESULTS, []), _result(message, turn)]
        elif is_answer and turn.get(_RESULTS) and not turn["content"]:
            turn["content"] = message["content"]
        elif message.get("tool_calls") and message["content"]:
            found += [{"role": message["role"], "content": message["content"]}, message | {"content": ""}]
        else:
            found.append(dict(message))
    return found


def _result(message: Mapping[str, Any], turn: Mapping[str, Any]) -> dict[str, Any]:
    """A result with the name of the function: that of its call, or else of the call at its place."""
    calls = turn["tool_calls"]
    place = min(len(turn.get(_RESULTS, [])), len(calls) - 1)
    call = next((each for each in calls if _is_of(message, each)), calls[place])
    try:
        content = json.loads(message["content"])
    except (ValueError, RecursionError):
        content = message["content"]
    return {"name": str((call.get("function") or {}).get("name")), "response": content}
