"""What a request asks its answer to be: `response_format`, llama.cpp's `json_schema` and `grammar`, a forced tool call.

Each becomes one of the structures of `GenerateOptions`; a mistake in a schema is one 400 that names the field and the
place in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgespec.chat.marks import Marks
from edgespec.chat.tool_forms import Form
from edgespec.config import GenerateOptions
from edgespec.errors import CapabilityError, ConfigError, shown
from edgespec.server.call_grammar import ANY_OBJECT, call_grammar, lists_arguments, parameters_of
from edgespec.server.fields import Fields
from edgespec.server.http_errors import HttpError, bad_request
from edgespec.server.service import Loaded

MOST_CALLS = 4  # of one answer: small models tend to go on calling
_PLAIN = ("grammar", "regex", "free_until")


def read_structure(fields: Fields, loaded: Loaded, options: GenerateOptions) -> GenerateOptions:
    """`options` with the structure that the request asks for, checked. Raises HttpError 400."""
    given: dict[str, Any] = {name: text for name in _PLAIN if (text := fields.text(name)) is not None}
    schema = fields.fields("json_schema")
    if schema is not None:
        given["json_schema"] = fields.given("json_schema")
    where = fields.path(next((name for name in ("json_schema", "grammar", "regex") if name in given), "free_until"))
    described = _response_format(fields)
    if described is not None:
        if "json_schema" in given:
            raise bad_request("response_format and json_schema are the same setting: give one", "response_format")
        where, given["json_schema"] = described
    return structured(loaded, options, given, where) if given else options


def _response_format(fields: Fields) -> tuple[str, Mapping[str, Any]] | None:
    """(the field that holds the schema, the schema) of OpenAI's `response_format`; None for free text."""
    form = fields.fields("response_format")
    if form is None:
        return None
    kind = form.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        where = fields.path("response_format")
        raise bad_request(f"{form.path('type')} is missing: give text, json_object or json_schema", where)
    if kind == "json_object" and form.fields("schema") is not None:  # llama.cpp's form, from before OpenAI's
        form.finish()
        return form.path("schema"), form.given("schema")
    if kind != "json_schema":
        form.finish()
        return None if kind == "text" else (fields.path("response_format"), ANY_OBJECT)
    described = form.fields("json_schema")
    schema = None if described is None else described.fields("schema")
    if described is None or schema is None:
        where = form.path("json_schema")
        raise bad_request(f'{where} is missing: give {{"name": ..., "schema": {{...}}}}', where)
    described.text("name", 64)
    described.ignore("description")
    described.flag("strict")  # every schema is kept strictly
    described.finish()
    form.finish()
    return described.path("schema"), described.given("schema")


def structured(loaded: Loaded, options: GenerateOptions, given: Mapping[str, Any], where: str) -> GenerateOptions:
    """`options` with the structure `given`, checked. Raises HttpError 400, which names the field `where`."""
    try:
        chosen = replace(options, **given)
        loaded.model.check_structure(chosen)
    except ConfigError as exc:
        name = next((name for name in ("json_schema", "grammar", "regex") if str(exc).startswith(name)), "")
        message = f"{where}{str(exc).removeprefix(name)}" if name else str(exc)
        raise bad_request(message, where, "invalid_structure") from exc
    except CapabilityError as exc:
        raise HttpError(501, str(exc), param=where, code="not_supported") from exc
    return chosen


def structured_behind(loaded: Loaded, options: GenerateOptions, marks: Marks) -> GenerateOptions:
    """`options` with a structure that begins behind the reasoning, for a prompt that opens it.

    Unchanged without a structure, or where the request says itself from where on the answer is structured. Raises
    HttpError 400 where the end of the reasoning is a token without a text, which no structure can begin behind.
    """
    name = options.structure
    if name is None or options.free_until is not None:
        return options
    vocabulary = loaded.model.target.vocabulary
    if any(not vocabulary.piece(token_id) for token_id in vocabulary.encode(marks.closing, parse_special=True)):
        raise bad_request(
            f"{name}: this model reasons first and ends that with a token without text: turn reasoning off", name
        )
    return structured(loaded, options, {"free_until": marks.closing}, name)


def forced_calls(
    loaded: Loaded,
    options: GenerateOptions,
    tools: Sequence[dict[str, Any]],
    choice: object,
    form: Form,
    *,
    parallel: bool,
) -> GenerateOptions:
    """`options` with a grammar of the calls that `tool_choice` asks for, or unchanged where it asks for none.

    Under auto with a JSON schema the answer is either calls or JSON. Raises HttpError for another choice, a function
    that is not among the tools, and parameters that cannot be used.
    """
    is_free = choice in (None, "auto")
    if is_free and options.json_schema is None:
        return options
    if not is_free and options.structure is not None:
        raise bad_request(
            f"tool_choice forces a call, but {options.structure} asks for another answer: keep one", "tool_choice"
        )
    chosen = list(tools) if is_free or choice == "required" else [_named(choice, tools)]
    for tool in chosen:
        where = f"tools.{tools.index(tool)}.function.parameters"
        structured(loaded, replace(options, json_schema=None), {"json_schema": parameters_of(tool)}, where)
        if form.argument and not lists_arguments(tool):
            raise bad_request(
                f"{where} must name every argument under properties: this model writes calls argument by argument, and "
                'a forced one can have no others (use tool_choice "auto")',
                where,
            )
    most = MOST_CALLS if parallel and form.takes_several and (is_free or choice == "required") else 1
    answer = None if options.json_schema is None else json.loads(str(options.json_schema))
    grammar = call_grammar(chosen, form, loaded.model.target.vocabulary, most, answer)
    return structured(loaded, replace(options, json_schema=None), {"grammar": grammar}, "tool_choice")


def _named(choice: object, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The tool that a choice names."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise bad_request(
            'tool_choice must be none, auto, required or {"type": "function", "function": {"name": ...}}', "tool_choice"
        )
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    raise bad_request(f"tool_choice names {shown(name)}, which is not among the tools", "tool_choice")
