"""The options: one table of a dataclass for each of what is loaded, how tokens are chosen, an answer, the command line
and the server. SETTINGS are those that the command line, the environment and the config file set.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, TypedDict

from edgespec.config.table import Section, check_values, settings_of
from edgespec.config.values import (
    CPU,
    MAX_COUNT,
    MAX_DRAFT_LENGTH,
    CacheType,
    ContextLength,
    DrafterName,
    DraftLength,
    EngineName,
    GpuLayers,
    NumSequences,
    PoolingName,
    ProviderName,
    ReasoningFormat,
    RuleName,
    TensorOverrides,
    as_context_length,
    as_given,
    as_model,
    as_schema,
    as_texts,
    budget_bytes,
    device_names,
    number,
    parse_endpoints,
    refuses_unknown,
    tensor_overrides,
)
from edgespec.errors import ConfigError, SamplingError, name_option, shown

Location = str | os.PathLike[str]
MAX_TOP_LOGPROBS = 256
MAX_PARALLEL = 64
RANDOM_SEED = -1  # as a seed, like None: another one each time, as in llama.cpp
NO_LIMIT = -1  # as a number of new tokens, like None
MAX_GRAMMAR_CHARACTERS = 1 << 18  # of a schema or grammar: what compiles within a second
MAX_TEMPERATURE = 100
_MAX_BIAS = 1e30  # finite in float32 even after a logit is added
_MAX_WAIT_S = 10**9
_model, _hardware, _speculation = Section("load", "Model"), Section("load", "Hardware"), Section("load", "Speculation")
_sampling, _answer = Section("sampling", "Sampling"), Section("generate", "Answer")
_prompt, _output = Section("session", "Answer"), Section("session", "Output")
_serve = Section("serve", "Options").basic
_or_auto = partial(number, words=("auto",))
STRUCTURES = ("json_schema", "grammar", "regex")


class LoadKeywords(TypedDict, total=False):
    """The fields of `LoadOptions` except `model`, for type checkers: as keywords of `load`, whose paths may be str."""

    draft: Location | None
    medium: Location | None
    exit_layer: int | None
    heads: Location | None
    chat_template_file: Location | None
    pooling: PoolingName | None
    context_length: ContextLength | None
    draft_context_length: int | None
    engine: EngineName
    threads: int | None
    parallel: NumSequences
    gpu_layers: GpuLayers | None
    draft_gpu_layers: int | None
    device: str | None
    draft_device: str | None
    cpu_moe_layers: int | None
    override_tensor: str | None
    rpc: str | None
    provider: ProviderName
    cache_type_k: CacheType | None
    cache_type_v: CacheType | None
    memory: str | int | None
    drafter: DrafterName
    draft_length: DraftLength
    max_slowdown: float
    verify: RuleName
    reproducible: bool | None
    corpus: bool
    learn: bool


@refuses_unknown(ConfigError)
@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Which models to load, and how. None means: choose by model and machine. Paths may be str. --help says more.

    `context_length`: 0 for as many tokens as the target was trained for, "auto" for the most that fit into memory with
    nothing else given up. `parallel`: generations that can run at once (`Model.batch`), each with such a context;
    "auto": up to four where our kernels, which take memory as texts grow, run the model and all of it fits; else one.
    `gpu_layers`: -1 for all; "auto": as many of the target as its free memory holds, and the draft if it fits beside
    them; None: auto where this machine and llama.cpp's build have a GPU, unless the mode is to be reproducible.
    `device`: without `gpu_layers`, all layers go there. `override_tensor`: before `cpu_moe_layers`. `rpc`: the draft
    stays on this machine. `memory`: bytes, too; options that are not given are reduced to stay within it; None: the
    free memory, and only the draft model is left out.

    `drafter`: auto chooses the drafter with the best expected speed, every round. `draft_length`: tokens, or nodes for
    a drafter that drafts trees if the target can score trees; auto chooses every round; a number with drafter auto
    selects the pair's own draft, or ngram without one. `reproducible`: same tokens with and without speculation; None:
    where model and rule allow it; True: required, else CapabilityError; False: off, for speed.

    Raises ConfigError for a value that is not allowed.
    """

    model: str = _model("demo", "-m --model MODEL", "Same as MODEL [demo]", check=as_model)
    draft: Path | None = _model.basic(
        None, "-md --model-draft --draft-model", "Draft model, a GGUF or ONNX file [the pair's]"
    )
    medium: Path | None = _model(None, "--medium", "Model between draft and target, for --drafter hierarchical")
    exit_layer: int | None = _model(
        None, "--exit-layer", "Draft with the first N layers of the target (early-exit)", check=number(1)
    )
    heads: Path | None = _model(None, "--heads", "Heads file for --drafter medusa or eagle")
    chat_template_file: Path | None = _model(
        None, "--chat-template-file", "Jinja chat template to use instead of the model's"
    )
    pooling: PoolingName | None = _model(
        None, "--pooling", "GGUF: what of a text is its embedding, where the file does not say"
    )
    context_length: ContextLength | None = _model.basic(
        None,
        "-c --ctx-size N|auto|max",
        "Context in tokens; max or 0: the model's own; auto: what fits [the model's, at most 4096]",
        check=as_context_length,
    )
    draft_context_length: int | None = _model(
        None, "-cd --ctx-size-draft", "Context size of the draft model [the draft's, at most 4096]", check=number(16)
    )
    engine: EngineName = _hardware("auto", "--engine", "Inference engine")
    threads: int | None = _hardware.basic(None, "-t --threads", "CPU threads [free fast cores]", check=number(1))
    parallel: NumSequences = _hardware(1, check=_or_auto(1, MAX_PARALLEL))
    gpu_layers: GpuLayers | None = _hardware.basic(
        None, "-ngl --gpu-layers N", "GGUF: layers on the GPU, -1: all; auto: what fits", check=_or_auto(-1)
    )
    draft_gpu_layers: int | None = _hardware(
        None,
        "-ngld --gpu-layers-draft",
        "GGUF: layers of the draft model on the GPU [as --gpu-layers]",
        check=number(-1),
    )
    device: str | None = _hardware(
        None,
        "-dev --device NAMES",
        "GGUF: devices for these layers, as doctor lists them, or none [all GPUs, with --gpu-layers]",
        check=as_given(device_names),
    )
    draft_device: str | None = _hardware(
        None,
        "-devd --device-draft NAMES",
        "GGUF: devices of the draft model [as --device]",
        check=as_given(device_names),
    )
    cpu_moe_layers: int | None = _hardware(
        None,
        "-ncmoe --n-cpu-moe",
        "GGUF: keep the experts of the first N layers on the processor [with -ngl auto: what the GPU has no room for]",
        check=number(0, 999),
    )
    override_tensor: str | None = _hardware(
        None, "-ot --override-tensor REGEX=DEVICE,...", "GGUF: devices of tensors", check=as_given(tensor_overrides)
    )
    rpc: str | None = _hardware(
        None,
        "--rpc HOST:PORT,...",
        "GGUF: spread the target over RPC servers (edgespec rpc-server)",
        check=as_given(parse_endpoints),
    )
    provider: ProviderName = _hardware("auto", "--provider", "ONNX: device")
    cache_type_k: CacheType | None = _hardware(None, "-ctk --cache-type-k", "Type of cached keys [f16, ONNX f32]")
    cache_type_v: CacheType | None = _hardware(None, "-ctv --cache-type-v", "Type of cached values [f16, ONNX f32]")
    memory: str | int | None = _hardware.basic(
        None,
        "--memory 6GiB|80%|auto",
        "Memory budget: a size, a share of the free memory, or auto [all free memory]",
        check=as_given(budget_bytes),
    )
    drafter: DrafterName = _speculation.basic("auto", "--drafter NAME", "How tokens are drafted; none: not at all")
    draft_length: DraftLength = _speculation.basic(
        "auto",
        "--draft-length --num-draft-tokens --draft-max N|auto",
        "Draft tokens per step",
        check=_or_auto(0, MAX_DRAFT_LENGTH),
    )
    max_slowdown: float = _speculation(
        0.02,
        "--max-slowdown SHARE",
        "Caps the time that speculation can lose, as a share",
        check=number(0, 1, is_whole=False),
    )
    verify: RuleName = _speculation("coupled", "--verify", "Rule that accepts or rejects draft tokens")
    reproducible: bool | None = _speculation.basic(
        None, "--reproducible", "Same text as without speculation [on if free]"
    )
    corpus: bool = _speculation(True, "--corpus", "Also draft from common texts and your own (edgespec corpus add)")
    learn: bool = _speculation.basic(False, "--learn", "Store answers on this disk, draft from them")

    def __post_init__(self) -> None:
        check_values(self)
        if self.reproducible and self.verify != "coupled":
            raise ConfigError(
                f"--reproducible does not work with --verify {self.verify}, whose text depends on the "
                "draft. Use --verify coupled, or --no-reproducible"
            )
        if self.reproducible and self.gpu_layers == "auto":
            raise ConfigError(
                "--reproducible does not work with -ngl auto, which depends on how much memory is free: results "
                "depend on which layers are on the GPU. Give their number; edgespec plan -ngl auto prints it"
            )
        if self.context_length == "auto" and (self.target_gpu_layers or self.provider not in ("auto", "cpu")):
            raise ConfigError(
                "ctx-size auto is chosen by this machine's memory, which a GPU, another device or an RPC server does "
                "not share: give a number"
            )

    @property
    def context_tokens(self) -> int | None:
        """`context_length` once it is a number, which `memory.fit` makes of 0 and "auto"; None: the default."""
        found = self.context_length
        assert found != "auto" and found != 0, "the context is chosen before a model is planned or opened"
        return found

    @property
    def sequences(self) -> int:
        """`parallel`; 1 for "auto" until `memory.fit` has chosen a number."""
        return 1 if self.parallel == "auto" else self.parallel

    @property
    def rpc_servers(self) -> tuple[str, ...]:
        """The RPC servers for the target, HOST:PORT each."""
        return () if self.rpc is None else parse_endpoints(self.rpc)

    @property
    def target_devices(self) -> tuple[str, ...] | None:
        """Names of the devices for the target's layers; None: llama.cpp's choice."""
        return None if self.device is None else device_names(self.device)

    @property
    def draft_devices(self) -> tuple[str, ...] | None:
        """The same for draft models, which are placed as the target where nothing is said, but never on RPC servers."""
        if self.draft_device is not None:
            return device_names(self.draft_device)
        return None if self.rpc is not None else self.target_devices

    @property
    def target_gpu_layers(self) -> int:
        """Layers of the target that are not the processor's, -1 for all; "auto" counts as all until it is chosen."""
        if self.gpu_layers == "auto":
            return -1
        return self.gpu_layers or (-1 if self.rpc or self.target_devices else 0)

    @property
    def target_overrides(self) -> TensorOverrides:
        """Devices for tensors of the target that do not lie with their layers."""
        named = () if self.override_tensor is None else tensor_overrides(self.override_tensor)
        numbers = "|".join(map(str, range(self.cpu_moe_layers or 0)))
        experts = ((rf"blk\.({numbers})\.ffn_(up|down|gate|gate_up)_(ch|)exps", CPU),) if numbers else ()
        return (*named, *experts)

    @property
    def draft_model_gpu_layers(self) -> int:
        """The same for draft models."""
        if self.draft_gpu_layers is not None:
            return self.draft_gpu_layers
        if self.draft_device is not None:
            return -1 if self.draft_devices else 0
        return 0 if self.rpc is not None else self.target_gpu_layers


