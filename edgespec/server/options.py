"""What requests to OpenAI's and llama-server's paths have in common: sampling, limits, speculation, structure.

Their clients send many fields that ask for nothing else here, and these are accepted. Values that would change the text
are refused: samplers that are not built in.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from edgespec.config.options import GenerateOptions, Sampling
from edgespec.errors import SamplingError
from edgespec.server.http_errors import bad_request
from edgespec.server.requests import Asked, Fields, one_of
from edgespec.server.service import Loaded

MOST_WHOLE = 2**31 - 1
MOST_CHOICES, MOST_LOGPROBS, MOST_TOOLS = 16, 20, 128  # OpenAI's limit of log probabilities is 5; clients ask for more
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-100, le=100)]
Tokens = Annotated[int, Meta(ge=-2, le=MOST_WHOLE, description="-1: no limit; 0: as 1")]
Positive = Annotated[int, Meta(ge=1, le=MOST_WHOLE)]
Choices = Annotated[int, Meta(ge=1, le=MOST_CHOICES)]
Logprobs = Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)]
Biases = Annotated[dict[str, Any], Meta(max_length=1024)]
Stop = Annotated[str, Meta(min_length=1, max_length=512)]
StopList = Annotated[list[Stop], Meta(max_length=16)]
Stops = Annotated[str, Meta(max_length=512)] | StopList
Tools = Annotated[list[Any], Meta(max_length=MOST_TOOLS)]
# What requests call the settings of sampling, in every protocol.
NAMED_ALIKE = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
SAMPLING = {name: name for name in NAMED_ALIKE} | {"repeat_last_n": "penalty_window", "seed": "seed"}
# Fields of OpenAI's API, of OpenRouter's, vLLM's and LM Studio's that cannot change an answer here.
WITHOUT_EFFECT = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_salt", "ttl"),
        *("prompt_cache_retention", "prompt_cache_options", "session_id", "provider", "request_id", "priority"),
    )
)
DRAFT_MODEL: Asked = {"draft_model": ("the draft is the one that the server was started with", ())}  # LM Studio's
# llama-server's, which change nothing while the samplers that they belong to are turned off.
_OF_SAMPLERS = frozenset(
    (
        *("dynatemp_exponent", "mirostat_tau", "mirostat_eta", "xtc_threshold", "adaptive_decay", "backend_sampling"),
        *("n_keep", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    )
)
_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")
_OWN_ORDER = ("penalties", "temperature", "top_k", "top_p", "min_p")
# llama-server's, which cannot hold here and whose text is one that llama-server may write as well.
_OF_LLAMA_SERVER: Asked = {
    "cache_prompt": ("a prompt that begins as an earlier one is always read from there on", (True,)),
    "id_slot": ("a request takes the free context whose text it continues furthest", (-1,)),
    "post_sampling_probs": ("the probabilities are those before sampling", (False,)),
    "samplers": (f"the order here is {', '.join(_OWN_ORDER)}", ([], "", [*_OWN_ORDER])),
}


def turned_off(**values: tuple[Any, ...]) -> Asked:
    """Samplers that are not built in, with the values that turn each one off, its default first."""
    why = "this sampler is not built in; {} turns it off"
    return {name: (why.format(json.dumps(off[0])), off) for name, off in values.items()}


class Speculative(Fields):
    """How to draft for one request."""

    drafter: str | None = None
    draft_length: int | str | None = None
    verify: str | None = None


class Sampled(Fields):
    """The settings of sampling."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MOST_WHOLE)] | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=MOST_WHOLE)] | None = None
    seed: int | None = None


class Generated(Sampled):
    """A request to OpenAI's or llama-server's paths."""

    ignored: ClassVar[frozenset[str]] = _OF_SAMPLERS
    noted: ClassVar[Asked] = _OF_LLAMA_SERVER
    refused: ClassVar[Asked] = turned_off(
        **dict.fromkeys(("dynatemp_range", "mirostat", "xtc_probability", "dry_multiplier"), (0,)),
        **dict.fromkeys(("typical_p", "typ_p"), (1,)),
        top_n_sigma=(-1, 0),
        min_keep=(0, 1),
        adaptive_target=(-1, -0.01),  # llama-server's default and SillyTavern's
    )
    model: str | None = None
    max_tokens: Tokens | None = None
    n_predict: Tokens | None = None
    n: Choices | None = None
    stop: Stops | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    speculative: bool | Speculative | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    regex: str | None = None
    free_until: str | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None

    @property
    def token_limit(self) -> int | None:
        """The limit of new tokens under any of its names; None without any. Raises HttpError if two of them differ."""
        given = {name: getattr(self, name) for name in _LIMITS if getattr(self, name, None) is not None}
        return one_of({name: value if value >= 0 else None for name, value in given.items()})


class StreamOptions(Fields):
    include_usage: bool | None = None
    include_obfuscation: Any = None


class JsonSchema(Fields):
    """Every schema is kept strictly."""

    schema: dict[str, Any]
    name: Annotated[str, Meta(max_length=64)] | None = None
    description: Any = None
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None  # of a json_object: llama.cpp's form, from before OpenAI's


class OpenAiRequest(Generated):
    """A request to OpenAI's paths."""

    ignored: ClassVar[frozenset[str]] = Generated.ignored | WITHOUT_EFFECT
    noted: ClassVar[Asked] = {**Generated.noted, **DRAFT_MODEL}
    logit_bias: Biases | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with the usage. Raises HttpError without a stream."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def sampling_of(request: OpenAiRequest, loaded: Loaded) -> list[Sampling]:
    """The sampling of each answer, the request's over the server's: seeds count up from the request's, or from one
    random seed. Raises SamplingError and HttpError.
    """
    biases = request.logit_bias
    given: dict[str, Any] = {setting: getattr(request, name) for name, setting in SAMPLING.items()}
    given = {setting: value for setting, value in given.items() if value is not None}
    if biases is not None:
        if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in biases):
            raise bad_request("logit_bias must map token ids, written as strings of digits, to numbers", "logit_bias")
        given["logit_bias"] = {int(key): value for key, value in biases.items()}
    try:
        first = replace(loaded.sampling, **given).seeded()
    except SamplingError as exc:  # which begins with the setting's name
        name, _, rest = str(exc).partition(" ")
        sent = next((key for key, setting in SAMPLING.items() if setting == name), None)
        raise exc if sent is None else bad_request(f"{sent} {rest}", sent) from exc
    more = range(1, request.n or 1)
    return [first, *(replace(first, seed=((first.seed or 0) + each) & (2**63 - 1)) for each in more)]


def options_of(request: Generated, loaded: Loaded, top_logprobs: int | None) -> GenerateOptions:
    """The request's options over the server's. `top_logprobs` None: no log probabilities. Raises ConfigError."""
    chosen, stop, limit = request.speculative, request.stop, request.token_limit
    drafting: dict[str, Any] = {"drafter": "none"} if chosen is False else {}
    if isinstance(chosen, Speculative):
        drafting = {name: given for name in chosen.__struct_fields__ if (given := getattr(chosen, name)) is not None}
    return replace(
        loaded.options,
        max_tokens=loaded.options.max_tokens if limit is None else max(limit, 1),
        stop=([stop] if stop else []) if isinstance(stop, str) else stop or [],  # some clients send an empty one
        ignore_eos=bool(request.ignore_eos),
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
        **drafting,
    )
