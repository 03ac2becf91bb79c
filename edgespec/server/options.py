"""The sampling and generation options of a request, under OpenAI's and llama.cpp's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from edgespec.config import GenerateOptions
from edgespec.errors import SamplingError
from edgespec.sampling import Sampling
from edgespec.server.fields import Fields
from edgespec.server.http_errors import bad_request
from edgespec.server.service import Limits, Loaded, Names, unknown_model

# What requests call the settings of sampling, in every protocol.
_NAMED_ALIKE = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
SAMPLING = {name: name for name in _NAMED_ALIKE} | {"repeat_last_n": "penalty_window", "seed": "seed"}
_SPECULATIVE = ("drafter", "draft_length", "verify")
MOST_TOKENS = 2**31 - 1
UNLIMITED = (-1, -2)  # as max_tokens: LM Studio's examples and llama-server's clients send -1; -2: as the context holds
# Fields of OpenAI's API, of OpenRouter's, vLLM's and LM Studio's that cannot change an answer here.
WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    *("session_id", "provider", "request_id", "priority", "cache_salt", "ttl"),
)


def ignore_others(fields: Fields) -> None:
    """Accept `WITHOUT_EFFECT`, and LM Studio's choice of a draft, which changes the speed alone."""
    fields.ignore(*WITHOUT_EFFECT)
    fields.without_effect("draft_model", "the draft is the one that the server was started with")


def require_model(names: Names, fields: Fields) -> None:
    """Check the field `model`; absent: the served one. Raises HttpError 404 for another: names are never paths."""
    name = fields.text("model")
    if name is None or name in names.all:
        return
    if not names.include(name):
        raise unknown_model(names)
    answered_by(names, fields)


def answered_by(names: Names, fields: Fields) -> None:
    """Note that another model answers than the request asks for."""
    why = "no model here has that name" if names.beside else "the only model here"
    fields.note("model", f"{names.own} answers, {why}")


def read_sampling(fields: Fields, loaded: Loaded) -> Sampling:
    """The request's sampling over the server's. Raises SamplingError and HttpError."""
    given = {name: value for key, name in SAMPLING.items() if (value := fields.given(key)) is not None}
    biases = fields.fields("logit_bias")
    if biases is not None:
        given["logit_bias"] = _read_biases(fields, loaded.limits)
    try:
        return replace(loaded.sampling, **given)
    except SamplingError as exc:
        raise _as_sent(exc, fields) from exc


def _as_sent(error: SamplingError, fields: Fields) -> Exception:
    """`error`, which begins with a setting's name, with the name that the client used for it."""
    name, _, rest = str(error).partition(" ")
    sent = next((fields.path(key) for key, setting in SAMPLING.items() if setting == name), None)
    return error if sent is None else bad_request(f"{sent} {rest}", sent)


def _read_biases(fields: Fields, limits: Limits) -> dict[int, Any]:
    """JSON's keys are strings: {"42": -100}."""
    table = fields.given("logit_bias")
    if len(table) > limits.max_biases:
        raise bad_request(f"logit_bias has {len(table)} entries; at most {limits.max_biases} are allowed", "logit_bias")
    wrong = [key for key in table if not (key.isascii() and key.isdigit() and len(key) < 10)]
    if wrong:
        raise bad_request("logit_bias must map token ids, written as strings of digits, to numbers", "logit_bias")
    return {int(key): value for key, value in table.items()}


def read_stops(fields: Fields, limits: Limits, name: str = "stop") -> list[str]:
    """Stop strings: one or a list. Raises HttpError."""
    value = fields.given(name)
    if value == "":  # llama.cpp's clients send it where nothing is to stop
        return []
    stops = [value] if isinstance(value, str) else fields.listed(name, limits.max_stops) or []
    if not all(isinstance(stop, str) and 0 < len(stop) <= limits.max_stop_characters for stop in stops):
        sent = fields.path(name)
        raise bad_request(
            f"{sent} must be a string or a list of strings of 1 to {limits.max_stop_characters} characters", sent
        )
    return stops


def read_max_tokens(fields: Fields, *names: str) -> int | None:
    """The limit of new tokens under any of `names`; None without any. Raises HttpError if two of them differ.

    0: the prompt is only read, so that the next request finds it in the cache.
    """
    limits = [name for name in names if fields.given(name) not in UNLIMITED]
    return read_alike(fields, limits, 0, MOST_TOKENS)


def read_alike(fields: Fields, names: Sequence[str], low: int, high: int) -> int | None:
    """One setting that has several `names`; None without any. Raises HttpError if two of them differ."""
    given = {name: value for name in names if (value := fields.whole(name, low, high)) is not None}
    if len(set(given.values())) > 1:
        raise bad_request(f"{' and '.join(given)} are the same setting: give one", names[0])
    return next(iter(given.values()), None)


def read_options(fields: Fields, loaded: Loaded, max_tokens: int | None, top_logprobs: int | None) -> GenerateOptions:
    """The request's options over the server's. `top_logprobs` None: no log probabilities.

    Raises ConfigError and HttpError.
    """
    return replace(
        loaded.options,
        max_tokens=loaded.options.max_tokens if max_tokens is None else max(max_tokens, 1),
        stop=read_stops(fields, loaded.limits),
        ignore_eos=fields.flag("ignore_eos"),
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
        **_read_speculation(fields),
    )


def _read_speculation(fields: Fields) -> dict[str, Any]:
    """`speculative`: false switches it off, an object chooses drafter, draft_length and verify for this request."""
    value = fields.given("speculative")
    if isinstance(value, bool):
        return {} if value else {"drafter": "none"}
    chosen = fields.fields("speculative")
    if chosen is None:
        return {}
    given = {name: found for name in _SPECULATIVE if (found := chosen.given(name)) is not None}
    chosen.finish()
    return given


def read_choices(fields: Fields, limits: Limits) -> int:
    """`n`: the number of answers."""
    return fields.whole("n", 1, limits.max_choices) or 1


def numbered(sampling: Sampling, count: int) -> list[Sampling]:
    """The sampling of each of `count` answers: seeds count up from the request's, or from one random seed."""
    first = sampling.seeded()
    return [first, *(replace(first, seed=((first.seed or 0) + more) & (2**63 - 1)) for more in range(1, count))]


def read_stream_options(options: Fields | None, *, is_stream: bool) -> bool:
    """Whether the stream ends with the usage."""
    if options is None:
        return False
    if not is_stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    includes_usage = options.flag("include_usage")
    options.ignore("include_obfuscation")
    options.finish()
    return includes_usage