_limited = partial(number, is_whole=False, error=SamplingError)
_counted = partial(number, error=SamplingError)
_bias = _limited(-_MAX_BIAS, _MAX_BIAS)
_token_id = _counted(0, MAX_COUNT)


def _as_bias(name: str, given: object) -> Mapping[int, float]:
    """A checked copy: later changes by the caller have no effect. Raises SamplingError."""
    if not isinstance(given, Mapping):
        raise SamplingError(f"{name} must map token ids to numbers, got {shown(given)}")
    found: dict[int, float] = {}
    for token_id, bias in given.items():
        known = _token_id(f"a token id in {name}", token_id)
        is_ban = isinstance(bias, Real) and bias == -math.inf
        found[known] = -math.inf if is_ban else _bias(f"{name} of token {known} (-inf forbids it)", bias)
    return found


@refuses_unknown(SamplingError)
@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of one generation. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 disable these filters.

    Penalties as in llama.cpp, over the last `penalty_window` tokens; -1: all of the context. `logit_bias`: token id to
    added logit; -inf forbids the token. `seed` None, or -1 as in llama.cpp: a fresh one for each generation, which its
    result tells.
    Raises SamplingError for a value that is out of range, not finite or of another type (bool is not a number).
    """

    temperature: float = _sampling.basic(
        0.8, "--temp --temperature", "Temperature; 0 is greedy", check=_limited(0, MAX_TEMPERATURE)
    )
    top_k: int = _sampling.basic(
        40, "--top-k", "Keep the N most likely tokens; 0 keeps all", check=_counted(-1, hint="0 or -1 keeps all")
    )
    top_p: float = _sampling(
        0.95, "--top-p", "Keep the most likely tokens up to probability X; 1 keeps all", check=_limited(0, 1)
    )
    min_p: float = _sampling(
        0.05, "--min-p", "Drop tokens below X times the probability of the most likely one", check=_limited(0, 1)
    )
    repeat_penalty: float = _sampling(
        1.0, "--repeat-penalty", "Divide the logits of recent tokens; 1 is off", check=_limited(0.01, 100)
    )
    presence_penalty: float = _sampling(
        0.0, "--presence-penalty", "Subtract once from the logit of each recent token", check=_limited(-100, 100)
    )
    frequency_penalty: float = _sampling(
        0.0,
        "--frequency-penalty",
        "Subtract from the logit of a recent token per occurrence",
        check=_limited(-100, 100),
    )
    penalty_window: int = _sampling(
        64, "--repeat-last-n", "How many tokens count as recent; -1: all", check=_counted(-1)
    )
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = _sampling.basic(
        None, "--seed", "Random seed; -1 draws one [random]", check=_counted(-(2**63), 2**64 - 1)
    )

    def __post_init__(self) -> None:
        if isinstance(self.seed, int) and self.seed == RANDOM_SEED:
            object.__setattr__(self, "seed", None)
        check_values(self)
        object.__setattr__(self, "top_k", max(self.top_k, 0))  # -1 is how llama.cpp and vLLM keep all
        object.__setattr__(self, "logit_bias", _as_bias("logit_bias", self.logit_bias))

    def seeded(self) -> Sampling:
        """These settings with a seed: a fresh one if `seed` is None."""
        return self if self.seed is not None else replace(self, seed=fresh_seed())

    @property
    def uses_history(self) -> bool:
        """Whether a penalty is in effect, which depends on the previous tokens."""
        return self.penalty_window != 0 and (
            self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        )


def fresh_seed() -> int:
    """A random seed of 32 bits, which fits any JSON reader."""
    return secrets.randbits(32)


@refuses_unknown(ConfigError)
@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Options of one generation. `drafter`, `draft_length` and `verify` None: as the model was loaded.

    `max_tokens`: limit of new tokens; None, or -1 as in llama.cpp: until the context is full. `stop`: one or more
    strings that end the answer and are not part of it. `logprobs`: return each token's natural log probability under
    the raw softmax, before temperature, bias, penalties and truncation; `top_logprobs`: number of most likely tokens to
    return the same for. `max_wait_s`: seconds to wait for another generation to end; 0: do not wait; None: no limit.

    Structured output, one of: `json_schema`: the answer is JSON that matches it, a dict or JSON text; `grammar`: a Lark
    or GBNF grammar that the answer follows; `regex`: a regular expression that the whole answer matches.
    `free_until`: the answer is free up to and including this text, such as "</think>", then up to two line ends may
    come, and what follows is structured. An answer cut by `max_tokens`, a stop string or the context is incomplete. A
    grammar is checked when a generation is requested.

    `prediction`: what most of the answer is expected to be, such as a file that is to be edited; it is drafted from and
    changes no text.
    Raises ConfigError for a value that is not allowed.
    """

    max_tokens: int | None = _answer.basic(
        None, "-n --max-tokens", "Most tokens of an answer [until it ends]", check=number(1, words=(NO_LIMIT,))
    )
    stop: str | Sequence[str] = _answer(
        (), "--stop", "Text that ends the answer; repeatable", kind="texts", check=as_texts
    )
    ignore_eos: bool = _answer(False, "--ignore-eos", "Continue after end-of-text tokens")
    drafter: DrafterName | None = _answer(None)
    draft_length: DraftLength | None = _answer(None, check=_or_auto(0, MAX_DRAFT_LENGTH))
    verify: RuleName | None = _answer(None)
    logprobs: bool = _answer(True)
    top_logprobs: int = _answer(0, check=number(0, MAX_TOP_LOGPROBS))
    max_wait_s: float | None = _answer(None, check=number(0, _MAX_WAIT_S, is_whole=False))
    json_schema: Mapping[str, Any] | str | None = _answer.basic(
        None, "--json-schema FILE|JSON", "Answer with JSON that matches this schema", kind="contents", check=as_schema
    )
    grammar: str | None = _answer(
        None, "--grammar FILE", "Answer with text that follows this Lark or GBNF grammar", kind="contents"
    )
    regex: str | None = _answer(None, "--regex", "Answer with text that matches this regular expression")
    free_until: str | None = _answer(None, "--free-until", "Leave the answer free up to this text, such as </think>")
    prediction: str | None = _answer(None)

    def __post_init__(self) -> None:
        if self.max_tokens == NO_LIMIT and isinstance(self.max_tokens, int):
            object.__setattr__(self, "max_tokens", None)
        check_values(self)
        if self.top_logprobs and not self.logprobs:
            raise ConfigError(f"top_logprobs must be 0 without logprobs, got {self.top_logprobs}")
        self._check_structure()

    @property
    def structure(self) -> str | None:
        """Which of json_schema, grammar and regex is given; None for an answer without structure."""
        return next((name for name in STRUCTURES if getattr(self, name) is not None), None)

    def _check_structure(self) -> None:
        """Raise ConfigError for more than one structure, an empty one, or an option that contradicts it."""
        given = {name: text for name in STRUCTURES if (text := getattr(self, name)) is not None}
        for name, text in (given | {"free_until": self.free_until}).items():
            if text == "":
                raise ConfigError(f"{name} is empty: leave it out for an answer without structure")
            if text is not None and len(text) > MAX_GRAMMAR_CHARACTERS:
                raise ConfigError(f"{name} has {len(text)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed")
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} were both given: an answer has one structure, keep one")
        if self.free_until is not None and not given:
            raise ConfigError("free_until needs json_schema, grammar or regex: without one the whole answer is free")
        if given and self.ignore_eos:
            raise ConfigError(
                f"ignore_eos contradicts {next(iter(given))}, which decides where the answer ends: keep one"
            )


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What the command line shows, and how it builds the prompt. Does not change the output for a given prompt.

    `thinking`: whether a model that can reason before it answers does; None leaves it to the chat template.
    `raw`: print the text exactly as the model wrote it in a terminal too, without word wrap or readable tool calls.
    """

    system: str | None = _prompt.basic(None, "-s --system", "System prompt")
    chat_template: bool = _prompt(True, "--chat-template", "Put the prompt into the chat template")
    thinking: bool | None = _prompt(None, "--thinking --think", "Let the model reason before it answers, if it can")
    reasoning_format: ReasoningFormat = _output(
        "auto",
        "--reasoning-format",
        "Reasoning before an answer: kept separate (auto, deepseek) or left in the text (none)",
    )
    stats: bool = _output.basic(False, "--stats", "Show speed and acceptance after each answer")
    raw: bool = _output(False, "--raw", "In a terminal: no word wrap, tool calls as the model wrote them")

    def __post_init__(self) -> None:
        check_values(self)
        if self.system and not self.chat_template:
            raise ConfigError("--system needs the chat template, which --no-chat-template switches off: keep one")
        if self.thinking is not None and not self.chat_template:
            raise ConfigError(
                "--thinking and --no-thinking need the chat template, which --no-chat-template switches off"
            )


@refuses_unknown(ConfigError)
@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where the server listens, who may call it, and for how long it keeps its models. --help says more.

    Raises ConfigError for a value that is not allowed.
    """

    host: str = _serve("127.0.0.1", "--host ADDRESS", "Address to listen on [127.0.0.1: this machine only]")
    port: int = _serve(8080, "--port", "Port; 0 chooses a free one", check=number(0, 65535))
    api_key: str | None = _serve(
        None, "--api-key KEY", "Key that clients must send; better in EDGESPEC_API_KEY [any key]"
    )
    alias: tuple[str, ...] = _serve(
        (), "--alias NAME", "Name for clients; NAME=MODEL: of another model [its own]", check=as_texts
    )
    parallel: NumSequences | None = _serve(
        None,
        "-np --parallel N",
        "Answers generated at once, each with its own context; others wait [up to 4 on our kernels, else 1]",
        check=_or_auto(1, MAX_PARALLEL),
    )
    max_queue: int = _serve(32, "--max-queue", "Requests that may wait; more get 429", check=number(0, 4096))
    timeout: float = _serve(
        3600.0, "--timeout S", "Seconds per request, waiting included", check=number(0.001, _MAX_WAIT_S, is_whole=False)
    )
    exit_with_stdin: bool = _serve(False, "--exit-with-stdin", "Exit when standard input closes: the parent has ended")
    stdio: bool = _serve(False, "--stdio", "Speak JSON lines on standard streams instead of HTTP")
    cors_origin: tuple[str, ...] = _serve(
        (), "--cors-origin ORIGIN", "Web page that may call, * for all; repeatable [local ones]", check=as_texts
    )
    allowed_host: tuple[str, ...] = _serve(
        (),
        "--allowed-host NAME",
        "Name by which clients may call this machine; repeatable [local ones; any with another --host]",
        check=as_texts,
    )
    idle_unload: float | None = _serve(
        None,
        "--idle-unload S",
        "Unload a model after S seconds without a request [never]",
        check=number(-_MAX_WAIT_S, _MAX_WAIT_S, is_whole=False),
    )
    models_max: int = _serve(
        1, "--models-max --max-models", "Of several models, how many may be loaded at once", check=number(1)
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.api_key == "":
            raise ConfigError("the API key is empty: give --api-key a key, or leave it and EDGESPEC_API_KEY out")
        if self.idle_unload == 0:
            raise ConfigError("idle-unload must be a number of seconds, or -1 for never, got 0")

    @property
    def idle_unload_s(self) -> float | None:
        """The same without negative values."""
        return None if self.idle_unload is None or self.idle_unload < 0 else self.idle_unload


SETTINGS = tuple(
    setting
    for owner in (LoadOptions, Sampling, GenerateOptions, SessionOptions, ServeOptions)
    for setting in settings_of(owner)
    if setting.flags
)
BY_KEY = {key: setting for setting in SETTINGS for key in setting.keys}
# Off unless a user asks: answers are private. Commands that measure ignore them: a prompt that is decoded again would
# find its own answer.
REMEMBERING = ("learn",)
STRUCTURE = (*STRUCTURES, "free_until")  # of one answer: for commands that give several kinds
PROMPTING = ("system", "thinking")  # of the prompt, besides its text: for commands with prompts of their own
# What means one model's files, layers or training.
OF_ONE_MODEL = ("draft", "medium", "heads", "exit_layer", "chat_template_file", "pooling")
# How one answer is printed: for commands that print none to leave out.
PRINTING = ("stats", "raw", "reasoning_format")
for _setting in SETTINGS:
    if _setting.part in ("load", "sampling", "generate") and _setting.name != "model":
        name_option(_setting.key, _setting.name, is_switch=_setting.kind == "switch", is_name=bool(_setting.choices))
