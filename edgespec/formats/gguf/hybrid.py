"""GGUFs of hybrids that our kernels run: their tensors layer by layer, and the sizes of their running states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from edgespec.formats.architectures import ATTENTION, HEAD_NORMS, MLP, Sizes, Tensor
from edgespec.formats.gguf.header import TensorInfo
from edgespec.formats.gguf.model import GgufModel, Reader, Tensors
from edgespec.formats.gguf.tables import EXPERTS, PREFERENCE, SHARED_EXPERT, STATE_KEYS
from edgespec.formats.onnx.forms import EMBEDDING, HEAD
from edgespec.formats.onnx.hybrid import HybridConfig
from edgespec.formats.onnx.llama_config import Experts, LlamaConfig

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
_MAMBA = {
    "mamba.in_proj.weight": Tensor("ssm_in.weight", "inputs d"),
    "mamba.conv1d.weight": Tensor("ssm_conv1d.weight", "channels taps"),
    "mamba.conv1d.bias": Tensor("ssm_conv1d.bias", "channels"),
    "mamba.dt_bias": Tensor("ssm_dt.bias", "heads"),
    "mamba.A": Tensor("ssm_a", "heads 1"),
    "mamba.D": Tensor("ssm_d", "heads 1"),
    "mamba.norm.weight": Tensor("ssm_norm.weight", "1 values"),
    "mamba.out_proj.weight": Tensor("ssm_out.weight", "d values"),
}
_JOINED_NAME = "ffn_gate_up_exps.weight"
_NEXTN = {
    "eh_proj.weight": Tensor("nextn.eh_proj.weight", "d 2d"),
    "enorm.weight": Tensor("nextn.enorm.weight", "d"),
    "hnorm.weight": Tensor("nextn.hnorm.weight", "d"),
    "norm.weight": Tensor("nextn.shared_head_norm.weight", "d", is_optional=True),
    "embed_tokens.weight": Tensor("nextn.embed_tokens.weight", "v d", is_optional=True),
    "lm_head.weight": Tensor("nextn.shared_head_head.weight", "v d", is_optional=True),
}
_SIGMOID = 2  # llama.cpp's number
# First tokens of a vocabulary that a further layer scores: with Qwen2.5's 97 to 99% of English and code.
MOST_PREDICTED = 1 << 16


class _HybridReader(Reader):
    """`_recurrent`: layers with a running state; `_attention`, `_mixer`: the tensors of either kind of layer."""

    _recurrent: frozenset[int] = frozenset()
    _attention: Mapping[str, Tensor]
    _mixer: Mapping[str, Tensor]
    _second_norm = "ffn_norm.weight"
    _feed_forward: Mapping[str, Tensor] = MLP

    def _layer_table(self, layer: int) -> Mapping[str, Tensor]:
        norms = {**_PRE_NORM, "post_attention_layernorm.weight": Tensor(self._second_norm, "d")}
        return {**norms, **(self._mixer if layer in self._recurrent else self._attention), **self._feeds(layer)}

    def _feeds(self, layer: int) -> Mapping[str, Tensor]:
        """The tensors of a layer's feed-forward."""
        return self._feed_forward

    def _config(self, sizes: Sizes, tensors: Tensors) -> LlamaConfig:
        return HybridConfig(
            **self._settings(sizes, tensors),
            recurrent_layers=self._recurrent,
            taps=sizes.others["taps"],
            key_heads=sizes.others.get("key_heads", 0),
            value_heads=sizes.others.get("heads", 0),
            state_size=sizes.others.get("state", 0),
            value_size=sizes.others.get("value", 0),
            has_gated_attention=self._attention["self_attn.q_proj.weight"].shape == "2q d",
        )

    def _check_heads(self, sizes: Sizes) -> None:
        if not 0 < len(self._recurrent) < sizes.layers:
            raise self._wrong("its layers are all of one kind; of a hybrid some keep a running state and some attend")
        super()._check_heads(sizes)

    def _kv_heads(self, layers: int, heads: int) -> int:
        """Of the layers that attend; those that have none in the list of a file keep a running state."""
        counts = tuple(map(int, self._items("attention.head_count_kv")))
        if not counts:
            return super()._kv_heads(layers, heads)
        kinds = {count for count in counts if count}
        if len(counts) != layers or len(kinds) != 1:
            raise self._wrong(f"its layers have {counts} heads of keys; one number or 0 in each is needed")
        self._recurrent = frozenset(layer for layer, count in enumerate(counts) if not count)
        return kinds.pop()


