"""Models that keep a running state beside keys and values, or instead of them: Qwen3.5, LFM2, Mamba and others.

A state cannot be shortened by a token as a cache can. For some architectures llama.cpp keeps snapshots of the state as
it was after each of the last rows of a pass (`n_rs_seq`), which is enough for speculation: a rejected draft is the end
of the pass that verified it. Each pass then copies the state, which lookups alone rarely earn: only what was asked for
by name, or comes with a model of its own, is drafted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from edgespec.engines.llamacpp.library import library
from edgespec.formats.gguf.header import GgufHeader, GgufNumbers

# Some of the architectures whose states llama.cpp can roll back (llm_arch_supports_rs_rollback): those that tests run,
# and the same with experts.
WITH_SNAPSHOTS = frozenset({"lfm2", "lfm2moe", "qwen35", "qwen35moe"})
MOST_SNAPSHOTS = 8
ONLY_ASKED = (
    "on llama.cpp it would cost this model, which keeps a running state, more than lookups alone earn. A draft model "
    "(-md) or --drafter suffix turns it on"
)
_STATE_BYTES = 4  # of a number; llama.cpp stores states as float32


def keeps_running_state(model: Any) -> bool:
    """Whether a loaded model's cache cannot be rolled back to any length, as its layers keep a running state."""
    return bool(library().llama_model_is_recurrent(model) or library().llama_model_is_hybrid(model))


@dataclass(frozen=True, slots=True)
class RunningState:
    """The bytes of the running state of one sequence, and whether llama.cpp can keep snapshots of it."""

    num_bytes: int
    has_snapshots: bool

    @classmethod
    def of(cls, header: GgufHeader) -> Self | None:
        """That of a model, by its metadata; None where every layer keeps keys and values only."""
        numbers = _numbers_per_layer(header)
        if not numbers:
            return None
        num_bytes = sum(recurrent_layers(header)) * numbers * _STATE_BYTES
        return cls(num_bytes, header.architecture in WITH_SNAPSHOTS)

    def snapshots(self, speculates: bool) -> int:
        """How many to keep."""
        return MOST_SNAPSHOTS if speculates and self.has_snapshots else 0


def recurrent_layers(header: GgufHeader) -> list[bool]:
    """Of each layer, whether it keeps a running state and no keys and values."""
    layers = _number(header, "block_count") - _number(header, "nextn_predict_layers")
    if interval := _number(header, "full_attention_interval"):
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    heads = header.metadata.get(f"{header.architecture}.attention.head_count_kv")
    if isinstance(heads, GgufNumbers) and len(heads.items) >= layers:
        return [count == 0 for count in heads.items[:layers]]
    if header.architecture in ("qwen35", "qwen35moe", "qwen3next"):
        return [(layer + 1) % 4 != 0 for layer in range(layers)]
    return [_numbers_per_layer(header) > 0] * layers


def _numbers_per_layer(header: GgufHeader) -> int:
    """How many numbers the state of a layer has (llama.cpp's n_embd_r and n_embd_s); 0 without one."""
    width = _number(header, "embedding_length")
    if size := _number(header, "wkv.head_size"):
        return width * (size + (_number(header, "token_shift_count") or 2))
    if kernel := _number(header, "shortconv.l_cache"):
        return width * (kernel - 1)
    inner, state = _number(header, "ssm.inner_size"), _number(header, "ssm.state_size")
    convolved = inner + 2 * _number(header, "ssm.group_count") * state
    return max(_number(header, "ssm.conv_kernel") - 1, 0) * convolved + state * inner


def _number(header: GgufHeader, name: str) -> int:
    found = header.metadata.get(f"{header.architecture}.{name}")
    return found if isinstance(found, int) else 0
