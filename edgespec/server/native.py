"""llama-server's `/completion` and `/infill`, which editors and SillyTavern use; the answers of both in its own form.

As in llama-server, control tokens that a prompt spells out are read as such, so that a rendered template can be
continued; those in the texts around a gap are not.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from edgespec.chat.reasoning import AnswerSplitter
from edgespec.chat.tools import ToolCall
from edgespec.reports import TokenEvent
from edgespec.server.answer import Answer, Delta, Exchange, Work, logprobs_of, prompt_progress, sse
from edgespec.server.completions import Completion, fill_prompt, prepare, require_fim
from edgespec.server.options import Generated, Logprobs
from edgespec.server.requests import Asked, Fields, one_of, wrong
from edgespec.server.scheduler import Ticket
from edgespec.server.service import Loaded
from edgespec.vocabulary import FimTokens, Vocabulary

Milliseconds = Annotated[int, Meta(ge=-1, le=1 << 31)]
_FORBIDDEN = -1e9
_PREFIX_SHARE = 0.75  # of the room, for the text before a gap where both texts are too long
_LEAST_ANSWER = 256  # tokens kept free for an answer of unlimited length, where the context allows


class Native(Generated):
    """A request in llama-server's form. `n_indent`, `t_max_predict_ms`: see `_Bounded`."""

    noted: ClassVar[Asked] = {
        **Generated.noted,
        "t_max_prompt_ms": ("the whole prompt is read, as in llama-server", (0, -1)),
    }
    refused: ClassVar[Asked] = {
        **Generated.refused,
        "lora": ("this server applies no adapters; an empty list asks for none", ([],)),
    }
    logit_bias: Annotated[list[Any], Meta(max_length=1024)] | dict[str, Any] | None = None
    n_probs: Logprobs | None = None
    logprobs: Logprobs | None = None
    n_indent: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    t_max_predict_ms: Milliseconds | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[list[str], Meta(max_length=64)] | None = None


class NativeCompletion(Native, kw_only=True):
    """A request to `/completion`: one prompt, a text or a list of token ids, or a list of several."""

    prompt: str | list[Any]


class File(Fields, kw_only=True):
    """Another file, or a part of one, that is shown before a gap."""

    text: str
    filename: str | None = None
    time: Any = None  # llama.vim's note of when it took the text


