"""Reads a request to `/v1/chat/completions`; the other chat protocols are translated into one first."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from edgespec.chat.continuation import Ending
from edgespec.chat.history import part_text
from edgespec.chat.marks import reasoning_marks
from edgespec.chat.reasoning import Reasoning, before_structure
from edgespec.chat.rendered import chat_text
from edgespec.chat.template import answer_prefix, num_characters
from edgespec.chat.tool_forms import call_form
from edgespec.config import REASONING_FORMATS
from edgespec.errors import shown
from edgespec.generation.inputs import require_writer
from edgespec.server.chat_completions import ChatExchange, Tools
from edgespec.server.evidence import check_question, note_left_out
from edgespec.server.fields import Fields
from edgespec.server.http_errors import bad_request
from edgespec.server.llamacpp_fields import read_llamacpp
from edgespec.server.options import (
    ignore_others,
    numbered,
    read_choices,
    read_max_tokens,
    read_options,
    read_sampling,
    read_stream_options,
    require_model,
)
from edgespec.server.scheduler import Job
from edgespec.server.service import Loaded
from edgespec.server.structure import forced_calls, read_structure, structured_behind
from edgespec.server.system_turns import placed

MOST_TOP_LOGPROBS = 20
_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")  # the last is llama.cpp's
REASONING_EFFORTS = ("minimal", "low", "medium", "high", "xhigh")  # of a model that always reasons: no difference
_EFFORTS_OF_CHANNELS = {"none": "low", "minimal": "low", "xhigh": "high"}  # gpt-oss knows low, medium and high
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def read_chat(loaded: Loaded, fields: Fields) -> ChatExchange:
    """Check a request and render its prompt. Blocks while it encodes. Raises HttpError and EdgespecError."""
    require_model(loaded.names, fields)
    require_writer(loaded.model.target.facts)
    template = loaded.model.target.vocabulary.chat_template
    if template is None:
        raise bad_request("this model has no chat template, as usual for base models: use /v1/completions", "messages")
    is_stream = fields.flag("stream")
    stream_options = fields.fields("stream_options")
    includes_usage = read_stream_options(stream_options, is_stream=is_stream)
    per_token, tells_progress = fields.flag("timings_per_token"), fields.flag("return_progress")
    sampling = read_sampling(fields, loaded)
    max_tokens = read_max_tokens(fields, *_LIMITS)
    options = read_options(fields, loaded, max_tokens, _read_logprobs(fields))
    options = replace(read_structure(fields, loaded, options), prediction=_read_prediction(fields))
    count = read_choices(fields, loaded.limits)
    tools, choice = _read_tools(fields, loaded)
    if tools.shown and tools.form:
        options = forced_calls(loaded, options, tools.shown, choice, tools.form, parallel=tools.parallel)
    arguments = _template_arguments(fields, template)
    splits = (fields.choice("reasoning_format", REASONING_FORMATS) or loaded.reasoning_format) != "none"
    ending = _read_ending(fields)
    _refuse_unsupported(fields)
    read_llamacpp(fields, loaded)
    given = _read_messages(fields)
    loaded.model.require_room(len(given), "messages")
    loaded.model.require_room(num_characters(given, tools.shown), "characters")
    messages = placed(template, given, fields)
    fields.finish()
    vocabulary = loaded.model.target.vocabulary
    prompt_ids = loaded.model.encode_chat(
        messages,
        tools.shown,
        arguments,
        add_generation_prompt=ending.opens,
        continue_final_message=ending.continues,
    )
    prefix = answer_prefix(messages, ending)
    prompt_ids = before_structure(vocabulary, prompt_ids, options, prefix)
    reasoning = Reasoning.of(vocabulary, prompt_ids, prefix)
    if reasoning is not None and reasoning.is_open:
        options = structured_behind(loaded, options, reasoning.marks)
    jobs = [
        Job(prompt_ids, each, options, tells_progress, reads_only=max_tokens == 0) for each in numbered(sampling, count)
    ]
    return ChatExchange(
        loaded,
        jobs,
        tools,
        reasoning if splits or _needs_split(reasoning, tools) else None,
        is_stream=is_stream,
        includes_usage=includes_usage,
        per_token=per_token,
    )


def _needs_split(reasoning: Reasoning | None, tools: Tools) -> bool:
    """Whether calls can only be read once the reasoning is told apart: channels order the parts of a call freely."""
    return reasoning is not None and reasoning.marks.has_channels and tools.form is not None


def _template_arguments(fields: Fields, template: str) -> dict[str, Any]:
    """What the chat template is told besides: `chat_template_kwargs`, as in llama.cpp, and whether to reason."""
    given = fields.fields("chat_template_kwargs")
    asked: dict[str, Any] = {} if given is None else fields.given("chat_template_kwargs")
    switch = fields.given("enable_thinking")  # as some clients send it
    asked = asked | ({} if switch is None else {"enable_thinking": switch})
    chosen = {name: value for name, value in asked.items() if name in template}
    for name in asked.keys() - chosen.keys():
        if (name, asked[name]) != ("enable_thinking", False) or reasoning_marks(template) is not None:
            fields.notes.append(f"{shown(name)}: the chat template of this model does not use it")
    effort = fields.text("reasoning_effort")
    if effort is None:
        return chosen
    knows_effort, has_switch = "reasoning_effort" in template, "enable_thinking" in template
    marks = reasoning_marks(template)
    if knows_effort and not (has_switch and effort == "none"):
        known = _EFFORTS_OF_CHANNELS.get(effort, effort) if marks is not None and marks.has_channels else effort
        return {"reasoning_effort": known} | chosen
    if has_switch and effort in ("none", *REASONING_EFFORTS):
        return {"enable_thinking": effort != "none"} | chosen
    fields.refuse(
        "reasoning_effort",
        "the chat template of this model has no switch for reasoning",
        ("none",) if marks is None else REASONING_EFFORTS,
    )
    return chosen


def _read_ending(fields: Fields) -> Ending:
    """Where the prompt ends, as in vLLM and llama-server: what is continued gets no beginning of a turn."""
    continues = None if fields.given("continue_final_message") is None else fields.flag("continue_final_message")
    if continues and fields.flag("add_generation_prompt"):
        raise bad_request(
            "continue_final_message and add_generation_prompt exclude each other", "add_generation_prompt"
        )
    return Ending(fields.flag("add_generation_prompt", True), continues)


def _read_logprobs(fields: Fields) -> int | None:
    """The number of most likely tokens to report; None: no log probabilities at all."""
    is_wanted = fields.flag("logprobs")
    top = fields.whole("top_logprobs", 0, MOST_TOP_LOGPROBS)
    if top and not is_wanted:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    return (top or 0) if is_wanted else None


def _read_prediction(fields: Fields) -> str | None:
    """OpenAI's `prediction`: what most of the answer is expected to be."""
    prediction = fields.fields("prediction")
    if prediction is None:
        return None
    kind, content = prediction.choice("type", ("content",)), prediction.given("content")
    texts = [part_text(part) for part in (content if isinstance(content, list) else [content])]
    prediction.finish()
    if kind is None or None in texts:
        raise bad_request('prediction must be {"type": "content", "content": a text or parts of text}', "prediction")
    return "".join(text for text in texts if text)


