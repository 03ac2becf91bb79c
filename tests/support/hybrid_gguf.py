"""Random hybrid models as GGUF files: layers with a running state beside layers with keys and values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tiny_gguf import Shape, begin, finish, vocabulary, write_vocabulary

Extents = Mapping[str, tuple[int, ...]]
Metadata = Mapping[str, Any] | None
CONV_KERNEL = 4


@dataclass(frozen=True)
class HybridShape:
    """Sizes of a hybrid; every fourth layer has keys and values. `rotated`: of a head's values, 0: all.

    `value_size`: of Granite's heads with a state; others have values as wide as keys.

    `experts` of a mixture: count, used, inner size; `hidden` is then that of Qwen3.5's shared one, or of LFM2's first
    layer. `is_joined`: their gate and up are one tensor.
    """

    layers: int = 4
    width: int = 64
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    rotated: int = 0
    state_heads: int = 4
    key_heads: int = 4
    state_size: int = 16
    value_size: int = 32
    context: int = 512
    merges: int = 40
    seed: int = 0
    experts: tuple[int, int, int] = (0, 0, 0)
    is_joined: bool = False
    weights: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32

    @property
    def lfm2(self) -> str:
        return "lfm2moe" if self.experts[0] else "lfm2"

    @property
    def qwen35(self) -> str:
        return "qwen35moe" if self.experts[0] else "qwen35"

    def is_recurrent(self, layer: int) -> bool:
        return layer % 4 != 3


def write_lfm2(path: Path, shape: HybridShape = HybridShape(), *, metadata: Metadata = None) -> Path:
    """Write a random LFM2: short convolutions and attention. `metadata` replaces entries."""
    writer = _begin(path, shape.lfm2, shape)
    writer.add_head_count_kv([0 if shape.is_recurrent(n) else shape.kv_heads for n in range(shape.layers)])
    writer.add_uint32(f"{shape.lfm2}.shortconv.l_cache", CONV_KERNEL - 1)
    if shape.experts[0]:
        writer.add_expert_feed_forward_length(shape.experts[2])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(1)
    width = shape.width
    recurrent = {
        "shortconv.conv.weight": (width, CONV_KERNEL - 1),
        "shortconv.in_proj.weight": (3 * width, width),
        "shortconv.out_proj.weight": (width, width),
    }

    def feeds(layer: int) -> Extents:
        return _feed_forward(shape if layer else replace(shape, experts=(0, 0, 0)), "ffn_norm", shared=False)

    attention = _attention(shape, width // shape.heads)
    extents = {"token_embd_norm.weight": (width,), **_layers(shape, feeds, recurrent, attention)}
    return _finish(writer, path, extents, shape, {}, metadata)


GRANITE_SCALES = {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0, "attention.scale": 0.09}


def write_granite(path: Path, shape: HybridShape = HybridShape(), *, metadata: Metadata = None) -> Path:
    """Write a random Granite 4 H: Mamba-2, and attention without positions. Values are `value_size` wide."""
    writer = _begin(
        path, "granitehybrid", replace(shape, hidden=shape.experts[2] or shape.hidden), size=shape.head_size
    )
    inner, width = shape.state_heads * shape.value_size, shape.width
    channels, size = inner + 2 * shape.state_size, shape.head_size
    writer.add_head_count_kv([0 if shape.is_recurrent(n) else shape.kv_heads for n in range(shape.layers)])
    for name, scale in GRANITE_SCALES.items():
        writer.add_float32(f"granitehybrid.{name}", scale)
    writer.add_rope_scaling_finetuned(False)
    _add_states(writer, shape, inner, 1)
    if shape.experts[0]:
        writer.add_expert_shared_feed_forward_length(shape.hidden)
    recurrent = {
        "ssm_in.weight": (inner + channels + shape.state_heads, width),
        "ssm_conv1d.weight": (channels, CONV_KERNEL),
        "ssm_conv1d.bias": (channels,),
        "ssm_dt.bias": (shape.state_heads,),
        "ssm_a": (shape.state_heads, 1),
        "ssm_d": (shape.state_heads, 1),
        "ssm_norm.weight": (1, inner),
        "ssm_out.weight": (width, inner),
    }
    feeds = {name: own for name, own in _feed_forward(shape, "ffn_norm").items() if "gate_inp_shexp" not in name}
    attention = {name: own for name, own in _attention(shape, size).items() if "norm" not in name}
    extents = {"output_norm.weight": (width,), **_layers(shape, lambda _: feeds, recurrent, attention)}
    return _finish(writer, path, extents, shape, {}, metadata)


def write_qwen35(
    path: Path,
    shape: HybridShape = HybridShape(),
    *,
    has_mtp: bool = False,
    tensors: Mapping[str, NDArray[np.float32]] | None = None,
    only_mtp: bool = False,
    metadata: Metadata = None,
) -> Path:
    """Write a random Qwen3.5: gated delta nets, and attention in every fourth layer.

    `has_mtp`: with a multi-token prediction layer; `only_mtp`: without all others; `tensors` and `metadata` replace
    what it would hold.
    """
    writer = _begin(path, shape.qwen35, shape, size=shape.head_size, further=has_mtp)
    inner, size = shape.state_heads * shape.state_size, shape.head_size
    channels = inner + 2 * shape.key_heads * shape.state_size
    writer.add_head_count_kv(shape.kv_heads)
    rotated = shape.rotated or size
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_dimension_sections([rotated // 4, rotated // 8, rotated // 8, 0])
    _add_states(writer, shape, inner, shape.key_heads)
    writer.add_uint32(f"{shape.qwen35}.full_attention_interval", 4)
    if shape.experts[0]:
        writer.add_expert_feed_forward_length(shape.experts[2])
        writer.add_expert_shared_feed_forward_length(shape.hidden)
    recurrent = {
        "attn_qkv.weight": (channels, shape.width),
        "attn_gate.weight": (inner, shape.width),
        "ssm_conv1d.weight": (channels, CONV_KERNEL),
        "ssm_dt.bias": (shape.state_heads,),
        "ssm_a": (shape.state_heads,),
        "ssm_beta.weight": (shape.state_heads, shape.width),
        "ssm_alpha.weight": (shape.state_heads, shape.width),
        "ssm_norm.weight": (shape.state_size,),
        "ssm_out.weight": (shape.width, inner),
    }
    feeds, attention = _feed_forward(shape, "post_attention_norm"), _attention(shape, size, gated=True)
    extents: Extents = {"output_norm.weight": (shape.width,)}
    if has_mtp:
        writer.add_uint32(f"{shape.qwen35}.nextn_predict_layers", 1)
        pairs: dict[str, tuple[int, ...]] = {"nextn.eh_proj.weight": (shape.width, 2 * shape.width)}
        pairs |= {f"nextn.{name}.weight": (shape.width,) for name in ("enorm", "hnorm")}
        own = {"attn_norm.weight": (shape.width,), **feeds, **attention, **pairs}
        extents = {**extents, **{f"blk.{shape.layers}.{name}": each for name, each in own.items()}}
    if not only_mtp:
        extents = {**extents, **_layers(shape, lambda _: feeds, recurrent, attention)}
    return _finish(writer, path, extents, shape, tensors or {}, metadata)


def _begin(
    path: Path, architecture: str, shape: HybridShape, *, size: int | None = None, further: int = 0
) -> gguf.GGUFWriter:
    """`size` of heads, where it is not width / heads; `further` layers than the model's own."""
    sizes = {"context": shape.context, "width": shape.width, "hidden": shape.hidden, "heads": shape.heads}
    writer = begin(path, architecture, layers=shape.layers + further, size=size, **sizes)
    if shape.experts[0]:
        writer.add_expert_count(shape.experts[0])
        writer.add_expert_used_count(shape.experts[1])
    return writer


