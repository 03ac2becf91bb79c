"""Chat templates: render messages as the prompt text that a model was trained on, and encode it.

Templates come from model files or from the user and are untrusted: they run in a sandbox in a child process, which
limits what they may take. Rendering a conversation of a few messages there takes a millisecond.

Control tokens that a text spells out stay text: characters stand for them while a template renders it. Where the last
message is an assistant's text, the answer goes on behind it. Templates render only finished messages, so a mark is put
behind that text, and what a template writes from there on, as its end of the turn, is cut off.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from pickle import PicklingError
from typing import Any

from edgespec.chat.marks import PRINTED_MARKS
from edgespec.chat.messages import Message, checked_messages, with_short_ids
from edgespec.chat.tool_forms import with_tools
from edgespec.contained import Containment, Overrun
from edgespec.errors import CapabilityError, ConfigError, PromptError, shown
from edgespec.platform.files import given_text
from edgespec.vocabulary import Vocabulary

_BAR = "|\N{FULLWIDTH VERTICAL LINE}"
_MARK = re.compile(f"<[{_BAR}].+[{_BAR}]>")
_MOST_CHARACTERS = 1 << 20  # published templates have a few ten thousand
CHILDREN = Containment("edgespec.chat.sandbox", most=2, limit_s=2.0)
_TOO_DEEP = "the messages or tools are nested too deeply"
_THINKING = re.compile(r"\.thinking\b|\[.thinking.\]")
FIX = "give another with --chat-template-file, or use --no-chat-template"


def begun_answer(message: Message) -> str:
    """The text of a checked message that the answer goes on from; "" if it is no assistant's, or only holds calls."""
    is_answer = message["role"] == "assistant" and not message.get("tool_calls")
    text = message["content"] if is_answer else ""
    return text if text.strip() else ""


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
    arguments, given_tools = arguments or {}, list(tools) if tools else None
    found, others = with_tools(
        source, [_with_thinking(source, each) for each in checked_messages(messages)], given_tools
    )
    given: dict[str, Any] = {"messages": found, "tools": given_tools, "bos_token": bos_token, "eos_token": eos_token}
    given |= {"add_generation_prompt": add_generation_prompt} | others
    for name in arguments:
        if name in given or name not in source:
            what = "gets this from edgespec" if name in given else "does not use it"
            raise PromptError(f"the chat template of this model cannot be given the argument {shown(name)}: it {what}")
    try:
        return CHILDREN.run(_in_child, source, {**given, **arguments})
    except Overrun as exc:
        raise CapabilityError(f"the model's chat template cannot be used: {exc}; {FIX}") from exc
    except RecursionError as exc:
        raise PromptError(_TOO_DEEP) from exc
    except (TypeError, AttributeError, PicklingError) as exc:  # no JSON, and nothing else that a process can be sent
        raise PromptError(f"the messages or tools hold what a template cannot be given: {exc}") from exc


def _in_child(source: str, values: Mapping[str, Any]) -> str:
    from edgespec.chat.sandbox import rendered  # jinja2 is needed only here

    return rendered(source, values)


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
) -> list[int]:
    """Token ids of a conversation, rendered by the vocabulary's template up to the start of the assistant's turn.

    Where the last message is an assistant's text, they end behind it, so that the model goes on from there. Only the
    template can produce control tokens: one that any text of `messages` and `tools` spells out ("<|im_end|>") is
    encoded as text, so that it cannot forge a turn. Raises PromptError if there is no template, for messages that are
    not valid or a text that is not shown, and the errors of `render_chat`.
    """
    source = vocabulary.chat_template
    if source is None:
        raise PromptError(f"model {model_name!r} has no chat template: use --no-chat-template or generate()")
    given: Any = [_without_empty_end(checked_messages(messages)), list(tools or ()), dict(arguments or {})]
    try:
        everything = "\0".join(texts(given))
        printed = filter(_MARK.fullmatch, vocabulary.printed_names)  # marks of turns, as DeepSeek R1's are
        names = dict.fromkeys((*vocabulary.control_names, *PRINTED_MARKS, *printed))
        marks = sorted((name for name in names if name in everything), key=len, reverse=True)
        unused = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in everything)  # of private use
        end, *stand_ins = islice(unused, len(marks) + 1)
        given = _replaced(given, dict(zip(marks, stand_ins, strict=True))) if marks else given
    except RecursionError as exc:
        raise PromptError(_TOO_DEEP) from exc
    shown, shown_tools, shown_arguments = given
    goes_on = bool(begun_answer(shown[-1]))
    if goes_on:  # the mark also keeps templates from cutting blanks there
        shown[-1] = {**shown[-1], "content": shown[-1]["content"] + end}
    ends = (vocabulary.bos_id, vocabulary.eos_id)
    bos, eos = ("" if token_id is None else vocabulary.token_name(token_id) for token_id in ends)
    text = render_chat(
        source,
        with_short_ids(source, shown),
        tools=shown_tools,
        bos_token=bos,
        eos_token=eos,
        add_generation_prompt=not goes_on,
        arguments=shown_arguments,
    )
    ids = list[int]()
    originals = dict(zip(stand_ins, marks, strict=True))
    text = _cut_at(text, end) if goes_on else text
    for piece in re.split(f"([{''.join(stand_ins)}])", text) if marks else [text]:
        if piece in originals:
            ids += as_text(vocabulary, originals[piece])
        elif piece:
            ids += vocabulary.encode(piece, parse_special=True)
    if vocabulary.adds_bos and vocabulary.bos_id is not None and ids[:1] != [vocabulary.bos_id]:
        ids.insert(0, vocabulary.bos_id)
    return ids


