"""The sandbox that chat templates run in, and what they may call: the names, filters and blocks of transformers.

It keeps a template from everything but its values. What it takes is limited by the child process in which `rendered` is
called; the limits here only turn common excesses into errors that say what they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgespec.chat.messages import Message, in_parts, other_forms, takes_parts_only
from edgespec.errors import CapabilityError, PromptError

MAX_PROMPT_CHARACTERS = 16_000_000
FIX = "give another with --chat-template-file, or use --no-chat-template"
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


def rendered(source: str, values: Mapping[str, Any]) -> str:
    """What a template makes of `values`; messages in the form that it takes. Raises as `render_chat`."""
    try:
        template = compiled(source)
    except RecursionError as exc:
        raise PromptError(
            "the model's chat template is nested too deeply; use --no-chat-template, or --prompt"
        ) from exc
    except jinja2.TemplateSyntaxError as exc:
        raise CapabilityError(f"the model's chat template is broken: {exc}; {FIX}") from exc
    if _takes_parts_only(source):
        values = {**values, "messages": [in_parts(message) for message in values["messages"]]}
    try:
        return _rendered(template, values)
    except CapabilityError as exc:
        if not isinstance(exc.__cause__, TypeError):
            raise
        for other in other_forms(values):
            with suppress(CapabilityError):
                return _rendered(template, other)
        raise


@lru_cache(maxsize=8)
def _takes_parts_only(source: str) -> bool:
    def said(message: Message) -> str:
        values = {"messages": [message], "tools": None, "add_generation_prompt": True, "bos_token": "", "eos_token": ""}
        return _rendered(compiled(source), values)

    return takes_parts_only(source, said)


def _rendered(template: jinja2.Template, values: Mapping[str, Any]) -> str:
    parts: list[str] = []
    size = 0
    try:
        for part in template.generate(values):
            parts.append(part)
            size += len(part)
            if size > MAX_PROMPT_CHARACTERS:
                raise PromptError(f"the chat template renders a prompt of over {MAX_PROMPT_CHARACTERS} characters")
    except jinja2.exceptions.SecurityError as exc:
        raise CapabilityError(f"the model's chat template does something forbidden: {exc}") from exc
    except jinja2.TemplateError as exc:
        raise PromptError(f"the model's chat template rejects this conversation: {exc}") from exc
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError) as exc:
        raise CapabilityError(f"the model's chat template fails: {exc}; {FIX}") from exc
    return "".join(parts)