def _add_states(writer: gguf.GGUFWriter, shape: HybridShape, inner: int, groups: int) -> None:
    writer.add_ssm_conv_kernel(CONV_KERNEL)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(shape.state_size)
    writer.add_ssm_time_step_rank(shape.state_heads)
    writer.add_ssm_group_count(groups)


def _layers(shape: HybridShape, feeds: Callable[[int], Extents], recurrent: Extents, attention: Extents) -> Extents:
    found: dict[str, tuple[int, ...]] = {}
    for layer in range(shape.layers):
        mixes = recurrent if shape.is_recurrent(layer) else attention
        own = {"attn_norm.weight": (shape.width,), **feeds(layer), **mixes}
        found |= {f"blk.{layer}.{name}": extents for name, extents in own.items()}
    return found


def _feed_forward(shape: HybridShape, norm: str, *, shared: bool = True) -> Extents:
    """Of a layer; `shared`: beside routed experts there is one for all tokens."""
    count, _, inner = shape.experts
    end, width = "_shexp" if count else "", shape.width
    found: dict[str, tuple[int, ...]] = {f"{norm}.weight": (width,)}
    if shared or not count:
        found |= {f"ffn_{name}{end}.weight": (shape.hidden, width) for name in ("gate", "up")}
        found[f"ffn_down{end}.weight"] = width, shape.hidden
    if not count:
        return found
    found |= {"ffn_gate_inp_shexp.weight": (width,)} if shared else {"exp_probs_b.bias": (count,)}
    found["ffn_gate_inp.weight"] = count, width
    gates = {"gate_up": 2 * inner} if shape.is_joined else {"gate": inner, "up": inner}
    found |= {f"ffn_{name}_exps.weight": (count, size, width) for name, size in gates.items()}
    return {**found, "ffn_down_exps.weight": (count, width, inner)}


