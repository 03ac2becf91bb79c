"""Tools of `/v1/responses` as functions: those that OpenAI runs are left out, freeform ones take one text.

A freeform tool (`custom`), such as Codex' apply_patch, is called with a text instead of JSON. For the model it is a
function with that text as its argument; calls are turned back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from edgespec.chat.tools import ToolCall
from edgespec.server.fields import Fields
from edgespec.server.http_errors import bad_request

INPUT = "input"
_RUN_THERE = (
    *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search"),
)


def as_functions(tools: Sequence[Any] | None, fields: Fields) -> list[dict[str, Any]] | None:
    """The tools as chat completions nest them. Raises HttpError 400 for kinds that a client runs and no model knows."""
    if tools is None:
        return None
    found = []
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and _is_run_there(kind):
            fields.note("tools", f"{kind} is left out: this server runs no tools itself")
        elif kind == "function":
            names = ("name", "description", "parameters", "strict")
            found.append({"type": "function", "function": {name: tool[name] for name in names if name in tool}})
        elif kind == "custom":
            found.append({"type": "function", "function": _freeform(tool)})
        else:
            where = f"tools.{index}"
            reason = f"{where}: only tools of type function and custom are supported"
            raise bad_request(reason, where, "unsupported_parameter")
    return found


def _is_run_there(kind: str) -> bool:
    """Their types may end in a date."""
    return kind in _RUN_THERE or any(kind.startswith(f"{name}_2") for name in _RUN_THERE)


def _freeform(tool: dict[str, Any]) -> dict[str, Any]:
    described, form = tool.get("description"), tool.get("format")
    description = described if isinstance(described, str) else ""
    given = form if isinstance(form, dict) else {}
    definition = given.get("definition")
    if isinstance(definition, str):
        description += f"\n\nThe input must match this {given.get('syntax', 'lark')} grammar:\n{definition}"
    text = {"type": "string", "description": "The whole input of the tool, as it is"}
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return {"name": tool.get("name"), "description": description.strip(), "parameters": parameters}


def freeform_names(tools: Sequence[Any]) -> frozenset[str]:
    """The names of the freeform tools among those of a request that was read."""
    return frozenset(tool["name"] for tool in tools if tool["type"] == "custom")


def freeform_input(call: ToolCall) -> str:
    """The text that a call of a freeform tool holds."""
    try:
        given = json.loads(call.arguments)
    except ValueError:
        return call.arguments
    text = given.get(INPUT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else call.arguments
