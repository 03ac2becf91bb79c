"""llama-server's own protocol: `/completion`, also `/completions` without /v1, `/slots`, and what `/infill` shares.

A request is translated to one of `completions`, which checks it. As in llama-server, control tokens that a prompt
spells out are read as such, so that the text of `/apply-template` can be continued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from edgespec.server.completions import MOST_LOGPROBS, check_count, raw_ids, read_completion, require_room
from edgespec.server.exchange import Exchange
from edgespec.server.fields import Fields
from edgespec.server.http_errors import HttpError
from edgespec.server.llamacpp_fields import read_llamacpp, read_other_names
from edgespec.server.native_answer import Form, NativeExchange, Prompt, settings
from edgespec.server.options import MOST_TOKENS, SAMPLING, read_alike
from edgespec.server.scheduler import Ticket
from edgespec.server.service import Loaded

ReadPrompts = Callable[[Loaded, Fields, int | None], Sequence[Prompt]]
"""Reads the prompts of a request with at most so many new tokens; None: no limit. Raises HttpError."""
_SAME = (*SAMPLING, "model", "stop", "stream", "ignore_eos", "grammar", "json_schema", "speculative", "return_progress")
_MAY_BE_EMPTY = ("model", "grammar")
_WITHOUT_EFFECT = ("n_cache_reuse", "n_discard", "sse_ping_interval")
_MOST_FIELDS, _MOST_MS, _MOST_BLANKS = 64, 1 << 31, 1 << 20
_BIASES = "must be a list of pairs of a token id or a text and a number or false, or an object of these"
_FORBIDDEN = -1e9


def read_native(loaded: Loaded, fields: Fields) -> Exchange:
    """Check a request and encode its prompts. Blocks meanwhile. Raises HttpError and EdgespecError."""
    return read_form(loaded, fields, _read_prompts)


def read_form(loaded: Loaded, fields: Fields, read_prompts: ReadPrompts, *, any_order: bool = False) -> NativeExchange:
    """Check a request and encode its prompts. Blocks meanwhile. Raises HttpError and EdgespecError.

    `any_order`: see `read_llamacpp`.
    """
    limit = read_alike(fields, ("n_predict", "max_tokens"), -2, MOST_TOKENS)
    num_probs = read_alike(fields, ("n_probs", "logprobs"), 0, MOST_LOGPROBS)
    count = read_alike(fields, ("n_cmpl", "n"), 1, loaded.limits.max_choices)
    max_tokens = None if limit is None or limit < 0 else limit
    form = _read_form(fields)
    fields.refuse("lora", "this server applies no adapters; an empty list asks for none", ([],))
    if (fields.whole("t_max_prompt_ms", -1, _MOST_MS) or 0) > 0:
        fields.note("t_max_prompt_ms", "the whole prompt is read, as in llama-server")
    fields.ignore(*_WITHOUT_EFFECT)
    read_llamacpp(fields, loaded, any_order=any_order)
    read_other_names(fields)
    body = {name: value for name in _SAME if (value := fields.given(name)) != "" or name not in _MAY_BE_EMPTY}
    body |= {"max_tokens": max_tokens, "logprobs": num_probs or None, "n": count}
    body |= {"logit_bias": _read_biases(loaded, fields)}
    prompts = read_prompts(loaded, fields, max_tokens)
    fields.finish()
    inner = read_completion(loaded, Fields(body | {"prompt": [each.token_ids for each in prompts]}, notes=fields.notes))
    return NativeExchange(loaded, inner, prompts, form)


def _read_form(fields: Fields) -> Form:
    shown = fields.listed("response_fields", _MOST_FIELDS) or []
    if not all(isinstance(name, str) for name in shown):
        raise fields.wrong("response_fields", "must be a list of names", shown)
    most_ms = fields.whole("t_max_predict_ms", -1, _MOST_MS) or 0
    return Form(
        with_tokens=fields.flag("return_tokens"),
        per_token=fields.flag("timings_per_token"),
        fields=shown,
        n_indent=fields.whole("n_indent", 0, _MOST_BLANKS) or 0,
        most_s=most_ms / 1000 if most_ms > 0 else None,
    )


def _read_biases(loaded: Loaded, fields: Fields) -> dict[str, Any] | None:
    """`logit_bias` as OpenAI's object, from pairs [[token id or text, bias]] or an object of these.

    false forbids a token; the bias of a text is that of each of its tokens; those of one token add up.
    """
    given, ids = fields.given("logit_bias"), list[Any]()
    is_object = isinstance(given, dict)
    pairs = list(given.items()) if is_object else fields.listed("logit_bias", loaded.limits.max_biases)
    found: dict[str, Any] = {}
    for pair in pairs or ():
        key, bias = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (None, None)
        bias = _FORBIDDEN if bias is False else bias
        if any(isinstance(each, bool) for each in (key, bias)) or not isinstance(bias, int | float):
            key = None
        if isinstance(key, str) and not (is_object and key.isascii() and key.isdigit()):
            ids = loaded.model.target.vocabulary.encode(key)
        elif isinstance(key, int | str):
            ids = [key]
        else:
            raise fields.wrong("logit_bias", _BIASES, pair)
        for token_id in ids:
            found[str(token_id)] = found.get(str(token_id), 0) + bias
    return found or None


def _read_prompts(loaded: Loaded, fields: Fields, _max_tokens: int | None) -> list[Prompt]:
    """One prompt, a text or a list of token ids and texts; or a list of several: texts alone, or some lists."""
    given = fields.given("prompt")
    require_room(loaded, given)
    has_several = isinstance(given, list) and given and not any(isinstance(part, int) for part in given)
    prompts: list[Any] = given if has_several else [given]
    check_count(prompts, loaded.limits)
    return [_read_prompt(loaded, fields, prompt) for prompt in prompts]


def _read_prompt(loaded: Loaded, fields: Fields, given: Any) -> Prompt:
    parts: list[Any] = given if isinstance(given, list) else [given]
    if not parts or any(isinstance(part, bool) or not isinstance(part, str | int) for part in parts):
        rule = "must be one prompt or a list of them; each is a text, or a list of token ids and texts"
        raise fields.wrong("prompt", rule, given)
    vocabulary = loaded.model.target.vocabulary
    found: list[int] = []
    for index, part in enumerate(parts):
        if isinstance(part, int):
            found.append(part)
        elif index == 0:
            found += raw_ids(loaded, part)
        else:  # encoding puts a begin in front of every text
            loaded.model.require_room(len(part), "characters")
            ids = loaded.model.encode(part, parse_special=True)
            found += ids[1:] if vocabulary.adds_bos and ids[:1] == [vocabulary.bos_id] else ids
    if not found:
        raise fields.wrong("prompt", "must not be empty", given)
    return Prompt(found, given if isinstance(given, str) else loaded.model.decode(found))


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
    used = settings(loaded, request.sampler.sampling, request.options, ticket.seed)
    shown = {name: value for name, value in used.items() if name not in ("stop", "grammar")}  # a client's texts
    return {
        "id_task": ticket.number,
        "is_processing": True,
        "speculative": request.drafter != "none" and loaded.model.target.facts.can_speculate,
        "params": shown,
        "n_prompt_tokens": stats.prompt_tokens,
        "n_prompt_tokens_cache": stats.reused_tokens,
        "next_token": [{"has_next_token": True, "n_remain": remaining, "n_decoded": decoded}],
    }
