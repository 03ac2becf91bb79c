"""GGUFs of hybrids that our kernels run: their tensors layer by layer, and the sizes of their running states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edgespec.formats.architectures import ATTENTION, HEAD_NORMS, MLP, Sizes, Tensor
from edgespec.formats.gguf.header import GgufHeader, GgufNumbers
from edgespec.formats.gguf.model import SIZES, STATE_KEYS, Kind, Reader, Tensors
from edgespec.formats.onnx.hybrid import HybridConfig
from edgespec.formats.onnx.llama_config import LlamaConfig

_PRE_NORM = {"input_layernorm.weight": Tensor("attn_norm.weight", "d")}
_NORMED_ATTENTION = {**ATTENTION, **HEAD_NORMS}
_GATED_ATTENTION = {**_NORMED_ATTENTION, "self_attn.q_proj.weight": Tensor("attn_q.weight", "2q d")}
_DELTA_NET = {
    "linear_attn.in_proj_qkv.weight": Tensor("attn_qkv.weight", "channels d"),
    "linear_attn.in_proj_z.weight": Tensor("attn_gate.weight", "values d"),
    "linear_attn.in_proj_b.weight": Tensor("ssm_beta.weight", "heads d"),
    "linear_attn.in_proj_a.weight": Tensor("ssm_alpha.weight", "heads d"),
    "linear_attn.conv1d.weight": Tensor("ssm_conv1d.weight", "channels taps"),
    "linear_attn.dt_bias": Tensor("ssm_dt.bias", "heads"),
    "linear_attn.A": Tensor("ssm_a", "heads"),
    "linear_attn.norm.weight": Tensor("ssm_norm.weight", "state"),
    "linear_attn.out_proj.weight": Tensor("ssm_out.weight", "d values"),
}
_SHORT_CONVOLUTION = {
    "conv.in_proj.weight": Tensor("shortconv.in_proj.weight", "3d d"),
    "conv.conv.weight": Tensor("shortconv.conv.weight", "d taps"),
    "conv.out_proj.weight": Tensor("shortconv.out_proj.weight", "d d"),
}


def hybrid_reader(path: Path, header: GgufHeader, kind: Kind) -> Reader:
    reader = {"qwen35": _Qwen35, "lfm2": _Lfm2}[header.architecture]
    return reader(path, header, kind)


@dataclass(frozen=True, slots=True)
class _HybridSizes(Sizes):
    """`values`: of all heads of a gated delta net; `channels`: that it convolves."""

    taps: int = 0
    key_heads: int = 0
    value_heads: int = 0
    state: int = 0

    def shape(self, letters: str) -> tuple[int, ...]:
        values = self.value_heads * self.state
        own = {"heads": self.value_heads, "values": values, "state": self.state, "taps": self.taps}
        own |= {"channels": values + 2 * self.key_heads * self.state, "2q": 2 * self.heads * self.head_dim}
        return tuple(own[each] if each in own else Sizes.shape(self, each)[0] for each in letters.split())


class _HybridReader(Reader):
    """`_recurrent`: layers with a running state; `_attention`, `_mixer`: the tensors of either kind of layer."""

    _recurrent: frozenset[int] = frozenset()
    _attention: Mapping[str, Tensor]
    _mixer: Mapping[str, Tensor]
    _second_norm = "ffn_norm.weight"

    def _layer_table(self, layer: int) -> Mapping[str, Tensor]:
        norms = {**_PRE_NORM, "post_attention_layernorm.weight": Tensor(self._second_norm, "d")}
        return {**norms, **(self._mixer if layer in self._recurrent else self._attention), **MLP}

    def _config(self, sizes: Sizes, tensors: Tensors) -> LlamaConfig:
        assert isinstance(sizes, _HybridSizes)
        return HybridConfig(
            **self._settings(sizes, tensors),
            rotary_dim=self._num_rotated(sizes),
            recurrent_layers=self._recurrent,
            taps=sizes.taps,
            key_heads=sizes.key_heads,
            value_heads=sizes.value_heads,
            state_size=sizes.state,
            has_gated_attention=self._attention["self_attn.q_proj.weight"].shape == "2q d",
        )

    def _check_heads(self, sizes: Sizes) -> None:
        if not 0 < len(self._recurrent) < sizes.layers:
            raise self._wrong("its layers are all of one kind; of a hybrid some keep a running state and some attend")
        super()._check_heads(sizes)

    def _num_rotated(self, sizes: Sizes) -> int:
        rotated = self._size("rope.dimension_count", sizes.head_dim)
        if rotated % 2 or rotated > sizes.head_dim:
            raise self._wrong(f"its rope.dimension_count {rotated} is odd, or above its head size {sizes.head_dim}")
        return rotated

    def _numbers(self, key: str) -> tuple[int, ...]:
        """A number of each layer, as a file lists them; empty without a list."""
        found = self._value(key)
        return tuple(int(each) for each in found.items) if isinstance(found, GgufNumbers) else ()


class _Qwen35(_HybridReader):
    """Gated delta nets, and gated attention in every n-th layer; layers that predict further tokens are left out."""

    _attention = _GATED_ATTENTION
    _mixer = _DELTA_NET
    _second_norm = "post_attention_norm.weight"

    def _sizes(self) -> Sizes:
        all_layers, context, width, inner, heads = (self._size(key) for key in SIZES)
        layers = all_layers - int(self._number("nextn_predict_layers", 0))
        for name in [name for name in self._infos if name.startswith("blk.") and not _is_before(name, layers)]:
            del self._infos[name]
        every, flags = self._size("full_attention_interval", 4), self._numbers("attention.recurrent_layers")
        self._recurrent = frozenset(n for n in range(layers) if (flags[n : n + 1] or ((n + 1) % every,))[0])
        taps, values, state, value_heads, key_heads = (self._size(key) for key in STATE_KEYS)
        if values != value_heads * state or value_heads % key_heads:
            told = f"{value_heads} heads of {state} values for {key_heads} of keys"
            raise self._wrong(f"its {told} are not {values} wide")
        head_dim, kv_heads = self._size("attention.key_length", width // heads), self._size("attention.head_count_kv")
        return _HybridSizes(
            *(layers, width, inner, heads, kv_heads, head_dim, len(self._header.tokens), context),
            taps=taps,
            key_heads=key_heads,
            value_heads=value_heads,
            state=state,
        )


class _Lfm2(_HybridReader):
    """Short convolutions, and attention in the layers that have heads of keys."""

    _attention = _NORMED_ATTENTION
    _mixer = _SHORT_CONVOLUTION

    def _sizes(self) -> Sizes:
        layers, context, width, inner, heads = (self._size(key) for key in SIZES)
        counts = self._numbers("attention.head_count_kv")
        kinds = {count for count in counts if count}
        if len(counts) != layers or len(kinds) != 1:
            raise self._wrong(f"its layers have {counts or 'unknown'} heads of keys; one number or 0 in each is needed")
        self._recurrent = frozenset(layer for layer, count in enumerate(counts) if not count)
        head_dim, taps = self._size("attention.key_length", width // heads), self._size("shortconv.l_cache")
        tokens = len(self._header.tokens)
        return _HybridSizes(layers, width, inner, heads, kinds.pop(), head_dim, tokens, context, taps=taps)


def _is_before(name: str, layers: int) -> bool:
    """Whether a tensor belongs to one of the first layers."""
    number = name.split(".")[1]
    return number.isdigit() and int(number) < layers
