"""Tools and calls for chat templates that take them in another place than OpenAI's API, or not at all.

Templates of Hermes, Qwen, Llama and Mistral read `tools` and each message's `tool_calls`. SmolLM3's calls the tools
`xml_tools`, Phi-4-mini's reads them from the system message, and neither shows the calls of earlier turns, as LFM2's
does not: these are put into the message's text as the model writes them, so that no part of a conversation is lost.
DeepSeek's show calls and no tools, which the system message tells then. Gemma 4's first template reads results from the
message with the calls; gpt-oss's and Llama's show one call of a message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.chat.marks import CHANNEL
from edgespec.chat.tool_forms import PLAIN_FORMS, call_form
from edgespec.errors import PromptError

_OWN_NAME = re.compile(r"(?<![.'\"\w])tools\b")
_RESULTS = "tool_responses"
_TOOL_ROLE = re.compile(r"[=!]=\s*['\"]tool['\"]")
_DEEPSEEK = "<\uff5ctool▁sep\uff5c>"
_TOLD = "You can call these functions:\n{functions}\n\nA call is written like this:\n{call}"
_OF_MESSAGE = re.compile(r"message(?:\.tools\b|\[.tools.\])")


def with_tools(
    template: str, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(the messages, names for the template besides `tools`) in which every tool and call is where `template` looks.

    Raises PromptError for tools that it would leave out.
    """
    shown = [_with_calls(template, message) for message in messages]
    if "tool" not in template:  # it may leave out roles that it does not know
        shown = [message | ({"role": "user"} if message["role"] == "tool" else {}) for message in shown]
    if CHANNEL in template or "single tool-calls" in template:
        shown = _one_call_each(shown)
    if _RESULTS in template and _TOOL_ROLE.search(template) is None:
        shown = _with_results(shown)
    if not tools or _OWN_NAME.search(template):
        return shown, {}
    if "xml_tools" in template:
        return shown, {"xml_tools": list(tools)}
    form, is_of_message = call_form(template), _OF_MESSAGE.search(template) is not None
    if form is None and not is_of_message:
        raise PromptError("the chat template of this model does not support tools: leave them out")
    functions = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    if shown[0]["role"] != "system":
        shown.insert(0, {"role": "system", "content": ""})
    if is_of_message or form is None:
        shown[0] = shown[0] | {"tools": functions}
    else:
        told = _TOLD.format(functions=functions, call=form.written([("function_name", {"argument": "value"})]))
        shown[0] = shown[0] | {"content": f"{shown[0]['content']}\n\n{told}".strip()}
    return shown, {}


def _with_calls(template: str, message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls or "tool_calls" in template:
        shows_empty = calls and not message.get("content") and _DEEPSEEK in template and " none" in template
        return message | {"content": None} if shows_empty else message
    form = call_form(template) or PLAIN_FORMS[0]  # of another model, which this conversation began with
    functions = [call.get("function") or {} for call in calls]
    written = form.written((str(each.get("name")), each.get("arguments") or {}) for each in functions)
    text = message.get("content") or ""
    return message | {"content": f"{text}\n{written}" if text else written}


def _one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with one call at most, each with its result behind it."""
    found, rest = list[dict[str, Any]](), list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            found.append(message)
            continue
        results = list[dict[str, Any]]()
        while rest and rest[0]["role"] == "tool":
            results.append(rest.pop(0))
        for place, call in enumerate(calls):
            own = next((each for each in results if _is_of(each, call)), results[0] if results else None)
            text = {} if not place else {"content": ""}
            found += [message | {"tool_calls": [call]} | text, *([own] if own is not None else ())]
            results = [each for each in results if each is not own]
        found += results
    return found


def _is_of(result: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
    """Whether a result names the call that it is of."""
    return isinstance(call.get("id"), str) and call["id"] == result.get("tool_call_id")


def _with_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which calls, their results and the answer behind them are one, as in one turn of the model.

    A text before the calls is a message of its own: the template would put it behind the results.
    """
    found = list[dict[str, Any]]()
    for message in messages:
        turn = found[-1] if found else {}
        if message["role"] == "tool" and turn.get("tool_calls"):
            turn[_RESULTS] = [*turn.get(_RESULTS, []), _result(message, turn)]
        elif turn.get(_RESULTS) and not turn["content"] and _is_answer(message):
            turn["content"] = message["content"]
        elif message.get("tool_calls") and message["content"]:
            found += [{"role": message["role"], "content": message["content"]}, message | {"content": ""}]
        else:
            found.append(dict(message))
    return found


def _is_answer(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


def _result(message: Mapping[str, Any], turn: Mapping[str, Any]) -> dict[str, Any]:
    """A result with the name of the function: that of its call, or else of the call at its place."""
    calls = turn["tool_calls"]
    place = min(len(turn.get(_RESULTS, [])), len(calls) - 1)
    call = next((each for each in calls if _is_of(message, each)), calls[place])
    try:
        content = json.loads(message["content"])
    except (ValueError, RecursionError):
        content = message["content"]
    return {"name": str((call.get("function") or {}).get("name")), "response": content}