def _without_empty_end(messages: list[Message]) -> list[Message]:
    """Checked messages without an assistant's at the end that holds nothing: some clients send one to be filled."""
    last = messages[-1]
    has_more = last["content"].strip() or last.get("tool_calls") or last.get("reasoning_content")
    is_empty = last["role"] == "assistant" and not has_more
    return messages[:-1] if is_empty and len(messages) > 1 else messages


def _cut_at(rendered: str, end: str) -> str:
    """The rendered conversation up to the last mark `end`. Raises PromptError where the template left the text out."""
    text, found, _ = rendered.rpartition(end)
    if not found:
        raise PromptError(
            "the conversation ends with an assistant's message, which the model is to go on from, but its chat "
            "template leaves that message out: end with another message, or give another template with "
            "--chat-template-file"
        )
    return text.replace(end, "")  # templates may show a text more than once


def num_characters(*values: Any) -> int:
    """Of all texts in messages and tools. Raises PromptError where they are nested too deeply."""
    try:
        return sum(map(len, texts(list(values))))
    except RecursionError as exc:
        raise PromptError(_TOO_DEEP) from exc


def as_text(vocabulary: Vocabulary, mark: str) -> list[int]:
    """Token ids that spell a mark and are not its token."""
    ids = vocabulary.encode(mark)
    prints = mark in PRINTED_MARKS or mark in vocabulary.printed_names
    is_unknown = max(ids, default=0) >= vocabulary.size  # behind the vocabulary
    if is_unknown or (prints and len(ids) == 1 and vocabulary.token_name(ids[0]) == mark):
        return vocabulary.encode(mark[:1]) + vocabulary.encode(mark[1:])
    return ids


def texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in (*value, *value.values()):
            yield from texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts(each)


def _replaced(value: Any, stand_ins: Mapping[str, str]) -> Any:
    """A JSON value with `stand_ins` in place of marks in every text of it."""
    if isinstance(value, str):
        for mark, stand_in in stand_ins.items():
            value = value.replace(mark, stand_in)
        return value
    if isinstance(value, Mapping):
        return {_replaced(key, stand_ins): _replaced(each, stand_ins) for key, each in value.items()}
    return [_replaced(each, stand_ins) for each in value] if isinstance(value, list | tuple) else value


def answer_prefix(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text at the end of a conversation that the answer goes on from; "" where the model begins its turn.

    Raises PromptError for messages that are not valid.
    """
    return begun_answer(checked_messages(messages)[-1])


def read_template(path: Path | None) -> str | None:
    """The Jinja source in a file; None where none is given. Raises ConfigError for a file that is no chat template."""
    if path is None:
        return None
    source = given_text(path, "chat-template-file")
    if len(source) > _MOST_CHARACTERS:
        raise ConfigError(f"chat-template-file: {path} has more than {_MOST_CHARACTERS} characters: no chat template")
    if "messages" not in source:
        raise ConfigError(f"chat-template-file: {path} does not mention 'messages', which a template writes as text")
    try:
        with suppress(PromptError):  # of a template that wants more than one question
            render_chat(source, [{"role": "user", "content": "Hello"}])
    except CapabilityError as exc:
        raise ConfigError(f"chat-template-file: {path}: {exc.on_the_command_line}") from exc
    return source
