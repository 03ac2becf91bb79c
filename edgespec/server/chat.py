"""`/v1/chat/completions`: OpenAI's chat protocol, with `speculative` in requests and `timings` in answers.

The other chat protocols become a `Chat` first, which `prepare` checks and renders.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

from edgespec import __version__
from edgespec.chat.marks import reasoning_marks
from edgespec.chat.messages import Message, checked_messages, part_text, unread_kinds
from edgespec.chat.reasoning import Reasoning, before_structure
from edgespec.chat.template import answer_prefix, num_characters, render_chat
from edgespec.chat.tool_forms import ToolForm, call_form
from edgespec.chat.tools import ToolCall
from edgespec.config.values import ReasoningFormat
from edgespec.errors import EdgespecError, shown
from edgespec.generation.request import require_writer
from edgespec.reports import TokenEvent
from edgespec.server.answer import DONE, Answer, Exchange, Work, logprobs_of, prompt_progress, sse, usage
from edgespec.server.http_errors import bad_request
from edgespec.server.options import Logprobs, OpenAiRequest, Tokens, Tools
from edgespec.server.requests import Asked, Fields, unsupported
from edgespec.server.scheduler import Job
from edgespec.server.service import Loaded
from edgespec.server.structure import forced_calls, read_settings, structured_behind

REASONING_EFFORTS = ("minimal", "low", "medium", "high", "xhigh")  # of a model that always reasons: no difference
_EFFORTS_OF_CHANNELS = {"none": "low", "minimal": "low", "xhigh": "high"}  # gpt-oss knows low, medium and high
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_RUN_THERE = re.compile(
    r"(web_search(_preview)?|web_fetch|code_(execution|interpreter)|file_search|image_generation|mcp|advisor"
    r"|tool_search(_tool_\w+)?)(_2[\w-]*)?"
)
RUNS_NONE = "this server runs no tools itself"
_PROBE = "Answer in one line."
TEXT_ONLY = "this server reads text only"
VERBOSITY: Asked = {"verbosity": ("the model decides how much it writes", ("medium",))}


class Prediction(Fields):
    """What most of the answer is expected to be: a text or parts of text."""

    type: Literal["content"]
    content: Any


class ChatRequest(OpenAiRequest, kw_only=True):
    """A request to `/v1/chat/completions`."""

    noted: ClassVar[Asked] = {**OpenAiRequest.noted, **VERBOSITY}
    refused: ClassVar[Asked] = {
        **OpenAiRequest.refused,
        **dict.fromkeys(("audio", "web_search_options", "moderation"), ("this server has no such feature", ())),
        **dict.fromkeys(("functions", "function_call"), ("use tools and tool_choice", ())),
        "modalities": ("this server answers with text only", (["text"],)),
    }
    messages: list[Any]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning_format: ReasoningFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: Any = None
    prediction: Prediction | None = None

    @property
    def num_logprobs(self) -> int | None:
        """The number of most likely tokens to report; None: no log probabilities at all."""
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def predicted(self) -> str | None:
        if self.prediction is None:
            return None
        content = self.prediction.content
        texts = [part_text(part) for part in (content if isinstance(content, list) else [content])]
        if None in texts:
            raise bad_request("prediction.content must be a text or parts of text", "prediction.content")
        return "".join(text for text in texts if text)


def answer_chat(loaded: Loaded, chat: ChatRequest, notes: list[str]) -> ChatExchange:
    """Answer a conversation (OpenAI)."""
    return ChatExchange(prepare(loaded, chat, notes), chat)


def prepare(loaded: Loaded, chat: ChatRequest, notes: list[str]) -> Work:
    """The work of a request. Blocks while it encodes. Raises HttpError and EdgespecError."""
    model, vocabulary = loaded.model, loaded.model.target.vocabulary
    require_writer(model.target.facts)
    template = vocabulary.chat_template
    if template is None:
        needs = "use /v1/completions, or start the server with --chat-template-file"
        raise bad_request(f"this model has no chat template, as usual for base models: {needs}", "messages")
    sampling, options = read_settings(chat, loaded, chat.num_logprobs)
    options = replace(options, prediction=chat.predicted)
    tools, form = _read_tools(chat, template)
    parallel = chat.parallel_tool_calls is not False
    if form is not None:
        options = forced_calls(loaded, options, tools, chat.tool_choice, form, parallel=parallel)
    arguments = _template_arguments(chat, template, notes)
    model.require_room(len(chat.messages), "messages")
    model.require_room(num_characters(chat.messages, tools), "characters")
    if kinds := unread_kinds(chat.messages):
        notes.append(f"messages: {', '.join(kinds)} left out of what was said before: {TEXT_ONLY}")
    messages = placed(template, checked_messages(list(map(_as_system, chat.messages))), notes)
    prompt_ids = model.encode_chat(messages, tools or None, arguments)
    prefix = answer_prefix(messages)
    prompt_ids = before_structure(vocabulary, prompt_ids, options, prefix)
    reasoning = Reasoning.of(vocabulary, prompt_ids, prefix)
    if reasoning is not None and reasoning.is_open:
        options = structured_behind(loaded, options, reasoning.marks)
    # Channels order the parts of a call freely: calls can only be read once the reasoning is told apart.
    has_to_split = reasoning is not None and reasoning.marks.has_channels and form is not None
    splits = has_to_split or (chat.reasoning_format or loaded.reasoning_format) != "none"
    jobs = [Job(prompt_ids, each, options, bool(chat.return_progress)) for each in sampling]
    return Work(loaded, jobs, tools, form, parallel, reasoning if splits else None)


def can_reason(loaded: Loaded) -> bool:
    """Whether the chat template has marks of reasoning, or a switch for it."""
    template = loaded.model.target.vocabulary.chat_template or ""
    return reasoning_marks(template) is not None or "enable_thinking" in template or "reasoning_effort" in template


def effort_of(loaded: Loaded, field: str, effort: str | None, notes: list[str]) -> str | None:
    """The effort that a `field` asks for, where the model can reason; none needs no reasoning."""
    if effort in (None, "none") or can_reason(loaded):
        return effort
    notes.append(f"{field}: this model answers without reasoning")
    return None


def run_by_client(tools: Sequence[Any] | None, notes: list[str]) -> Iterator[tuple[str, Any, Any]]:
    """(place, tool, its type) of those that OpenAI's or Anthropic's servers do not run themselves, which notes name."""
    for index, tool in enumerate(tools or ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and _RUN_THERE.fullmatch(kind) is not None:  # it may end in a date
            notes.append(f"tools: {kind} is left out: {RUNS_NONE}")
        else:
            yield f"tools.{index}", tool, kind


def _template_arguments(chat: ChatRequest, template: str, notes: list[str]) -> dict[str, Any]:
    """What the chat template is told besides: `chat_template_kwargs`, as in llama.cpp, and whether to reason."""
    asked = dict(chat.chat_template_kwargs or {})
    if chat.enable_thinking is not None:  # as some clients send it
        asked["enable_thinking"] = chat.enable_thinking
    chosen = {name: value for name, value in asked.items() if name in template}
    marks = reasoning_marks(template)
    for name in asked.keys() - chosen.keys():
        if (name, asked[name]) != ("enable_thinking", False) or marks is not None:
            notes.append(f"{shown(name)}: the chat template of this model does not use it")
    effort = chat.reasoning_effort
    if effort is None:
        return chosen
    knows_effort, has_switch = "reasoning_effort" in template, "enable_thinking" in template
    if knows_effort and not (has_switch and effort == "none"):
        known = _EFFORTS_OF_CHANNELS.get(effort, effort) if marks is not None and marks.has_channels else effort
        return {"reasoning_effort": known} | chosen
    if has_switch and effort in ("none", *REASONING_EFFORTS):
        return {"enable_thinking": effort != "none"} | chosen
    if effort not in (("none",) if marks is None else REASONING_EFFORTS):
        raise unsupported("reasoning_effort", "the chat template of this model has no switch for reasoning")
    return chosen


# -- messages


def _as_system(message: Any) -> Any:
    """A developer's message in the role under which templates know it."""
    is_developer = isinstance(message, dict) and message.get("role") == "developer"
    return message | {"role": "system"} if is_developer else message


