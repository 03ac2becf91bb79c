"""Writes a decoder of the Llama family as a graph: `model.onnx` and its weights, one matrix in memory, without torch.

Operators and names are those of onnxruntime-genai's model builder, so that all that reads an export (`engines.onnx`,
cutting after a layer) reads this too.
What this module does not know: where the weights come from, and how matrices are stored (`forms`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from edgespec.formats.onnx import DATA, MICROSOFT, MODEL
from edgespec.formats.onnx.forms import HEAD, WeightForm
from edgespec.formats.onnx.graph import TOKENS, DataWriter, Nodes, Ports, WeightWriter, port
from edgespec.formats.onnx.llama_config import LlamaConfig
from edgespec.formats.onnx.tiles import ATTENTION, CACHE, DOMAIN, FEATURES, NEXT_STATES, NORM, ROWS, Tiles

Progress = Callable[[int, int], None]
Tables = tuple[NDArray[np.float32], NDArray[np.float32]]
_LENGTHS = "/model/attn_mask_reformat/attn_mask_subgraph/Sub/Cast/output_0"
_TOTAL = "/model/attn_mask_reformat/attn_mask_subgraph/Gather/Cast/output_0"
_POSITIONS_AT_ONCE = 4096
_TABLES, _WINDOW_TABLES = ("cos_cache", "sin_cache"), ("cos_cache_local", "sin_cache_local")


def write_llama(
    folder: Path, config: LlamaConfig, make_form: Callable[[Nodes], WeightForm], progress: Progress | None = None
) -> None:
    """Write `model.onnx` and `model.onnx.data` into `folder`, which is nobody's yet.

    `progress` gets parts (done, total): the embedding, each layer, the head. Raises OSError, and what the form does.
    """
    with (folder / DATA).open("wb") as file:
        found = llama_graph(config, DataWriter(file, DATA), make_form, progress)
    (folder / MODEL).write_bytes(found.SerializeToString())


def llama_graph(
    config: LlamaConfig, data: WeightWriter, make_form: Callable[[Nodes], WeightForm], progress: Progress | None = None
) -> onnx.ModelProto:
    """The graph, whose weights go to `data`. `progress` and exceptions: as in `write_llama`."""
    nodes = Nodes(data)
    form = make_form(nodes)
    graph = _kernel_graph(config)(config, nodes, form) if isinstance(form, Tiles) else _LlamaGraph(config, nodes, form)
    for done, _ in enumerate(graph.parts(), 1):
        if progress is not None:
            progress(done, config.num_layers + 2)
    return nodes.model(*graph.values())


def _kernel_graph(config: LlamaConfig) -> type[KernelGraph]:
    """The writer of a model's architecture; those of others than Llama's family extend `KernelGraph`."""
    from edgespec.formats.onnx.dflash import BlockChain, BlockConfig, BlockEncoder, BlockGraph
    from edgespec.formats.onnx.eagle import Eagle3Graph, EagleConfig, EagleEncoder, EagleGraph
    from edgespec.formats.onnx.gemma4 import Gemma4Config, Gemma4DrafterGraph, Gemma4Graph
    from edgespec.formats.onnx.hybrid import ExpertsGraph, HybridConfig, HybridGraph, NextnGraph

    if isinstance(config, HybridConfig):
        return NextnGraph if config.is_nextn else HybridGraph
    if isinstance(config, EagleConfig):
        return EagleEncoder if config.part else Eagle3Graph if config.feature_size else EagleGraph
    if isinstance(config, BlockConfig):
        return {"": BlockGraph, "encoder": BlockEncoder, "chain": BlockChain}[config.part]
    if isinstance(config, Gemma4Config):
        return Gemma4DrafterGraph if config.target_width else Gemma4Graph
    return ExpertsGraph


def rotary_tables(config: LlamaConfig) -> Tables:
    """Cosines and sines [positions, half of what is rotated], from 64 bits: numpy's own 32 bits depend on the CPU."""
    halves = np.arange(0, config.num_rotated, 2, dtype=np.float32) / np.float32(config.num_rotated)
    base = np.full(halves.shape, np.float32(config.rope_theta), np.float64)
    powers: NDArray[np.float32] = np.power(base, halves.astype(np.float64)).astype(np.float32)
    frequencies = np.reciprocal(powers)
    is_long = bool(config.long_divisors) and config.max_positions > config.trained_positions
    if divisors := config.long_divisors if is_long else config.rope_divisors:
        frequencies = frequencies / np.array(divisors, np.float32)
    cosines, sines = (np.empty((config.max_positions, frequencies.size), np.float32) for _ in range(2))
    for start in range(0, config.max_positions, _POSITIONS_AT_ONCE):  # of a context of a million tokens gigabytes
        stop = min(start + _POSITIONS_AT_ONCE, config.max_positions)
        angles = np.arange(start, stop, dtype=np.float32)[:, None] * frequencies
        wide = angles.astype(np.float64)
        cosines[start:stop], sines[start:stop] = config.rope_scale * np.cos(wide), config.rope_scale * np.sin(wide)
    return cosines, sines


