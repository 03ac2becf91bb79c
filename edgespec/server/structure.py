"""What a request asks its answer to be: `response_format`, llama.cpp's `json_schema` and `grammar`, a forced tool call.

Each becomes one of the structures of `GenerateOptions`; a mistake in a schema is one 400 that names the field and the
place in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from edgespec.chat.arguments import bare, kinds_of, listed_of, resolved
from edgespec.chat.marks import Marks
from edgespec.chat.tool_forms import Form
from edgespec.config.options import GenerateOptions, Sampling
from edgespec.errors import CapabilityError, ConfigError, shown
from edgespec.sampling.constraint.grammar import escaped, laid_out
from edgespec.server.http_errors import HttpError, bad_request
from edgespec.server.options import (
    Generated,
    OpenAiRequest,
    ResponseFormat,
    check_llamacpp,
    numbered,
    options_of,
    sampling_of,
)
from edgespec.server.scheduler import Job
from edgespec.server.service import Loaded
from edgespec.vocabulary import Vocabulary

MOST_CALLS = 4  # of one answer: small models tend to go on calling
_STRUCTURES = ("json_schema", "grammar", "regex")


def read_settings(
    request: OpenAiRequest, loaded: Loaded, notes: list[str], top_logprobs: int | None
) -> tuple[list[Sampling], GenerateOptions]:
    """The sampling of each answer and the options of all, checked. `top_logprobs` None: no log probabilities.

    Raises HttpError and EdgespecError.
    """
    sampling = sampling_of(request, loaded, request.logit_bias)
    options = options_of(request, loaded, request.token_limit, top_logprobs)
    options = read_structure(request, loaded, options, request.response_format)
    check_llamacpp(request, loaded, notes, has_probs=options.logprobs)
    return numbered(sampling, request.n or 1), options


def job_of(request: Generated, prompt_ids: Sequence[int], sampling: Sampling, options: GenerateOptions) -> Job:
    return Job(prompt_ids, sampling, options, bool(request.return_progress), reads_only=request.token_limit == 0)


def read_structure(
    request: Generated, loaded: Loaded, options: GenerateOptions, form: ResponseFormat | None = None
) -> GenerateOptions:
    """`options` with the structure that the request asks for, checked. Raises HttpError 400."""
    given = {name: value for name in (*_STRUCTURES, "free_until") if (value := getattr(request, name)) is not None}
    where = next(iter(given), "")
    described = None if form is None else _described(form)
    if described is not None:
        if "json_schema" in given:
            raise bad_request("response_format and json_schema are the same setting: give one", "response_format")
        where, given["json_schema"] = described
    return structured(loaded, options, given, where) if given else options


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


ANY_OBJECT: dict[str, Any] = {"type": "object"}
# Keywords of an object schema that nothing but `properties` adds properties to.
_PLAIN_OBJECT = {"type", "properties", "required", "title", "description", "$defs", "definitions", "$schema"}
_VALUES = ("const", "enum", "default", "examples")  # keywords that hold no schema
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name
_ROOT = "parameters"
_MOST_COUNTED = 500  # characters of a text: longer bounds take long to compile, and are left to the reader
Literal = Callable[[str], str]  # Lark for a text


def parameters_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments. Without a word on further ones there are none: small models go on adding."""
    found = ANY_OBJECT | (tool["function"].get("parameters") or {})
    names, required = found.get("properties"), found.get("required", [])
    if not (isinstance(names, dict) and isinstance(required, list) and found.keys() <= _PLAIN_OBJECT):
        return found
    return found | {"additionalProperties": False} if all(str(name) in names for name in required) else found


def lists_arguments(tool: Mapping[str, Any]) -> bool:
    """Whether a tool's parameters name every argument, as a form that writes them one by one has to know them."""
    found = ANY_OBJECT | (tool["function"].get("parameters") or {})
    properties, required = found.get("properties", {}), found.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or found.get("type") != "object":
        return False
    has_others = not properties and bool(found.get("additionalProperties"))
    are_named = all(isinstance(name, str) and name in properties for name in required)
    return are_named and not has_others and found.keys() <= _PLAIN_OBJECT | {"additionalProperties"}


