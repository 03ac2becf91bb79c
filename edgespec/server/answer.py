"""One answer as every protocol sends it: reasoning, text, tool calls and log probabilities, from a ticket's events; and
an exchange: a request that was read and checked, and how its answers are written in one protocol.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from edgespec.chat.marks import ChannelSplitter
from edgespec.chat.reasoning import AnswerSplitter, Reasoning
from edgespec.chat.tool_forms import Form
from edgespec.chat.tools import ToolCall
from edgespec.drafters.predicted import PREDICTION
from edgespec.reports import PromptProgress, Stats, TokenEvent
from edgespec.server.http_errors import HttpError
from edgespec.server.scheduler import Job, Ticket
from edgespec.server.service import Loaded
from edgespec.vocabulary import Vocabulary


def token_logprob(vocabulary: Vocabulary, token_id: int, logprob: float) -> dict[str, Any]:
    """One token in OpenAI's shape: its text, log probability and bytes."""
    piece = vocabulary.piece(token_id)
    text = piece.decode("utf-8", errors="replace") if piece else vocabulary.token_name(token_id)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(piece)}


def logprobs_of(
    vocabulary: Vocabulary, events: Sequence[TokenEvent], *, with_ids: bool = False
) -> list[dict[str, Any]]:
    """Tokens with their `top_logprobs` in OpenAI's shape; `with_ids`: and with ids, as in llama-server."""
    found = []
    for event in events:
        pairs = ((event.token_id, event.logprob or 0.0), *event.top_logprobs)
        own, *top = [({"id": pair[0]} if with_ids else {}) | token_logprob(vocabulary, *pair) for pair in pairs]
        found.append(own | {"top_logprobs": top})
    return found


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Token counts of a request; a prompt counts once, however many answers it got."""
    of_prompts = {id(answer.ticket.job.prompt_ids): answer.stats for answer in reversed(answers)}.values()
    prompt, new = sum(each.prompt_tokens for each in of_prompts), sum(answer.stats.new_tokens for answer in answers)
    found = {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(each.reused_tokens for each in of_prompts)},
    }
    details = {}
    if answers[0].splits_reasoning:
        details["reasoning_tokens"] = sum(answer.num_reasoning_tokens for answer in answers)
    if answers[0].ticket.generation.request.options.prediction is not None:
        details["accepted_prediction_tokens"] = accepted = sum(answer.num_predicted for answer in answers)
        drafted = sum(answer.ticket.drafted.get(PREDICTION, 0) for answer in answers)
        details["rejected_prediction_tokens"] = drafted - accepted
    return found | ({"completion_tokens_details": details} if details else {})


def timings(stats: Stats, drafted: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Speed and drafting of one answer: llama.cpp's names, `rounds` and `mean_accepted_length`. Times in milliseconds.

    `drafted`: tokens by drafter. The mean width of a target pass is (draft_n + rounds) / rounds.
    """
    by = dict(drafted or {})
    read = stats.prompt_tokens - stats.reused_tokens
    prompt_ms, decode_ms = 1000 * stats.prefill_s, 1000 * max(stats.decode_s, 0.0)
    return {
        "prompt_n": read,
        "cache_n": stats.reused_tokens,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / read if read else 0.0,
        "prompt_per_second": read / stats.prefill_s if stats.prefill_s > 0 else 0.0,
        "predicted_n": stats.new_tokens,
        "predicted_ms": decode_ms,
        "predicted_per_token_ms": 1000 / stats.tokens_per_second if stats.tokens_per_second else 0.0,
        "predicted_per_second": stats.tokens_per_second,
        "draft_n": stats.drafted_tokens,
        "draft_n_accepted": stats.accepted_tokens,
        "drafter": max(by, key=lambda name: by[name], default=None),
        "draft_n_by_drafter": by,
        "rounds": stats.rounds,
        "mean_accepted_length": stats.mean_accepted_length,
    }


