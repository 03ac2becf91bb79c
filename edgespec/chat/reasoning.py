"""What an answer is made of: reasoning before it, such as `<think>...</think>`, text, and the tool calls in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from edgespec.chat.marks import ANSWER_HEADER, ChannelSplitter, Marks, begun, control_text, reasoning_marks
from edgespec.chat.tool_forms import ToolForm, call_form
from edgespec.chat.tools import ToolCall, ToolParser
from edgespec.config.options import GenerateOptions
from edgespec.errors import CapabilityError, PromptError
from edgespec.vocabulary import IncrementalDecoder, Vocabulary

_LAST_TOKENS = 24  # of a prompt, among which a mark may be spelled; one token each in most vocabularies


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How one answer reasons. `is_open`: its prompt ends inside the reasoning, so that the answer begins with it.

    `is_answering`: its prompt ends inside the answer itself.
    """

    marks: Marks
    is_open: bool = False
    is_answering: bool = False

    @classmethod
    def of(cls, vocabulary: Vocabulary, prompt_ids: Sequence[int], prefix: str = "") -> Self | None:
        """What the chat template and the end of a prompt say; None for an answer without reasoning.

        `prefix`: the text with which the prompt has begun the answer.
        """
        marks = reasoning_marks(vocabulary.chat_template)
        if marks is None:
            return None
        if prefix and marks.has_channels:  # another part may follow that of the prefix
            return cls(marks, is_answering=True)
        if prefix:
            return cls(marks, is_open=True) if prefix.rfind(marks.opening) > prefix.rfind(marks.closing) else None
        end = b"".join(_bytes(vocabulary, token_id) for token_id in prompt_ids[-_LAST_TOKENS:]).rstrip()
        if marks.has_channels and end.endswith(ANSWER_HEADER.encode()):
            return None
        return cls(marks, end.endswith(marks.opening.encode()))

    def splitter(self, parser: ToolParser | None = None) -> ChannelSplitter | ReasoningSplitter:
        """A splitter of one answer; `parser`: of its calls."""
        if self.marks.has_channels:
            return ChannelSplitter(is_open=self.is_open, is_answering=self.is_answering)
        return ReasoningSplitter(self.marks, parser, is_open=self.is_open)


class ReasoningSplitter:
    """Splits the text of one answer, as it comes, into reasoning and answer, without the marks and the blanks at them.

    An answer reasons only at its beginning. Nothing but a possible part of a mark, and blanks before it, is held back.
    Reasoning that never ends is reasoning to the end of the text, or to calls that end it: models forget its mark then.
    """

    def __init__(self, marks: Marks, parser: ToolParser | None = None, *, is_open: bool = False) -> None:
        self._marks, self._parser, self._is_open = marks, parser, is_open
        self._held = ""
        self._place: Literal["before", "inside", "behind", "answer"] = "before"
        self._has_text = False  # whether the reasoning has begun with more than blanks

    @property
    def is_answering(self) -> bool:
        """Whether the answer itself has begun."""
        return self._place == "answer"

    @property
    def has_reasoned(self) -> bool:
        """Whether the text is known to begin with reasoning."""
        return self._place in ("inside", "behind")

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) that are certain after `text`."""
        if self._place == "answer":
            return "", text
        self._held += text
        if self._place == "before":
            self._begin()
        reasoning = self._reasoning() if self._place == "inside" else ""
        if self._place == "behind" and (rest := self._held.lstrip()):
            self._held, self._place = rest, "answer"
        if self._place != "answer":
            return reasoning, ""
        answer, self._held = self._held, ""
        return reasoning, answer

    def finish(self, *, is_cut: bool = False) -> tuple[str, str]:
        """The rest, at the end of the text: part of a mark that was none."""
        end = self._end_before_calls(is_end=True, is_cut=is_cut) if self._place == "inside" else len(self._held)
        held, self._held = self._held, ""
        if self._place == "inside" or (self._place == "before" and self._is_open):
            return held[:end].rstrip(), held[end:]
        return "", "" if self._place == "behind" else held

    def _begin(self) -> None:
        """Find out what the text begins with; a mark that the prompt holds already may be repeated."""
        begin, opening = self._held.lstrip(), self._marks.opening
        if begin.startswith(opening):
            self._held, self._place = begin.removeprefix(opening), "inside"
        elif begin and not opening.startswith(begin):
            self._held, self._place = (begin, "inside") if self._is_open else (self._held, "answer")

    def _reasoning(self) -> str:
        closing = self._marks.closing
        if not self._has_text:
            self._held = self._held.lstrip()
        end = self._held.find(closing)
        if end >= 0:
            found, self._held = self._held[:end].rstrip(), self._held[end + len(closing) :]
            self._place = "behind"
            return found
        marks = (closing,) if self._parser is None else (closing, *self._parser.form.opens)
        certain = min(len(self._held) - begun(self._held, *marks), self._end_before_calls())
        passed = len(self._held[:certain].rstrip())
        found, self._held = self._held[:passed], self._held[passed:]
        self._has_text = self._has_text or bool(found)
        return found

    def _end_before_calls(self, *, is_end: bool = False, is_cut: bool = False) -> int:
        """Where calls begin in what is held, with nothing else behind them; its length if there are none."""
        if self._parser is None:
            return len(self._held)
        for found in self._parser.form.opening.finditer(self._held):
            parser = ToolParser(self._parser.form, self._parser.tools)
            shown, calls = parser.push(self._held[found.start() :])
            if is_end and not shown and not parser.is_over:
                shown, more = parser.finish(is_cut=is_cut)
                calls += more
            if not shown and not parser.is_over and (calls or not is_end):
                return found.start()
        return len(self._held)


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """Of an answer, or of what became certain of it at once. `text` is for the reader: without the reasoning, and
    without the calls, which are in their order.
    """

    reasoning: str
    text: str
    tool_calls: tuple[ToolCall, ...]

    def as_message(self) -> dict[str, Any]:
        """The assistant's message for the next turn, in OpenAI's form; results follow as messages of the role tool."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [call.as_openai() for call in self.tool_calls]
        return message


