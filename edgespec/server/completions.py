"""`/v1/completions`: OpenAI's older protocol, which continues texts or token ids without a chat template.

A control token that a text spells out is read as that token, as in llama-server, vLLM and Ollama: clients write the
marks of a template or of a gap to fill there. Unlike in a chat, the whole prompt is one text of the client. With a
`suffix`, both are texts around a gap, in which nothing is a mark.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from edgespec.reports import TokenEvent
from edgespec.server.answer import Answer, Work, prompt_progress, token_logprob, usage
from edgespec.server.chat import OpenAiExchange
from edgespec.server.http_errors import HttpError, bad_request
from edgespec.server.options import MOST_CHOICES, Logprobs, OpenAiRequest
from edgespec.server.requests import Asked, wrong
from edgespec.server.scheduler import Job
from edgespec.server.service import Loaded
from edgespec.server.structure import read_settings
from edgespec.vocabulary import FimTokens, Vocabulary


class Completion(OpenAiRequest, kw_only=True):
    """A request to `/v1/completions`. `suffix`: what follows the gap that is to be filled."""

    refused: ClassVar[Asked] = {
        **OpenAiRequest.refused,
        "echo": ("the answer holds new text only", (False,)),
        "best_of": ("use n", (1,)),
    }
    prompt: str | list[Any]
    logprobs: Logprobs | None = None
    suffix: str | None = None


def answer_completion(loaded: Loaded, request: Completion, _: list[str]) -> CompletionExchange:
    """Continue texts or token ids (OpenAI)."""
    return CompletionExchange(prepare(loaded, request), request)


def prepare(loaded: Loaded, request: Completion) -> Work:
    """The work of a request. Blocks while it encodes. Raises HttpError and EdgespecError."""
    count = request.n or 1
    if request.suffix:
        prompts = _read_filling(loaded, request)
    else:
        prompts = _read_prompts(loaded, request.prompt, partial(_raw_ids, loaded))
    sampling, options = read_settings(request, loaded, request.logprobs)
    if count * len(prompts) > MOST_CHOICES:
        raise bad_request(f"{len(prompts)} prompts with n = {count}: at most {MOST_CHOICES} answers", "prompt")
    tells = bool(request.return_progress)
    jobs = [Job(ids, each, options, tells) for ids, each in itertools.product(prompts, sampling)]
    return Work(loaded, jobs)


# -- prompts


def _read_filling(loaded: Loaded, request: Completion) -> list[list[int]]:
    """The prompts to fill the gap between each text and the suffix."""
    tokens, vocabulary = require_fim(loaded, "suffix"), loaded.model.target.vocabulary
    suffix_ids = vocabulary.encode(request.suffix or "")
    prefixes: list[list[int]] = [[]]
    if request.prompt != "":  # which is a gap at the beginning
        prefixes = _read_prompts(loaded, request.prompt, vocabulary.encode)
    return [fill_prompt(vocabulary, tokens, prefix_ids, suffix_ids) for prefix_ids in prefixes]


def _read_prompts(loaded: Loaded, given: Any, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """The token ids of one prompt, a text or a list of token ids, or each of a list of them; `encode`: for texts.

    Raises HttpError and PromptError.
    """
    for each in (given, *given[:MOST_CHOICES]) if isinstance(given, list) else ():
        if isinstance(each, list):  # before anything looks at what it holds
            loaded.model.require_room(len(each), "tokens")
    has_several = isinstance(given, list) and given and not any(isinstance(part, int) for part in given)
    prompts: Sequence[Any] = given if has_several else [given]
    if len(prompts) > MOST_CHOICES:
        raise bad_request(f"prompt holds {len(prompts)} prompts; at most {MOST_CHOICES} are allowed", "prompt")
    for prompt in prompts:
        is_ids = isinstance(prompt, list) and all(type(each) is int for each in prompt)  # True is none
        if not prompt or not (is_ids or isinstance(prompt, str)):
            raise wrong("prompt", "must be a text or a list of token ids, not empty, or a list of these", prompt)
    return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _raw_ids(loaded: Loaded, text: str) -> list[int]:
    """A whole prompt. It has one begin-of-text token, also if it spells that out."""
    vocabulary = loaded.model.target.vocabulary
    loaded.model.require_room(len(text), "characters")
    ids = loaded.model.encode(text, parse_special=True)  # which puts a begin in front of every text
    return ids[1:] if vocabulary.adds_bos and ids[:2] == [vocabulary.bos_id] * 2 else ids


def require_fim(loaded: Loaded, where: str) -> FimTokens:
    """The model's FIM tokens. Raises HttpError 501, which names the field `where`, for a model without them."""
    found = loaded.model.target.vocabulary.fim
    if found is None:
        raise HttpError(
            501,
            f"{where}: this model cannot fill a gap: its vocabulary has no tokens for prefix, suffix and middle, as "
            "those of models of code have (Qwen2.5-Coder, StarCoder2, Granite, DeepSeek-Coder, CodeLlama)",
            param=where,
            code="not_supported",
        )
    return found