def placed(template: str, messages: list[Message], notes: list[str]) -> list[Message]:
    """Checked messages with each system message where the chat template shows it: agents send them in mid-conversation.

    Where it shows only one, those that follow it at once join it, and later ones become texts of the user.
    """
    is_system = [message["role"] == "system" for message in messages]
    if not any(is_system[1:]) or _shows_late_ones(template):
        return messages
    found: list[Message] = []
    is_moved = False
    for index, message in enumerate(messages):
        was_moved, is_moved = is_moved, is_system[index] and not all(is_system[:index])
        given = message | {"role": "user"} if is_moved else message
        joins = is_moved or was_moved or is_system[index]
        if joins and found and found[-1]["role"] == given["role"]:
            both = (found[-1]["content"], given["content"])
            found[-1] = found[-1] | {"content": "\n\n".join(text for text in both if text)}
        else:
            found.append(given)
        if is_moved:
            notes.append("messages: this model shows one system message only: later ones are read as the user's")
    return found


@lru_cache(maxsize=8)
def _shows_late_ones(template: str) -> bool:
    """Whether a template shows two system messages at the beginning, and one in the middle."""
    first, asked, said = ({"role": role, "content": "Hello."} for role in ("system", "user", "assistant"))
    probe = {"role": "system", "content": _PROBE}
    try:
        return all(
            _PROBE in render_chat(template, messages)
            for messages in ([first, probe, asked], [first, asked, said, probe, asked])
        )
    except EdgespecError:
        return False