class AnswerSplitter:
    """Splits one answer, as its tokens come, into reasoning, text and tool calls.

    `reasoning`: how it reasons; None leaves that in the text. `form`: of the calls of `tools`; None leaves them there.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        reasoning: Reasoning | None = None,
        form: ToolForm | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._vocabulary = vocabulary
        self.parser = None if form is None else ToolParser(form, tools)
        self.splitter = None if reasoning is None else reasoning.splitter(self.parser)
        self._names = (*(form.marks if form else ()), *(reasoning.marks.names if reasoning else ()))

    @property
    def kind(self) -> Literal["reasoning", "text"] | None:
        """What the answer is at; None before that is known."""
        if self.splitter is None or self.splitter.is_answering:
            return "text"
        return "reasoning" if self.splitter.has_reasoned else None

    def push(self, token_id: int | None, text: str) -> AnswerParts:
        """What is certain after a token and the `text` that is known with it; None: no token."""
        mark = ""
        if self._names and token_id is not None:
            mark = control_text(self._vocabulary, token_id, self._names)
        return self._parsed(*(("", mark + text) if self.splitter is None else self.splitter.push(mark + text)))

    def finish(self, *, is_cut: bool = False) -> AnswerParts:
        """What was held back, at the end of the answer; a limit may have cut it."""
        found = self._parsed(*(("", "") if self.splitter is None else self.splitter.finish(is_cut=is_cut)))
        if self.parser is None:
            return found
        rest, calls = self.parser.finish(is_cut=is_cut)
        return AnswerParts(found.reasoning, found.text + rest, (*found.tool_calls, *calls))

    def _parsed(self, reasoning: str, answer: str) -> AnswerParts:
        text, calls = (answer, ()) if self.parser is None else self.parser.push(answer)
        return AnswerParts(reasoning, text, tuple(calls))


def before_structure(
    vocabulary: Vocabulary, prompt_ids: Sequence[int], options: GenerateOptions, prefix: str = ""
) -> list[int]:
    """A chat's prompt; for an answer of a given structure with the header that a model with channels writes first.

    A structure that says itself where it begins, or a grammar that names control tokens, gets none. Raises PromptError
    for a structure behind a `prefix`: it would have to hold for both, and the text before it may be any.
    """
    if prefix and options.structure is not None:
        raise PromptError(
            "the conversation ends with an assistant's message, which the answer goes on from: then it cannot be "
            f"given a structure ({options.structure}) or a forced tool call. Leave out that message or these"
        )
    begins_itself = options.free_until is not None or any(mark in (options.grammar or "") for mark in ("<[", "<|"))
    if options.structure is None or begins_itself:
        return [*prompt_ids]
    reasoning = Reasoning.of(vocabulary, prompt_ids)
    has_header = reasoning is not None and reasoning.marks.has_channels and not reasoning.is_open
    return [*prompt_ids, *(vocabulary.encode(ANSWER_HEADER, parse_special=True) if has_header else ())]


def _bytes(vocabulary: Vocabulary, token_id: int) -> bytes:
    return vocabulary.piece(token_id) or vocabulary.token_name(token_id).encode()


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
    splitter = AnswerSplitter(vocabulary, Reasoning.of(vocabulary, prompt_ids, prefix), form, tools)
    decoder, parts, num_read = IncrementalDecoder(vocabulary), list[AnswerParts](), 0
    for token_id in token_ids:
        end = num_read + len(decoder.push(token_id))
        parts.append(splitter.push(token_id, text[num_read:end]))
        num_read = end
    parts += [splitter.push(None, text[num_read:]), splitter.finish(is_cut=is_cut)]
    reasoning, answer = ("".join(getattr(part, name) for part in parts) for name in ("reasoning", "text"))
    return AnswerParts(reasoning, answer, tuple(call for part in parts for call in part.tool_calls))
