"""The sandbox that chat templates run in, and what they may call: the names, filters and blocks of transformers.

It keeps a template from everything but its values. What it takes is limited by the child process in which `rendered` is
called.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgespec.chat.messages import in_parts, other_forms
from edgespec.chat.template import FIX
from edgespec.errors import CapabilityError, EdgespecError, PromptError

MAX_PROMPT_CHARACTERS = 16_000_000


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
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
    return environment.from_string(source)


def rendered(source: str, values: Mapping[str, Any]) -> str:
    """What a template makes of `values`; messages in the form that it takes. Raises as `render_chat`."""
    try:
        template = compiled(source)
    except RecursionError as exc:
        raise PromptError(f"the model's chat template is nested too deeply; {FIX}") from exc
    except jinja2.TemplateSyntaxError as exc:
        raise CapabilityError(f"the model's chat template is broken: line {exc.lineno}: {exc.message}; {FIX}") from exc
    text = _in_a_form(template, values)
    questions = [str(message["content"]).strip() for message in values["messages"] if message["role"] == "user"]
    if questions and questions[-1] not in text:  # as templates of models that see pictures leave out all but parts
        with suppress(EdgespecError):
            other = _in_a_form(template, {**values, "messages": [in_parts(each) for each in values["messages"]]})
            return other if questions[-1] in other else text
    return text


def _in_a_form(template: jinja2.Template, values: Mapping[str, Any]) -> str:
    try:
        return _rendered(template, values)
    except CapabilityError as exc:
        if not isinstance(exc.__cause__, TypeError):
            raise
        for other in other_forms(values):
            with suppress(CapabilityError):
                return _rendered(template, other)
        raise


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
