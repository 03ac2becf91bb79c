"""`/v1/completions`: OpenAI's older protocol, which continues texts or token ids without a chat template.

A control token that a text spells out is read as that token, as in llama-server, vLLM and Ollama: clients write the
marks of a template or of a gap to fill there. Unlike in a chat, the whole prompt is one text of the client. With a
`suffix`, both are texts around a gap, in which nothing is a mark.
"""

from __future__ import annotations

import codecs
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from edgespec.reports import TokenEvent
from edgespec.server.answer import Answer, token_logprob, usage
from edgespec.server.chat_completions import FINGERPRINT
from edgespec.server.exchange import DONE, Exchange, sse
from edgespec.server.fields import Fields
from edgespec.server.fim import fill_prompt, require_fim
from edgespec.server.http_errors import bad_request
from edgespec.server.llamacpp_fields import prompt_progress, read_llamacpp
from edgespec.server.options import (
    ignore_others,
    numbered,
    read_choices,
    read_max_tokens,
    read_options,
    read_sampling,
    read_stream_options,
    require_model,
)
from edgespec.server.scheduler import Job, Ticket
from edgespec.server.service import Limits, Loaded
from edgespec.server.structure import read_structure

MOST_LOGPROBS = 20  # OpenAI's limit is 5, Ollama's and llama-server's clients ask for more


