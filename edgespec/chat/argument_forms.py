"""Tool calls whose arguments are not one JSON object: each stands by itself, with or without a word on its type.

Qwen3-Coder and Qwen3.5, GLM 4.5 and later, Gemma 4, LFM2, MiniCPM5. Where a form writes texts without quotation marks,
the parameters of the tool say which arguments are texts.
"""

from __future__ import annotations

import ast
import json
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from edgespec.chat.gemma_values import ParsedValue, parsed_arguments, written_value
from edgespec.chat.tools import CLOSE, OPEN, Enclosed, ToolCall, as_call, as_calls, loaded

_NAME = r"[A-Za-z0-9_.-]{1,64}"
_WORDS: dict[str, Any] = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_CDATA = re.compile(r"\A\s*<!\[CDATA\[(.*)\]\]>\s*\Z", re.DOTALL)
_MOST_DEPTH = 64


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
        given = arguments if isinstance(arguments, Mapping) else {}
        each = (f"{cls.opened(str(key))}{cls.written_value(value)}{cls.closed}" for key, value in given.items())
        return "".join(cls.before(name)) + cls.between_arguments.join(each) + cls.after

    def _typed(self, name: str, arguments: Mapping[str, str]) -> ToolCall:
        """A call with bare arguments, each of the type that the tool gives it."""
        properties = self._parameters.get(name, {}).get("properties")
        known = properties if isinstance(properties, dict) else {}
        values = {key: _as_typed(text, known.get(key)) for key, text in arguments.items()}
        return ToolCall(name, json.dumps(values, ensure_ascii=False))


class QwenXml(ArgumentForm):
    """`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`, each on its own line."""

    opening, closing = OPEN, CLOSE
    marks = (OPEN, CLOSE)
    between = "\n"
    after = f"</function>\n{CLOSE}"
    closed = "\n</parameter>\n"
    texts_are_bare = True
    _whole = re.compile(rf"\s*<function=({_NAME})>(.*?)(?:</function>)?\s*", re.DOTALL)
    # A value may hold the closing mark itself: what follows the real one is another parameter or the end.
    _each = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)

    @classmethod
    def before(cls, name: str) -> tuple[str, ...]:
        return (f"{OPEN}\n<function={name}>\n",)

    @classmethod
    def opened(cls, key: str) -> str:
        return f"<parameter={key}>\n"

    def _calls(self, text: str) -> list[ToolCall]:
        whole = self._whole.fullmatch(text)
        arguments = None if whole is None else _all_of(self._each, whole[2])
        return [] if whole is None or arguments is None else [self._typed(whole[1], arguments)]


class MiniCpm(ArgumentForm):
    """`<function name="NAME"><param name="KEY">value</param></function>`: MiniCPM5. A value may be in CDATA marks."""

    opening, closing = "<function name=", "</function>"
    marks = (closing,)
    after = closing
    closed = "</param>"
    texts_are_bare = True
    _whole = re.compile(rf'"({_NAME})"\s*>(.*)', re.DOTALL)
    _each = re.compile(r'\s*<param name="([^"\n]+)"\s*>(.*?)</param>(?=\s*(?:<param name=|\Z))', re.DOTALL)

    @classmethod
    def before(cls, name: str) -> tuple[str, ...]:
        return (f'<function name="{name}">',)

    @classmethod
    def opened(cls, key: str) -> str:
        return f'<param name="{key}">'

    @classmethod
    def written_value(cls, value: object) -> str:
        has_marks = isinstance(value, str) and any(mark in value for mark in "<&\n")
        return f"<![CDATA[{value}]]>" if has_marks else super().written_value(value)

    def _calls(self, text: str) -> list[ToolCall]:
        whole = self._whole.fullmatch(text)
        arguments = None if whole is None else _all_of(self._each, whole[2])
        if whole is None or arguments is None:
            return []
        return [self._typed(whole[1], {key: _CDATA.sub(r"\1", value) for key, value in arguments.items()})]


class Glm(ArgumentForm):
    """`<tool_call>NAME`, then `<arg_key>KEY</arg_key>` and `<arg_value>value</arg_value>` by turns, `</tool_call>`."""

    opening, closing = OPEN, CLOSE
    marks = (OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    between = "\n"
    after = CLOSE
    closed = "</arg_value>\n"
    texts_are_bare = True
    _whole = re.compile(rf"\s*({_NAME})\s*((?:<arg_key>.*)?)", re.DOTALL)
    _each = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL)

    @classmethod
    def before(cls, name: str) -> tuple[str, ...]:
        return (f"{OPEN}{name}\n",)

    @classmethod
    def opened(cls, key: str) -> str:
        return f"<arg_key>{key}</arg_key>\n<arg_value>"

    def _calls(self, text: str) -> list[ToolCall]:
        whole = self._whole.fullmatch(text)
        arguments = None if whole is None else _all_of(self._each, whole[2])
        return [] if whole is None or arguments is None else [self._typed(whole[1], arguments)]