# -- tools


def _read_tools(chat: ChatRequest, template: str) -> tuple[list[dict[str, Any]], ToolForm | None]:
    """The tools that the model may call, and how it writes its calls; none where it must not call any."""
    if not chat.tools:
        if chat.tool_choice not in (None, "none", "auto"):
            raise bad_request("tool_choice forces a call, but no tools are given", "tool_choice")
        return [], None
    for index, tool in enumerate(chat.tools):
        _check_tool(tool, f"tools.{index}")
    if chat.tool_choice == "none":
        return [], None
    form = call_form(template)
    if form is None:
        why = (
            "the chat template of this model does not support tools, or its calls have a format that is not known here"
        )
        raise bad_request(why, "tools", "unsupported_parameter")
    return chat.tools, form


def _check_tool(tool: Any, where: str) -> None:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise bad_request(f'{where} must be {{"type": "function", "function": {{...}}}}', where)
    name = function.get("name")
    where += ".function"
    if not isinstance(name, str) or _TOOL_NAME.fullmatch(name) is None:
        raise bad_request(f"{where}.name must be 1 to 128 letters, digits, _, - or .", f"{where}.name")
    if not isinstance(function.get("description") or "", str):
        raise bad_request(f"{where}.description must be a string", f"{where}.description")
    if not isinstance(function.get("parameters") or {}, dict):
        raise bad_request(f"{where}.parameters must be an object", f"{where}.parameters")


# -- answers


