"""llama-server's own protocol: `/completion`, also `/completions` without /v1, and `/slots`.

A request is translated to one of `completions`, which checks it. As in llama-server, control tokens that a prompt
spells out are read as such, so that the text of `/apply-template` can be continued.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from edgespec.config import GenerateOptions
from edgespec.sampling import Sampling
from edgespec.server.answer import Answer, token_logprob
from edgespec.server.completions import MOST_LOGPROBS, raw_ids, read_completion
from edgespec.server.exchange import Exchange, sse
from edgespec.server.fields import Fields
from edgespec.server.http_errors import HttpError
from edgespec.server.llamacpp_fields import prompt_progress, read_llamacpp
from edgespec.server.options import MOST_TOKENS
from edgespec.server.scheduler import Ticket
from edgespec.server.service import Loaded
from edgespec.types import TokenEvent

_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n"),
    *("presence_penalty", "frequency_penalty"),
)
_SAME = ("model", *_SAMPLING, "stop", "stream", "ignore_eos", "grammar", "json_schema", "speculative")
_SENT_AS = {"max_tokens": "n_predict", "logprobs": "n_probs"}
# Features that are off unless they have another value; the settings of those that are off have no effect.
_OFF: dict[str, tuple[Any, ...]] = (
    dict.fromkeys(("t_max_predict_ms",), (0, -1))
    | dict.fromkeys(("lora", "response_fields"), ([],))
    | {"n_indent": (0,), "n_cmpl": (1,), "post_sampling_probs": (False,)}
)
_WITHOUT_EFFECT = ("n_cache_reuse", "sse_ping_interval")


class NativeExchange(Exchange):
    """A request to `/completion`, around the one to `/v1/completions` that it became. `prompt`: the text of it."""

    def __init__(self, loaded: Loaded, inner: Exchange, prompt: str, *, with_tokens: bool, per_token: bool) -> None:
        super().__init__(inner.jobs, is_stream=inner.is_stream)
        self._loaded, self._inner, self._prompt = loaded, inner, prompt
        self._with_tokens, self._per_token = with_tokens, per_token
        self._vocabulary = loaded.model.target.vocabulary

    def answer(self, ticket: Ticket) -> Answer:
        return self._inner.answer(ticket)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        tokens = list(answer.token_ids) if self._with_tokens else []
        return {"index": 0, "content": answer.text, "tokens": tokens} | self._end(answer) | self._probs(answer.tokens)

    async def stream(self, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        (answer,) = answers
        num_sent = 0
        async for piece in answer.pieces():
            tokens, num_sent = list(answer.token_ids[num_sent:]), len(answer.token_ids)
            counts = {"tokens_predicted": num_sent, "tokens_evaluated": answer.stats.prompt_tokens}
            extra = {"timings": answer.timings} if self._per_token else {}
            if piece.progress is not None:
                extra = {"prompt_progress": prompt_progress(piece.progress)}
            head = {"index": 0, "content": piece.text, "tokens": tokens, "stop": False}
            yield sse(head | counts | extra | self._probs(piece.tokens))
        yield sse({"index": 0, "content": "", "tokens": []} | self._end(answer))

    def _end(self, answer: Answer) -> dict[str, Any]:
        job, stats = self.jobs[0], answer.stats
        word = answer.matched_stop(job.options.stop)
        is_cut = answer.finish_reason == "length"
        return {
            "stop": True,
            "model": self._loaded.name,
            "tokens_predicted": stats.new_tokens,
            "tokens_evaluated": stats.prompt_tokens,
            "generation_settings": _settings(self._loaded, job.sampling, job.options) | {"seed": answer.ticket.seed},
            "prompt": self._prompt,
            "has_new_line": "\n" in answer.text,
            "truncated": is_cut and stats.new_tokens != job.options.max_tokens,
            "stop_type": "limit" if is_cut else "eos" if word is None else "word",
            "stopping_word": word or "",
            "tokens_cached": stats.reused_tokens,
            "timings": answer.timings,
        }

    def _probs(self, tokens: Sequence[TokenEvent]) -> dict[str, Any]:
        if not self.jobs[0].options.logprobs:
            return {}
        return {"completion_probabilities": [self._prob(event) for event in tokens]}

    def _prob(self, event: TokenEvent) -> dict[str, Any]:
        own = self._token(event.token_id, event.logprob or 0.0)
        return own | {"top_logprobs": [self._token(*pair) for pair in event.top_logprobs]}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"id": token_id} | token_logprob(self._vocabulary, token_id, logprob)


def read_native(loaded: Loaded, fields: Fields) -> Exchange:
    """Check a request and encode its prompt. Blocks meanwhile. Raises HttpError and EdgespecError."""
    body = {name: fields.given(name) for name in _SAME}
    limit = fields.whole("n_predict", -2, MOST_TOKENS)
    if limit == 0:
        raise fields.wrong("n_predict", "must be at least 1, or -1 for no limit", limit)
    num_probs = fields.whole("n_probs", 0, MOST_LOGPROBS)
    with_tokens, per_token = fields.flag("return_tokens"), fields.flag("timings_per_token")
    for name, neutral in _OFF.items():
        fields.refuse(name, "this server has no such feature", neutral)
    read_llamacpp(fields, loaded)
    fields.ignore(*_WITHOUT_EFFECT)
    prompt_ids = _read_prompt(loaded, fields)
    body |= {"logit_bias": _read_biases(fields), "prompt": prompt_ids, "logprobs": num_probs or None}
    body |= {"seed": fields.given("seed"), "max_tokens": None if limit is None or limit < 0 else limit}
    body |= {"return_progress": fields.flag("return_progress")}
    fields.finish()
    inner = read_completion(loaded, Fields(body, names=_SENT_AS, notes=fields.notes))
    given = fields.given("prompt")
    text = given if isinstance(given, str) else loaded.model.decode(prompt_ids)
    return NativeExchange(loaded, inner, text, with_tokens=with_tokens, per_token=per_token)


def _read_prompt(loaded: Loaded, fields: Fields) -> list[int]:
    """One prompt: a text, or a list of token ids and texts."""
    given = fields.given("prompt")
    parts: list[Any] = given if isinstance(given, list) else [given]
    has_several = len(parts) > 1 and not any(isinstance(part, int) for part in parts)
    if not parts or has_several or any(isinstance(part, bool) or not isinstance(part, str | int) for part in parts):
        rule = "must be one prompt: a text, or a list of token ids and texts (/v1/completions takes several)"
        raise fields.wrong("prompt", rule, given)
    vocabulary = loaded.model.target.vocabulary
    found: list[int] = []
    for index, part in enumerate(parts):
        if isinstance(part, int):
            found.append(part)
        elif index == 0:
            found += raw_ids(loaded, part)
        else:  # encoding puts a begin in front of every text
            ids = loaded.model.encode(part, parse_special=True)
            found += ids[1:] if vocabulary.adds_bos and ids[:1] == [vocabulary.bos_id] else ids
    if not found:
        raise fields.wrong("prompt", "must not be empty", given)
    return found


def _read_biases(fields: Fields) -> Any:
    """`logit_bias` as pairs [[token id, bias]], false for a token that is forbidden, or as OpenAI's object."""
    given = fields.given("logit_bias")
    if not isinstance(given, list):
        return given
    pairs = [pair for pair in given if isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int]
    if len(pairs) < len(given):
        raise fields.wrong("logit_bias", "must be a list of pairs of a token id and a number or false", given)
    return {str(token_id): -1e9 if bias is False else bias for token_id, bias in pairs} or None


