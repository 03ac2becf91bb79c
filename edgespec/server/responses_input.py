"""Requests to `/v1/responses` under the names of `/v1/chat/completions`: input items, tools and the text's format."""

from __future__ import annotations

from typing import Any

from edgespec.chat.marks import reasoning_marks
from edgespec.chat.messages import part_text
from edgespec.server.evidence import check_question
from edgespec.server.fields import Fields
from edgespec.server.http_errors import HttpError, bad_request
from edgespec.server.options import WITHOUT_EFFECT
from edgespec.server.responses_tools import INPUT, as_functions
from edgespec.server.service import Loaded

_MOST_ITEMS = 4096
_SAME = (
    *("model", "temperature", "top_p", "stream", "parallel_tool_calls"),
    *("seed", "top_k", "min_p", "repeat_penalty", "speculative"),  # as in /v1/chat/completions; not OpenAI's
)
# What the client calls the fields of the chat request that its own one becomes.
SENT_AS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}
_REASONED = "reasoning_content"  # as chat templates call it
# What `include` may name: a server that stores nothing encrypts nothing, and runs no tools that would have results.
_NEVER_THERE = (
    *("reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results"),
    *("file_search_call.results", "code_interpreter_call.outputs", "computer_call_output.output.image_url"),
)
_STATELESS = "this server stores no responses: send the whole conversation as input"


def as_chat(fields: Fields, loaded: Loaded) -> tuple[dict[str, Any], dict[str, Any]]:
    """The chat request, and the fields of the request that its answer repeats. Raises HttpError."""
    instructions = fields.text("instructions")
    first = [{"role": "system", "content": instructions}] if instructions else []
    body = {name: fields.given(name) for name in _SAME}
    body |= {"messages": first + _read_input(fields), "max_completion_tokens": fields.given("max_output_tokens")}
    tools = fields.listed("tools", loaded.limits.max_tools)
    choice = fields.given("tool_choice")
    body |= {"tools": as_functions(tools, fields), "tool_choice": _read_choice(choice)}
    form = _read_format(fields)
    body["response_format"] = form
    _refuse_unsupported(fields)
    effort = _read_effort(fields, loaded)
    body["reasoning_effort"] = effort
    metadata = fields.given("metadata")
    fields.finish()
    echoed = {
        "instructions": instructions,
        "max_output_tokens": body["max_completion_tokens"],
        "parallel_tool_calls": body["parallel_tool_calls"] is not False,
        "tools": tools or [],
        "tool_choice": choice or "auto",
        "text": {"format": {"type": "text"} if form is None else _flat_format(form)},
        "reasoning": {"effort": effort, "summary": None},
        "metadata": metadata if isinstance(metadata, dict) else {},
    }
    return body, echoed


def _refuse_unsupported(fields: Fields) -> None:
    fields.ignore(*(name for name in WITHOUT_EFFECT if name != "metadata"), "client_metadata")
    fields.without_effect("draft_model", "the draft is the one that the server was started with")
    for name in ("previous_response_id", "conversation"):
        fields.refuse(name, _STATELESS)
    fields.refuse("background", _STATELESS, (False,))
    fields.without_effect("truncation", "a conversation that does not fit is refused, never cut", ("disabled",))
    included = [name for name in fields.listed("include", _MOST_ITEMS) or () if name not in _NEVER_THERE]
    if included:
        raise _unsupported("include", f"answers hold nothing further (without effect: {', '.join(_NEVER_THERE)})")
    fields.refuse("prompt", "this server stores no prompts")
    fields.refuse("top_logprobs", "use /v1/chat/completions for log probabilities", (0,))
    fields.refuse("max_tool_calls", "this server runs no tools itself")
    options = fields.fields("stream_options")
    if options is not None:
        options.ignore("include_obfuscation")
        options.finish()


def _read_effort(fields: Fields, loaded: Loaded) -> str | None:
    """`reasoning.effort`. Summaries are left out: answers hold the reasoning itself."""
    reasoning = fields.fields("reasoning")
    if reasoning is None:
        return None
    effort = reasoning.text("effort")
    reasoning.ignore("summary", "generate_summary")
    reasoning.finish()
    template = loaded.model.target.vocabulary.chat_template or ""
    reasons = reasoning_marks(template) is not None or "enable_thinking" in template or "reasoning_effort" in template
    if effort in (None, "none") or reasons:
        return effort
    reasoning.note("effort", "this model answers without reasoning")
    return None


def _read_input(fields: Fields) -> list[dict[str, Any]]:
    given = fields.given("input")
    if given is None:
        raise bad_request("input is missing: give a text or a list of items", "input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[dict[str, Any]] = []
    places: list[str] = []
    for index, item in enumerate(fields.listed("input", _MOST_ITEMS) or ()):
        _add_item(found, item, f"input.{index}")
        places += [f"input.{index}.content"] * (len(found) - len(places))
    check_question(found, places)
    return [{"content": "", **message} for message in found]


def _add_item(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    """Append an item; calls of one turn join the assistant's message before them, as chat templates expect."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    begun = messages[-1] if messages and _REASONED in messages[-1] and "content" not in messages[-1] else None
    if kind == "message" and begun is not None and item.get("role") == "assistant":
        begun["content"] = item.get("content")
    elif kind == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary")
        text = "".join(part_text(part) or "" for part in parts) if isinstance(parts, list) else parts
        messages += [{"role": "assistant", _REASONED: text}] if text else []  # empty: OpenAI's, which is encrypted
    elif isinstance(kind, str) and kind.endswith("_call"):  # or one of another server's tools, such as a local shell
        given = item.get("arguments", item.get("action"))
        arguments = {INPUT: item.get("input")} if kind == "custom_tool_call" else given
        function = {"name": item.get("name") or kind.removesuffix("_call"), "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif isinstance(kind, str) and kind.endswith("_call_output"):
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    else:
        raise bad_request(f"{where} must be a message, a reasoning, a call such as function_call, or its output", where)


def _read_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _read_format(fields: Fields) -> dict[str, Any] | None:
    """`text.format` as a `response_format`; None for plain text."""
    text = fields.fields("text")
    if text is None:
        return None
    text.without_effect("verbosity", "the model decides how much it writes", ("medium",))
    form = text.given("format")
    text.finish()
    if form is None:
        return None
    if not isinstance(form, dict):
        raise text.wrong("format", "must be an object", form)
    if form.get("type") == "text":
        return None
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}


def _flat_format(form: dict[str, Any]) -> dict[str, Any]:
    described = form.get("json_schema")
    return {"type": form.get("type"), **(described if isinstance(described, dict) else {})}


def _unsupported(where: str, why: str) -> HttpError:
    return bad_request(f"{where}: {why}", where, "unsupported_parameter")
