"""Random Qwen3 MoE, gpt-oss and Gemma 4 as GGUF files, and all of them once more in numpy, in double precision.

The numpy twin rounds keys and values to half precision, as the cache does, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from numpy_layers import attended, normed, rotated
from tiny_gguf import Shape, begin, finish, vocabulary, write_vocabulary

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
NOT_ROTATED = 1e30


@dataclass(frozen=True)
class Case:
    """One model. `window_every`: all but each n-th layer have a window; `size_windowed`: of their heads.

    `sharing`: last layers without keys and values of their own; `experts`: count, used, inner size.
    """

    kind: str
    layers: int
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    kv_heads_full: int = 2
    size: int = 32
    size_windowed: int = 32
    inner: int = 96
    window: int = 0
    window_every: int = 0
    base: float = 1_000_000.0
    base_windowed: float = 10_000.0
    epsilon: float = 1e-6
    context: int = 512
    experts: tuple[int, int, int] = (0, 0, 0)
    sharing: int = 0
    per_layer: int = 0
    has_values: bool = True
    yarn: tuple[float, float, float, float] = ()  # type: ignore[assignment]  # factor, trained context, fast, slow
    metadata: Mapping[str, Any] = field(default_factory=dict)
    merges: int = 40
    seed: int = 0

    @property
    def is_gemma(self) -> bool:
        return self.kind == "gemma4"

    @property
    def is_gpt_oss(self) -> bool:
        return self.kind == "gpt-oss"

    @property
    def cap(self) -> float:
        return 30.0 if self.is_gemma else 0.0

    def is_windowed(self, layer: int) -> bool:
        return bool(self.window_every) and (layer + 1) % self.window_every != 0

    def size_of(self, layer: int) -> int:
        return self.size_windowed if self.is_windowed(layer) else self.size

    def kv_heads_of(self, layer: int) -> int:
        return self.kv_heads if self.is_windowed(layer) else self.kv_heads_full

    def inner_of(self, layer: int) -> int:
        return self.inner * (2 if self.per_layer and layer >= self.layers - self.sharing else 1)

    def read_layer(self, layer: int) -> int:
        """The layer whose keys and values a layer attends to."""
        own = self.layers - self.sharing
        same = (each for each in reversed(range(own)) if self.is_windowed(each) == self.is_windowed(layer))
        return layer if layer < own else next(same)

    def tokens(self) -> int:
        return len(vocabulary(self.merges)[0])


YARN = (8.0, 64.0, 32.0, 1.0)
CASES = {
    "qwen3moe": Case("qwen3moe", 3, experts=(6, 2, 32)),
    "gpt-oss": Case(
        "gpt-oss", 4, base=150_000.0, window=6, window_every=2, epsilon=1e-5, experts=(5, 3, 32), yarn=YARN
    ),
    "gemma4-e2b": Case(
        *("gemma4", 6), size=64, window=6, window_every=3, kv_heads=1, kv_heads_full=1, sharing=3, per_layer=16
    ),
    "gemma4-31b": Case("gemma4", 4, size=64, window=6, window_every=2, kv_heads_full=1, has_values=False),
    "gemma4-26b": Case("gemma4", 3, size=64, window=6, window_every=3, has_values=False, experts=(6, 2, 32)),
}


def tensors(case: Case) -> dict[str, Floats]:
    """All by their GGUF names, matrices as [..., outputs, inputs]."""
    rng = np.random.default_rng(case.seed)

    def draw(*shape: int, scale: float = 1.0) -> Floats:
        return (rng.standard_normal(shape) * scale / math.sqrt(shape[-1])).astype(np.float32)

    def norm(size: int) -> Floats:
        return (1 + rng.standard_normal(size) / 8).astype(np.float32)

    def bias(*shape: int) -> Floats:
        return (rng.standard_normal(shape) / 4).astype(np.float32)

    width, tokens, (count, _, expert_inner) = case.width, case.tokens(), case.experts
    found = {"token_embd.weight": draw(tokens, width, scale=3.0), "output_norm.weight": norm(width)}
    if not case.is_gemma:
        found["output.weight"] = draw(tokens, width)
    if case.is_gemma:
        pairs = case.size // 2
        found["rope_freqs.weight"] = np.where(np.arange(pairs) < pairs // 4, 1.0, NOT_ROTATED).astype(np.float32)
    if case.per_layer:
        found["per_layer_token_embd.weight"] = draw(tokens, case.layers * case.per_layer, scale=2.0)
        found["per_layer_model_proj.weight"] = draw(case.layers * case.per_layer, width)
        found["per_layer_proj_norm.weight"] = norm(case.per_layer)
    for layer in range(case.layers):
        size, kv_heads, inner = case.size_of(layer), case.kv_heads_of(layer), case.inner_of(layer)
        own = {
            "attn_norm.weight": norm(width),
            "attn_q.weight": draw(case.heads * size, width),
            "attn_output.weight": draw(width, case.heads * size),
        }
        if case.read_layer(layer) == layer:
            own["attn_k.weight"] = draw(kv_heads * size, width)
            if case.has_values or case.is_windowed(layer):
                own["attn_v.weight"] = draw(kv_heads * size, width)
        if case.is_gpt_oss:
            own |= {f"attn_{kind}.bias": bias(heads * size) for kind, heads in zip("qkv", (4, 2, 2), strict=True)}
            own |= {"attn_output.bias": bias(width), "attn_sinks.weight": 2 * bias(case.heads)}
            own["post_attention_norm.weight"] = norm(width)
        else:
            factor = np.float32(2 * size**-0.5 if case.is_gemma else 1)  # as the attention is not scaled
            own |= {"attn_q_norm.weight": norm(size) * factor, "ffn_norm.weight": norm(width)}
            if case.read_layer(layer) == layer:
                own["attn_k_norm.weight"] = norm(size)
        if case.is_gemma:
            own |= {"post_attention_norm.weight": norm(width), "post_ffw_norm.weight": norm(width)}
            own |= {"ffn_gate.weight": draw(inner, width), "ffn_up.weight": draw(inner, width)}
            own |= {"ffn_down.weight": draw(width, inner), "layer_output_scale.weight": np.array([0.8], np.float32)}
        if case.per_layer:
            own |= {"inp_gate.weight": draw(case.per_layer, width), "proj.weight": draw(width, case.per_layer)}
            own["post_norm.weight"] = norm(width)
        if count:
            own["ffn_gate_inp.weight"] = draw(count, width, scale=2.0)
            own["ffn_down_exps.weight"] = draw(count, width, expert_inner)
        if count and case.is_gemma:
            own["ffn_gate_up_exps.weight"] = draw(count, 2 * expert_inner, width)
            own |= {"ffn_gate_inp.scale": norm(width), "ffn_down_exps.scale": norm(count)}
            own |= {f"{name}.weight": norm(width) for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")}
        elif count:
            own |= {f"ffn_{kind}_exps.weight": draw(count, expert_inner, width) for kind in ("gate", "up")}
        if case.is_gpt_oss:
            own |= {f"ffn_{kind}_exps.bias": bias(count, expert_inner) for kind in ("gate", "up")}
            own |= {"ffn_down_exps.bias": bias(count, width), "ffn_gate_inp.bias": bias(count)}
            own["ffn_gate_exps.weight"] *= 6  # so that the limits of 7 matter
            own["ffn_up_exps.weight"] *= 6
        found |= {f"blk.{layer}.{name}": values for name, values in own.items()}
    return found


def write(
    path: Path,
    case: Case,
    kinds: Mapping[str, str] | None = None,
    *,
    metadata: Mapping[str, Any] | None = None,
    changed: Mapping[str, Floats | None] | None = None,
) -> Path:
    """`kinds`: the type of what a GGUF name ends with, F32 for the rest; `metadata` and `changed` replace entries."""
    kind, layers = case.kind, case.layers
    sizes = {"layers": layers, "width": case.width, "hidden": case.inner, "heads": case.heads, "size": case.size}
    writer = begin(path, kind, context=case.context, kv_heads=case.kv_heads, epsilon=case.epsilon, **sizes)
    writer.add_rope_freq_base(case.base)
    own: dict[str, Any] = {}
    count, used, expert_inner = case.experts
    if count:
        writer.add_expert_count(count)
        writer.add_expert_used_count(used)
        writer.add_expert_feed_forward_length(expert_inner)
    if case.is_gemma:
        own = {"feed_forward_length": [case.inner_of(layer) for layer in range(layers)]}
        own |= {"attention.head_count_kv": [case.kv_heads_of(layer) for layer in range(layers)]}
        add_windows(writer, kind, case, layers)
        writer.add_uint32(f"{kind}.embedding_length_per_layer_input", case.per_layer)
        writer.add_uint32(f"{kind}.attention.shared_kv_layers", case.sharing)
        writer.add_float32(f"{kind}.final_logit_softcapping", case.cap)
    elif case.window:
        writer.add_sliding_window(case.window)
    if case.yarn:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(case.yarn[0])
        writer.add_rope_scaling_orig_ctx_len(int(case.yarn[1]))
        writer.add_float32(f"{kind}.rope.scaling.yarn_beta_fast", case.yarn[2])
        writer.add_float32(f"{kind}.rope.scaling.yarn_beta_slow", case.yarn[3])
    write_vocabulary(writer, Shape(merges=case.merges))

    def stored(name: str) -> gguf.GGMLQuantizationType:
        found = next((made for end, made in (kinds or {}).items() if name.endswith(end)), "F32")
        return gguf.GGMLQuantizationType[found]

    given = {f"{kind}.{key}": value for key, value in own.items()} | {**case.metadata, **(metadata or {})}
    return finish(writer, path, {**tensors(case), **(changed or {})}, given, stored)


def add_windows(writer: gguf.GGUFWriter, kind: str, case: Case, layers: int) -> None:
    """What a Gemma 4 and its drafter say of layers with a window."""
    writer.add_sliding_window(case.window)
    writer.add_array(f"{kind}.attention.sliding_window_pattern", [case.is_windowed(n) for n in range(layers)])
    for key in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        writer.add_uint32(f"{kind}.{key}", case.size_windowed)
    writer.add_rope_dimension_count(case.size)
    writer.add_float32(f"{kind}.rope.freq_base_swa", case.base_windowed)


class Twin:
    """A model in numpy; `weights` replace those of `tensors`."""

    def __init__(self, case: Case, weights: Mapping[str, Floats] | None = None) -> None:
        self.case = case
        self._all = {name: values.astype(np.float64) for name, values in (weights or tensors(case)).items()}

    def logits(self, token_ids: list[int]) -> Doubles:
        """[tokens, vocabulary] of one text."""
        case, whole = self.case, self._all
        logits: Doubles = self.states(token_ids) @ whole.get("output.weight", whole["token_embd.weight"]).T
        return case.cap * np.tanh(logits / case.cap) if case.cap else logits

    def states(self, token_ids: list[int]) -> Doubles:
        """[tokens, width] of one text, behind the last norm; its keys and values are kept."""
        case, whole = self.case, self._all
        x = whole["token_embd.weight"][token_ids] * (math.sqrt(case.width) if case.is_gemma else 1.0)
        beside = self._beside(token_ids, x) if case.per_layer else None
        self.cache: dict[int, tuple[Doubles, Doubles]] = {}
        for layer in range(case.layers):
            x = self.layer(layer, whole, x, case.read_layer(layer), None if beside is None else beside[:, layer])
        return self._norm(x, whole["output_norm.weight"])

    def layer(
        self,
        layer: int,
        weights: Mapping[str, Doubles],
        x: Doubles,
        read: int,
        beside: Doubles | None = None,
        first: int = 0,
    ) -> Doubles:
        """A layer of `weights` over `x` [rows, width] from place `first` on; it attends to what layer `read` kept."""
        start = f"blk.{layer}."
        own = {n.removeprefix(start).removesuffix(".weight"): v for n, v in weights.items() if n.startswith(start)}
        attended = self._attend(layer, own, self._norm(x, own["attn_norm"]), read, first)
        if self.case.is_gemma:
            attended = self._norm(attended, own["post_attention_norm"])
        x = x + attended
        x = x + self._feed(own, x)
        if beside is not None:
            gated = _gelu(x @ own["inp_gate"].T) * beside
            x = x + self._norm(gated @ own["proj"].T, own["post_norm"])
        return x * own.get("layer_output_scale", 1.0)

    def _norm(self, x: Doubles, weight: Doubles | float = 1.0) -> Doubles:
        return normed(x, weight, self.case.epsilon)

    def _beside(self, token_ids: list[int], x: Doubles) -> Doubles:
        """[tokens, layers, size]: what goes into each layer beside the hidden state."""
        case, whole = self.case, self._all
        shape = len(token_ids), case.layers, case.per_layer
        looked_up = whole["per_layer_token_embd.weight"][token_ids].reshape(shape) * math.sqrt(case.per_layer)
        projected = (x @ whole["per_layer_model_proj.weight"].T / math.sqrt(case.width)).reshape(shape)
        found: Doubles = (self._norm(projected, whole["per_layer_proj_norm.weight"]) + looked_up) / math.sqrt(2)
        return found

    def _attend(self, layer: int, own: Mapping[str, Doubles], inner: Doubles, read: int, first: int) -> Doubles:
        case, count, size, kv_heads = self.case, len(inner), self.case.size_of(layer), self.case.kv_heads_of(layer)

        def project(kind: str, heads: int) -> Doubles:
            made = inner @ own[f"attn_{kind}"].T + own.get(f"attn_{kind}.bias", 0.0)
            return made.reshape(-1, heads, size)

        def placed(x: Doubles, kind: str) -> Doubles:
            return self._rotated(
                self._norm(x, own[f"attn_{kind}_norm"]) if f"attn_{kind}_norm" in own else x, layer, first
            )

        queries = placed(project("q", case.heads), "q")
        if "attn_k" in own:
            keys = project("k", kv_heads)
            values = project("v", kv_heads) if "attn_v" in own else keys
            values = self._norm(values) if case.is_gemma else values
            self.cache[layer] = _halves(placed(keys, "k")), _halves(values)
        keys, values = self.cache[read]
        distance = first + np.arange(count)[:, None] - np.arange(len(keys))[None]
        sees = (distance >= 0) & ((distance < case.window) | (not case.is_windowed(layer)))
        scale = 1.0 if case.is_gemma else size**-0.5
        found: Doubles = attended(queries, keys, values, sees, scale, own.get("attn_sinks")) @ own["attn_output"].T
        return found + own.get("attn_output.bias", 0.0)

    def _rotated(self, x: Doubles, layer: int, first: int) -> Doubles:
        case, half = self.case, x.shape[-1] // 2
        is_own = case.is_gemma and case.is_windowed(layer)
        frequencies = (case.base_windowed if is_own else case.base) ** (-np.arange(half) / half)
        scale = 1.0
        if case.is_gemma and not is_own:
            frequencies = frequencies / self._all["rope_freqs.weight"]
        if case.yarn:
            factor, trained, *turns = case.yarn
            low, high = (half * math.log(trained / (each * 2 * math.pi)) / math.log(case.base) for each in turns)
            low, high = max(low, 0.0), min(high, 2 * half - 1.0)
            ramp = np.clip((np.arange(half) - low) / (high - low), 0, 1)
            frequencies, scale = frequencies * (ramp / factor + 1 - ramp), 0.1 * math.log(factor) + 1
        return rotated(x, first + np.arange(len(x)), frequencies, scale)

    def _feed(self, own: Mapping[str, Doubles], x: Doubles) -> Doubles:
        case = self.case
        if not case.is_gemma:
            inner = self._norm(x, own["post_attention_norm" if case.is_gpt_oss else "ffn_norm"])
            return self._experts(own, inner, inner)
        inner = self._norm(x, own["ffn_norm"])
        fed = (_gelu(inner @ own["ffn_gate"].T) * (inner @ own["ffn_up"].T)) @ own["ffn_down"].T
        if case.experts[0]:
            routed = self._norm(x, own["ffn_gate_inp.scale"]) / math.sqrt(case.width)
            found = self._experts(own, routed, self._norm(x, own["pre_ffw_norm_2"]))
            fed = self._norm(fed, own["post_ffw_norm_1"]) + self._norm(found, own["post_ffw_norm_2"])
        return self._norm(fed, own["post_ffw_norm"])

    def _experts(self, own: Mapping[str, Doubles], routed: Doubles, inner: Doubles) -> Doubles:
        logits = routed @ own["ffn_gate_inp"].T + own.get("ffn_gate_inp.bias", 0.0)
        found = np.zeros_like(inner)
        for row, scores in enumerate(logits):
            chosen = np.argsort(-scores, kind="stable")[: self.case.experts[1]]
            shares = np.exp(scores[chosen] - scores[chosen].max())
            for expert, share in zip(chosen, shares / shares.sum(), strict=True):
                scale = own["ffn_down_exps.scale"][expert] if self.case.is_gemma else 1.0
                found[row] += share * scale * self._expert(own, expert, inner[row])
        return found

    def _expert(self, own: Mapping[str, Doubles], expert: int, x: Doubles) -> Doubles:
        if "ffn_gate_up_exps" in own:
            gate, up = np.split(own["ffn_gate_up_exps"][expert] @ x, 2)
        else:
            gate, up = (own[f"ffn_{kind}_exps"][expert] @ x for kind in ("gate", "up"))
        if self.case.is_gemma:
            both = _gelu(gate) * up
        elif self.case.is_gpt_oss:
            gate = np.minimum(gate + own["ffn_gate_exps.bias"][expert], 7.0)
            up = np.clip(up + own["ffn_up_exps.bias"][expert], -7.0, 7.0)
            both = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        else:
            both = gate / (1 + np.exp(-gate)) * up
        found: Doubles = own["ffn_down_exps"][expert] @ both
        return found + own["ffn_down_exps.bias"][expert] if self.case.is_gpt_oss else found


def _gelu(x: Doubles) -> Doubles:
    found: Doubles = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return found


def _halves(x: Doubles) -> Doubles:
    return x.astype(np.float16).astype(np.float64)


# -- a Gemma 4 and its drafter, which reads the keys and values of the target's last two layers

GEMMA = Case("gemma4", 4, size=32, size_windowed=16, window=512, window_every=2)
DRAFTER, DRAFTER_LAYERS, DRAFTER_WIDTH = "gemma4-assistant", 4, 32


def drafter_tensors(case: Case) -> dict[str, Floats]:
    rng = np.random.default_rng(case.seed + 1)

    def draw(rows: int, columns: int, scale: float = 1.0) -> Floats:
        return (rng.standard_normal((rows, columns)) * scale / math.sqrt(columns)).astype(np.float32)

    def norm(length: int) -> Floats:
        return (1 + rng.standard_normal(length) / 8).astype(np.float32)

    pairs = case.size // 2
    found = {
        "token_embd.weight": draw(case.tokens(), DRAFTER_WIDTH, 3.0),
        "output_norm.weight": norm(DRAFTER_WIDTH),
        "rope_freqs.weight": np.where(np.arange(pairs) < pairs // 4, 1.0, NOT_ROTATED).astype(np.float32),
        "nextn.pre_projection.weight": draw(DRAFTER_WIDTH, 2 * case.width),
        "nextn.post_projection.weight": draw(case.width, DRAFTER_WIDTH),
    }
    for layer in range(DRAFTER_LAYERS):
        size = case.size_of(layer)
        own = {
            "attn_q.weight": draw(case.heads * size, DRAFTER_WIDTH),
            "attn_q_norm.weight": norm(size) * np.float32(2 * size**-0.5),
            "attn_output.weight": draw(DRAFTER_WIDTH, case.heads * size),
            "ffn_gate.weight": draw(case.inner, DRAFTER_WIDTH),
            "ffn_up.weight": draw(case.inner, DRAFTER_WIDTH),
            "ffn_down.weight": draw(DRAFTER_WIDTH, case.inner),
            "layer_output_scale.weight": np.array([0.8], np.float32),
        }
        own |= {f"{name}.weight": norm(DRAFTER_WIDTH) for name in ("attn_norm", "post_attention_norm")}
        own |= {f"{name}.weight": norm(DRAFTER_WIDTH) for name in ("ffn_norm", "post_ffw_norm")}
        found |= {f"blk.{layer}.{name}": values for name, values in own.items()}
    return found


def write_drafter(
    path: Path,
    case: Case = GEMMA,
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Floats | None] | None = None,
) -> Path:
    """`metadata` and `tensors` replace what a sound file holds, None leaves an entry out."""
    sizes = {
        "layers": DRAFTER_LAYERS,
        "width": DRAFTER_WIDTH,
        "hidden": case.inner,
        "heads": case.heads,
        "size": case.size,
    }
    writer = begin(path, DRAFTER, context=case.context, kv_heads=case.kv_heads, epsilon=case.epsilon, **sizes)
    writer.add_rope_freq_base(case.base)
    add_windows(writer, DRAFTER, case, DRAFTER_LAYERS)
    writer.add_uint32(f"{DRAFTER}.embedding_length_out", case.width)
    writer.add_uint32(f"{DRAFTER}.nextn_predict_layers", DRAFTER_LAYERS)
    write_vocabulary(writer, Shape(merges=case.merges))
    return finish(writer, path, {**drafter_tensors(case), **(tensors or {})}, metadata)


class PairTwin(Twin):
    """Both models over one text."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._drafter = {name: values.astype(np.float64) for name, values in drafter_tensors(case).items()}

    def read(self, token_ids: list[int]) -> tuple[Floats, Floats]:
        """(logits, hidden states) of a text; its keys and values are kept for the drafter."""
        return self.logits(token_ids).astype(np.float32), self.states(token_ids).astype(np.float32)

    def draft(self, token_id: int, state: Floats, position: int) -> tuple[Floats, Floats]:
        """(logits, the next state) of one step; `position` is that of the last token of the text."""
        case, weights = self.case, self._drafter
        embedded = self._all["token_embd.weight"][[token_id]] * math.sqrt(case.width)
        joined: Doubles = np.concatenate((embedded, state[None].astype(np.float64)), axis=1)
        x: Doubles = joined @ weights["nextn.pre_projection.weight"].T
        for layer in range(DRAFTER_LAYERS):
            read = case.layers - (2 if case.is_windowed(layer) else 1)
            x = self.layer(layer, weights, x, read, first=position)
        x = self._norm(x, weights["output_norm.weight"])
        logits, after = x @ weights["token_embd.weight"].T, x @ weights["nextn.post_projection.weight"].T
        return logits[0].astype(np.float32), after[0].astype(np.float32)
