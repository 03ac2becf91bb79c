"""Writes Gemma 4 as a graph of our operators. How it differs from Gemma 3:

Full layers have heads of another size and number than windowed ones, and may have no values: keys, normed otherwise,
are these. The last layers have no keys and values at all: they read those of the last layer of their kind that has
them. Values are normed, attention is not scaled. In the small models (E2B, E4B) a second embedding of each token goes
into every layer, gated by the hidden state; in 26B-A4B routed experts are beside the feed-forward. Every layer's result
is scaled by a number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from edgespec.formats.onnx.graph import Ports
from edgespec.formats.onnx.hybrid import ExpertsGraph
from edgespec.formats.onnx.llama import Tables, rotary_tables
from edgespec.formats.onnx.llama_config import LlamaConfig
from edgespec.formats.onnx.tiles import FEATURES, NEXT_STATES

PER_LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"


@dataclass(frozen=True, slots=True)
class Gemma4Layer:
    """One layer. `projections`: first letters of its matrices of queries, keys and values: q, qk or qkv.

    `first_head`: of its keys, or of the layer's whose it reads, among the heads of all layers.
    """

    projections: str
    kv_heads: int
    head_dim: int
    first_head: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(LlamaConfig):
    """`per_layer_size`: of the second embedding in each layer, 0 without; `has_scales`: of the layers' results.

    `target_width`: of the model that this one drafts for, whose keys and values its `layers` read; 0: it is a model.
    """

    layers: tuple[Gemma4Layer, ...]
    per_layer_size: int = 0
    has_scales: bool = True
    target_width: int = 0


class Gemma4Graph(ExpertsGraph):
    _config: Gemma4Config

    def _projections(self, layer: int) -> str:
        return self._config.layers[layer].projections

    def _key_heads(self, layer: int) -> tuple[int, int, int]:
        found = self._config.layers[layer]
        return found.kv_heads, found.head_dim, found.first_head

    def _head_vectors(self, layer: int) -> list[str]:
        queries = self._head_norm_weight(layer, "q")
        found = self._config.layers[layer]
        if found.projections == "q":
            return [queries]
        ones = f"edgespec.ones_of_{found.head_dim}"
        if not self._nodes.has(ones):
            self._nodes.store(ones, np.ones(found.head_dim, np.float32))
        return [queries, self._head_norm_weight(layer, "k"), "", ones]

    def _embed(self) -> None:
        super()._embed()
        if self._config.per_layer_size:
            self._embed_per_layer()

    def _embed_per_layer(self) -> None:
        """For each layer and token (its second embedding + norm(projection of its first)) / sqrt(2).

        The factor of the projection, 1 / sqrt(width), is the norm's: its epsilon is that of the width's multiple.
        """
        config, here, add = self._config, "/model/per_layer", self._nodes.add
        size, width = config.per_layer_size, config.num_layers * config.per_layer_size
        projected = self._product(f"{here}/projection/MatMul", self._residual, ("model.per_layer_model_projection",))
        rows = self._reshape(projected, size, f"{here}/Reshape_1")
        weight = self._form.vector("model.per_layer_projection_norm.weight") * np.float32(0.5**0.5)
        weight_name = self._nodes.store("model.per_layer_projection_norm.weight", weight)
        epsilon = config.norm_epsilon * config.hidden_size
        self._plain_norm(f"{here}/LayerNorm", rows, weight_name, f"{here}/normed", epsilon)
        self._form.look_up(PER_LAYER_EMBEDDING, f"{here}/looked_up", f"{here}/TiledLookup")
        scaled = self._scalar("Mul", f"{here}/looked_up", (size / 2) ** 0.5, f"{here}/Mul")
        wide = self._reshape(f"{here}/normed", width, f"{here}/Reshape_2")
        add("Add", [wide, scaled], [f"{here}/sum"], f"{here}/Add")
        outputs = [self._of_layer(layer) for layer in range(config.num_layers)]
        add("Split", [f"{here}/sum"], outputs, f"{here}/Split", axis=-1, num_outputs=config.num_layers)

    def _of_layer(self, layer: int) -> str:
        return f"/model/per_layer/Split/output_{layer}"

    def _feed_forward(self, layer: int) -> None:
        if self._config.experts:
            self._dense_and_experts(layer)
        else:
            super()._feed_forward(layer)
        config, here, there = self._config, f"/model/layers.{layer}", f"model.layers.{layer}"
        if config.per_layer_size:
            self._add_up(f"{here}/Add_1")
            gate = self._product(f"{here}/per_layer_gate/MatMul", self._residual, (f"{there}.per_layer_input_gate",))
            both = f"{here}/per_layer/Concat/output_0"
            self._nodes.add("Concat", [gate, self._of_layer(layer)], [both], f"{here}/per_layer/Concat", axis=-1)
            self._delta = f"{here}/per_layer_projection/output_0"
            weights = [f"{there}.per_layer_projection.weight"]
            self._form.products(f"{here}/per_layer_projection/MatMul", both, weights, [self._delta], gate="gelu")
            self._after(layer, "post_per_layer_input")
        if config.has_scales:
            self._add_up(f"{here}/Add_2")
            scale = float(self._form.vector(f"{there}.layer_scalar")[0])
            self._residual = self._scalar("Mul", self._residual, scale, f"{here}/Mul")

    def _dense_and_experts(self, layer: int) -> None:
        """The sum of the normed results of both, normed once more. The router reads a norm of its own."""
        experts, there = self._config.experts, f"layers.{layer}"
        assert experts is not None
        dense = self._dense(layer, self._norm(f"{there}/pre_feedforward_layernorm"))
        dense = self._normed(f"{there}/post_feedforward_layernorm_1", dense)
        state = self._normed(f"{there}/pre_feedforward_layernorm_2", self._residual)
        name, factor = f"model.{there}.mlp.router.scale", np.float32(self._config.hidden_size**-0.5)
        weight = self._nodes.store(name, self._form.vector(name) * factor)
        place = f"/model/{there}/mlp/router/LayerNorm"
        routed = self._plain_norm(place, self._residual, weight, f"{place}/output_0")
        scales = self._stored(f"model.{there}.mlp.experts.scale")
        found = self._experts(layer, experts, routed, state, scales)
        found = self._normed(f"{there}/post_feedforward_layernorm_2", found)
        self._delta = f"/model/{there}/mlp/Add/output_0"
        self._nodes.add("Add", [dense, found], [self._delta], f"/model/{there}/mlp/Add")
        self._after(layer, "post_feedforward")

    def _normed(self, place: str, value: str) -> str:
        return self._plain_norm(f"/model/{place}/LayerNorm", value, self._vector(place), f"/model/{place}/output_0")


class Gemma4DrafterGraph(Gemma4Graph):
    """Reads a state of the target and the embedding of the token behind it there; gives the next state, too.

    All tokens of a draft are at the place behind the target's text. Their rows name the text's last one, whose key is
    in the target's cache, and rotary tables begin a place later.
    """

    def values(self) -> Ports:
        return self._values_with_states(self._config.target_width, self._config.target_width)

    def _rotary_tables(self, config: LlamaConfig) -> Tables:
        cosines, sines = rotary_tables(replace(config, max_positions=config.max_positions + 1))
        return cosines[1:], sines[1:]

    def _embed(self) -> None:
        super()._embed()
        here = "/model/pre_projection"
        self._nodes.add("Concat", [self._residual, FEATURES], [f"{here}/pair"], f"{here}/Concat", axis=-1)
        self._residual = self._product(f"{here}/MatMul", f"{here}/pair", ("model.pre_projection",))

    def _head(self) -> None:
        super()._head()
        self._product("/model/post_projection/MatMul", self._residual, ("model.post_projection",), NEXT_STATES)