def fill_prompt(
    vocabulary: Vocabulary,
    tokens: FimTokens,
    prefix_ids: Sequence[int],
    suffix_ids: Sequence[int],
    files: Sequence[Sequence[int]] = (),
) -> list[int]:
    """The prompt after which the model writes what is between `prefix_ids` and `suffix_ids`.

    In llama-server's order: other `files`, what is before the gap, what is behind it, then the token behind which the
    model writes. The texts are a user's files: control tokens that they spell out are read as text.
    """
    found = [vocabulary.bos_id] if vocabulary.adds_bos and vocabulary.bos_id is not None else []
    if files and tokens.repository is not None:
        found += [tokens.repository, *vocabulary.encode("repository\n")]
    for file_ids in files:
        found += file_ids
    if files and tokens.file is not None:
        found += [tokens.file, *vocabulary.encode("file\n")]
    return [*found, tokens.prefix, *prefix_ids, tokens.suffix, *suffix_ids, tokens.middle]


# -- answers


class CompletionExchange(OpenAiExchange):
    kind, chunk_kind, begins = "text_completion", "text_completion", "cmpl-"
    nothing: ClassVar[dict[str, Any]] = {"text": ""}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            logprobs = self._logprobs(answer.tokens(), 0)
            choice = {"index": index, "text": answer.text, "logprobs": logprobs, "finish_reason": answer.finish_reason}
            choices.append(choice)
        return self.ended(choices, answers, usage(answers))

    async def chunks(self, index: int, answer: Answer) -> AsyncIterator[bytes]:
        async for delta in answer.deltas():
            told: dict[str, Any] = {"timings": answer.timings} if self.per_token else {}
            if delta.progress is not None:
                told = {"prompt_progress": prompt_progress(delta.progress)}
            begin = len(delta.part.text) - len(delta.text)
            yield self.chunk(index, {"text": delta.text}, self._logprobs(delta.tokens, begin), **told)

    def _logprobs(self, tokens: Sequence[TokenEvent], begin: int) -> dict[str, Any] | None:
        """OpenAI's older shape: lists that run in step. `begin`: where the first of them does in the text."""
        if not self.has_logprobs:
            return None
        own = [token_logprob(self.vocabulary, event.token_id, event.logprob or 0.0) for event in tokens]
        tops = [[token_logprob(self.vocabulary, *pair) for pair in event.top_logprobs] for event in tokens]
        return {
            "tokens": [_spelled(each) for each in own],
            "token_logprobs": [each["logprob"] for each in own],
            "top_logprobs": [{_spelled(each): each["logprob"] for each in reversed(top)} for top in tops],
            "text_offset": [*itertools.accumulate((len(event.text) for event in tokens), initial=begin)][:-1],
        }


def _spelled(token: Mapping[str, Any]) -> str:
    """A token's text; the bytes of one that is a part of a character, as OpenAI writes them."""
    data = bytes(token["bytes"])
    is_whole = not data or data.decode(errors="replace").encode() == data
    return str(token["token"]) if is_whole else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
