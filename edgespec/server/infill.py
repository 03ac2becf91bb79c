"""llama-server's `/infill`, which editors use to complete code: fills the gap between two texts.

A request is translated to one of `completions`, which checks it. Besides the tokens, `n_indent` and `t_max_predict_ms`
may end an answer, both only once it has a line of its own.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from edgespec.server.answer import Answer, Piece
from edgespec.server.completions import read_completion
from edgespec.server.exchange import Exchange, sse
from edgespec.server.fields import Fields
from edgespec.server.fim import ExtraFile, fitted, require_fim
from edgespec.server.http_errors import bad_request
from edgespec.server.llamacpp_fields import read_llamacpp
from edgespec.server.options import MOST_TOKENS
from edgespec.server.scheduler import Ticket
from edgespec.server.service import Loaded
from edgespec.types import TokenEvent
from edgespec.vocabulary import FimTokens

_SAME = (
    *("model", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "presence_penalty"),
    *("frequency_penalty", "stop", "stream", "seed", "ignore_eos", "grammar", "json_schema", "speculative"),
)
_WITHOUT_EFFECT = ("t_max_prompt_ms", "n_cache_reuse")
_MOST_FILES, _MOST_FIELDS, _MOST_MS = 1024, 64, 1 << 31
_LEAST_ANSWER = 256  # tokens kept free for an answer of unlimited length, where the context allows


class CodeAnswer(Answer):
    """An answer that also ends before a line with less than `n_indent` blanks, or `most_s` after its first token."""

    def __init__(self, ticket: Ticket, loaded: Loaded, n_indent: int, most_s: float | None) -> None:
        super().__init__(ticket, loaded.model.target.vocabulary)
        self._n_indent, self._most_s, self._first_s = n_indent, most_s, 0.0
        self.is_cut_short = False

    async def read(self) -> None:
        async for _ in self.pieces():  # one by one: each may be the last
            pass

    def _joined(self, events: Sequence[TokenEvent]) -> Piece:
        self._first_s = self._first_s or time.monotonic()
        return super()._joined(events)

    def _kept(self, piece: Piece) -> Piece:
        end = _end_of_block(self.text + piece.text, self._n_indent)
        if end is not None:
            piece.text, self.is_cut_short = piece.text[: max(0, end - len(self.text))], True
        return super()._kept(piece)

    def _is_complete(self) -> bool:
        if self._most_s is not None and "\n" in self.text and time.monotonic() - self._first_s > self._most_s:
            self.is_cut_short = True
        return self.is_cut_short


def _end_of_block(text: str, n_indent: int) -> int | None:
    """Where the first line begins its text that is indented by less than `n_indent` blanks; None without one."""
    start = text.find("\n") + 1 if n_indent else 0
    while start:
        line = text[start:].split("\n", 1)[0]
        blanks = len(line) - len(line.lstrip(" \t"))
        if blanks < len(line) and blanks < n_indent:
            return start + blanks
        start = text.find("\n", start) + 1
    return None


class InfillExchange(Exchange):
    """A request to `/infill`, around the completion that it became, in llama-server's own form."""

    def __init__(
        self,
        loaded: Loaded,
        inner: Exchange,
        *,
        is_cut: bool,
        reads_only: bool,
        limits: tuple[int, float | None],
        shown: Sequence[str],
    ) -> None:
        super().__init__(inner.jobs, is_stream=inner.is_stream)
        self._loaded, self._is_cut, self._reads_only = loaded, is_cut, reads_only
        self._limits, self._shown = limits, shown

    def answer(self, ticket: Ticket) -> Answer:
        return CodeAnswer(ticket, self._loaded, *self._limits)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        return _picked(self._end(answer, "" if self._reads_only else answer.text), self._shown)

    async def stream(self, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        (answer,) = answers
        async for piece in answer.pieces():
            if piece.text and not self._reads_only:
                stats = answer.stats
                counts = {"tokens_predicted": stats.new_tokens, "tokens_evaluated": stats.prompt_tokens}
                yield sse({"index": 0, "content": piece.text, "tokens": [], "stop": False} | counts)
        yield sse(_picked(self._end(answer, ""), self._shown))

    def _end(self, answer: Answer, content: str) -> dict[str, Any]:
        stats = answer.stats
        word = answer.matched_stop(self.jobs[0].options.stop)
        is_limit = answer.finish_reason == "length" or (isinstance(answer, CodeAnswer) and answer.is_cut_short)
        return {
            "index": 0,
            "content": content,
            "tokens": [],
            "stop": True,
            "model": self._loaded.name,
            "tokens_predicted": 0 if self._reads_only else stats.new_tokens,
            "tokens_evaluated": stats.prompt_tokens,
            "has_new_line": "\n" in answer.text,
            "truncated": self._is_cut,
            "stop_type": "limit" if is_limit else "eos" if word is None else "word",
            "stopping_word": word or "",
            "tokens_cached": stats.reused_tokens,
            "timings": answer.timings,
        }


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


def read_infill(loaded: Loaded, fields: Fields) -> InfillExchange:
    """Check a request and encode its prompt. Blocks meanwhile. Raises HttpError and EdgespecError."""
    tokens = require_fim(loaded, "/infill")
    body = {name: fields.given(name) for name in _SAME}
    limit = fields.whole("n_predict", -2, MOST_TOKENS)
    body |= {"max_tokens": None if limit is None or limit < 0 else max(limit, 1)}
    n_indent, most_ms = fields.whole("n_indent", 0, 1 << 20) or 0, fields.whole("t_max_predict_ms", -1, _MOST_MS)
    shown = fields.listed("response_fields", _MOST_FIELDS) or []
    if not all(isinstance(name, str) for name in shown):
        raise fields.wrong("response_fields", "must be a list of names", shown)
    read_llamacpp(fields, loaded, any_order=True)  # editors send a list with "infill", which is not built in
    fields.ignore(*_WITHOUT_EFFECT)
    prompt_ids, is_cut = _read_prompt(loaded, fields, tokens, body["max_tokens"])
    fields.finish()
    inner = read_completion(loaded, Fields(body | {"prompt": prompt_ids}, notes=fields.notes))
    limits = n_indent, most_ms / 1000 if most_ms and most_ms > 0 else None
    return InfillExchange(loaded, inner, is_cut=is_cut, reads_only=limit == 0, limits=limits, shown=shown)


def _read_prompt(loaded: Loaded, fields: Fields, tokens: FimTokens, max_tokens: int | None) -> tuple[list[int], bool]:
    """(the prompt, whether it had to be cut to fit the context beside the answer)."""
    before, after = fields.text("input_prefix"), fields.text("input_suffix")
    begun = fields.text("prompt") or ""  # what the user has typed of the answer
    for name, text in (("input_prefix", before), ("input_suffix", after)):
        if text is None:
            raise bad_request(f"{name} is missing: give the text on that side of the gap, which may be empty", name)
    files = [_read_file(each, index) for index, each in enumerate(fields.listed("input_extra", _MOST_FILES) or ())]
    vocabulary, length = loaded.model.target.vocabulary, loaded.model.context_length
    reserve = min(max_tokens or loaded.options.max_tokens or _LEAST_ANSWER, length // 4)
    before_ids, after_ids = vocabulary.encode((before or "") + begun), vocabulary.encode(after or "")
    return fitted(vocabulary, tokens, before_ids, after_ids, files, length - reserve)


def _read_file(given: Any, index: int) -> ExtraFile:
    where = f"input_extra.{index}"
    if not isinstance(given, dict):
        raise bad_request(f'{where} must be {{"filename": ..., "text": ...}}', where)
    file = Fields(given, where)
    name, text = file.text("filename"), file.text("text")
    file.ignore("time")  # llama.vim's note of when it took the text
    file.finish()
    if text is None:
        raise bad_request(f"{where}.text is missing: give the text of the file", f"{where}.text")
    return ExtraFile(name or "file", text)