def call_grammar(
    tools: Sequence[Mapping[str, Any]],
    form: Form,
    vocabulary: Vocabulary,
    most: int,
    answer: dict[str, Any] | None,
) -> str:
    """Lark for 1 to `most` calls in a form, or else for JSON of the schema `answer`."""

    def literal(text: str) -> str:
        """A text in which control tokens may be spelled."""
        marks = "|".join(map(re.escape, form.marks))
        parts = re.split(f"({marks})", text)
        return " ".join(
            terminal(part, vocabulary) if part in form.marks else json.dumps(part) for part in parts if part
        )

    def beginning(name: str) -> str:
        """What a call begins with, in which regular expressions stand between slashes."""
        return " ".join(part if part.startswith("/") else literal(part) for part in form.head_parts(name))

    more = f" ({literal(form.between)} call){{0,{most - 1}}}" if most > 1 else ""
    start, end = map(literal, form.around)
    lines = [f"start: {start} calls {end}{'' if answer is None else ' | answer'}", f"calls: call{more}"]
    lines.append(f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}")
    for index, tool in enumerate(tools):
        before = beginning(tool["function"]["name"])
        arguments = f"arguments_{index}" if form.argument else _json(parameters_of(tool))
        if form.argument:
            lines += _arguments(arguments, form, parameters_of(tool), literal)
        lines.append(f"call_{index}: {before} {arguments} {literal(form.tail)}")
    if answer is not None:
        lines.append(f"answer: {literal(form.before_answer)} {_json(answer)}")
    return "\n".join(lines)


def _moved(schema: Any, root: str) -> Any:
    """`schema` with references to its own root, or below it, that point to `root` instead."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _moved_part(key, each, root) for key, each in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        found["$ref"] = root + reference[1:]
    return found


def _moved_part(key: str, part: Any, root: str) -> Any:
    if key in _VALUES:
        return part
    if key in _NAMED and isinstance(part, dict):  # its keys are names, whatever they look like
        return {name: _moved(each, root) for name, each in part.items()}
    return _moved(part, root)


def _arguments(rule: str, form: Form, parameters: Mapping[str, Any], literal: Literal) -> list[str]:
    """Rules for the arguments of one call, the required ones first, each at most once; `rule` is the first one."""
    given, listed = parameters.get("properties"), parameters.get("required")
    properties: dict[str, Any] = given if isinstance(given, dict) else {}
    required = [name for name in properties if isinstance(listed, list) and name in listed]
    optional = [name for name in properties if name not in required]
    names = {key: f"{rule}_{number}" for number, key in zip(count(), properties, strict=False)}
    between = literal(form.between_arguments)
    first = f" {between} ".join(names[key] for key in required)
    behind = " ".join(f"({between} {names[key]})?" for key in optional)
    if required or not optional:
        lines = [f"{rule}: {first} {behind}" if properties else f'{rule}: ""']
    else:  # whichever comes first has no separator before it
        starts = (
            " ".join([names[key], *(f"({between} {names[later]})?" for later in optional[place + 1 :])])
            for place, key in enumerate(optional)
        )
        lines = [f"{rule}: ({' | '.join(starts)})?"]
    place = f"#/$defs/{_ROOT}"
    shared = {"$defs": {_ROOT: _moved(parameters, place)}} if '"$ref"' in json.dumps(parameters) else {}
    for key, name in names.items():
        lines += _argument(name, form, key, _moved(resolved(properties[key], parameters), place) | shared, literal)
    return lines


def _argument(rule: str, form: Form, key: str, schema: Mapping[str, Any], literal: Literal) -> list[str]:
    """Rules for one argument, with what its schema refers to. A text is free up to the mark behind it, or listed."""
    opened, closed, quote = literal(form.argument.replace("{key}", key)), literal(form.closed), literal(form.quote)
    # A bare form has no quotation marks that would tell a text from anything else.
    kinds = kinds_of(schema, schema)
    if not (form.quote or form.closed) or "string" not in kinds or (kinds != {"string"} and not form.closed):
        return [f"{rule}: {opened} {_json(schema)} {closed}"]
    listed = listed_of(schema, schema)
    if listed is not None:
        marks = [quote if isinstance(value, str) else "" for value in listed]
        texts = [f"{mark} {literal(bare(value))} {mark}" for mark, value in zip(marks, listed, strict=True)]
        return [f"{rule}: {opened} ({' | '.join(texts)}) {closed}"]
    least, most = (schema.get(f"{end}Length") for end in ("min", "max"))
    letters = f"(?s:.{{{least if _is_count(least) else 0},{most if _is_count(most) else ''}}})"
    if quote.startswith("<["):  # a control token is no text, so the text ends before it
        return [f"{rule}: {opened} {quote} {rule}_text {quote} {closed}", f"{rule}_text: /{letters}/"]
    end = escaped(form.quote + form.closed)
    return [f"{rule}: {opened} {quote} {rule}_text", f"{rule}_text[lazy]: /{letters}{end}/"]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST_COUNTED  # True is an int to isinstance


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(laid_out(schema))}"


def terminal(mark: str, vocabulary: Vocabulary) -> str:
    """Lark for a mark: a control token, or text where the vocabulary has no such token."""
    ids = vocabulary.encode(mark, parse_special=True)
    is_control = len(ids) == 1 and not vocabulary.piece(ids[0])
    return f"<[{ids[0]}]>" if is_control else json.dumps(mark)
