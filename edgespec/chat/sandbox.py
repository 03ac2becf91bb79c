"""The sandbox that chat templates run in, with limits on repetition and number size, and what templates may call.

The names, filters and blocks are those that transformers gives to templates.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_PROMPT_CHARACTERS = 16_000_000
_MOST_WIDTH = 999
_WIDE_FIELD = re.compile(r"\d{4}|\{[^}]*\{")  # in `str.format`; or a width that is a field itself
_WIDE_FORM = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, which limits `range`, plus limits for 'x' * 10**9, 9**9**9 and texts filled to any width."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        is_filling = isinstance(obj, str) and attr in ("center", "expandtabs", "ljust", "rjust", "zfill")
        return not is_filling and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        found = super().wrap_str_format(value)
        if found is not None and _WIDE_FIELD.search(value.__self__):
            raise jinja2.TemplateRuntimeError("a format is too wide")
        return found

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            _check_form(left)
            return super().call_binop(context, operator, left, right)
        repeated = [len(value) for value in (left, right) if isinstance(value, (str, list, tuple))]
        bits = [value.bit_length() for value in (left, right) if isinstance(value, int)]
        if repeated and bits and repeated[0] * max(left, right, key=_as_count) > MAX_PROMPT_CHARACTERS:
            raise jinja2.TemplateRuntimeError("a repetition is too long")
        if sum(bits) > 4096 or (operator == "**" and any(count > 10 for count in bits)):
            raise jinja2.TemplateRuntimeError("a number has thousands of digits")
        return super().call_binop(context, operator, left, right)


def _check_form(form: Any) -> None:
    if isinstance(form, str) and _WIDE_FORM.search(form):
        raise jinja2.TemplateRuntimeError("a format is too wide")


def _format(form: str, *values: Any, **names: Any) -> str:
    _check_form(form)
    return jinja2.filters.do_format(form, *values, **names)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if (width if isinstance(width, int) else len(width)) > _MOST_WIDTH:
        raise jinja2.TemplateRuntimeError("an indentation is too wide")
    return jinja2.filters.do_indent(text, width, first, blank)


def _as_count(value: Any) -> int:
    return value if isinstance(value, int) else -1


class _Generation(jinja2.ext.Extension):
    """The block `{% generation %}`, with which templates mark answers for training: what it holds, in its own scope."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON with transformers' arguments; jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=8)
def compiled(source: str) -> jinja2.Template:
    """A template that can be rendered. Raises jinja2.TemplateSyntaxError and RecursionError."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    environment.filters.update(tojson=_to_json, format=_format, indent=_indent)
    del environment.filters["center"]  # allocates any width it is given
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
    return environment.from_string(source)


def check_template(source: str) -> str | None:
    """What is wrong with the syntax of a template; None if nothing is."""
    try:
        compiled(source)
    except jinja2.TemplateSyntaxError as exc:
        return f"line {exc.lineno}: {exc.message}"
    except RecursionError:
        return "it is nested too deeply"
    return None
