"""One answer as every protocol sends it: reasoning, text, tool calls and log probabilities, from a ticket's events; and
an exchange: a request that was read and checked, and how its answers are written in one protocol.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from edgespec.chat.arguments import dumped
from edgespec.chat.marks import ChannelSplitter
from edgespec.chat.reasoning import AnswerSplitter, Reasoning
from edgespec.chat.tool_forms import ToolForm
from edgespec.chat.tools import ToolCall
from edgespec.drafters.predicted import PREDICTION
from edgespec.reports import PromptProgress, Stats, TokenEvent
from edgespec.server.http_errors import HttpError
from edgespec.server.requests import Fields, read
from edgespec.server.scheduler import Job, Ticket
from edgespec.server.service import Loaded
from edgespec.vocabulary import Vocabulary

_OTHER_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}


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


@dataclass(slots=True)
class AnswerPart:
    """One part of an answer. `tokens`: those that its text is made of, marks of reasoning included, with log
    probabilities only. `is_last`: it was open at the end.
    """

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call: ToolCall | None = None
    tokens: list[TokenEvent] = field(default_factory=list)
    is_last: bool = False


@dataclass(slots=True)
class Delta:
    """What became certain at once of a `part`: more of its text and tokens, or a whole call.

    `shares`: the text by token, each with the drafter that proposed it or None. `progress`: how much of the prompt is
    read, for jobs that tell it, in a delta of its own before all others.
    """

    part: AnswerPart
    text: str = ""
    tokens: list[TokenEvent] = field(default_factory=list)
    shares: list[tuple[str, str | None]] = field(default_factory=list)
    progress: PromptProgress | None = None


class Event(NamedTuple):
    """What becomes of a part: it begins, grows by `text`, ends."""

    what: Literal["begins", "grows", "ends"]
    part: AnswerPart
    text: str = ""


async def events(answer: Answer) -> AsyncIterator[Event]:
    """The answer as its parts come, of which one is open at a time. An empty answer has one empty text."""
    opened: AnswerPart | None = None
    async for delta in answer.deltas():
        part = delta.part
        if not delta.text and part.call is None:
            continue
        if opened is not part:
            if opened is not None:
                yield Event("ends", opened)
            yield Event("begins", part)
        opened = part
        yield Event("grows", part, delta.text if part.call is None else part.call.arguments)
    if opened is not None:
        opened.is_last = opened.call is None
        yield Event("ends", opened)
    if not (answer.text.strip() or answer.calls or (opened is not None and opened.kind == "text")):
        empty = AnswerPart("text", is_last=True)
        for what in ("begins", "grows", "ends"):
            yield Event(what, empty)


class Answer:
    """The answer of one ticket: iterate over `deltas` once; everything else is complete after that.

    `parallel`: whether one answer may hold several calls.
    """

    def __init__(self, ticket: Ticket, vocabulary: Vocabulary, splitter: AnswerSplitter, *, parallel: bool) -> None:
        self.ticket = ticket
        self.parts: list[AnswerPart] = []
        self.num_predicted = 0  # tokens that were taken from the request's `prediction`
        self._vocabulary, self._splitter, self._parallel = vocabulary, splitter, parallel
        self._num_before, self._has_reasoned = 0, False  # tokens before the answer began
        # With log probabilities: (token, the part that was open when it came, where its bytes begin), until its text is
        # shown and it is known what the answer begins with.
        self._held: list[tuple[TokenEvent, str | None, int]] = []
        self._num_bytes = self._num_shown_bytes = 0
        self._end: TokenEvent | None = None
        self._token_ids: list[int] = []
        self._num_characters = 0  # of the text, reasoning and marks included
        self._is_cut = False  # the calls are complete: what the model writes after them is dropped

    def _texts(self, kind: str) -> str:
        return "".join(part.text for part in self.parts if part.kind == kind)

    @property
    def text(self) -> str:
        return self._texts("text")

    @property
    def reasoning(self) -> str:
        return self._texts("reasoning")

    @property
    def calls(self) -> list[ToolCall]:
        return [part.call for part in self.parts if part.call is not None]

    def tokens(self, kind: str = "text") -> list[TokenEvent]:
        """Those of the answer or of its reasoning, with log probabilities only."""
        return [token for part in self.parts if part.kind == kind for token in part.tokens]

    @property
    def stats(self) -> Stats:
        """Counters of the generation."""
        return self.ticket.generation.stats

    @property
    def seed(self) -> int:
        return self.ticket.generation.seed

    @property
    def timings(self) -> dict[str, Any]:
        """Speed and drafting: llama.cpp's names, `rounds` and `mean_accepted_length`. Times in milliseconds.

        The mean width of a target pass is (draft_n + rounds) / rounds.
        """
        stats, by = self.stats, dict(self.ticket.drafted)
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
        return self._num_before if self._has_reasoned else 0

    @property
    def finish_reason(self) -> str:
        """stop, length or tool_calls; length too where the limit came behind a call, perhaps within the next one."""
        if self.calls and (self._is_cut or not self._is_limited):
            return "tool_calls"
        return "length" if self._is_limited else "stop"

    @property
    def _is_limited(self) -> bool:
        return self._end is not None and self._end.finish_reason == "length"

    def matched_stop(self, stops: Sequence[str]) -> str | None:
        """Which of the request's stop strings ended it; None if something else did."""
        end = self._end
        if end is None or self.finish_reason != "stop" or end.token_id in self._vocabulary.end_ids:
            return None
        rest = self._vocabulary.decode(self._token_ids)[self._num_characters :]
        return next((stop for stop in stops if rest.startswith(stop)), None)

    @property
    def shown_parts(self) -> list[AnswerPart]:
        """What `events` has told of, for a whole answer."""
        shown = [part for part in self.parts if part.text.strip() or part.call is not None]
        if all(part.kind == "reasoning" for part in shown):
            shown.append(AnswerPart("text", self.text))
        shown[-1].is_last = shown[-1].call is None
        return shown

    async def deltas(self) -> AsyncIterator[Delta]:
        """The answer as it comes. Raises what the generation failed with; HttpError 503 if the server ended it."""
        try:
            async for events in self.ticket:
                for progress in (event for event in events if isinstance(event, PromptProgress)):
                    yield Delta(AnswerPart("text"), progress=progress)
                tokens = [event for event in events if isinstance(event, TokenEvent)]
                for delta in () if self._is_cut else self._joined(tokens):
                    yield delta
                if not self._is_cut and self._is_complete():
                    self._is_cut = True
                    self.ticket.cancel()
            if self._end is None and not self._is_cut:
                raise HttpError(503, "the server ended this answer before it was complete", code="stopping")
            for delta in () if self._is_cut else self._rest():
                yield delta
        finally:
            self.ticket.cancel()

    async def read(self) -> None:
        if self._splitter.parser is None:  # which ends an answer when its calls are complete
            self.ticket.is_read_whole = True
        async for _ in self.deltas():
            pass

    def _joined(self, events: Sequence[TokenEvent]) -> list[Delta]:
        reasoning, text, calls = Delta(AnswerPart("reasoning")), Delta(AnswerPart("text")), list[ToolCall]()
        for event in events:
            if event.finish_reason is not None:
                self._end = event
            self._token_ids.append(event.token_id)
            self.num_predicted += event.drafter == PREDICTION
            self._num_characters += len(event.text)
            split = self._splitter.push(event.token_id, event.text)
            kind = self._splitter.kind
            self._num_before += kind != "text"
            self._has_reasoned = self._has_reasoned or kind == "reasoning"
            for delta, said in ((reasoning, split.reasoning), (text, split.text)):
                delta.text += said
                delta.shares.append((said, event.drafter))
            calls += split.tool_calls
            if event.logprob is not None:
                self._held.append((event, kind, self._num_bytes))
                self._num_bytes += len(self._vocabulary.piece(event.token_id))
                self._num_shown_bytes += len(event.text.encode("utf-8", "replace"))
            if self._splitter.kind is not None:
                self._sort(reasoning, text)
        return self._kept(reasoning, text, calls)

    def _sort(self, reasoning: Delta, text: Delta) -> None:
        """Put the tokens that are shown to the part that was open when they came."""
        is_header = isinstance(self._splitter.splitter, ChannelSplitter) and not self._has_reasoned
        for token, kind in self._shown():
            if kind is not None or not is_header:
                is_text = kind == "text" or (kind is None and not self._has_reasoned)
                (text if is_text else reasoning).tokens.append(token)

    def _shown(self) -> list[tuple[TokenEvent, str | None]]:
        """Take out of the held tokens those whose text is shown; one of a stop string and the end token never are."""
        shown = [
            (token, kind) for token, kind, begin in self._held if begin < self._num_shown_bytes or self._is_limited
        ]
        self._held = self._held[len(shown) :]
        return shown

    def _rest(self) -> list[Delta]:
        """What was held back, at the end of the answer."""
        split = self._splitter.finish(is_cut=self._is_limited)
        reasoning, text = (
            Delta(AnswerPart(kind), said, shares=[(said, None)])  # type: ignore[arg-type]
            for kind, said in (("reasoning", split.reasoning), ("text", split.text))
        )
        (text if split.text else reasoning).tokens = [token for token, _ in self._shown()]
        return self._kept(reasoning, text, split.tool_calls)

    def _kept(self, reasoning: Delta, text: Delta, calls: Sequence[ToolCall]) -> list[Delta]:
        """What there is of it, as growth of the parts."""
        found = [delta for delta in (reasoning, text) if delta.text or delta.tokens]
        for delta in found:
            if self.parts and self.parts[-1].kind == delta.part.kind:
                delta.part = self.parts[-1]
            else:
                self.parts.append(delta.part)
            delta.part.text += delta.text
            delta.part.tokens += delta.tokens
        called = calls if self._parallel else calls[: max(0, 1 - len(self.calls))]
        found += [Delta(AnswerPart("call", call=call)) for call in called]
        self.parts += [delta.part for delta in found if delta.part.call is not None]
        return found

    def _is_complete(self) -> bool:
        parser = self._splitter.parser
        return bool(self.calls) and (not self._parallel or (parser is not None and parser.is_over))


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
    form: ToolForm | None = None
    parallel: bool = True
    reasoning: Reasoning | None = None