class Qwen35Reader(_HybridReader):
    """Gated delta nets, and gated attention in every n-th layer; the layer that predicts a further token is left out.

    The feed-forward of Qwen3.5 MoE are routed experts and one that all tokens share.
    """

    _attention = _GATED_ATTENTION
    _mixer = _DELTA_NET
    _second_norm = "post_attention_norm.weight"

    def _sizes(self) -> Sizes:
        found = super()._sizes()
        layers = found.layers - int(self._number("nextn_predict_layers", 0))
        self._infos = dict(self._chosen(layers))
        self._feed_forward = self._routed() if found.experts else MLP
        every, flags = self._size("full_attention_interval", 4), self._items("attention.recurrent_layers")
        self._recurrent = frozenset(n for n in range(layers) if (flags[n : n + 1] or ((n + 1) % every,))[0])
        taps, values, state, value_heads, key_heads = (self._size(key) for key in STATE_KEYS)
        if values != value_heads * state or value_heads % key_heads:
            told = f"{value_heads} heads of {state} values for {key_heads} of keys"
            raise self._wrong(f"its {told} are not {values} wide")
        others = {"taps": taps, "key_heads": key_heads, "heads": value_heads, "state": state, "values": values}
        return replace(found, layers=layers, others=others | {"channels": values + 2 * key_heads * state})

    def _chosen(self, layers: int) -> Iterator[tuple[str, TensorInfo]]:
        """The tensors that the model is made of, by name."""
        return ((name, info) for name, info in self._infos.items() if _layer_of(name) < layers)

    def _experts(self, sizes: Sizes) -> Experts:
        is_joined = "mlp.experts.up.weight" not in self._feed_forward
        return replace(super()._experts(sizes), is_joined=is_joined, has_shared=True)

    def _routed(self) -> Mapping[str, Tensor]:
        """The tables of the experts, whose gate and up may be one matrix."""
        if any(name.endswith(_JOINED_NAME) for name in self._infos):
            down = {name: EXPERTS[name] for name in ("mlp.router.weight", "mlp.experts.down.weight")}
            return {**down, "mlp.experts.gate.weight": Tensor(_JOINED_NAME, "e 2x d"), **SHARED_EXPERT}
        return {**EXPERTS, **SHARED_EXPERT}


class NextnReader(Qwen35Reader):
    """The layer behind the others: it reads a state of the model and the token behind it (DeepSeek-V3, 2.2).

    As a model of one layer. Where it has no embeddings, norm or head, these are the model's.
    """

    def read(self) -> GgufModel:
        found = super().read()
        tensors = found.tensors
        head = tensors.get("model.layers.0.lm_head.weight") or tensors.get(HEAD) or tensors[EMBEDDING]
        for name in ("norm", "embed_tokens"):
            if own := tensors.pop(f"model.layers.0.{name}.weight", None):
                tensors[f"model.{name}.weight"] = own
        tensors.pop("model.layers.0.lm_head.weight", None)
        # Of a large vocabulary most of a pass would be the product with all of the head.
        count = min(head[0].shape[1], MOST_PREDICTED)
        tensors[HEAD] = _some_rows(head, 0, count)
        return replace(found, config=replace(found.config, vocab_size=count))

    def _sizes(self) -> Sizes:
        found = super()._sizes()
        if self._number("nextn_predict_layers", 0) != 1:
            raise self._wrong("it has not one layer that predicts a further token")
        self._recurrent = frozenset()
        return replace(found, layers=1)

    def _chosen(self, layers: int) -> Iterator[tuple[str, TensorInfo]]:
        for name, info in self._infos.items():
            if _layer_of(name) in (-1, layers):
                yield name.replace(f"blk.{layers}.", "blk.0."), info

    def _layer_table(self, layer: int) -> Mapping[str, Tensor]:
        return {**super()._layer_table(layer), **_NEXTN}

    def _config(self, sizes: Sizes, tensors: Tensors) -> LlamaConfig:
        found = super()._config(sizes, tensors)
        assert isinstance(found, HybridConfig)
        return replace(found, is_nextn=True)

    def _check_heads(self, sizes: Sizes) -> None:
        super(_HybridReader, self)._check_heads(sizes)


