"""What a finished answer is made of: reasoning, text, and the tool calls in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.chat.marks import control_text
from edgespec.chat.reasoning import Reasoning
from edgespec.chat.tool_forms import call_form
from edgespec.chat.tools import ToolCall, ToolParser
from edgespec.errors import CapabilityError
from edgespec.vocabulary import IncrementalDecoder, Vocabulary


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """`text` is what is for the reader, without the reasoning and without the calls, which are in their order."""

    reasoning: str
    text: str
    tool_calls: tuple[ToolCall, ...]

    def as_message(self) -> dict[str, Any]:
        """The assistant's message for the next turn, in OpenAI's form; results follow as messages of the role tool."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


def answer_parts(
    vocabulary: Vocabulary,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    text: str,
    tools: Sequence[Mapping[str, Any]],
    prefix: str,
    *,
    is_cut: bool = False,
) -> AnswerParts:
    """The parts of the answer `text`, which `token_ids` spell and which goes on from `prefix`; a limit may have cut it.

    Raises CapabilityError as `Model.split_answer`.
    """
    form = call_form(vocabulary.chat_template) if tools else None
    if tools and form is None:
        raise CapabilityError(
            "this model's chat template writes no tool calls in a form that is known: leave out tools"
        )
    parser = None if form is None else ToolParser(form, tools)
    reasoning = Reasoning.of(vocabulary, prompt_ids, prefix)
    splitter = None if reasoning is None else reasoning.splitter(parser)
    names = (*(parser.marks if parser else ()), *(reasoning.marks.names if reasoning else ()))
    thoughts, texts, calls = list[str](), list[str](), list[ToolCall]()

    def take(thought: str, rest: str) -> None:
        thoughts.append(thought)
        if parser is None:
            texts.append(rest)
        elif not parser.is_over:  # what a model writes behind its calls is no part of the answer
            shown, more = parser.push(rest)
            texts.append(shown)
            calls.extend(more)

    for part in _spelled(vocabulary, token_ids, text, names):
        take(*(("", part) if splitter is None else splitter.push(part)))
    if splitter is not None:
        take(*splitter.finish(is_cut=is_cut))
    if parser is not None:
        rest, more = parser.finish(is_cut=is_cut)
        texts.append(rest)
        calls += more
    return AnswerParts("".join(thoughts), "".join(texts), tuple(calls))


def _spelled(vocabulary: Vocabulary, token_ids: Sequence[int], text: str, names: Sequence[str]) -> list[str]:
    """The text token by token, with the names of the control tokens among `names`, which print nothing."""
    decoder, parts, num_read = IncrementalDecoder(vocabulary), list[str](), 0
    for token_id in token_ids:
        length = len(decoder.push(token_id))
        parts.append(control_text(vocabulary, token_id, names) + text[num_read : num_read + length])
        num_read += length
    return [*parts, text[num_read:]]
