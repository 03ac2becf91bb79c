"""What a request asks its answer to be: `response_format`, llama.cpp's `json_schema` and `grammar`, a forced tool call.

Each becomes one of the structures of `GenerateOptions`; a mistake in a schema is one 400 that names the field and the
place in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgespec.chat.marks import Marks
from edgespec.chat.tool_forms import ToolForm
from edgespec.config.options import GenerateOptions, Sampling
from edgespec.errors import CapabilityError, ConfigError, shown
from edgespec.sampling.constraint.grammar import laid_out
from edgespec.server.http_errors import HttpError, bad_request
from edgespec.server.options import OpenAiRequest, ResponseFormat, options_of, sampling_of
from edgespec.server.service import Loaded
from edgespec.vocabulary import Vocabulary

MOST_CALLS = 4  # of one answer: small models tend to go on calling
_STRUCTURES = ("json_schema", "grammar", "regex")


def read_settings(
    request: OpenAiRequest, loaded: Loaded, top_logprobs: int | None
) -> tuple[list[Sampling], GenerateOptions]:
    """The sampling of each answer and the options of all, checked. `top_logprobs` None: no log probabilities.

    Raises HttpError and EdgespecError.
    """
    sampling, options = sampling_of(request, loaded), options_of(request, loaded, top_logprobs)
    asked = {name: getattr(request, name) for name in (*_STRUCTURES, "free_until")}
    given = {name: value for name, value in asked.items() if value not in (None, "")}
    where = next(iter(given), "")
    if (form := request.response_format) is not None and (described := _described(form)) is not None:
        if "json_schema" in given:
            raise bad_request("response_format and json_schema are the same setting: give one", "response_format")
        where, given["json_schema"] = described
    return sampling, structured(loaded, options, given, where) if given else options


def _described(form: ResponseFormat) -> tuple[str, Mapping[str, Any]] | None:
    """(the field that holds the schema, the schema) of OpenAI's `response_format`; None for free text."""
    where = "response_format"
    for name, kind in (("schema", "json_object"), ("json_schema", "json_schema")):
        if getattr(form, name) is not None and form.type != kind:
            raise bad_request(f"{where}.{name} needs type {kind}, got {form.type}", f"{where}.{name}")
    if form.type == "text":
        return None
    if form.type == "json_object":
        return (where, ANY_OBJECT) if form.schema is None else (f"{where}.schema", form.schema)
    if form.json_schema is None:
        where += ".json_schema"
        raise bad_request(f'{where} is missing: give {{"name": ..., "schema": {{...}}}}', where)
    return f"{where}.json_schema.schema", form.json_schema.schema


def structured(loaded: Loaded, options: GenerateOptions, given: Mapping[str, Any], where: str) -> GenerateOptions:
    """`options` with the structure `given`, checked. Raises HttpError 400, which names the field `where`."""
    try:
        chosen = replace(options, **given)
        loaded.model.check_structure(chosen)
    except ConfigError as exc:
        name = next((name for name in _STRUCTURES if str(exc).startswith(name)), "")
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
    form: ToolForm,
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
    most = MOST_CALLS if parallel and form.takes_several and (is_free or choice == "required") else 1
    answer = None if options.json_schema is None else json.loads(str(options.json_schema))
    grammar = call_grammar(chosen, form, loaded.model.target.vocabulary, most, answer)
    return structured(loaded, replace(options, json_schema=None), {"grammar": grammar}, "tool_choice")


def _named(choice: object, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise bad_request(
            "tool_choice must be none, auto, required, or the name of a tool in the form of this API", "tool_choice"
        )
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    raise bad_request(f"tool_choice names {shown(name)}, which is not among the tools", "tool_choice")


ANY_OBJECT: dict[str, Any] = {"type": "object"}
# Keywords of an object schema that nothing but `properties` adds properties to.
_PLAIN_OBJECT = {"type", "properties", "required", "title", "description", "$defs", "definitions", "$schema"}


def parameters_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments. Without a word on further ones there are none: small models go on adding."""
    found = ANY_OBJECT | (tool["function"].get("parameters") or {})
    names, required = found.get("properties"), found.get("required", [])
    if not (isinstance(names, dict) and isinstance(required, list) and found.keys() <= _PLAIN_OBJECT):
        return found
    return found | {"additionalProperties": False} if all(str(name) in names for name in required) else found


def call_grammar(
    tools: Sequence[Mapping[str, Any]], form: ToolForm, vocabulary: Vocabulary, most: int, answer: dict[str, Any] | None
) -> str:
    """Lark for 1 to `most` calls in a form, or else for JSON of the schema `answer`."""
    form = form.forced

    def literal(text: str) -> str:
        """A text in which control tokens may be spelled."""
        marks = "|".join(map(re.escape, form.marks))
        parts = re.split(f"({marks})", text)
        return " ".join(
            terminal(part, vocabulary) if part in form.marks else json.dumps(part) for part in parts if part
        )

    more = f" ({literal(form.between)} call){{0,{most - 1}}}" if most > 1 else ""
    start, end = map(literal, form.around)
    lines = [f"start: {start} calls {end}{'' if answer is None else ' | answer'}", f"calls: call{more}"]
    lines.append(f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}")
    for index, tool in enumerate(tools):
        before = literal(form.head.replace("{name}", tool["function"]["name"]))
        lines.append(f"call_{index}: {before} {_json(parameters_of(tool))} {literal(form.tail)}")
    if answer is not None:
        lines.append(f"answer: {literal(form.before_answer)} {_json(answer)}")
    return "\n".join(lines)


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(laid_out(schema))}"


def terminal(mark: str, vocabulary: Vocabulary) -> str:
    """Lark for a mark: a control token, or text where the vocabulary has no such token."""
    ids = vocabulary.encode(mark, parse_special=True)
    is_control = len(ids) == 1 and not vocabulary.piece(ids[0])
    return f"<[{ids[0]}]>" if is_control else json.dumps(mark)