def _attention(shape: HybridShape, size: int, *, gated: bool = False) -> Extents:
    """Heads of `size`; `gated`: each query has a gate beside it."""
    queries, keys = shape.heads * size, shape.kv_heads * size
    return {
        "attn_q_norm.weight": (size,),
        "attn_k_norm.weight": (size,),
        "attn_q.weight": (queries * (1 + gated), shape.width),
        "attn_k.weight": (keys, shape.width),
        "attn_v.weight": (keys, shape.width),
        "attn_output.weight": (shape.width, queries),
    }


def _finish(
    writer: gguf.GGUFWriter,
    path: Path,
    extents: Extents,
    shape: HybridShape,
    given: Mapping[str, NDArray[np.float32]],
    metadata: Metadata,
) -> Path:
    tokens = write_vocabulary(writer, Shape(merges=shape.merges))
    rng = np.random.default_rng(shape.seed)
    further = {name: values.shape for name, values in given.items() if name not in extents}
    sizes = {"token_embd.weight": (tokens, shape.width), **extents, **further}
    drawn = {name: given.get(name, _values(rng, name, size)) for name, size in sizes.items()}
    kept = re.compile(r"conv|norm|ssm_[ad]\b")  # as floats; of Granite vectors are matrices
    floats = gguf.GGMLQuantizationType.F32
    return finish(writer, path, drawn, metadata, lambda name: floats if kept.search(name) else shape.weights)


def _values(rng: np.random.Generator, name: str, size: tuple[int, ...]) -> NDArray[np.float32]:
    if "norm" in name:
        return np.ones(size, np.float32)
    drawn = rng.standard_normal(size).astype(np.float32)
    if name.endswith("ssm_a"):  # how fast states fade: negative
        return (-np.abs(drawn) / np.float32(4)).astype(np.float32)
    scale = 8 if "embd" in name else 1.5 / math.sqrt(size[-1]) if len(size) > 1 else 1
    return drawn * np.float32(scale)


def tensors_of(path: Path) -> dict[str, NDArray[np.float32]]:
    """The float32 tensors of a GGUF by name, matrices as [rows, columns]."""
    return {tensor.name: np.array(tensor.data).reshape(tensor.shape[::-1]) for tensor in gguf.GGUFReader(path).tensors}


def cycle_tensors(shape: HybridShape, share: float) -> tuple[dict[str, NDArray[np.float32]], NDArray[np.bool_]]:
    """Tensors with which a Qwen3.5 writes its vocabulary in a cycle, and behind which tokens its layer is right.

    Token n + 1 follows token n: no layer adds anything, and the head scores a token by the embedding of the one before
    it. The further layer passes the token on, and its own head is wrong behind the other tokens.
    """
    tokens, rng = len(vocabulary(shape.merges)[0]), np.random.default_rng(shape.seed)
    table = rng.standard_normal((tokens, shape.width)).astype(np.float32)
    known = rng.random(tokens) < share
    wrong = np.roll(table, 1, axis=0)
    others = np.flatnonzero(np.roll(~known, 1))
    wrong[others] = wrong[np.roll(others, 1)]
    silent = {"ffn_down": shape.hidden, "attn_output": shape.heads * shape.head_size}
    silent["ssm_out"] = shape.state_heads * shape.state_size
    one, none = np.eye(shape.width, dtype=np.float32), np.zeros((shape.width, shape.width), np.float32)
    further = f"blk.{shape.layers}.nextn"
    return {
        "token_embd.weight": table,
        "output.weight": np.roll(table, 1, axis=0),
        f"{further}.eh_proj.weight": np.concatenate((one, none), axis=1),
        f"{further}.shared_head_head.weight": wrong,
        **{
            f"blk.{layer}.{name}.weight": np.zeros((shape.width, inputs), np.float32)
            for layer in range(shape.layers + 1)
            for name, inputs in silent.items()
            if (name == "ssm_out") == (layer < shape.layers and shape.is_recurrent(layer)) or name == "ffn_down"
        },
    }, known
