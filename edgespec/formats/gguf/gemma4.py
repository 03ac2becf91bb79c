"""What a GGUF of a Gemma 4 holds: its layers differ in the sizes of heads and feed-forward, and in what they have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgespec.formats.architectures import Sizes, Tensor
from edgespec.formats.gguf.header import GgufNumbers, TensorInfo
from edgespec.formats.gguf.model import HEAD_MULTIPLE, GgufModel, Reader
from edgespec.formats.onnx.forms import EMBEDDING, HEAD
from edgespec.formats.onnx.gemma4 import Gemma4Config, Gemma4Layer

# Tensors that all layers have, or none of them.
PER_LAYER = ("per_layer_input_gate.weight", "per_layer_projection.weight", "post_per_layer_input_layernorm.weight")
ROUTED = (
    *("mlp.router.weight", "mlp.router.scale", "mlp.experts.gate.weight", "mlp.experts.down.weight"),
    *("mlp.experts.scale", "pre_feedforward_layernorm_2.weight"),
    *("post_feedforward_layernorm_1.weight", "post_feedforward_layernorm_2.weight"),
)
OUTER = (
    *("model.embed_tokens_per_layer.weight", "model.per_layer_model_projection.weight"),
    "model.per_layer_projection_norm.weight",
)


class Gemma4Reader(Reader):
    def read(self) -> GgufModel:
        self._refuse_unknown_keys()
        layers, context, width, heads = (
            self._size(key) for key in ("block_count", "context_length", "embedding_length", "attention.head_count")
        )
        windowed = self._windowed(layers)
        inner, kv_heads = (self._each_layer(key, layers) for key in ("feed_forward_length", "attention.head_count_kv"))
        head_dims = self._head_dim("", width // heads), self._head_dim("_swa", width // heads)
        experts = int(self._number("expert_count", 0))
        outer = self._made(
            *(layers, width, inner[0], heads, kv_heads[0], head_dims[0], len(self._header.tokens), context, experts),
            self._size("expert_feed_forward_length") if experts else 0,
            int(self._number("embedding_length_per_layer_input", 0)),
        )
        sizes = [
            replace(outer, inner=inner[layer], kv_heads=kv_heads[layer], head_dim=head_dims[layer in windowed])
            for layer in range(layers)
        ]
        tensors = self._tensors(sizes.__getitem__)
        self._check_parts(tensors, outer)
        own = {
            "intermediate_size": max(inner),
            "window_head_dim": head_dims[1],
            "attention_scale": 1.0,
            "layers": self._layers(sizes, windowed, tensors),
            "per_layer_size": outer.per_layer,
            "has_scales": "model.layers.0.layer_scalar" in tensors,
        }
        config = Gemma4Config(**self._settings(outer, tensors) | own)
        return GgufModel(self._path, self._header, self._kind, config, tensors)

    def _made(self, *sizes: int) -> Sizes:
        return Sizes(*sizes)

    def _each_layer(self, key: str, layers: int) -> list[int]:
        """A size that is given for all layers together or for each."""
        found = self._value(key)
        if not isinstance(found, GgufNumbers):
            return [self._size(key)] * layers
        if len(found.items) != layers or not all(isinstance(each, int) and 0 < each < 1 << 31 for each in found.items):
            raise self._wrong(f"its {key} is {str(found.items)[:40]}, a size for each of {layers} layers was expected")
        return [int(each) for each in found.items]

    def _head_dim(self, kind: str, default: int) -> int:
        """Of full layers ("") or windowed ones ("_swa"); all of a head is rotated."""
        found = self._size(f"attention.key_length{kind}", default)
        for key in (f"attention.value_length{kind}", f"rope.dimension_count{kind}"):
            if self._size(key, found) != found:
                raise self._wrong(f"its {key} {self._value(key)} is not its head size {found}")
        if found % HEAD_MULTIPLE:
            raise self._wrong(f"it has attention heads of {found} values; a multiple of {HEAD_MULTIPLE} is needed")
        return found

    def _layers(
        self, sizes: list[Sizes], windowed: frozenset[int], tensors: dict[str, tuple[TensorInfo, Tensor]]
    ) -> tuple[Gemma4Layer, ...]:
        """Where each layer's keys and values are; a later one reads those of the last of its kind that has them."""
        own = len(sizes) - int(self._number("attention.shared_kv_layers", 0))
        found: list[Gemma4Layer] = []
        last: dict[bool, Gemma4Layer] = {}
        next_head = 0
        for layer, size in enumerate(sizes):
            is_windowed = layer in windowed
            if layer < own:
                has = {kind for kind in "kv" if f"model.layers.{layer}.self_attn.{kind}_proj.weight" in tensors}
                if "k" not in has or f"model.layers.{layer}.self_attn.k_norm.weight" not in tensors:
                    raise self._wrong(f"its layer {layer} has no keys")
                projections = "qkv" if "v" in has else "qk"
                last[is_windowed] = Gemma4Layer(projections, size.kv_heads, size.head_dim, next_head)
                next_head += size.kv_heads
                found.append(last[is_windowed])
            elif is_windowed not in last or last[is_windowed].kv_heads != size.kv_heads:
                raise self._wrong(f"its layer {layer} has no keys, and no layer before it has keys of its kind")
            else:
                found.append(replace(last[is_windowed], projections="q"))
        return tuple(found)

    def _check_parts(self, tensors: dict[str, Any], sizes: Sizes) -> None:
        """Raise ModelFileError where only some layers have the tensors of a part, or lack those that sizes ask for."""
        layers = range(sizes.layers)
        parts = (*OUTER, *(f"model.layers.{layer}.{name}" for layer in layers for name in PER_LAYER))
        for is_there, names in (
            (bool(sizes.per_layer), parts),
            (bool(sizes.experts), [f"model.layers.{layer}.{name}" for layer in layers for name in ROUTED]),
            ("model.layers.0.layer_scalar" in tensors, [f"model.layers.{layer}.layer_scalar" for layer in layers]),
        ):
            if wrong := [name for name in names if (name in tensors) != is_there]:
                raise self._wrong(f"it {'lacks' if is_there else 'should not have'} what it calls {wrong[0]}")