class Lfm2Reader(_HybridReader):
    """Short convolutions, and attention in the layers that have heads of keys.

    LFM2 MoE has routed experts behind its first layers.
    """

    _attention = _NORMED_ATTENTION
    _mixer = _SHORT_CONVOLUTION

    def _sizes(self) -> Sizes:
        found = super()._sizes()
        if found.experts and self._number("expert_gating_func") != _SIGMOID:
            raise self._wrong(f"its expert_gating_func is not {_SIGMOID}, a sigmoid")
        return replace(found, others={"taps": self._size("shortconv.l_cache")})

    def _experts(self, sizes: Sizes) -> Experts:
        return replace(super()._experts(sizes), first_layer=self._num_dense)

    def _feeds(self, layer: int) -> Mapping[str, Tensor]:
        return {**EXPERTS, **PREFERENCE} if self._kind.experts and layer >= self._num_dense else MLP

    @property
    def _num_dense(self) -> int:
        return int(self._number("leading_dense_block_count", 0))


class GraniteHybridReader(_HybridReader):
    """Mamba-2, and attention in the layers that have heads of keys; dense, or with experts beside a shared one."""

    _attention = ATTENTION
    _mixer = _MAMBA

    def _sizes(self) -> Sizes:
        found = super()._sizes()
        if found.experts:
            shared = {name: row for name, row in SHARED_EXPERT.items() if name != "mlp.shared_gate.weight"}
            self._feed_forward = {**EXPERTS, **shared}
        taps, values, state, value_heads, groups = (self._size(key) for key in STATE_KEYS)
        if groups != 1 or values % (16 * value_heads) or state % 16:
            told = f"{value_heads} heads, {values} values and {state} numbers of a key in {groups} groups"
            raise self._wrong(f"it has {told}; the kernels have one group, and heads of sizes that 16 divides")
        others = {"taps": taps, "key_heads": 1, "heads": value_heads, "state": state, "values": values}
        channels = values + 2 * state
        others |= {"value": values // value_heads, "channels": channels, "inputs": values + channels + value_heads}
        return replace(found, others=others)

    def _experts(self, sizes: Sizes) -> Experts:
        return replace(super()._experts(sizes), has_shared=True, gates_shared=False)

    def _tensors(self, sizes: Sizes) -> Tensors:
        """The matrix in front of a Mamba layer as its parts: gates, values, keys and queries, times."""
        found, numbers = super()._tensors(sizes), sizes.others
        for layer in self._recurrent:
            whole, at = found.pop(f"model.layers.{layer}.mamba.in_proj.weight"), 0
            sizes_of = numbers["values"], numbers["values"], 2 * numbers["state"], numbers["heads"]
            for part, count in zip(("z", "x", "bc", "dt"), sizes_of, strict=True):
                found[f"model.layers.{layer}.mamba.in_proj_{part}.weight"] = _some_rows(whole, at, count)
                at += count
        return found


def _some_rows(matrix: tuple[TensorInfo, Tensor], start: int, count: int) -> tuple[TensorInfo, Tensor]:
    """`count` rows of a matrix from `start` on, as a matrix."""
    info, row = matrix
    size = info.num_bytes // info.shape[1]
    return replace(info, shape=(info.shape[0], count), num_bytes=count * size, offset=info.offset + start * size), row


def _layer_of(name: str) -> int:
    """The number of the layer that a tensor belongs to; -1: to none."""
    start, number, *_ = (*name.split("."), "", "")
    return int(number) if start == "blk" and number.isdigit() else -1
