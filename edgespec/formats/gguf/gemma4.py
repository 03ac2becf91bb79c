"""What a GGUF of a Gemma 4 holds: its layers differ in the sizes of heads and feed-forward, and in what they have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edgespec.formats.architectures import Sizes, Tensor
from edgespec.formats.gguf.model import EXPERT_INNER, HEAD_MULTIPLE, INNER, SIZES, GgufModel, Reader, Tensors
from edgespec.formats.gguf.tables import ROUTED_LAYER, SCALED_LAYER, SECOND_EMBEDDING, SECOND_EMBEDDING_LAYER
from edgespec.formats.onnx.forms import EMBEDDING, HEAD
from edgespec.formats.onnx.gemma4 import Gemma4Config, Gemma4Layer
from edgespec.formats.onnx.llama_config import LlamaConfig


class Gemma4Reader(Reader):
    """`_layer_sizes`: of each layer."""

    _layer_sizes: list[Sizes]

    def _sizes(self) -> Sizes:
        layers, context, width, heads = (self._size(key) for key in SIZES)
        windowed = self._windowed(layers)
        inner, kv_heads = (self._each_layer(key, layers) for key in (INNER, "attention.head_count_kv"))
        head_dims = self._head_dim("", width // heads), self._head_dim("_swa", width // heads)
        experts = int(self._number("expert_count", 0))
        outer = Sizes(
            *(layers, width, inner[0], heads, kv_heads[0], head_dims[0], len(self._header.tokens), context, experts),
            self._size(EXPERT_INNER) if experts else 0,
            self._other_sizes(layers),
        )
        self._layer_sizes = [
            replace(outer, inner=inner[layer], kv_heads=kv_heads[layer], head_dim=head_dims[layer in windowed])
            for layer in range(layers)
        ]
        if outer.others["p"]:
            self._kind = replace(self._kind, outer={**self._kind.outer, **SECOND_EMBEDDING})
        return outer

    def _other_sizes(self, layers: int) -> Mapping[str, int]:
        """p: of the second embedding in a layer, P: in all."""
        size = int(self._number("embedding_length_per_layer_input", 0))
        return {"p": size, "P": size * layers}

    def _sizes_of(self, layer: int, sizes: Sizes) -> Sizes:
        return self._layer_sizes[layer]

    def _layer_table(self, layer: int) -> Mapping[str, Tensor]:
        sizes, is_scaled = self._layer_sizes[layer], "blk.0.layer_output_scale.weight" in self._infos
        return {
            **self._kind.layer,
            **(SECOND_EMBEDDING_LAYER if sizes.others["p"] else {}),
            **(ROUTED_LAYER if sizes.experts else {}),
            **(SCALED_LAYER if is_scaled else {}),
        }

    def _check_heads(self, sizes: Sizes) -> None:
        """`_head_dim` does."""

    def _config(self, sizes: Sizes, tensors: Tensors) -> LlamaConfig:
        windowed = self._windowed(sizes.layers)
        own = {
            "window_head_dim": self._head_dim("_swa", sizes.width // sizes.heads),
            "attention_scale": 1.0,
            "layers": self._layers(windowed, tensors),
            "per_layer_size": sizes.others["p"],
            "has_scales": "model.layers.0.layer_scalar" in tensors,
        }
        return Gemma4Config(**self._settings(sizes, tensors) | own)

    def _each_layer(self, key: str, layers: int) -> list[int]:
        """A size that is given for all layers together or for each."""
        found = self._items(key) or (self._size(key),) * layers
        sizes = [each for each in found if isinstance(each, int) and 0 < each < 1 << 31]
        if len(sizes) != layers or len(found) != layers:
            raise self._wrong(f"its {key} is {str(found)[:40]}, a size for each of {layers} layers was expected")
        return sizes

    def _head_dim(self, kind: str, default: int) -> int:
        """Of full layers ("") or windowed ones ("_swa"); all of a head is rotated."""
        found = self._size(f"attention.key_length{kind}", default)
        for key in (f"attention.value_length{kind}", f"rope.dimension_count{kind}"):
            if self._size(key, found) != found:
                raise self._wrong(f"its {key} {self._value(key)} is not its head size {found}")
        if found % HEAD_MULTIPLE:
            raise self._wrong(f"it has attention heads of {found} values; a multiple of {HEAD_MULTIPLE} is needed")
        return found

    def _layers(self, windowed: frozenset[int], tensors: Tensors) -> tuple[Gemma4Layer, ...]:
        """Where each layer's keys and values are; a later one reads those of the last of its kind that has them."""
        own = len(self._layer_sizes) - int(self._number("attention.shared_kv_layers", 0))
        found: list[Gemma4Layer] = []
        last: dict[bool, Gemma4Layer] = {}
        next_head = 0
        for layer, size in enumerate(self._layer_sizes):
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


class Gemma4DrafterReader(Gemma4Reader):
    """Gemma 4's drafter: layers of queries alone. Until its target is known, embeddings are its own."""

    def read(self) -> GgufModel:
        found = super().read()
        config, width = found.config, self._size("embedding_length_out")
        assert isinstance(config, Gemma4Config)
        # Its rows are at the last token that the target has read, one before their place (`Gemma4DrafterGraph`).
        config = replace(config, window=config.window - 1, target_width=width, embedding_scale=float(width**0.5))
        return replace(found, config=config, tensors={**found.tensors, HEAD: found.tensors[EMBEDDING]})

    def _other_sizes(self, layers: int) -> Mapping[str, int]:
        """P: of the target's states."""
        width = self._size("embedding_length_out")
        return {"p": 0, "P": width, "2P": 2 * width}

    def _layers(self, windowed: frozenset[int], tensors: Tensors) -> tuple[Gemma4Layer, ...]:
        return tuple(Gemma4Layer("q", size.kv_heads, size.head_dim, 0) for size in self._layer_sizes)