class _Offsets:
    """Where the tokens of an answer begin in its text, in characters. A character may take several tokens."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def push(self, piece: bytes) -> int:
        """Where the next token begins, whose bytes are `piece`."""
        begin = self._num_characters
        self._num_characters += len(self._decoder.decode(piece))
        return begin


class CompletionExchange(Exchange):
    """A request to `/v1/completions`: the answers to one or more prompts."""

    def __init__(
        self, loaded: Loaded, jobs: Sequence[Job], *, is_stream: bool, includes_usage: bool, per_token: bool
    ) -> None:
        super().__init__(jobs, is_stream=is_stream)
        self._loaded, self._includes_usage, self._per_token = loaded, includes_usage, per_token
        self._vocabulary = loaded.model.target.vocabulary
        self._has_logprobs = jobs[0].options.logprobs
        self._id, self._created = f"cmpl-{secrets.token_hex(12)}", int(time.time())

    def answer(self, ticket: Ticket) -> Answer:
        return Answer(ticket, self._vocabulary)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            self._choice(index, answer.text, self._logprobs(answer.tokens, _Offsets()), answer.finish_reason)
            for index, answer in enumerate(answers)
        ]
        last = {
            "usage": self._usage(answers),
            "timings": answers[0].timings,
            "seed": answers[0].ticket.seed,
        }
        return self._object(choices) | last

    async def stream(self, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        for index, answer in enumerate(answers):
            offsets = _Offsets()
            async for piece in answer.pieces():
                logprobs = self._logprobs(piece.tokens, offsets)
                extra: dict[str, Any] = {"timings": answer.timings} if self._per_token else {}
                if piece.progress is not None:
                    extra = {"prompt_progress": prompt_progress(piece.progress)}
                yield self._chunk(self._choice(index, piece.text, logprobs, None), extra)
            end = self._choice(index, "", None, answer.finish_reason)
            yield self._chunk(end, {"timings": answer.timings, "seed": answer.ticket.seed})
        if self._includes_usage:
            yield sse(self._object([]) | {"usage": self._usage(answers)})
        yield DONE

    def _chunk(self, choice: dict[str, Any], extra: dict[str, Any] | None = None) -> bytes:
        empty_usage = {"usage": None} if self._includes_usage else {}
        return sse(self._object([choice]) | empty_usage | (extra or {}))

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._loaded.name,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }

    def _choice(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[TokenEvent], offsets: _Offsets) -> dict[str, Any] | None:
        """OpenAI's older shape: lists that run in step. `offsets`: those of the answer, `tokens` come next in it."""
        if not self._has_logprobs:
            return None
        own = [token_logprob(self._vocabulary, event.token_id, event.logprob or 0.0) for event in tokens]
        tops = [[token_logprob(self._vocabulary, *pair) for pair in event.top_logprobs] for event in tokens]
        return {
            "tokens": [each["token"] for each in own],
            "token_logprobs": [each["logprob"] for each in own],
            "top_logprobs": [{each["token"]: each["logprob"] for each in reversed(top)} for top in tops],
            "text_offset": [offsets.push(bytes(each["bytes"])) for each in own],
        }

    def _usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The counts of all prompts; a prompt with several answers counts once."""
        per_prompt = len({id(job.prompt_ids): None for job in self.jobs})
        step = len(answers) // per_prompt
        parts = [usage(answers[begin : begin + step]) for begin in range(0, len(answers), step)]
        total = {
            key: sum(part[key] for part in parts) for key in ("prompt_tokens", "completion_tokens", "total_tokens")
        }
        cached = sum(part["prompt_tokens_details"]["cached_tokens"] for part in parts)
        return total | {"prompt_tokens_details": {"cached_tokens": cached}}


def read_completion(loaded: Loaded, fields: Fields) -> CompletionExchange:
    """Check a request and encode its prompts. Blocks meanwhile. Raises HttpError and EdgespecError."""
    require_model(loaded.names, fields)
    is_stream = fields.flag("stream")
    includes_usage = read_stream_options(fields.fields("stream_options"), is_stream=is_stream)
    sampling = read_sampling(fields, loaded)
    max_tokens = read_max_tokens(fields, "max_tokens", "n_predict")
    options = read_options(fields, loaded, max_tokens, fields.whole("logprobs", 0, MOST_LOGPROBS))
    options = read_structure(fields, loaded, options)
    count = read_choices(fields, loaded.limits)
    per_token, tells_progress = fields.flag("timings_per_token"), fields.flag("return_progress")
    ignore_others(fields)
    read_llamacpp(fields, loaded)
    fields.refuse("echo", "the answer holds new text only", (False,))
    fields.refuse("best_of", "use n", (count,))
    suffix = fields.text("suffix")
    prompts = _read_filling(fields, loaded, suffix) if suffix else _read_prompts(fields, loaded)
    fields.finish()
    if count * len(prompts) > loaded.limits.max_choices:
        raise bad_request(
            f"{len(prompts)} prompts with n = {count}: at most {loaded.limits.max_choices} answers", "prompt"
        )
    jobs = [
        Job(ids, each, options, tells_progress, reads_only=max_tokens == 0)
        for ids, each in itertools.product(prompts, numbered(sampling, count))
    ]
    return CompletionExchange(loaded, jobs, is_stream=is_stream, includes_usage=includes_usage, per_token=per_token)


def _read_filling(fields: Fields, loaded: Loaded, suffix: str) -> list[list[int]]:
    """The prompts to fill the gap between each text and `suffix`."""
    tokens, vocabulary = require_fim(loaded, "suffix"), loaded.model.target.vocabulary
    suffix_ids = vocabulary.encode(suffix)
    prefixes: list[list[int]] = [[]]
    if fields.given("prompt") != "":  # which is a gap at the beginning
        prefixes = _read_prompts(fields, loaded, vocabulary.encode)
    return [fill_prompt(vocabulary, tokens, prefix_ids, suffix_ids) for prefix_ids in prefixes]


def _read_prompts(fields: Fields, loaded: Loaded, encode: Callable[[str], list[int]] | None = None) -> list[list[int]]:
    """A text, token ids, or a list of either, as token ids. `encode`: for the texts; None: as a whole prompt."""
    prompt = fields.given("prompt")
    require_room(loaded, prompt)
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(_is_id(each) for each in prompt)):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise fields.wrong("prompt", "must be a text, a list of token ids, or a list of either", prompt)
    check_count(prompt, loaded.limits)
    encoded = []
    for each in prompt:
        if isinstance(each, str) and each:
            encoded.append((encode or partial(raw_ids, loaded))(each))
        elif isinstance(each, list) and each and all(_is_id(token_id) for token_id in each):
            encoded.append(list(each))
        else:
            raise fields.wrong("prompt", "must hold texts that are not empty, or lists of token ids", each)
    return encoded


def raw_ids(loaded: Loaded, text: str) -> list[int]:
    """A whole prompt. One that spells the begin-of-text token out does not get a second one."""
    vocabulary = loaded.model.target.vocabulary
    loaded.model.require_room(len(text), "characters")
    ids = loaded.model.encode(text, parse_special=True)
    return ids[1:] if vocabulary.adds_bos and ids[:2] == [vocabulary.bos_id] * 2 else ids


def require_room(loaded: Loaded, prompt: Any) -> None:
    """Raise PromptError for a list that is longer than the context, before anything looks at what it holds."""
    for each in (prompt, *prompt[: loaded.limits.max_choices]) if isinstance(prompt, list) else ():
        if isinstance(each, list):
            loaded.model.require_room(len(each), "tokens")


def check_count(prompts: list[Any], limits: Limits) -> None:
    """Raise HttpError for more prompts than one request may have answers."""
    if len(prompts) > limits.max_choices:
        raise bad_request(f"prompt holds {len(prompts)} prompts; at most {limits.max_choices} are allowed", "prompt")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