class Gemma(ArgumentForm):
    """`<|tool_call>call:NAME{KEY:value,...}<tool_call|>`, with the mark <|"|> around texts: Gemma 4."""

    quote = '<|"|>'
    opening, closing = "<|tool_call>", "<tool_call|>"
    marks = (opening, closing, quote)
    after = f"}}{closing}"
    between_arguments = ","
    _whole = re.compile(rf"\s*call:({_NAME})(\{{.*\}})\s*", re.DOTALL)

    @classmethod
    def before(cls, name: str) -> tuple[str, ...]:
        return (f"{cls.opening}call:{name}{{",)

    @classmethod
    def opened(cls, key: str) -> str:
        return f"{key}:"

    @classmethod
    def written_value(cls, value: object) -> str:
        return written_value(value, cls.quote)

    def _calls(self, text: str) -> list[ToolCall]:
        whole = self._whole.fullmatch(text)
        found: ParsedValue = None if whole is None else parsed_arguments(whole[2], self.quote)
        call = as_call({"name": whole[1], "arguments": found}) if whole is not None and found is not None else None
        return [] if call is None else [call]


class Lfm(ArgumentForm):
    """`<|tool_call_start|>[NAME(KEY=value, ...), ...]<|tool_call_end|>`: LFM2, which may write a JSON list instead."""

    opening, closing = "<|tool_call_start|>", "<|tool_call_end|>"
    marks = (opening, closing)
    around_all = (f"{opening}[", f"]{closing}")
    between = ", "
    after = ")"
    between_arguments = ", "
    is_json = True

    @classmethod
    def before(cls, name: str) -> tuple[str, ...]:
        return (f"{name}(",)

    @classmethod
    def opened(cls, key: str) -> str:
        return f"{key}="

    def _calls(self, text: str) -> list[ToolCall]:
        value = loaded(text)
        if value is not None:
            return as_calls([value] if isinstance(value, dict) else value)
        calls = _python_calls(text.strip())
        return [ToolCall(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]


def _all_of(each: re.Pattern[str], text: str) -> dict[str, str] | None:
    """The arguments that `text` is made of, one after another; None if it holds anything else."""
    found, end = dict[str, str](), 0
    for match in each.finditer(text):
        if match.start() != end:
            return None
        found[match[1].strip()] = match[2]
        end = match.end()
    return found if not text[end:].strip() else None


def _as_typed(text: str, schema: Any) -> Any:
    """A bare value: text where the schema allows that, else JSON or Python, else text all the same."""
    kinds = _kinds(schema)
    if "string" in kinds:
        return None if text == "null" and "null" in kinds else text
    value = loaded(text)
    if value is not None:
        return value
    try:
        return _python_value(_parsed(text.strip()))
    except ValueError:
        return text


def _kinds(schema: Any) -> set[str]:
    """The types that a schema names."""
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    found = {kind} if isinstance(kind, str) else {str(each) for each in kind} if isinstance(kind, list) else set()
    for name in ("anyOf", "oneOf"):
        for each in schema[name] if isinstance(schema.get(name), list) else ():
            found |= _kinds(each)
    if not found and isinstance(schema.get("enum"), list) and any(isinstance(each, str) for each in schema["enum"]):
        found.add("string")
    return found


def _python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments) of each call in a Python list of calls; none if any of it is something else."""
    try:
        tree = _parsed(text)
        return [_python_call(each) for each in (tree.elts if isinstance(tree, ast.List) else [tree])]
    except ValueError:
        return []


def _parsed(text: str) -> ast.expr:
    """The expression that `text` is in Python. Raises ValueError if it is none, or nested too deeply."""
    if _depth(text) > _MOST_DEPTH:
        raise ValueError("nested too deeply")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as exc:
        raise ValueError("no expression") from exc


def _python_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise ValueError("no call with named arguments")
    name = ast.unparse(node.func)
    if re.fullmatch(_NAME, name) is None:
        raise ValueError("no name of a function")
    return name, {str(each.arg): _python_value(each.value) for each in node.keywords}


def _python_value(node: ast.expr) -> Any:
    """A value of Python or JSON. Raises ValueError for anything that would have to be computed."""
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        if any(not isinstance(key, ast.Constant) or not isinstance(key.value, str) for key in node.keys):
            raise ValueError("a key that is no text")
        keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
        return dict(zip(keys, map(_python_value, node.values), strict=True))
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("no value of JSON")
    return value


def _depth(text: str) -> int:
    """How deeply brackets are nested, those in texts counted too."""
    depth = most = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        most = max(most, depth)
    return most
