"""One answer as every protocol sends it: text, tool calls and log probabilities, made from a ticket's events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.server.http_errors import HttpError
from edgespec.server.scheduler import Ticket
from edgespec.server.tools import ToolCall, ToolParser
from edgespec.types import Stats, TokenEvent
from edgespec.vocabulary import Vocabulary


@dataclass(slots=True)
class Piece:
    """What became certain at once: text, whole tool calls, and the tokens that the text is made of.

    `tokens`: only with log probabilities; `shares`: the text by token, each with the drafter that proposed it or None.
    """

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[TokenEvent] = field(default_factory=list)
    shares: list[tuple[str, str | None]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.calls or self.tokens)


class Answer:
    """The answer of one ticket: iterate over `pieces` once; everything else is complete after that.

    `parser`: for a chat with tools; `parallel`: whether one answer may hold several calls.
    """

    def __init__(
        self, ticket: Ticket, vocabulary: Vocabulary, parser: ToolParser | None = None, *, parallel: bool = True
    ) -> None:
        self.ticket = ticket
        self.text = ""
        self.calls: list[ToolCall] = []
        self.tokens: list[TokenEvent] = []
        self._vocabulary, self._parser, self._parallel = vocabulary, parser, parallel
        self._shown = _ShownTokens(vocabulary)
        self._end: TokenEvent | None = None
        self._token_ids: list[int] = []
        self._is_cut = False  # the calls are complete: what the model writes after them is dropped

    @property
    def stats(self) -> Stats:
        """Counters of the generation."""
        return self.ticket.stats

    @property
    def finish_reason(self) -> str:
        """stop, length or tool_calls."""
        if self.calls:
            return "tool_calls"
        return "length" if self._end is not None and self._end.finish_reason == "length" else "stop"

    def matched_stop(self, stops: Sequence[str]) -> str | None:
        """Which of the request's stop strings ended it; None if something else did."""
        end = self._end
        if end is None or end.finish_reason != "stop" or self.calls or end.token_id in self._vocabulary.end_ids:
            return None
        rest = self._vocabulary.decode(self._token_ids)[len(self.text) :]
        return next((stop for stop in stops if rest.startswith(stop)), None)

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer as it comes. Raises what the generation failed with; HttpError 503 if the server ended it."""
        try:
            async for events in self.ticket:
                piece = Piece() if self._is_cut else self._joined(events)
                if piece:
                    yield self._kept(piece)
                if not self._is_cut and self._is_complete():
                    self._is_cut = True
                    self.ticket.cancel()
            if self._end is None and not self._is_cut:
                raise HttpError(503, "the server ended this answer before it was complete", code="stopping")
            if self._parser is not None and not self._is_cut:
                text, calls = self._parser.finish()
                piece = Piece(text, calls, shares=[(text, None)])
                if piece:
                    yield self._kept(piece)
        finally:
            self.ticket.cancel()

    async def read(self) -> None:
        """Read it to its end."""
        async for _ in self.pieces():
            pass

    def _joined(self, events: Sequence[TokenEvent]) -> Piece:
        piece = Piece()
        for event in events:
            if event.finish_reason is not None:
                self._end = event
            self._token_ids.append(event.token_id)
            piece.tokens += self._shown.push(event)
            text = event.text
            if self._parser is not None:
                text, calls = self._parser.push(self._mark(event) + text)
                piece.calls += calls
            piece.text += text
            piece.shares.append((text, event.drafter))
        return piece

    def _mark(self, event: TokenEvent) -> str:
        """The name of the control token that begins tool calls, which prints nothing."""
        mark = self._parser.mark if self._parser is not None else ""
        if mark and not self._vocabulary.piece(event.token_id) and self._vocabulary.token_name(event.token_id) == mark:
            return mark
        return ""

    def _kept(self, piece: Piece) -> Piece:
        if not self._parallel:
            del piece.calls[max(0, 1 - len(self.calls)) :]
        self.text += piece.text
        self.calls += piece.calls
        self.tokens += piece.tokens
        return piece

    def _is_complete(self) -> bool:
        return bool(self.calls) and (not self._parallel or (self._parser is not None and self._parser.is_over))


class _ShownTokens:
    """Holds tokens back until their text is shown; those of a stop string and the end token never are."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._held: list[tuple[TokenEvent, int]] = []  # and where its bytes begin in the answer
        self._num_bytes = self._num_shown = 0

    def push(self, event: TokenEvent) -> list[TokenEvent]:
        """The tokens that are shown now."""
        if event.logprob is None:
            return []
        self._held.append((event, self._num_bytes))
        self._num_bytes += len(self._vocabulary.piece(event.token_id))
        self._num_shown += len(event.text.encode("utf-8", "replace"))
        shown = [each for each, begin in self._held if begin < self._num_shown]
        self._held = self._held[len(shown) :]
        if event.finish_reason == "length":
            shown += [each for each, _ in self._held]
        return shown


def token_logprob(vocabulary: Vocabulary, token_id: int, logprob: float) -> dict[str, Any]:
    """One token in OpenAI's shape: its text, log probability and bytes."""
    piece = vocabulary.piece(token_id)
    text = piece.decode("utf-8", errors="replace") if piece else vocabulary.token_name(token_id)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(piece)}


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Token counts of a request; the prompt counts once, however many answers it got."""
    prompt, new = answers[0].stats.prompt_tokens, sum(answer.stats.new_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": answers[0].stats.reused_tokens},
    }


def timings(stats: Stats) -> dict[str, Any]:
    """Speed and drafting of one answer: llama.cpp's names, `rounds` and `mean_accepted_length`. Times in milliseconds.

    The mean width of a target pass is (draft_n + rounds) / rounds.
    """
    read = stats.prompt_tokens - stats.reused_tokens
    prompt_ms, decode_ms = 1000 * stats.prefill_s, 1000 * max(stats.decode_s, 0.0)
    return {
        "prompt_n": read,
        "cache_n": stats.reused_tokens,
        "prompt_ms": prompt_ms,
        "prompt_per_second": read / stats.prefill_s if stats.prefill_s > 0 else 0.0,
        "predicted_n": stats.new_tokens,
        "predicted_ms": decode_ms,
        "predicted_per_second": stats.tokens_per_second,
        "draft_n": stats.drafted_tokens,
        "draft_n_accepted": stats.accepted_tokens,
        "rounds": stats.rounds,
        "mean_accepted_length": stats.mean_accepted_length,
    }