def _read_messages(fields: Fields) -> list[Any]:
    messages = fields.given("messages")
    if messages is None:
        raise bad_request("messages is missing: give a list of messages", "messages")
    if not isinstance(messages, list):
        raise fields.wrong("messages", "must be a list", messages)
    check_question(messages, [f"messages.{index}.content" for index in range(len(messages))])
    note_left_out(messages, fields)
    return [_as_system(message) for message in messages]


def _as_system(message: Any) -> Any:
    """Templates know the role `developer` as `system`."""
    is_developer = isinstance(message, dict) and message.get("role") == "developer"
    return {**message, "role": "system"} if is_developer else message


def _refuse_unsupported(fields: Fields) -> None:
    ignore_others(fields)
    fields.refuse("modalities", "this server answers with text only", (["text"],))
    fields.without_effect("verbosity", "the model decides how much it writes", ("medium",))
    for name in ("audio", "web_search_options", "moderation"):
        fields.refuse(name, "this server has no such feature")
    for name in ("functions", "function_call"):
        fields.refuse(name, "use tools and tool_choice")


def _read_tools(fields: Fields, loaded: Loaded) -> tuple[Tools, object]:
    """The tools, and `tool_choice`."""
    tools = fields.listed("tools", loaded.limits.max_tools)
    parallel = fields.flag("parallel_tool_calls", True)
    choice = fields.given("tool_choice")
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise fields.wrong("tool_choice", "must be none, auto, required or an object that names a function", choice)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice forces a call, but no tools are given", "tool_choice")
        return Tools(), choice
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools.{index}")
    if choice == "none":
        return Tools(), choice
    form = call_form(loaded.model.target.vocabulary.chat_template)
    if form is None:
        raise bad_request(
            "the chat template of this model does not support tools, or its calls have a format that is not supported "
            "here",
            "tools",
            "unsupported_parameter",
        )
    return Tools(tools, form, parallel), choice


def _check_tool(tool: Any, where: str) -> None:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise bad_request(f'{where} must be {{"type": "function", "function": {{...}}}}', where)
    name = function.get("name")
    if not isinstance(name, str) or _TOOL_NAME.fullmatch(name) is None:
        raise bad_request(
            f"{where}.function.name must be 1 to 128 letters, digits, _, - or .", f"{where}.function.name"
        )
    kinds: tuple[tuple[str, type[Any], str], ...] = (
        ("description", str, "a string"),
        ("parameters", dict, "an object"),
    )
    for field, kind, shown_kind in kinds:
        if not isinstance(function.get(field) or kind(), kind):
            raise bad_request(f"{where}.function.{field} must be {shown_kind}", f"{where}.function.{field}")


def count_input_tokens(loaded: Loaded, fields: Fields) -> dict[str, Any]:
    """`/chat/completions/input_tokens`: the tokens of a prompt, nothing is generated. Raises as `read_chat`."""
    jobs = read_chat(loaded, fields).jobs
    return {"object": "response.input_tokens", "input_tokens": len(jobs[0].prompt_ids)}


def apply_template(loaded: Loaded, fields: Fields) -> dict[str, Any]:
    """`/apply-template`: the prompt of a chat request as text. Raises as `read_chat`."""
    read_chat(loaded, fields)  # which refuses what it would refuse
    vocabulary = loaded.model.target.vocabulary
    tools, _ = _read_tools(fields, loaded)
    arguments = _template_arguments(fields, vocabulary.chat_template or "")
    messages = placed(vocabulary.chat_template or "", _read_messages(fields), fields)
    return {"prompt": chat_text(vocabulary, messages, tools.shown, arguments, _read_ending(fields))}