@dataclass(slots=True)
class Piece:
    """What became certain at once: reasoning, text, whole tool calls, and the tokens that the text is made of.

    `tokens`: only with log probabilities; `shares`: the text by token, each with the drafter that proposed it or None.
    `reasoning_tokens` and `reasoning_shares` are the same of the reasoning, its marks included. `progress`: how much of
    the prompt is read, for jobs that tell it, in a piece of its own before all others.
    """

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[TokenEvent] = field(default_factory=list)
    shares: list[tuple[str, str | None]] = field(default_factory=list)
    reasoning: str = ""
    reasoning_tokens: list[TokenEvent] = field(default_factory=list)
    reasoning_shares: list[tuple[str, str | None]] = field(default_factory=list)
    progress: PromptProgress | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.calls or self.tokens or self.reasoning or self.reasoning_tokens)


@dataclass(slots=True)
class Part:
    """One part of an answer, as protocols show it that have items or blocks. `is_last`: it was open at the end."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call: ToolCall | None = None
    is_last: bool = False


class Event(NamedTuple):
    """What becomes of a part: it begins, grows by `text`, ends; a call is `whole` at once."""

    what: Literal["begins", "grows", "ends", "whole"]
    part: Part
    text: str = ""


async def events(answer: Answer) -> AsyncIterator[Event]:
    """The answer as its parts come, of which one is open at a time. An empty answer has one empty text."""
    opened: Part | None = None
    async for piece in answer.pieces():
        for part in (Part("reasoning", piece.reasoning), Part("text", piece.text)):
            if not part.text:
                continue
            if opened is None or opened.kind != part.kind:
                if opened is not None:
                    yield Event("ends", opened)
                opened = Part(part.kind)
                yield Event("begins", opened)
            opened.text += part.text
            yield Event("grows", opened, part.text)
        for call in piece.calls:
            if opened is not None:
                yield Event("ends", opened)
                opened = None
            yield Event("whole", Part("call", call=call))
    if opened is not None:
        opened.is_last = True
        yield Event("ends", opened)
    if not (answer.text.strip() or answer.calls or (opened is not None and opened.kind == "text")):
        empty = Part("text", is_last=True)
        for what in ("begins", "grows", "ends"):
            yield Event(what, empty)


class Answer:
    """The answer of one ticket: iterate over `pieces` once; everything else is complete after that.

    `splitter`: None leaves the text as it is; `parallel`: whether one answer may hold several calls.
    """

    def __init__(
        self,
        ticket: Ticket,
        vocabulary: Vocabulary,
        splitter: AnswerSplitter | None = None,
        *,
        parallel: bool = True,
    ) -> None:
        self.ticket = ticket
        self.text = self.reasoning = ""
        self.num_predicted = 0  # tokens that were taken from the request's `prediction`
        self.calls: list[ToolCall] = []
        self.tokens: list[TokenEvent] = []
        self.reasoning_tokens: list[TokenEvent] = []
        self._vocabulary, self._parallel = vocabulary, parallel
        self._splitter = AnswerSplitter(vocabulary) if splitter is None else splitter
        self._num_before = 0  # tokens before the answer began
        self._shown = _ShownTokens(vocabulary)
        self._unsorted: list[tuple[TokenEvent, int]] = []  # shown before it is known what the answer begins with
        self._end: TokenEvent | None = None
        self._token_ids: list[int] = []
        self._num_characters = 0  # of the text, reasoning and marks included
        self._is_cut = False  # the calls are complete: what the model writes after them is dropped

    @property
    def stats(self) -> Stats:
        """Counters of the generation."""
        return self.ticket.stats

    @property
    def seed(self) -> int:
        return self.ticket.generation.seed

    @property
    def timings(self) -> dict[str, Any]:
        return timings(self.stats, self.ticket.drafted)

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens so far, those that print nothing included."""
        return self._token_ids

    @property
    def splits_reasoning(self) -> bool:
        """Whether the model may reason, and what it reasons is told apart from its answer."""
        return self._splitter.splitter is not None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning, its marks and the blanks at them included."""
        return self._num_before if self._has_reasoning else 0

    @property
    def _has_reasoning(self) -> bool:
        """Whether what precedes the answer is reasoning: the header of a channel alone is none."""
        splitter = self._splitter.splitter
        has_more = bool(self._splitter.begins_at) and not isinstance(splitter, ChannelSplitter)
        return splitter is not None and (splitter.has_reasoned or has_more)

    @property
    def finish_reason(self) -> str:
        """stop, length or tool_calls; length too where the limit came behind a call, perhaps within the next one."""
        is_limited = self._end is not None and self._end.finish_reason == "length"
        if self.calls and (self._is_cut or not is_limited):
            return "tool_calls"
        return "length" if is_limited else "stop"

    def matched_stop(self, stops: Sequence[str]) -> str | None:
        """Which of the request's stop strings ended it; None if something else did."""
        end = self._end
        if end is None or self.finish_reason != "stop" or end.token_id in self._vocabulary.end_ids:
            return None
        rest = self._vocabulary.decode(self._token_ids)[self._num_characters :]
        return next((stop for stop in stops if rest.startswith(stop)), None)

    @property
    def parts(self) -> list[Part]:
        """What `events` has told of, with each kind of text as one part."""
        text = [Part("text", self.text, is_last=True)] if self.text.strip() or not self.calls else []
        reasoning = [Part("reasoning", self.reasoning)] if self.reasoning else []
        return [*reasoning, *text, *(Part("call", call=call) for call in self.calls)]

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer as it comes. Raises what the generation failed with; HttpError 503 if the server ended it."""
        try:
            async for events in self.ticket:
                if (progress := self.ticket.take_progress()) is not None:
                    yield Piece(progress=progress)
                piece = Piece() if self._is_cut else self._joined(events)
                if piece:
                    yield self._kept(piece)
                if not self._is_cut and self._is_complete():
                    self._is_cut = True
                    self.ticket.cancel()
            if self._end is None and not self._is_cut:
                raise HttpError(503, "the server ended this answer before it was complete", code="stopping")
            if not self._is_cut and (piece := self._rest()):
                yield self._kept(piece)
        finally:
            self.ticket.cancel()

    async def read(self) -> None:
        if self._splitter.parser is None:  # which ends an answer when its calls are complete
            self.ticket.read_whole()
        async for _ in self.pieces():
            pass

    def _joined(self, events: Sequence[TokenEvent]) -> Piece:
        piece = Piece()
        for event in events:
            if event.finish_reason is not None:
                self._end = event
            self._token_ids.append(event.token_id)
            self.num_predicted += event.drafter == PREDICTION
            self._unsorted += self._shown.push(event)
            self._num_characters += len(event.text)
            reasoning, text, calls = self._splitter.push(event.token_id, event.text)
            self._num_before += self._splitter.begins_at is None
            piece.reasoning += reasoning
            piece.reasoning_shares.append((reasoning, event.drafter))
            piece.calls += calls
            piece.text += text
            piece.shares.append((text, event.drafter))
        self._sort(piece)
        return piece

    def _rest(self) -> Piece:
        """What was held back, at the end of the answer."""
        is_cut = self._end is not None and self._end.finish_reason == "length"
        reasoning, text, calls = self._splitter.finish(is_cut=is_cut)
        piece = Piece(text, calls, shares=[(text, None)], reasoning=reasoning, reasoning_shares=[(reasoning, None)])
        self._sort(piece, is_end=True)
        return piece

    def _sort(self, piece: Piece, *, is_end: bool = False) -> None:
        """Put the shown tokens to the reasoning or the text, once it is known which they are."""
        begins_at = self._splitter.begins_at
        if begins_at is not None:
            for event, end in self._unsorted:
                if not begins_at or end > begins_at:
                    piece.tokens.append(event)
                elif self._has_reasoning:
                    piece.reasoning_tokens.append(event)
        elif is_end or self._has_reasoning:
            piece.reasoning_tokens += [event for event, _ in self._unsorted]
        else:
            return
        self._unsorted = []

    def _kept(self, piece: Piece) -> Piece:
        if not self._parallel:
            del piece.calls[max(0, 1 - len(self.calls)) :]
        self.text += piece.text
        self.reasoning += piece.reasoning
        self.calls += piece.calls
        self.tokens += piece.tokens
        self.reasoning_tokens += piece.reasoning_tokens
        return piece

    def _is_complete(self) -> bool:
        parser = self._splitter.parser
        return bool(self.calls) and (not self._parallel or (parser is not None and parser.is_over))


class _ShownTokens:
    """Holds tokens back until their text is shown; those of a stop string and the end token never are."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._held: list[tuple[TokenEvent, int, int]] = []  # and where its bytes begin and end in the answer
        self._num_bytes = self._num_shown = 0

    def push(self, event: TokenEvent) -> list[tuple[TokenEvent, int]]:
        """The tokens that are shown now, each with where its bytes end in the answer."""
        if event.logprob is None:
            return []
        begin = self._num_bytes
        self._num_bytes += len(self._vocabulary.piece(event.token_id))
        self._held.append((event, begin, self._num_bytes))
        self._num_shown += len(event.text.encode("utf-8", "replace"))
        shown = [(each, end) for each, begin, end in self._held if begin < self._num_shown]
        self._held = self._held[len(shown) :]
        if event.finish_reason == "length":
            shown += [(each, end) for each, _, end in self._held]
        return shown


