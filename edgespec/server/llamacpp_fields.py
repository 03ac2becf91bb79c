"""Fields of llama.cpp's server that its clients send with every request, and that ask for nothing else here.

Values that would change the text are refused: samplers that are not built in, and another order of the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.reports import PromptProgress
from edgespec.server.fields import Fields
from edgespec.server.http_errors import bad_request
from edgespec.server.service import Loaded

OWN_ORDER = ("penalties", "temperature", "top_k", "top_p", "min_p")
_THEIR_ORDER = ("penalties", "top_k", "top_p", "min_p", "temperature")  # llama.cpp's default


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """Samplers that clients of one protocol know and that are not built in.

    `off`: the values that turn each one off, its default first; `others`: fields that change nothing while it is off,
    and those of the protocol that never do.
    """

    off: Mapping[str, tuple[Any, ...]]
    others: tuple[str, ...]


LLAMACPP = Unbuilt(
    dict.fromkeys(("dynatemp_range", "mirostat", "xtc_probability", "dry_multiplier"), (0,))
    | {"typical_p": (1,), "typ_p": (1,), "top_n_sigma": (-1, 0), "min_keep": (0, 1)}
    | {"adaptive_target": (-1, -0.01)},  # llama-server's default and SillyTavern's
    (
        *("dynatemp_exponent", "mirostat_tau", "mirostat_eta", "xtc_threshold", "adaptive_decay", "backend_sampling"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "n_keep"),
    ),
)
OLLAMA = Unbuilt(
    {"typical_p": (1,), "tfs_z": (1,), "mirostat": (0,), "penalize_newline": (True,)},
    (
        *("mirostat_tau", "mirostat_eta", "num_batch", "num_gpu", "num_thread", "num_keep", "main_gpu", "use_mmap"),
        *("numa", "use_mlock", "low_vram", "f16_kv", "vocab_only", "logits_all", "embedding_only"),  # how it is loaded
    ),
)
_OTHER_NAMES = ("dry", "top_n_sigma", "typ_p", "typical_p", "xtc", "mirostat", "adaptive_p")
_NAMES = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature", "adaptive_p"]
_LETTERS = dict(zip("edskypmxta", _NAMES, strict=True))  # llama.cpp's short form of a list of samplers
# SillyTavern sends every setting under the names of all servers that it knows; llama-server reads one of them.
_OTHER_FIELDS = {
    **dict.fromkeys(("max_new_tokens", "num_predict"), "n_predict"),
    **dict.fromkeys(("rep_pen", "repetition_penalty"), "repeat_penalty"),
    **dict.fromkeys(("rep_pen_range", "repetition_penalty_range"), "repeat_last_n"),
    "typical": "typical_p",
    "nsigma": "top_n_sigma",
    "mirostat_mode": "mirostat",
    "sampler_seed": "seed",
    "stopping_strings": "stop",
    "ban_eos_token": "ignore_eos",
}
# And settings that llama-server does not have.
_OF_OTHERS = (
    *("skew", "top_a", "tfs", "smoothing_factor", "smoothing_curve", "guidance_scale", "negative_prompt"),
    *("min_tokens", "max_tokens_second", "rep_pen_slope", "custom_token_bans", "banned_strings"),
    *("add_bos_token", "skip_special_tokens", "include_reasoning"),
)
_NOTHING: tuple[Any, ...] = (0, 1, "", [])  # what they are when they ask for nothing; 0 and 1: false and true too


def read_unbuilt(fields: Fields, samplers: Unbuilt) -> None:
    """Accept samplers that are turned off. Raises HttpError for others."""
    for name, off in samplers.off.items():
        fields.refuse(name, f"this sampler is not built in; {json.dumps(off[0])} turns it off", off)
    fields.ignore(*samplers.others)


def read_llamacpp(fields: Fields, loaded: Loaded, *, any_order: bool = False) -> None:
    """Accept what changes nothing. Raises HttpError for what would. `any_order`: `samplers` is not looked at."""
    read_unbuilt(fields, LLAMACPP)
    if fields.flag("post_sampling_probs") and (fields.given("n_probs") or fields.given("logprobs")):
        fields.note("post_sampling_probs", "the probabilities are those before sampling")
    if not fields.flag("cache_prompt", True):
        fields.note("cache_prompt", "a prompt that begins as an earlier one is always read from there on")
    slot = fields.whole("id_slot", -1, loaded.model.options.parallel - 1)
    if slot is not None and slot >= 0:
        fields.note("id_slot", "a request takes the free context whose text it continues furthest")
    if any_order:
        fields.ignore("samplers")
    else:
        _check_samplers(fields)


def read_other_names(fields: Fields) -> None:
    """Accept what SillyTavern sends besides. Raises HttpError where a setting comes only under another name."""
    for name, known in _OTHER_FIELDS.items():
        fields.refuse(name, f"use {known}", (fields.given(known),))
    for name in _OF_OTHERS:
        fields.without_effect(name, "as in llama-server there is no such setting", _NOTHING)
    fields.ignore("api_type", "api_server", "truncation_length", "num_ctx")  # to itself


def _check_samplers(fields: Fields) -> None:
    given = fields.given("samplers")
    is_short = isinstance(given, str) and {*given} <= {*_LETTERS}
    given = [_LETTERS[letter] for letter in given] if is_short else fields.listed("samplers", 64)
    if not given:
        return
    order = tuple(name for name in given if name not in _OTHER_NAMES)
    if order not in (OWN_ORDER, _THEIR_ORDER):
        raise bad_request(
            f"samplers must name these, in this order: {', '.join(OWN_ORDER)} (turn one off by its own field)",
            "samplers",
            "unsupported_parameter",
        )
    if order != OWN_ORDER:
        fields.note("samplers", f"the order here is {', '.join(OWN_ORDER)}")


def prompt_progress(progress: PromptProgress) -> dict[str, Any]:
    """How much of the prompt is read, under llama.cpp's names."""
    return {
        "total": progress.total,
        "cache": progress.reused,
        "processed": progress.processed,
        "time_ms": int(1000 * progress.seconds),
    }