class Exchange(ABC):
    """`is_stream`: whether the answers are sent as they come; `begins`: the ids of answers."""

    begins = ""
    media_type = "text/event-stream"
    ping = b": ping\n\n"  # sent while there is nothing to send; a comment, which readers of events skip
    streams_by_default = False

    def __init__(self, work: Work, *, is_stream: bool) -> None:
        self.work, self.jobs, self.is_stream = work, work.jobs, is_stream
        self.id, self.created = f"{self.begins}{secrets.token_hex(12)}", int(time.time())
        self.name, self.vocabulary = work.loaded.service.name, work.loaded.model.target.vocabulary

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


class Endpoint(NamedTuple):
    """A path that takes a body, which is a `request`.

    `answer`: gives the answer to a request that was read, or what is to be generated for it. It blocks meanwhile, adds
    to the notes what the request does not get, and raises HttpError and EdgespecError. `form`: of its streams, None
    where it has none.
    """

    request: type[Fields]
    answer: Callable[[Loaded, Any, list[str]], Exchange | dict[str, Any]]
    form: type[Exchange] | None = None

    def read(self, loaded: Loaded, values: Mapping[str, Any], notes: list[str]) -> Exchange | dict[str, Any]:
        """The answer to a request with these `values`."""
        return self.answer(loaded, read(self.request, values, notes), notes)


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
    """JSON text of one line, for readers that take other characters for line ends, too (Python's `splitlines`)."""
    return dumped(value, separators=(",", ":")).translate(_OTHER_LINE_ENDS)


def prompt_progress(progress: PromptProgress) -> dict[str, Any]:
    """How much of the prompt is read, under llama.cpp's names."""
    return {
        "total": progress.total,
        "cache": progress.reused,
        "processed": progress.processed,
        "time_ms": int(1000 * progress.seconds),
    }