class Infill(Native, kw_only=True):
    """A request to `/infill`. `prompt`: the begin of what fills the gap."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[File], Meta(max_length=1024)] | None = None
    prompt: str | None = None


def answer_native(loaded: Loaded, request: NativeCompletion, _: list[str]) -> Exchange:
    """Continue texts or token ids (llama-server)."""
    return _exchange(loaded, request, request.prompt)


def answer_infill(loaded: Loaded, request: Infill, _: list[str]) -> Exchange:
    """Fill the gap between two texts (llama-server); 501 for models that cannot."""
    tokens, vocabulary = require_fim(loaded, "/infill"), loaded.model.target.vocabulary
    length = loaded.model.context_length
    room = length - min(request.token_limit or loaded.options.max_tokens or _LEAST_ANSWER, length // 4)
    before, after = vocabulary.encode(request.input_prefix + (request.prompt or "")), request.input_suffix
    ids, is_cut = fitted(vocabulary, tokens, before, vocabulary.encode(after), request.input_extra or (), room)
    return _exchange(loaded, request, [ids], is_cut=is_cut)


def _exchange(loaded: Loaded, request: Native, prompt: str | list[Any], *, is_cut: bool = False) -> Exchange:
    """`is_cut`: not all that was sent fits the context."""
    asked: dict[str, Any] = {name: getattr(request, name) for name in Generated.__struct_fields__}
    asked["logprobs"] = one_of({"n_probs": request.n_probs, "logprobs": request.logprobs}) or None
    asked["logit_bias"] = _biases(loaded, request.logit_bias)
    return NativeExchange(prepare(loaded, Completion(**asked, prompt=prompt)), request, is_cut=is_cut)


def _biases(loaded: Loaded, given: list[Any] | dict[str, Any] | None) -> dict[str, Any] | None:
    """OpenAI's object, or pairs of a token id or a text, whose bias is that of each of its tokens, and a number; false
    forbids a token.
    """
    found: dict[str, Any] = {}
    for pair in [list(each) for each in given.items()] if isinstance(given, dict) else given or ():
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], int | str):
            raise wrong("logit_bias", "must be a list of [token id or text, number or false], or an object", pair)
        key, bias = pair
        is_text = isinstance(key, str) and not isinstance(given, dict)
        ids = loaded.model.target.vocabulary.encode(key) if is_text else [key]
        found |= dict.fromkeys(map(str, ids), _FORBIDDEN if bias is False else bias)
    return found or None


def fitted(
    vocabulary: Vocabulary,
    tokens: FimTokens,
    prefix_ids: Sequence[int],
    suffix_ids: Sequence[int],
    files: Sequence[File],
    room: int,
) -> tuple[list[int], bool]:
    """(`fill_prompt` in at most `room` tokens, whether anything had to be left out for that).

    What is nearest to the gap is kept: first the texts around it, then whole files, the last ones before the others.
    """
    around = room - len(fill_prompt(vocabulary, tokens, [], []))
    is_cut = len(prefix_ids) + len(suffix_ids) > around
    if is_cut:
        num_before = min(len(prefix_ids), max(int(_PREFIX_SHARE * around), around - len(suffix_ids)))
        prefix_ids = prefix_ids[len(prefix_ids) - num_before :]
        suffix_ids = suffix_ids[: around - num_before]
    kept = [_encoded_file(vocabulary, tokens, file) for file in files]
    while len(found := fill_prompt(vocabulary, tokens, prefix_ids, suffix_ids, kept)) > room and kept:
        del kept[0]
    return found, is_cut or len(kept) < len(files)


def _encoded_file(vocabulary: Vocabulary, tokens: FimTokens, file: File) -> list[int]:
    """A file as models read those of a repository, behind its name; without a token for that, behind a line."""
    if tokens.file is None:
        return vocabulary.encode("\n\n--- snippet ---\n\n" + file.text)
    text = file.text if file.text.endswith("\n") else file.text + "\n"
    return [tokens.file, *vocabulary.encode(f"{file.filename or 'file'}\n{text}")]


# -- answers


class NativeExchange(Exchange):
    """A request in llama-server's form."""

    def __init__(self, work: Work, request: Native, *, is_cut: bool) -> None:
        super().__init__(work, is_stream=bool(request.stream))
        self._request, self._is_cut = request, is_cut

    def answer(self, ticket: Ticket) -> Answer:
        most_ms, n_indent = self._request.t_max_predict_ms or 0, self._request.n_indent or 0
        if n_indent or most_ms > 0:
            return _Bounded(ticket, self.vocabulary, n_indent, most_ms / 1000 if most_ms > 0 else None)
        return super().answer(ticket)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any] | list[dict[str, Any]]:
        found = []
        for index, answer in enumerate(answers):
            tokens = list(answer.token_ids) if self._request.return_tokens else []
            found.append(self._picked(self._end(index, answer, answer.text, tokens) | self._probs(answer.tokens())))
        return found[0] if len(found) == 1 else found

    async def stream(self, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        for index, answer in enumerate(answers):
            num_sent = 0
            async for delta in answer.deltas():
                ids, begin = answer.token_ids, num_sent
                has_end = bool(ids) and ids[-1] in self.vocabulary.end_ids  # which may come with text, or alone later
                num_sent = len(ids) - has_end
                tokens = list(ids[begin:num_sent])
                counts = {"tokens_predicted": len(ids), "tokens_evaluated": answer.stats.prompt_tokens}
                told = {"timings": answer.timings} if self._request.timings_per_token else {}
                if delta.progress is not None:
                    told = {"prompt_progress": prompt_progress(delta.progress)}
                head = {"index": index, "content": delta.text, "tokens": tokens, "stop": False}
                yield sse(head | counts | told | self._probs(delta.tokens))
            yield sse(self._picked(self._end(index, answer, "", [])))

    def _end(self, index: int, answer: Answer, content: str, tokens: list[int]) -> dict[str, Any]:
        job, vocabulary, stats = self.jobs[index], self.vocabulary, answer.stats
        shown = (each for each in job.prompt_ids if each != vocabulary.bos_id)
        prompt = b"".join(vocabulary.piece(each) or vocabulary.token_name(each).encode() for each in shown)
        word = answer.matched_stop(job.options.stop)
        is_full = stats.finish_reason == "length" and stats.new_tokens != job.options.max_tokens
        return {
            "index": index,
            "content": content,
            "tokens": tokens,
            "stop": True,
            "model": self.name,
            "tokens_predicted": stats.new_tokens,
            "tokens_evaluated": stats.prompt_tokens,
            "seed": answer.seed,
            "prompt": prompt.decode("utf-8", "replace"),
            "has_new_line": "\n" in answer.text,
            "truncated": self._is_cut or is_full,
            "stop_type": "limit" if answer.finish_reason == "length" else "eos" if word is None else "word",
            "stopping_word": word or "",
            "tokens_cached": stats.reused_tokens,
            "timings": answer.timings,
        }

    def _probs(self, tokens: Sequence[TokenEvent]) -> dict[str, Any]:
        if not self.jobs[0].options.logprobs:
            return {}
        return {"completion_probabilities": logprobs_of(self.vocabulary, tokens, with_ids=True)}

    def _picked(self, found: dict[str, Any]) -> dict[str, Any]:
        """The fields that `response_fields` names, "timings/prompt_n" for one of an object; all if it names none."""
        if not self._request.response_fields:
            return found
        picked: dict[str, Any] = {}
        for path in self._request.response_fields:
            value: Any = found
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, Mapping) else None
            picked |= {} if value is None else {path: value}
        return picked


class _Bounded(Answer):
    """An answer that also ends before a line with less than `n_indent` blanks, or `most_s` after its first token.

    The very first line may be indented as it likes.
    """

    def __init__(self, ticket: Ticket, vocabulary: Vocabulary, n_indent: int, most_s: float | None) -> None:
        super().__init__(ticket, vocabulary, AnswerSplitter(vocabulary), parallel=True)
        self._end_of_block = re.compile(rf"\n[ \t]{{0,{n_indent - 1}}}(?=[^ \t\n])" if n_indent else r"(?!)")
        self._most_s, self._first_s = most_s, 0.0
        self._is_cut_short = False

    @property
    def finish_reason(self) -> str:
        return "length" if self._is_cut_short else super().finish_reason

    async def read(self) -> None:
        async for _ in self.deltas():  # one by one: each may be the last
            pass

    def _kept(self, reasoning: Delta, text: Delta, calls: Sequence[ToolCall]) -> list[Delta]:
        self._first_s = self._first_s or time.monotonic()
        before = self.text
        end = self._end_of_block.search(before + text.text, max(before.rfind("\n"), 0))
        if end is not None:
            text.text, self._is_cut_short = text.text[: max(0, end.end() - len(before))], True
        return super()._kept(reasoning, text, calls)

    def _is_complete(self) -> bool:
        if self._most_s is not None and "\n" in self.text and time.monotonic() - self._first_s > self._most_s:
            self._is_cut_short = True
        return self._is_cut_short
