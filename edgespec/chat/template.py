"""Chat templates: render messages as the prompt text that a model was trained on, and encode it.

Templates come from model files and are untrusted: they run in a sandbox in a child process, which limits what they may
take. Rendering a conversation of a few messages there takes a millisecond.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import dropwhile, takewhile
from pickle import PicklingError
from typing import Any

from edgespec.chat.call_ids import wants_short_ids, with_short_ids
from edgespec.chat.continuation import USUAL_ENDING, Ending, begun_answer, cut_at, marked, without_empty_end
from edgespec.chat.history import checked_messages
from edgespec.chat.marks import PRINTED_MARKS
from edgespec.chat.message_forms import Message
from edgespec.chat.spelling import as_written
from edgespec.chat.stand_ins import as_text, printed_marks, replaced, texts, unused_characters
from edgespec.chat.tool_messages import with_tools
from edgespec.contained import Containment, Overrun
from edgespec.errors import CapabilityError, EdgespecError, PromptError, shown
from edgespec.vocabulary import Vocabulary

CHILDREN = Containment("edgespec.chat.sandbox", most=2, limit_s=2.0)
_TOO_DEEP = "the messages or tools are nested too deeply"
_THINKING = re.compile(r"\.thinking\b|\[.thinking.\]")
_FIX = "give another with --chat-template-file, or use --no-chat-template"


def render_chat(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    bos_token: str = "",
    eos_token: str = "",
    add_generation_prompt: bool = True,
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """Render a Jinja chat template with `messages` and `tools` as in OpenAI's API; returns the prompt text.

    The template sees the same names as in transformers: `messages`, `tools`, `bos_token`, `eos_token`,
    `add_generation_prompt`, `raise_exception`, `strftime_now`, and those of `arguments`, such as `enable_thinking`.
    Raises PromptError if a message or argument is not valid or the template rejects the conversation, CapabilityError
    if the template is broken or does something forbidden.
    """
    given: dict[str, Any] = {"tools": list(tools) if tools else None, "bos_token": bos_token, "eos_token": eos_token}
    given |= {"add_generation_prompt": add_generation_prompt}
    found = [_with_thinking(source, message) for message in checked_messages(messages)]
    return as_written(found, partial(_render, source, given, arguments or {}))


def _render(source: str, names: Mapping[str, Any], arguments: Mapping[str, Any], found: Sequence[Message]) -> str:
    """Raises as `render_chat`."""
    messages, others = with_tools(source, found, names["tools"])
    given = {**names, "messages": messages, **others}
    for name in arguments:
        if name in given or name not in source:
            what = "gets this from edgespec" if name in given else "does not use it"
            raise PromptError(f"the chat template of this model cannot be given the argument {shown(name)}: it {what}")
    try:
        return CHILDREN.run(_in_child, source, {**given, **(arguments or {})})
    except Overrun as exc:
        raise CapabilityError(f"the model's chat template cannot be used: {exc}; {_FIX}") from exc
    except RecursionError as exc:
        raise PromptError(_TOO_DEEP) from exc
    except (TypeError, AttributeError, PicklingError) as exc:  # no JSON, and nothing else that a process can be sent
        raise PromptError(f"the messages or tools hold what a template cannot be given: {exc}") from exc


def _in_child(source: str, values: Mapping[str, Any]) -> str:
    from edgespec.chat.sandbox import rendered  # jinja2 is needed only here

    return rendered(source, values)


def template_problem(source: str) -> str | None:
    """What is wrong with the syntax of a template; None if nothing is."""
    try:
        return CHILDREN.run(_problem_in_child, source)
    except Overrun as exc:
        return str(exc)


def _problem_in_child(source: str) -> str | None:
    from edgespec.chat.sandbox import check_template

    return check_template(source)


def _with_thinking(source: str, message: Message) -> Message:
    """A message whose reasoning has the name that the template reads; gpt-oss refuses it beside a text before calls."""
    reasoning = message.get("reasoning_content")
    if not reasoning or "reasoning_content" in source or _THINKING.search(source) is None:
        return message
    return message if message.get("tool_calls") and message["content"] else {**message, "thinking": reasoning}


def encode_messages(
    vocabulary: Vocabulary,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    model_name: str,
    arguments: Mapping[str, Any] | None = None,
    ending: Ending = USUAL_ENDING,
) -> list[int]:
    """Token ids of a conversation, rendered by the vocabulary's template up to the start of the assistant's turn.

    Where the last message is an assistant's text, they end behind it, so that the model goes on from there, unless
    `ending` says otherwise. Raises PromptError if there is no template or it leaves that text out, and the errors of
    `render_chat`.
    """
    if vocabulary.chat_template is None:
        raise PromptError(f"model {model_name!r} has no chat template: use --no-chat-template, or generate()")
    bos, eos = (
        "" if token_id is None else vocabulary.token_name(token_id)
        for token_id in (vocabulary.bos_id, vocabulary.eos_id)
    )
    source = vocabulary.chat_template
    short = with_short_ids if wants_short_ids(source) else None

    def render(given: Sequence[Message], **others: Any) -> str:
        return render_chat(source, short(given) if short else given, bos_token=bos, eos_token=eos, **others)

    ids = encode_rendered(vocabulary, render, messages, tools, arguments, ending)
    if vocabulary.adds_bos and vocabulary.bos_id is not None and ids[:1] != [vocabulary.bos_id]:
        ids.insert(0, vocabulary.bos_id)
    return ids


def num_characters(*values: Any) -> int:
    """Of all texts in messages and tools. Raises PromptError where they are nested too deeply."""
    try:
        return sum(map(len, texts(list(values))))
    except RecursionError as exc:
        raise PromptError(_TOO_DEEP) from exc


def answer_opening(vocabulary: Vocabulary) -> tuple[int, ...]:
    """The token ids with which the vocabulary's template opens each answer, from the first control token of them on.

    Empty where there is none.
    """
    try:
        one, other = (
            encode_messages(vocabulary, [{"role": "user", "content": text}], None, "") for text in ("Why?", "A list")
        )
    except EdgespecError:  # no template, or one that fails, which a conversation will say
        return ()
    same = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False))
    opening = [*takewhile(lambda token_id: token_id not in vocabulary.end_ids, (token_id for token_id, _ in same))]
    return tuple(dropwhile(vocabulary.piece, reversed(opening)))


def encode_rendered(
    vocabulary: Vocabulary,
    render: Callable[..., str],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    arguments: Mapping[str, Any] | None = None,
    ending: Ending = USUAL_ENDING,
) -> list[int]:
    """Token ids of rendered `messages` and `tools`, in which only the template can produce control tokens.

    A control token that any text of them spells out ("<|im_end|>") is encoded as text, so that it cannot forge a turn.
    `render` is called with the messages, with `tools` and `arguments` as keywords if there are any, and with
    `add_generation_prompt` False where an assistant's text at the end is to be continued. Raises its errors, and
    PromptError for messages that are not valid or a text that is not shown.
    """
    given: dict[str, Any] = {"messages": without_empty_end(checked_messages(messages))}
    has_begun = ending.is_begun(given["messages"][-1])
    given |= {"tools": list(tools)} if tools else {}
    given |= {"arguments": dict(arguments)} if arguments else {}
    try:
        everything = "\0".join(texts(given))
        names = dict.fromkeys((*vocabulary.control_names, *PRINTED_MARKS, *printed_marks(vocabulary)))
        marks = [name for name in names if name in everything]
        end, *stand_ins = unused_characters(len(marks) + 1, everything)
        originals = dict(zip(stand_ins, sorted(marks, key=len, reverse=True), strict=True))
        escaped = replaced(given, {mark: stand_in for stand_in, mark in originals.items()}) if marks else given
    except RecursionError as exc:
        raise PromptError(_TOO_DEEP) from exc
    turns = escaped.pop("messages")
    if has_begun:
        text = cut_at(render(marked(turns, end), add_generation_prompt=False, **escaped), end)
    else:
        text = render(turns, **({} if ending.opens else {"add_generation_prompt": False}), **escaped)
    if not marks:
        return vocabulary.encode(text, parse_special=True)
    ids: list[int] = []
    for piece in re.split(f"([{''.join(stand_ins)}])", text):
        if piece in originals:
            ids += as_text(vocabulary, originals[piece])
        elif piece:
            ids += vocabulary.encode(piece, parse_special=True)
    return ids


def answer_prefix(messages: Sequence[Mapping[str, Any]], ending: Ending = USUAL_ENDING) -> str:
    """The text at the end of a conversation that the answer goes on from; "" where the model begins its turn.

    Raises PromptError for messages that are not valid.
    """
    last = checked_messages(messages)[-1]
    return begun_answer(last) if ending.is_begun(last) else ""
