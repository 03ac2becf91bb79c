"""Requests to `/v1/messages` under the names of `/v1/chat/completions`: conversation, tools, thinking, format.

Claude Code and other agents send fields for Anthropic's servers, such as the management of the context: those that
cannot change the text are accepted.
"""

from __future__ import annotations

import re
from typing import Any

from edgespec.chat.marks import reasoning_marks
from edgespec.server.evidence import check_question
from edgespec.server.fields import Fields
from edgespec.server.http_errors import bad_request
from edgespec.server.options import MOST_TOKENS, answered_by
from edgespec.server.service import Loaded, asks_for_claude

_SAME = ("temperature", "top_p", "top_k", "stream", "speculative", "seed")
_MOST_BLOCKS = 4096
_RUN_THERE = re.compile(r"(web_search|web_fetch|code_execution|tool_search_tool_\w+|advisor)_\d{8}")
_WITHOUT_EFFECT = ("metadata", "service_tier", "betas", "cache_control", "inference_geo", "speed")


def as_chat(loaded: Loaded, fields: Fields) -> dict[str, Any]:
    """The chat request. Raises HttpError."""
    if fields.whole("max_tokens", 1, MOST_TOKENS) is None:
        raise bad_request("max_tokens is missing: give the maximum number of tokens of the answer", "max_tokens")
    given = {name: fields.given(name) for name in (*_SAME, "max_tokens")}
    given |= {"stop": fields.listed("stop_sequences", loaded.limits.max_stops)}
    return given | as_counted_chat(loaded, fields)


def as_counted_chat(loaded: Loaded, fields: Fields) -> dict[str, Any]:
    """The chat request for an answer that is not written. Raises HttpError."""
    body = _model(loaded, fields) | _read_conversation(loaded, fields)
    body |= {"reasoning_effort": _effort(loaded, fields), "response_format": _format(fields)}
    fields.ignore(*_WITHOUT_EFFECT)
    fields.without_effect("context_management", "the conversation is read as it is, nothing is cleared")
    fields.without_effect("container", "this server runs no tools itself")
    fields.refuse("mcp_servers", "this server runs no tools itself", ([],))
    fields.finish()
    return body


def _model(loaded: Loaded, fields: Fields) -> dict[str, Any]:
    """`model`. Claude's names are answered by the model that is here.

    Claude Code asks for a small one besides, for titles and summaries, by a name that its user does not choose.
    """
    name = fields.text("model")
    if name is None or not asks_for_claude(name) or name in loaded.names.all:
        return {"model": name}
    answered_by(loaded.names, fields)
    return {}


def _format(fields: Fields) -> dict[str, Any] | None:
    """`output_config.format` as a `response_format`, or `output_format`, its former place; None for free text."""
    form, config = fields.fields("output_format"), fields.fields("output_config")
    if config is not None:
        form = config.fields("format") or form
        config.ignore("effort")
        config.finish()
    if form is None:
        return None
    if form.choice("type", ("json_schema",)) is None or form.fields("schema") is None:
        raise bad_request('output_config.format must be {"type": "json_schema", "schema": {...}}', "output_config")
    schema = form.given("schema")
    form.finish()
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _effort(loaded: Loaded, fields: Fields) -> str | None:
    """`thinking` as a `reasoning_effort`. A budget limits nothing: the answer has `max_tokens` for both."""
    thinking = fields.fields("thinking")
    kind = None if thinking is None else thinking.choice("type", ("enabled", "adaptive", "disabled"))
    if kind in (None, "disabled"):
        return None if thinking is None else "none"
    if reasoning_marks(loaded.model.target.vocabulary.chat_template) is None:
        fields.note("thinking", "this model answers without reasoning")
        return None
    return "medium"


def _read_conversation(loaded: Loaded, fields: Fields) -> dict[str, Any]:
    """System text, messages and tools under OpenAI's names."""
    messages = fields.listed("messages", _MOST_BLOCKS)
    if messages is None:
        raise bad_request("messages is missing: give a list of messages", "messages")
    system = fields.given("system")
    found = [] if system is None else [{"role": "system", "content": _joined(_shown(system), "system")}]
    places = ["system"] * len(found)
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise bad_request(f"messages.{index}.role must be user, assistant or system", "messages")
        found += _translated(message)
        places += [f"messages.{index}.content"] * (len(found) - len(places))
    check_question(found, places)
    return {"messages": found} | _read_tools(loaded, fields)


def _shown(system: Any) -> Any:
    """The system prompt without Claude Code's line for billing, which Anthropic's models do not see.

    It differs from request to request, so that nothing of the prompt behind it could be taken from the cache.
    """
    if not isinstance(system, list):
        return system
    return [
        block
        for block in system
        if not (isinstance(block, dict) and str(block.get("text")).startswith("x-anthropic-billing-header:"))
    ]


def _translated(message: dict[str, Any]) -> list[dict[str, Any]]:
    """One message as those that OpenAI makes of it: tool results are messages of their own there."""
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results, calls, texts = list[dict[str, Any]](), list[dict[str, Any]](), list[Any]()
    thoughts = list[str]()
    blocks: list[Any] = content if isinstance(content, list) else [content] if role == "user" or content else []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind in ("thinking", "redacted_thinking") and role == "assistant":
            thoughts += [block["thinking"]] if isinstance(block.get("thinking"), str) else []
        elif kind == "tool_result" and role == "user":
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")})
        else:
            texts.append(block)
    found = results
    if texts or calls or thoughts:
        own: dict[str, Any] = {"role": role, "content": texts}
        own |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
        found.append(own | ({"tool_calls": calls} if calls else {}))
    return found


def _joined(content: Any, where: str) -> str:
    """The text of a content that may be a list of text blocks. Raises HttpError for other blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(
        isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)
        for block in content
    ):
        raise bad_request(f"{where} must be a text or a list of text blocks: this server reads text only", where)
    return "".join(block["text"] for block in content)


def _read_tools(loaded: Loaded, fields: Fields) -> dict[str, Any]:
    tools = fields.listed("tools", loaded.limits.max_tools)
    choice = fields.fields("tool_choice")
    found: dict[str, Any] = {}
    if choice is not None:
        kind = choice.choice("type", ("auto", "none", "any", "tool"))
        named = {"type": "function", "function": {"name": choice.text("name")}}
        forced = {"any": "required", "tool": named}.get(kind or "", kind)
        found = {"tool_choice": forced, "parallel_tool_calls": not choice.flag("disable_parallel_tool_use")}
        choice.finish()
    if tools is None:
        return found
    tools = [tool for index, tool in enumerate(tools) if not _is_run_there(fields, tool, index)]
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or not isinstance(tool.get("input_schema"), dict):
            raise bad_request(f"tools.{index} must have name and input_schema", f"tools.{index}")
    functions = [
        {"name": tool.get("name"), "description": tool.get("description") or "", "parameters": tool["input_schema"]}
        for tool in tools
    ]
    return found | {"tools": [{"type": "function", "function": function} for function in functions]}


def _is_run_there(fields: Fields, tool: Any, index: int) -> bool:
    """Whether a tool is one that Anthropic's servers run themselves, which is left out."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or _RUN_THERE.fullmatch(kind) is None:
        return False
    fields.note("tools", f"{kind} is left out: this server runs no tools itself")
    return True