# -- exchanges


DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Work:
    """What a request asks for, whatever its protocol. `tools`: those that the model may call, in `form`; `parallel`:
    several at once. `reasoning`: how the answer reasons, to be split from it; None leaves the text as it is.
    """

    loaded: Loaded
    jobs: Sequence[Job]
    tools: Sequence[dict[str, Any]] = ()
    form: Form | None = None
    parallel: bool = True
    reasoning: Reasoning | None = None


class Exchange(ABC):
    """`is_stream`: whether the answers are sent as they come."""

    media_type = "text/event-stream"
    ping = b": ping\n\n"  # sent while there is nothing to send; a comment, which readers of events skip
    streams_by_default = False

    def __init__(self, work: Work, *, is_stream: bool) -> None:
        self.work, self.jobs, self.is_stream = work, work.jobs, is_stream
        self.name, self.vocabulary = work.loaded.name, work.loaded.model.target.vocabulary

    def answer(self, ticket: Ticket) -> Answer:
        """The answer of one of the tickets of `jobs`."""
        work = self.work
        splitter = AnswerSplitter(self.vocabulary, work.reasoning, work.form, work.tools)
        return Answer(ticket, self.vocabulary, splitter, parallel=work.parallel)

    @abstractmethod
    def whole(self, answers: Sequence[Answer]) -> dict[str, Any] | list[dict[str, Any]]:
        """The body for answers that are complete."""

    @abstractmethod
    def stream(self, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        """The body, part by part; it reads the answers."""

    def failure(self, error: HttpError) -> bytes:
        """The last part of a stream that failed after it began."""
        return self.failed_early(error)

    @classmethod
    def failed_early(cls, error: HttpError) -> bytes:
        """The only part of a stream that failed before its request was read."""
        return sse(error.body(""))


@asynccontextmanager
async def answering(exchange: Exchange, notes: list[str]) -> AsyncIterator[list[Answer]]:
    """The answers of a request, to be read within the block, which ends what still runs. Adds what its options bring
    to `notes`. Raises as `Scheduler.submit`.
    """
    tickets = await exchange.work.loaded.scheduler.submit(exchange.jobs)
    try:
        notes += [note for ticket in tickets for note in ticket.generation.request.notes]
        yield [exchange.answer(ticket) for ticket in tickets]
    finally:
        for ticket in tickets:
            ticket.cancel()


def sse(value: Any, event: str = "") -> bytes:
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {compact(value)}\n\n".encode()


def compact(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which a model may write as an escape
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text


def prompt_progress(progress: PromptProgress) -> dict[str, Any]:
    """How much of the prompt is read, under llama.cpp's names."""
    return {
        "total": progress.total,
        "cache": progress.reused,
        "processed": progress.processed,
        "time_ms": int(1000 * progress.seconds),
    }
