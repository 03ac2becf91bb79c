"""Models that keep a running state beside keys and values, or instead of them: Qwen3.5, LFM2, Mamba and others.

A state cannot be shortened by a token as a cache can. For some architectures llama.cpp keeps snapshots of the state as
it was after each of the last rows of a pass (`n_rs_seq`), which is enough for speculation: a rejected draft is the end
of the pass that verified it. Every snapshot is as large as the state, so there are only as many as a share of the
weights pays for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from edgespec.engines.llamacpp.library import library
from edgespec.formats.gguf.check import has_mtp
from edgespec.formats.gguf.header import GgufHeader, GgufNumbers

# Some of the architectures whose states llama.cpp can roll back (llm_arch_supports_rs_rollback): those that tests run,
# and the same with experts. At a file's first load it is tried (`_drops_rows` of facts.py).
WITH_SNAPSHOTS = frozenset({"lfm2", "lfm2moe", "qwen35", "qwen35moe"})
MOST_SNAPSHOTS = 8
SNAPSHOT_SHARE = 0.1  # of the weights' bytes, for the snapshots of one sequence
_SLOWER = 1.2  # a single-token pass, per share: measured .043 at a share of .036, and nothing at .0001
_CHEAP_SHARE = 0.005
# What `auto` takes on by itself. Copies of the state slow a pass by about its share, and by .2 to .4 ms besides:
# measured 3% at a share of .01 and .4 GB, 4% at .036 and .5 GB.
_MOST_SHARE_FOR_MTP, _LEAST_BYTES_FOR_MTP = 0.01, 2 << 30
_STATE_BYTES = 4  # of a number; llama.cpp stores states as float32


def keeps_running_state(model: Any) -> bool:
    """Whether a loaded model's cache cannot be rolled back to any length, as its layers keep a running state."""
    return bool(library().llama_model_is_recurrent(model) or library().llama_model_is_hybrid(model))


@dataclass(frozen=True, slots=True)
class RunningState:
    """The running state of one sequence, and how many `snapshots` of it to keep where drafts are verified.

    `share`: its bytes over those of the weights that a single-token pass reads: with snapshots it copies the state
    besides.
    """

    num_bytes: int
    share: float
    snapshots: int

    @classmethod
    def of(cls, header: GgufHeader) -> Self | None:
        """That of a model, by its metadata; None where every layer keeps keys and values only."""
        numbers = _numbers_per_layer(header)
        if not numbers:
            return None
        num_bytes = sum(recurrent_layers(header)) * numbers * _STATE_BYTES
        if header.architecture not in WITH_SNAPSHOTS:
            return cls(num_bytes, num_bytes / _bytes_per_pass(header), 0)
        affordable = int(SNAPSHOT_SHARE * sum(tensor.num_bytes for tensor in header.tensors) / num_bytes)
        return cls(num_bytes, num_bytes / _bytes_per_pass(header), min(affordable, MOST_SNAPSHOTS))

    def snapshots_for(self, speculates: bool | None) -> int:
        """Whether drafts are verified decides; None: only by lookups, where plain passes must not pay for them."""
        is_wanted = self.share <= _CHEAP_SHARE if speculates is None else speculates
        return self.snapshots if is_wanted else 0


def auto_takes_mtp(header: GgufHeader) -> bool:
    """Whether a model with multi-token prediction layers is loaded with them, and so with snapshots, unasked.

    Its passes then cost more even where the layers never help, which a drafter that nobody asked for may not.
    """
    state = RunningState.of(header)
    is_large = _bytes_per_pass(header) >= _LEAST_BYTES_FOR_MTP
    return state is None or state.share <= (_MOST_SHARE_FOR_MTP if is_large else _CHEAP_SHARE)


def why_only_asked(header: GgufHeader, state: RunningState) -> str:
    """One line: why a model that could speculate decodes plainly, and what turns speculation on."""
    own = "--drafter mtp, as the file has a layer that drafts for it," if has_mtp(header) else "A draft model (-md)"
    slower = f"about {100 * _SLOWER * state.share:.0f}% slower"
    return (
        f"this model's running state would make each token {slower}, which lookups alone rarely earn. "
        f"{own} or --drafter suffix turns speculation on"
    )


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


def _bytes_per_pass(header: GgufHeader) -> float:
    """Of the weights that a pass over one token reads: of experts those that it uses, of a table of tokens one row."""
    used = _number(header, "expert_used_count") / max(_number(header, "expert_count"), 1) or 1
    has_head = any(tensor.name == "output.weight" for tensor in header.tensors)
    total = 0.0
    for tensor in header.tensors:
        if not (has_head and tensor.name == "token_embd.weight"):
            total += tensor.num_bytes * (used if "_exps." in tensor.name else 1)
    return max(total, 1.0)


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
