"""Answers in llama-server's own form, whole and streamed, which `/completion` and `/infill` share.

Besides the tokens, `n_indent` and `t_max_predict_ms` may end an answer, both only once it has a line of its own.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.config import GenerateOptions
from edgespec.reports import TokenEvent
from edgespec.sampling import Sampling
from edgespec.server.answer import Answer, Piece, logprobs_of
from edgespec.server.exchange import Exchange, sse
from edgespec.server.llamacpp_fields import prompt_progress
from edgespec.server.options import SAMPLING
from edgespec.server.scheduler import Ticket
from edgespec.server.service import Loaded
from edgespec.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Form:
    """What a request asks of its answers besides their text.

    `with_tokens`, `per_token`: token ids in whole answers, timings in every part of a stream; `fields`: those of the
    end to send, all if empty. `n_indent`, `most_s`: see `BoundedAnswer`.
    """

    with_tokens: bool
    per_token: bool
    fields: Sequence[str]
    n_indent: int
    most_s: float | None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as `token_ids` and as the `text` that the answer repeats. `is_cut`: not all of it fits the context."""

    token_ids: list[int]
    text: str
    is_cut: bool = False


class BoundedAnswer(Answer):
    """An answer that also ends before a line with less than `n_indent` blanks, or `most_s` after its first token."""

    def __init__(self, ticket: Ticket, vocabulary: Vocabulary, form: Form) -> None:
        super().__init__(ticket, vocabulary)
        self._n_indent, self._most_s, self._first_s = form.n_indent, form.most_s, 0.0
        self._is_cut_short = False
        self._last_line = 0  # where it begins; those before it have been looked at

    @property
    def finish_reason(self) -> str:
        return "length" if self._is_cut_short else super().finish_reason

    async def read(self) -> None:
        async for _ in self.pieces():  # one by one: each may be the last
            pass

    def _joined(self, events: Sequence[TokenEvent]) -> Piece:
        self._first_s = self._first_s or time.monotonic()
        return super()._joined(events)

    def _kept(self, piece: Piece) -> Piece:
        text = self.text + piece.text
        end = end_of_block(text, self._n_indent, self._last_line)
        self._last_line = text.rfind("\n") + 1
        if end is not None:
            piece.text, self._is_cut_short = piece.text[: max(0, end - len(self.text))], True
        return super()._kept(piece)

    def _is_complete(self) -> bool:
        if self._most_s is not None and "\n" in self.text and time.monotonic() - self._first_s > self._most_s:
            self._is_cut_short = True
        return self._is_cut_short


def end_of_block(text: str, n_indent: int, begin: int = 0) -> int | None:
    """Where the first line begins its text that is indented by less than `n_indent` blanks; None without one.

    The very first line may be indented as it likes; of the others those that begin at `begin` or later are looked at.
    """
    start = (begin or text.find("\n") + 1) if n_indent else 0
    while start:
        end = text.find("\n", start)
        line = text[start:] if end < 0 else text[start:end]
        blanks = len(line) - len(line.lstrip(" \t"))
        if blanks < len(line) and blanks < n_indent:
            return start + blanks
        start = text.find("\n", start) + 1
    return None


class NativeExchange(Exchange):
    """A request in llama-server's form, around the one to `/v1/completions` that it became. `prompts`: of its jobs."""

    def __init__(self, loaded: Loaded, inner: Exchange, prompts: Sequence[Prompt], form: Form) -> None:
        super().__init__(inner.jobs, is_stream=inner.is_stream)
        self._loaded, self._form = loaded, form
        self._prompts = [prompt for prompt in prompts for _ in range(len(inner.jobs) // len(prompts))]
        self._vocabulary = loaded.model.target.vocabulary

    def answer(self, ticket: Ticket) -> Answer:
        has_bounds = self._form.n_indent or self._form.most_s is not None
        return BoundedAnswer(ticket, self._vocabulary, self._form) if has_bounds else Answer(ticket, self._vocabulary)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any] | list[dict[str, Any]]:
        found = []
        for index, answer in enumerate(answers):
            tokens = list(answer.token_ids) if self._form.with_tokens else []
            end = self._end(index, answer, answer.text, tokens) | self._probs(answer.tokens)
            found.append(_picked(end, self._form.fields))
        return found[0] if len(found) == 1 else found

    async def stream(self, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        for index, answer in enumerate(answers):
            num_sent = 0
            async for piece in answer.pieces():
                tokens, num_sent = list(answer.token_ids[num_sent:]), len(answer.token_ids)
                counts = {"tokens_predicted": num_sent, "tokens_evaluated": answer.stats.prompt_tokens}
                extra = {"timings": answer.timings} if self._form.per_token else {}
                if piece.progress is not None:
                    extra = {"prompt_progress": prompt_progress(piece.progress)}
                head = {"index": index, "content": piece.text, "tokens": tokens, "stop": False}
                yield sse(head | counts | extra | self._probs(piece.tokens))
            yield sse(_picked(self._end(index, answer, "", []), self._form.fields))

    def _end(self, index: int, answer: Answer, content: str, tokens: list[int]) -> dict[str, Any]:
        job, prompt, stats = self.jobs[index], self._prompts[index], answer.stats
        word = answer.matched_stop(job.options.stop)
        is_full = answer.ticket.finish_reason == "length" and answer.ticket.stats.new_tokens != job.options.max_tokens
        found: dict[str, Any] = {
            "index": index,
            "content": content,
            "tokens": tokens,
            "stop": True,
            "model": self._loaded.name,
            "tokens_predicted": stats.new_tokens,
            "tokens_evaluated": stats.prompt_tokens,
            "generation_settings": settings(self._loaded, job.sampling, job.options, answer.ticket.seed),
            "prompt": prompt.text,
            "has_new_line": "\n" in answer.text,
            "truncated": prompt.is_cut or is_full,
            "stop_type": "limit" if answer.finish_reason == "length" else "eos" if word is None else "word",
            "stopping_word": word or "",
            "tokens_cached": stats.reused_tokens,
            "timings": answer.timings,
        }
        if job.reads_only:
            found["generation_settings"] |= {"n_predict": 0, "max_tokens": 0}
        return found

    def _probs(self, tokens: Sequence[TokenEvent]) -> dict[str, Any]:
        if not self.jobs[0].options.logprobs:
            return {}
        return {"completion_probabilities": logprobs_of(self._vocabulary, tokens, with_ids=True)}


def _picked(found: dict[str, Any], shown: Sequence[str]) -> dict[str, Any]:
    """The fields that `response_fields` names, "timings/prompt_n" for one of an object; all if it names none."""
    if not shown:
        return found
    picked: dict[str, Any] = {}
    for path in shown:
        value: Any = found
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        picked |= {} if value is None else {path: value}
    return picked


def settings(loaded: Loaded, sampling: Sampling, options: GenerateOptions, seed: int) -> dict[str, Any]:
    """`generation_settings` of an answer."""
    limit = -1 if options.max_tokens is None else options.max_tokens
    return {
        "n_ctx": loaded.model.context_length,
        "n_predict": limit,
        "max_tokens": limit,
        **{name: getattr(sampling, setting) for name, setting in SAMPLING.items()},
        "stop": list(options.stop),
        "ignore_eos": options.ignore_eos,
        "n_probs": options.top_logprobs,
        "grammar": options.grammar or "",
        "seed": seed,
    }