def _settings(loaded: Loaded, sampling: Sampling, options: GenerateOptions) -> dict[str, Any]:
    limit = -1 if options.max_tokens is None else options.max_tokens
    return {
        "n_ctx": loaded.model.context_length,
        "n_predict": limit,
        "max_tokens": limit,
        **{name: getattr(sampling, name) for name in _SAMPLING if name != "repeat_last_n"},
        "repeat_last_n": sampling.penalty_window,
        "stop": list(options.stop),
        "ignore_eos": options.ignore_eos,
        "n_probs": options.top_logprobs,
        "grammar": options.grammar or "",
    }


def slots(loaded: Loaded, *, must_have_room: bool) -> list[dict[str, Any]]:
    """`/slots`: what runs, without its text. A slot is a place for one answer; which context it gets may change.

    Raises HttpError 503 if `must_have_room` and all are in use.
    """
    running, num_slots = loaded.scheduler.running, loaded.model.options.parallel
    if must_have_room and len(running) >= num_slots:
        raise HttpError(503, "no slot available", code="unavailable")
    drafts = loaded.model.drafter_name != "none" and loaded.model.target.facts.can_speculate
    found: list[dict[str, Any]] = []
    for index in range(num_slots):
        slot = {"id": index, "n_ctx": loaded.model.context_length, "speculative": drafts}
        found.append(slot | (_running_slot(loaded, running[index]) if index < len(running) else _IDLE))
    return found


_IDLE: dict[str, Any] = {"id_task": -1, "is_processing": False}


def _running_slot(loaded: Loaded, ticket: Ticket) -> dict[str, Any]:
    request, stats = ticket.generation.request, ticket.stats
    limit, decoded = request.options.max_tokens, stats.new_tokens
    remaining = -1 if limit is None else max(limit - decoded, 0)
    settings = _settings(loaded, request.sampler.sampling, request.options) | {"seed": ticket.seed}
    shown = {name: value for name, value in settings.items() if name not in ("stop", "grammar")}  # a client's texts
    return {
        "id_task": ticket.number,
        "is_processing": True,
        "speculative": request.drafter != "none" and loaded.model.target.facts.can_speculate,
        "params": shown,
        "n_prompt_tokens": stats.prompt_tokens,
        "n_prompt_tokens_cache": stats.reused_tokens,
        "next_token": [{"has_next_token": True, "n_remain": remaining, "n_decoded": decoded}],
    }