def rotary_bytes(config: LlamaConfig) -> int:
    """Size of a graph's rotary tables: one pair, and another where windowed layers have a base of their own."""
    num_rotated = config.num_rotated if config.is_rotated else 0
    num_rotated += config.for_window().num_rotated if config.has_window_tables else 0
    return 4 * config.max_positions * num_rotated


class _LlamaGraph:
    """The operators so far. `_residual` and `_delta` are the two values whose sum is the hidden state."""

    def __init__(self, config: LlamaConfig, nodes: Nodes, form: WeightForm) -> None:
        self._config, self._nodes, self._form = config, nodes, form
        self._residual = self._delta = ""

    def parts(self) -> Iterator[None]:
        """Everything in the order of the computation; a step for the embedding, each layer, the head."""
        self._count_mask()
        self._embed()
        yield
        for layer in range(self._config.num_layers):
            self._attention(layer)
            self._feed_forward(layer)
            yield
        self._head()
        yield

    def values(self) -> Ports:
        config, whole = self._config, TensorProto.INT64
        mask = port("attention_mask", ["batch_size", "total_sequence_length"], whole)
        inputs = [port("input_ids", TOKENS, whole), mask]
        outputs = [port("logits", [*TOKENS, config.vocab_size])]
        for layer in range(config.num_layers):
            for kind in ("key", "value"):
                past, present = (
                    ["batch_size", config.num_kv_heads, f"{which}_sequence_length", config.head_dim]
                    for which in ("past", "total")
                )
                inputs.append(port(f"past_key_values.{layer}.{kind}", past))
                outputs.append(port(f"present.{layer}.{kind}", present))
        return inputs, outputs

    def _count_mask(self) -> None:
        """Lengths of past and whole, as attention takes them, from the ones of the attention mask."""
        start, add, store = "/model/attn_mask_reformat/attn_mask_subgraph", self._nodes.add, self._nodes.store
        one, last = store("edgespec.ones", np.ones(1, np.int64)), store("edgespec.one", np.array(1))
        add("ReduceSum", ["attention_mask", one], [f"{start}/sum"], f"{start}/ReduceSum", keepdims=0)
        add("Sub", [f"{start}/sum", one], [f"{start}/lengths"], f"{start}/Sub")
        add("Cast", [f"{start}/lengths"], [_LENGTHS], f"{start}/Sub/Cast", to=TensorProto.INT32)
        add("Shape", ["attention_mask"], [f"{start}/shape"], f"{start}/Shape")
        add("Gather", [f"{start}/shape", last], [f"{start}/total"], f"{start}/Gather", axis=0)
        add("Cast", [f"{start}/total"], [_TOTAL], f"{start}/Gather/Cast", to=TensorProto.INT32)

    def _embed(self) -> None:
        config = self._config
        self._residual = "/model/embed_tokens/Gather/output_0"
        self._form.embed(self._residual)
        if config.embedding_scale != 1:
            self._residual = self._scalar("Mul", self._residual, config.embedding_scale, "/model/embed_tokens/Mul")
        self._store_tables()

    def _store_tables(self) -> None:
        config = self._config
        if not config.is_rotated:
            return
        for name, table in zip(_TABLES, self._rotary_tables(config), strict=True):
            self._nodes.store(name, table)
        if config.has_window_tables:
            for name, table in zip(_WINDOW_TABLES, self._rotary_tables(config.for_window()), strict=True):
                self._nodes.store(name, table)

    def _rotary_tables(self, config: LlamaConfig) -> Tables:
        return rotary_tables(config)

    def _norm(self, place: str, *, is_last: bool = False) -> str:
        """The normed sum of residual and delta, which becomes the residual. The first norm has no delta."""
        state, total = (f"/model/{place}/output_{number}" for number in (0, 3))
        if not self._delta:
            return self._plain_norm(f"/model/{place}/LayerNorm", self._residual, self._vector(place), state)
        self._skip_norm(f"/model/{place}/SkipLayerNorm", self._vector(place), state, "" if is_last else total)
        self._residual = total
        return state

    def _skip_norm(self, name: str, weight: str, state: str, total: str) -> None:
        """`state`, the normed sum of residual and delta, and the sum itself, if it is wanted."""
        inputs, outputs = [self._residual, self._delta, weight], [state, "", "", total] if total else [state]
        epsilon = self._config.norm_epsilon
        self._nodes.add("SkipSimplifiedLayerNormalization", inputs, outputs, name, domain=MICROSOFT, epsilon=epsilon)

    def _plain_norm(self, name: str, value: str, weight: str, output: str) -> str:
        epsilon = self._config.norm_epsilon
        self._nodes.add(
            "SimplifiedLayerNormalization", [value, weight], [output], name, axis=-1, epsilon=epsilon, stash_type=1
        )
        return output

    def _after(self, layer: int, kind: str) -> None:
        """A norm of the delta alone, or a factor of it, where the architecture has one."""
        place = f"layers.{layer}/{kind}_layernorm"
        if self._config.has_post_norms:
            output = f"/model/{place}/output_0"
            self._delta = self._plain_norm(f"/model/{place}/LayerNorm", self._delta, self._vector(place), output)
        if self._config.residual_scale != 1:
            name = f"/model/layers.{layer}/{kind}_scale/Mul"
            self._delta = self._scalar("Mul", self._delta, self._config.residual_scale, name)

    def _vector(self, place: str) -> str:
        """The weights of a norm, as they are named in a checkpoint."""
        name = f"model.{place.replace('/', '.')}.weight"
        if not name.endswith("final_norm_layernorm.weight"):
            return self._nodes.store(name, self._form.vector(name))
        return self._nodes.store(name, self._form.vector("model.norm.weight") * np.float32(self._config.logit_scale))

    def _product(self, name: str, value: str, sources: tuple[str, ...], output: str = "") -> str:
        """`value` times the matrices of these names side by side, plus their biases."""
        output, weights = output or f"{name}/output_0", [f"{source}.weight" for source in sources]
        if bias := self._bias(name.rpartition("/")[0], sources):
            self._biased_product(name, value, weights, output, bias)
        else:
            self._form.product(name, value, weights, output)
        return output

    def _bias(self, place: str, sources: tuple[str, ...]) -> str:
        """The biases of some matrices side by side; empty where they have none."""
        if sources[0].rpartition(".")[2] not in self._config.biases:
            return ""
        bias = np.concatenate([self._form.vector(f"{source}.bias") for source in sources])
        return self._nodes.store(f"{place.removeprefix('/').replace('/', '.')}.Add.bias", bias)

    def _biased_product(self, name: str, value: str, weights: list[str], output: str, bias: str) -> None:
        self._form.product(name, value, weights, f"{name}/product")
        self._nodes.add("Add", [f"{name}/product", bias], [output], f"{name.rpartition('/')[0]}/Add")

    def _scalar(self, kind: str, value: str, number: float, name: str, output: str = "") -> str:
        """An operator of `value` and a constant."""
        output = output or f"{name}/output_0"
        constant = self._nodes.store(f"edgespec{name.replace('/', '.')}", np.array(number, np.float32))
        self._nodes.add(kind, [value, constant], [output], name)
        return output

    def _attention(self, layer: int) -> None:
        here, there = f"/model/layers.{layer}/attn", f"model.layers.{layer}.self_attn"
        self._delta = self._product(f"{here}/o_proj/MatMul", self._attended(layer), (f"{there}.o_proj",))
        self._after(layer, "post_attention")

    def _attended(self, layer: int) -> str:
        """The result of a layer's attention, before its last matrix."""
        config, here, there = self._config, f"/model/layers.{layer}/attn", f"model.layers.{layer}.self_attn"
        state = self._input(layer, "input")
        sources = tuple(f"{there}.{kind}_proj" for kind in "qkv")
        if config.has_head_norms:
            parts = [self._product(f"{here}/{s[-6:]}/MatMul", state, (s,)) for s in sources]
            joined = [*(self._head_norm(layer, kind, parts[place]) for place, kind in enumerate("qk")), parts[2]]
        else:
            joined = [self._product(f"{here}/qkv_proj/MatMul", state, sources), "", ""]
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        seen = f"{here}/GroupQueryAttention/output_0"
        self._nodes.add(
            "GroupQueryAttention",
            [*joined, *past, _LENGTHS, _TOTAL, *self._tables(layer), "", "", ""],
            [seen, f"present.{layer}.key", f"present.{layer}.value"],
            f"{here}/GroupQueryAttention",
            domain=MICROSOFT,
            num_heads=config.num_heads,
            kv_num_heads=config.num_kv_heads,
            scale=config.attention_scale or float(config.head_dim**-0.5),
            local_window_size=config.window if layer in config.windowed_layers else -1,
            softcap=config.attention_cap,
            do_rotary=int(layer not in config.unrotated_layers),
            rotary_interleaved=0,
        )
        return seen

    def _tables(self, layer: int) -> tuple[str, str]:
        """The rotary tables of a layer; no names where it has no rotary positions."""
        if layer in self._config.unrotated_layers:
            return "", ""
        has_own = layer in self._config.windowed_layers and self._config.has_window_tables
        return _WINDOW_TABLES if has_own else _TABLES

    def _input(self, layer: int, kind: str) -> str:
        """What a layer's attention or feed-forward reads: the hidden state, which is normed but for OLMo's like."""
        place = f"layers.{layer}/{kind}_layernorm"
        if self._config.has_pre_norms:
            return self._norm(place)
        if self._delta:
            self._add_up(f"/model/{place}/Add")
        return self._residual

    def _add_up(self, name: str) -> None:
        """Make the sum of residual and delta the residual."""
        self._nodes.add("Add", [self._residual, self._delta], [f"{name}/output_0"], name)
        self._residual, self._delta = f"{name}/output_0", ""

    def _head_norm(self, layer: int, kind: str, value: str) -> str:
        """`value` [batch, tokens, heads * head size] with every head normed by itself."""
        config, here = self._config, f"/model/layers.{layer}/attn/{kind}_norm"
        width = config.head_dim * (config.num_heads if kind == "q" else config.num_kv_heads)
        weight = self._head_norm_weight(layer, kind)
        heads = self._reshape(value, config.head_dim, f"{here}/Reshape_1")
        name = f"{here}/SimplifiedLayerNormalization"
        return self._reshape(self._plain_norm(name, heads, weight, f"{name}/output_0"), width, f"{here}/Reshape_2")

    def _head_norm_weight(self, layer: int, kind: str) -> str:
        weight = self._form.vector(f"model.layers.{layer}.self_attn.{kind}_norm.weight")
        return self._nodes.store(f"model.layers.{layer}.attn.{kind}_norm.layernorm.weight", weight)

    def _reshape(self, value: str, width: int, name: str) -> str:
        shape = f"edgespec.rows_of_{width}"
        if not self._nodes.has(shape):
            self._nodes.store(shape, np.array([0, -1, width]))
        self._nodes.add("Reshape", [value, shape], [f"{name}/output_0"], name)
        return f"{name}/output_0"

    def _feed_forward(self, layer: int) -> None:
        place = "pre_feedforward" if self._config.has_post_norms else "post_attention"
        self._delta = self._dense(layer, self._input(layer, place))
        self._after(layer, "post_feedforward")

    def _dense(self, layer: int, state: str) -> str:
        """The feed-forward of a normed `state`."""
        here, there = f"/model/layers.{layer}/mlp", f"model.layers.{layer}.mlp"
        gate, up = (
            self._product(f"{here}/{kind}_proj/MatMul", state, (f"{there}.{kind}_proj",)) for kind in ("gate", "up")
        )
        active, both = f"{here}/act_fn/Mul/output_0", f"{here}/Mul/output_0"
        if self._config.activation == "gelu":
            self._nodes.add("Gelu", [gate], [active], f"{here}/act_fn/FastGelu", approximate="tanh")
        else:
            self._nodes.add("Sigmoid", [gate], [f"{here}/act_fn/Sigmoid/output_0"], f"{here}/act_fn/Sigmoid")
            self._nodes.add("Mul", [gate, f"{here}/act_fn/Sigmoid/output_0"], [active], f"{here}/act_fn/Mul")
        self._nodes.add("Mul", [active, up], [both], f"{here}/Mul")
        return self._product(f"{here}/down_proj/MatMul", both, (f"{there}.down_proj",))

    def _head(self) -> None:
        state = self._norm(f"layers.{self._config.num_layers}/final_norm_layernorm", is_last=True)
        cap = self._config.logit_cap
        found = self._product("/lm_head/MatMul", state, ("lm_head",), "" if cap else "logits")
        if cap:
            found = self._scalar("Div", found, cap, "/lm_head/softcap/Div")
            self._nodes.add("Tanh", [found], ["/lm_head/softcap/Tanh/output_0"], "/lm_head/softcap/Tanh")
            self._scalar("Mul", "/lm_head/softcap/Tanh/output_0", cap, "/lm_head/softcap/Mul", "logits")