class _DrafterSizes(Sizes):
    """Of a drafter; `per_layer`: the width of its target."""

    def shape(self, letters: str) -> tuple[int, ...]:
        own = {"P": self.per_layer, "2P": 2 * self.per_layer}
        return tuple(own[each] if each in own else Sizes.shape(self, each)[0] for each in letters.split())


class Gemma4DrafterReader(Gemma4Reader):
    """Gemma 4's drafter: layers of queries alone. Until its target is known, embeddings are its own."""

    def read(self) -> GgufModel:
        found = super().read()
        config, width = found.config, self._size("embedding_length_out")
        assert isinstance(config, Gemma4Config)
        # Its rows are at the last token that the target has read, one before their place (`Gemma4DrafterGraph`).
        config = replace(
            config,
            window=config.window - 1,
            per_layer_size=0,
            target_width=width,
            embedding_scale=float(width**0.5),
        )
        return replace(found, config=config, tensors={**found.tensors, HEAD: found.tensors[EMBEDDING]})

    def _made(self, *sizes: int) -> Sizes:
        return replace(_DrafterSizes(*sizes), per_layer=self._size("embedding_length_out"))

    def _layers(
        self, sizes: list[Sizes], windowed: frozenset[int], tensors: dict[str, tuple[TensorInfo, Tensor]]
    ) -> tuple[Gemma4Layer, ...]:
        return tuple(Gemma4Layer("q", size.kv_heads, size.head_dim, 0) for size in sizes)

    def _check_parts(self, tensors: dict[str, Any], sizes: Sizes) -> None:
        if any(f"model.layers.{layer}.layer_scalar" not in tensors for layer in range(sizes.layers)):
            raise self._wrong("some of its layers lack layer_output_scale")