class OpenAiExchange(Exchange):
    """A request to one of OpenAI's older paths. `kind`: of its answers, and of their chunks; `nothing`: what a choice
    of a chunk holds that says nothing.
    """

    kind, chunk_kind = "", ""
    nothing: ClassVar[dict[str, Any]] = {}

    def __init__(self, work: Work, request: OpenAiRequest) -> None:
        super().__init__(work, is_stream=bool(request.stream))
        self.includes_usage, self.per_token = request.includes_usage, bool(request.timings_per_token)
        self.has_logprobs = work.jobs[0].options.logprobs

    def body(self, choices: list[dict[str, Any]], kind: str, **more: Any) -> dict[str, Any]:
        """An answer or a part of one."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.name}
        return head | {"system_fingerprint": f"edgespec-{__version__}", "choices": choices} | more

    def ended(self, choices: list[dict[str, Any]], answers: Sequence[Answer], usage: dict[str, Any]) -> dict[str, Any]:
        return self.body(choices, self.kind, usage=usage, timings=answers[0].timings, seed=answers[0].seed)

    def chunk(
        self,
        index: int,
        said: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        **more: Any,
    ) -> bytes:
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}
        empty: dict[str, Any] = {"usage": None} if self.includes_usage else {}
        return sse(self.body([choice], self.chunk_kind, **empty, **more))

    @abstractmethod
    def chunks(self, index: int, answer: Answer) -> AsyncIterator[bytes]:
        """One answer of a stream, as it comes, but for its end."""

    async def stream(self, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        for index, answer in enumerate(answers):
            async for chunk in self.chunks(index, answer):
                yield chunk
            end = {"timings": answer.timings, "seed": answer.seed}
            yield self.chunk(index, self.nothing, None, answer.finish_reason, **end)
        if self.includes_usage:
            yield sse(self.body([], self.chunk_kind, usage=usage(answers)))
        yield DONE


class ChatExchange(OpenAiExchange):
    kind, chunk_kind, begins = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    nothing: ClassVar[dict[str, Any]] = {"delta": {}}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            calls = [call.as_openai() for call in answer.calls]
            content = None if calls and not answer.text.strip() else answer.text
            message = {"role": "assistant", "content": content, "refusal": None}
            message |= {"reasoning_content": answer.reasoning} if answer.reasoning else {}
            choices.append(
                {
                    "index": index,
                    "message": message | ({"tool_calls": calls} if calls else {}),
                    "logprobs": self._logprobs(answer.tokens(), answer.tokens("reasoning")),
                    "finish_reason": answer.finish_reason,
                }
            )
        return self.ended(choices, answers, usage(answers))

    async def chunks(self, index: int, answer: Answer) -> AsyncIterator[bytes]:
        begins, num_calls = {"role": "assistant", "content": ""}, 0
        async for delta in answer.deltas():
            if begins:
                yield self.chunk(index, {"delta": begins})
                begins = {}
            if delta.progress is not None:
                yield self.chunk(index, self.nothing, prompt_progress=prompt_progress(delta.progress))
            elif delta.part.call is not None:
                for said in _call_deltas(delta.part.call, num_calls):
                    yield self.chunk(index, {"delta": said})
                num_calls += 1
            else:
                is_text = delta.part.kind == "text"
                logprobs = self._logprobs(*((delta.tokens,) if is_text else ([], delta.tokens)))
                said = {"content" if is_text else "reasoning_content": delta.text}
                yield self.chunk(index, {"delta": said}, logprobs, **self._told(answer, delta.shares))
        if begins:
            yield self.chunk(index, {"delta": begins})

    def _told(self, answer: Answer, shares: Sequence[tuple[str, str | None]]) -> dict[str, Any]:
        """With `timings_per_token`: the timings so far, and each token's text with the drafter that proposed it."""
        if not self.per_token:
            return {}
        return {"timings": answer.timings, "tokens": [{"text": text, "drafter": drafter} for text, drafter in shares]}

    def _logprobs(
        self, tokens: Sequence[TokenEvent], reasoning_tokens: Sequence[TokenEvent] = ()
    ) -> dict[str, Any] | None:
        """Those of the answer as `content`; those of its reasoning apart, so that `content` joins to the text."""
        if not self.has_logprobs:
            return None
        found: dict[str, Any] = {"content": logprobs_of(self.vocabulary, tokens), "refusal": None}
        reasoned = logprobs_of(self.vocabulary, reasoning_tokens)
        return found | ({"reasoning_content": reasoned} if reasoned else {})


def _call_deltas(call: ToolCall, index: int) -> list[dict[str, Any]]:
    """A call's first delta has its id and name, the second its arguments; both have its index."""
    first = ToolCall(call.name, "", call.id).as_openai()
    second = {"function": {"arguments": call.arguments}}
    return [{"tool_calls": [{"index": index} | each]} for each in (first, second)]