class KernelGraph(_LlamaGraph):
    """The same of our own operators. Rows may belong to several texts, whose cache is no tensor of the graph."""

    _form: Tiles

    def values(self) -> Ports:
        rows, cache = port(ROWS, ["sequence_length", 4], TensorProto.INT32), port(CACHE, [1], TensorProto.INT64)
        inputs = [port("input_ids", TOKENS, TensorProto.INT64), rows, cache]
        return inputs, [port("logits", [*TOKENS, self._config.vocab_size])]

    def _values_with_states(self, read: int, made: int = 0) -> Ports:
        """`values` of a draft head, with `FEATURES` [tokens, read], and states [tokens, made] that take their place."""
        inputs, outputs = KernelGraph.values(self)
        states = [port(NEXT_STATES, [*TOKENS, made])] if made else []
        return [*inputs, port(FEATURES, [*TOKENS, read])], [*outputs, *states]

    def _count_mask(self) -> None:
        """Rows say where they belong."""

    def _stored(self, name: str) -> str:
        return self._nodes.store(name, self._form.vector(name))

    def _pair(self, here: str, embedding_norm: str, state_norm: str) -> tuple[str, str]:
        """The normed state in `FEATURES`, and behind the normed embedding of the token after it: what a head reads."""
        embedded, state = (
            self._plain_norm(f"{here}/{n}/Norm", value, self._stored(f"model.layers.0.{n}.weight"), f"{here}/{n}")
            for n, value in ((embedding_norm, self._residual), (state_norm, FEATURES))
        )
        self._nodes.add("Concat", [embedded, state], [f"{here}/pair"], f"{here}/Concat", axis=-1)
        return state, f"{here}/pair"

    def _skip_norm(self, name: str, weight: str, state: str, total: str) -> None:
        inputs, outputs = [self._residual, weight, self._delta], [state, total] if total else [state]
        self._nodes.add(NORM, inputs, outputs, name, domain=DOMAIN, epsilon=self._config.norm_epsilon)

    def _plain_norm(self, name: str, value: str, weight: str, output: str, epsilon: float | None = None) -> str:
        epsilon = epsilon or self._config.norm_epsilon
        self._nodes.add(NORM, [value, weight], [output], name, domain=DOMAIN, epsilon=epsilon)
        return output

    def _biased_product(self, name: str, value: str, weights: list[str], output: str, bias: str) -> None:
        self._form.products(name, value, weights, [output], bias)

    def _attended(self, layer: int) -> str:
        config, here = self._config, f"/model/layers.{layer}/attn"
        seen = f"{here}/Attention/output_0"
        self._nodes.add(
            ATTENTION,
            [*self._projected(layer), ROWS, CACHE, *self._tables(layer), *self._head_vectors(layer)],
            [seen],
            f"{here}/Attention",
            domain=DOMAIN,
            **self._heads(layer),
            window=max(config.window, 0) if layer in config.windowed_layers else 0,
            scale=config.attention_scale or float(config.head_dim**-0.5),
            cap=config.attention_cap,
            epsilon=config.norm_epsilon,
        )
        return seen

    def _projected(self, layer: int) -> list[str]:
        """Queries, keys and values of a layer, side by side in the first where no norm comes between."""
        here, there = f"/model/layers.{layer}/attn", f"model.layers.{layer}.self_attn"
        state = self._input(layer, "input")
        sources = tuple(f"{there}.{kind}_proj" for kind in self._projections(layer))
        if not (self._config.has_wide_norms or self._config.attention_growth):
            return [self._product(f"{here}/qkv_proj/MatMul", state, sources), "", ""]
        parts = [f"{here}/{kind}_proj/output_0" for kind in "qkv"]
        self._form.products(f"{here}/qkv_proj/MatMul", state, [f"{source}.weight" for source in sources], parts)
        for at, kind in enumerate("qk" if self._config.has_wide_norms else ""):
            name, weight = f"{here}/{kind}_norm/LayerNorm", self._head_norm_weight(layer, kind)
            parts[at] = self._plain_norm(name, parts[at], weight, f"{name}/output_0")
        if self._config.attention_growth:
            self._nodes.add("Mul", [parts[0], self._grown()], [f"{here}/grown"], f"{here}/Mul")
            parts[0] = f"{here}/grown"
        return parts

    def _grown(self) -> str:
        """The factor of each row's queries [rows, 1], by its position (Llama 4)."""
        config, table, place = self._config, "edgespec.growth", "edgespec.positions"
        if not self._nodes.has(table):
            stretches = np.arange(config.max_positions) // config.trained_positions
            growth = 1 + config.attention_growth * np.log(1 + stretches)
            self._nodes.store(table, growth[:, None].astype(np.float32))
            self._nodes.add("Gather", [ROWS, self._nodes.store("edgespec.one", np.array(1))], [place], place, axis=1)
            self._nodes.add("Gather", [table, place], [f"{table}/rows"], table, axis=0)
        return f"{table}/rows"

    def _heads(self, layer: int) -> dict[str, int]:
        """Attributes of a layer's attention: its heads, and which of the cache's they are."""
        kv_heads, size, first = self._key_heads(layer)
        return {"heads": self._config.num_heads, "kv_heads": kv_heads, "head_size": size, "first_head": first}

    def _dense(self, layer: int, state: str) -> str:
        here, there = f"/model/layers.{layer}/mlp", f"model.layers.{layer}.mlp"
        kinds = ("gate_up",) if "gate_up_proj" in self._config.fused else ("gate", "up")
        both = self._product(f"{here}/gate_up_proj/MatMul", state, tuple(f"{there}.{kind}_proj" for kind in kinds))
        output, weights = f"{here}/down_proj/MatMul/output_0", [f"{there}.down_proj.weight"]
        bias = self._bias(f"{here}/down_proj", (f"{there}.down_proj",))
        self._form.products(f"{here}/down_proj/MatMul", both, weights, [output], bias, self._config.activation)
        return output

    def _projections(self, layer: int) -> Sequence[str]:
        """The names of the matrices in front of a layer's attention."""
        return ("qkv",) if "qkv_proj" in self._config.fused else "qkv"

    def _key_heads(self, layer: int) -> tuple[int, int, int]:
        """(number, size, first among those of all layers) of a layer's heads of keys."""
        return self._config.num_kv_heads, self._config.head_dim, layer * self._config.num_kv_heads

    def _head_vectors(self, layer: int) -> list[str]:
        """The attention's optional inputs: norms of queries and keys, and sinks."""
        norms = [self._head_norm_weight(layer, kind) if self._config.has_head_norms else "" for kind in "qk"]
        if not self._config.has_sinks:
            return norms if self._config.has_head_norms else []
        sinks = self._form.vector(f"model.layers.{layer}.self_attn.sinks")
        return [*norms, self._nodes.store(f"model.layers.{layer}.attn.sinks", sinks)]

    def _head(self) -> None:
        state = self._norm(f"layers.{self._config.num_layers}/final_norm_layernorm", is_last=True)
        self._form.products("/lm_head/MatMul", state, [HEAD], ["logits"], cap=self._config.logit_cap or 0.0)
        self._residual = state
