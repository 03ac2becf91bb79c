"""The options: one table, SETTINGS, names each of them once.

The command line's flags, the environment's variables, the config file's keys and the chat's `/set` are all read from
it. Defaults live in the dataclasses that the values end in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edgespec.config import CACHE_TYPES, DRAFTERS, ENGINES, POOLINGS, PROVIDERS, REASONING_FORMATS, RULES
from edgespec.config.habits import did_you_mean
from edgespec.errors import ConfigError
from edgespec.platform.files import expanded, read_text

Part = Literal["load", "sampling", "generate", "session", "serve"]
Group = Literal["Model", "Speculation", "Sampling", "Answer", "Output", "Hardware", "Options"]
Kind = Literal["text", "path", "integer", "number", "switch", "texts", "length", "context", "size", "contents"]
ENVIRONMENT_PREFIX = "EDGESPEC_"
# Variables that are no settings: where things lie, a real model for the tests that want one, the key of `serve`.
PLACES = ("CONFIG", "HOME", "KERNELS", "MODELS", "TEST_MODEL", "API_KEY")
_TOML_TYPES: dict[Kind, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "switch": (bool,),
    "text": (str,),
    "path": (str,),
    "texts": (str, list),
    "length": (int, str),
    "context": (int, str),
    "size": (int, str),
    "contents": (str,),
}
_EXPECTED: dict[Kind, str] = {
    "integer": "a whole number",
    "number": "a number",
    "switch": "true or false",
    "texts": "a text or a list of texts",
    "length": "a whole number or auto",
    "context": "a whole number, auto or max",
    "size": "a number of bytes, or a text such as '6GiB', '80%' or 'auto'",
}
_SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Setting:
    """One option: the dataclass field `name` that it fills, in which `part`, and the `flags` that set it.

    `group`: the section of --help that lists it; `is_basic`: listed by --help, the others by --help-all only.
    """

    name: str
    part: Part
    kind: Kind
    flags: tuple[str, ...]
    help: str
    group: Group
    choices: tuple[str, ...] = ()
    metavar: str = ""
    is_basic: bool = False

    @property
    def key(self) -> str:
        """The name that messages, config file and `/set` use: the first long flag."""
        return next(flag[2:] for flag in self.flags if flag.startswith("--"))

    @property
    def keys(self) -> tuple[str, ...]:
        """All spellings, with underscores."""
        long_flags = [flag[2:] for flag in self.flags if flag.startswith("--")]
        return tuple(dict.fromkeys(key.replace("-", "_") for key in (*long_flags, self.name)))

    def parse(self, text: str, source: str) -> Any:
        """The value that `text` spells. Raises ConfigError naming `source`."""
        if self.kind in ("length", "context") and text == "auto":
            return text
        if self.kind == "context" and text == "max":
            return 0
        try:
            if self.kind in ("integer", "length", "context"):
                return int(text)
            if self.kind == "number":
                return float(text)
        except ValueError:
            raise ConfigError(f"{source}: {text!r} is not {_EXPECTED[self.kind]}") from None
        if self.kind == "switch":
            if text.lower() not in _SWITCHES:
                raise ConfigError(f"{source}: {text!r} is neither on nor off; allowed: {', '.join(_SWITCHES)}")
            return _SWITCHES[text.lower()]
        if self.kind == "texts":
            return (text,)
        if self.kind == "contents":
            return contents(text, source, is_json=self.name == "json_schema")
        return self._chosen(text, source)

    def check(self, value: Any, source: str) -> Any:
        """`value` of a TOML file as the right Python value. Raises ConfigError naming `source`."""
        if type(value) not in _TOML_TYPES[self.kind]:  # exactly: to isinstance, a bool is an int
            raise ConfigError(f"{source}: {value!r} has the wrong type; expected {_EXPECTED.get(self.kind, 'a text')}")
        if self.kind == "texts":
            texts = (value,) if isinstance(value, str) else tuple(value)
            if not all(isinstance(text, str) for text in texts):
                raise ConfigError(f"{source}: every element must be a string, got {value!r}")
            return texts
        if self.kind == "number":
            return float(value)
        if self.kind in ("length", "context", "contents"):
            return self.parse(str(value), source)
        return self._chosen(value, source) if isinstance(value, str) else value

    def _chosen(self, text: str, source: str) -> str | Path:
        if self.choices and text not in self.choices:
            hint = did_you_mean(text, self.choices)
            raise ConfigError(f"{source}: {text!r} is not known; allowed: {', '.join(self.choices)}{hint}")
        return expanded(text) if self.kind == "path" else text


def contents(text: str, source: str, *, is_json: bool) -> str:
    """What a file holds; `text` itself where it is a JSON object and so no name of a file. Raises ConfigError."""
    if text.lstrip().startswith("{"):
        return text
    try:
        found = read_text(expanded(text))
        if is_json:
            json.loads(found)
        return found
    except json.JSONDecodeError as exc:
        raise ConfigError(f"{source}: the file {text!r} is not valid JSON: {exc}") from exc
    except RecursionError:
        return found  # nested too deeply, which is said where schemas are checked
    except (OSError, ValueError) as exc:  # ValueError: no UTF-8, a NUL in the name
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{source}: the file {text!r} cannot be read: {reason}") from exc


# Listed by --help; the others by --help-all only.
_BASIC = {
    *("draft", "context_length", "threads", "gpu_layers", "memory", "drafter", "draft_length", "reproducible", "learn"),
    *("temperature", "top_k", "seed", "max_tokens", "json_schema", "system", "stats"),
    *("cors_origin", "allowed_host", "idle_unload", "models_max"),
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "engine": ENGINES,
    "provider": PROVIDERS,
    "cache_type_k": CACHE_TYPES,
    "cache_type_v": CACHE_TYPES,
    "draft_cache_type_k": CACHE_TYPES,
    "draft_cache_type_v": CACHE_TYPES,
    "drafter": DRAFTERS,
    "verify": RULES,
    "pooling": POOLINGS,
    "reasoning_format": REASONING_FORMATS,
}
_METAVARS = {
    "memory": "6GiB|80%|auto",
    "device": "NAMES",
    "draft_device": "NAMES",
    "rpc": "HOST:PORT,...",
    "model": "MODEL",
    "draft_length": "N|auto",
    "gpu_layers": "N",
    "context_length": "N|auto|max",
    "max_slowdown": "SHARE",
    "json_schema": "FILE|JSON",
    "grammar": "FILE",
    "cors_origin": "ORIGIN",
    "allowed_host": "NAME",
    "idle_unload": "S",
}


def _of(group: Group, part: Part, *rows: tuple[str, Kind, str, str]) -> Iterator[Setting]:
    """The settings of one section of --help: (field, kind, flags, help) each."""
    for name, kind, flags, help in rows:
        choices, metavar = _CHOICES.get(name, ()), _METAVARS.get(name, "")
        yield Setting(name, part, kind, tuple(flags.split()), help, group, choices, metavar, name in _BASIC)


SETTINGS: tuple[Setting, ...] = (
    *_of(
        "Model",
        "load",
        ("model", "text", "-m --model", "Same as MODEL"),
        ("draft", "path", "-md --model-draft --draft-model", "Draft model, a GGUF or ONNX file"),
        ("medium", "path", "--medium", "Model between draft and target, for --drafter hierarchical"),
        ("exit_layer", "integer", "--exit-layer", "Draft with the first N layers of an ONNX target (early-exit)"),
        ("heads", "path", "--heads", "Heads file for --drafter medusa or eagle"),
        ("chat_template_file", "path", "--chat-template-file", "Jinja chat template to use instead of the model's"),
        ("pooling", "text", "--pooling", "GGUF: what of a text is its embedding, where the file does not say"),
        ("context_length", "context", "-c --ctx-size", "Context in tokens; max or 0: the model's own; auto: what fits"),
        ("draft_context_length", "integer", "-cd --ctx-size-draft", "Context size of the draft model"),
    ),
    *_of(
        "Hardware",
        "load",
        ("engine", "text", "--engine", "Inference engine"),
        ("threads", "integer", "-t --threads", "CPU threads"),
        ("gpu_layers", "length", "-ngl --gpu-layers", "GGUF: layers on the GPU, -1: all; auto: what fits"),
        ("draft_gpu_layers", "integer", "-ngld --gpu-layers-draft", "GGUF: layers of the draft model on the GPU"),
        ("device", "text", "-dev --device", "GGUF: devices for these layers, as doctor lists them, or none"),
        ("draft_device", "text", "-devd --device-draft", "GGUF: devices of the draft model"),
        ("kv_offload", "switch", "--kv-offload", "GGUF: KV cache on the device of its layers"),
        ("rpc", "text", "--rpc", "GGUF: spread the target over RPC servers (edgespec rpc-server)"),
        ("provider", "text", "--provider", "ONNX: device"),
        ("cache_type_k", "text", "-ctk --cache-type-k", "Type of cached keys"),
        ("cache_type_v", "text", "-ctv --cache-type-v", "Type of cached values"),
        ("draft_cache_type_k", "text", "-ctkd --cache-type-k-draft", "Type of the draft model's cached keys"),
        ("draft_cache_type_v", "text", "-ctvd --cache-type-v-draft", "Type of the draft model's cached values"),
        ("memory", "size", "--memory", "Memory budget: a size, a share of the free memory, or auto"),
    ),
    *_of(
        "Speculation",
        "load",
        ("drafter", "text", "--drafter", "How tokens are drafted; none: not at all"),
        ("draft_length", "length", "--draft-length --num-draft-tokens --draft-max", "Draft tokens per step"),
        (
            "draft_temperature",
            "number",
            "--draft-temp --draft-temperature",
            "Draft temperature as a multiple of --temp",
        ),
        ("max_slowdown", "number", "--max-slowdown", "Caps the time that speculation can lose, as a share"),
        ("verify", "text", "--verify", "Rule that accepts or rejects draft tokens"),
        ("reproducible", "switch", "--reproducible", "Same text as without speculation"),
        ("corpus", "switch", "--corpus", "Also draft from your texts (edgespec corpus add)"),
        ("recall", "switch", "--recall", "Draft from the answers that --learn stored"),
        ("learn", "switch", "--learn", "Store answers on this disk, draft from them"),
    ),
    *_of(
        "Sampling",
        "sampling",
        ("temperature", "number", "--temp", "Temperature; 0 is greedy"),
        ("top_k", "integer", "--top-k", "Keep the N most likely tokens; 0 keeps all"),
        ("top_p", "number", "--top-p", "Keep the most likely tokens up to probability X; 1 keeps all"),
        ("min_p", "number", "--min-p", "Drop tokens below X times the probability of the most likely one"),
        ("repeat_penalty", "number", "--repeat-penalty", "Divide the logits of recent tokens; 1 is off"),
        ("presence_penalty", "number", "--presence-penalty", "Subtract once from the logit of each recent token"),
        (
            "frequency_penalty",
            "number",
            "--frequency-penalty",
            "Subtract from the logit of a recent token per occurrence",
        ),
        ("penalty_window", "integer", "--repeat-last-n", "How many tokens count as recent; -1: all"),
        ("seed", "integer", "--seed", "Random seed; -1 draws one"),
    ),
    *_of(
        "Answer",
        "generate",
        ("max_tokens", "integer", "-n --max-tokens", "Most tokens of an answer"),
        ("stop", "texts", "--stop", "Text that ends the answer; repeatable"),
        ("ignore_eos", "switch", "--ignore-eos", "Continue after end-of-text tokens"),
        ("json_schema", "contents", "--json-schema", "Answer with JSON that matches this schema"),
        ("grammar", "contents", "--grammar", "Answer with text that follows this Lark or GBNF grammar"),
        ("regex", "text", "--regex", "Answer with text that matches this regular expression"),
        ("free_until", "text", "--free-until", "Leave the answer free up to this text, such as </think>"),
    ),
    *_of(
        "Answer",
        "session",
        ("system", "text", "-s --system", "System prompt"),
        ("chat_template", "switch", "--chat-template", "Put the prompt into the chat template"),
        ("thinking", "switch", "--thinking", "Let the model reason before it answers, if it can"),
    ),
    *_of(
        "Output",
        "session",
        (
            "reasoning_format",
            "text",
            "--reasoning-format",
            "Reasoning before an answer: kept separate (auto, deepseek) or left in the text (none)",
        ),
        ("show_draft", "switch", "--show-draft", "Show accepted draft tokens in another colour"),
        ("stats", "switch", "--stats", "Show speed and acceptance after each answer"),
        ("raw", "switch", "--raw", "In a terminal: no word wrap, tool calls as the model wrote them"),
    ),
    *_of(
        "Options",
        "serve",
        ("cors_origin", "texts", "--cors-origin", "Web page that may call, * for all; repeatable"),
        ("allowed_host", "texts", "--allowed-host", "Name by which clients may call this machine; repeatable"),
        ("idle_unload", "number", "--idle-unload", "Unload a model after S seconds without a request"),
        ("models_max", "integer", "--models-max --max-models", "Of several models, how many may be loaded at once"),
    ),
)
# Off unless a user asks: answers are private. Commands that measure ignore them: a prompt that is decoded again would
# find its own answer.
REMEMBERING = ("recall", "learn")
STRUCTURE = ("json_schema", "grammar", "regex", "free_until")  # of one answer: for commands that give several kinds
PROMPTING = ("system", "thinking")  # of the prompt, besides its text: for commands with prompts of their own
# How one answer is printed: for commands that print none to leave out.
PRINTING = ("show_draft", "stats", "raw", "reasoning_format")
BY_KEY = {key: setting for setting in SETTINGS for key in setting.keys}
