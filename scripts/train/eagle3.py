"""Convert a published EAGLE-3 head, in Hugging Face format, to the file that drafts for its target. Needs no torch.

    python scripts/train/eagle3.py HEAD TARGET -o head.gguf --model target.gguf
    python scripts/train/eagle3.py HEAD TARGET -o heads.npz --model exported/onnx/target/model.onnx

HEAD and TARGET are folders of checkpoints. A .gguf drafts for the target on llama.cpp, an .npz for its ONNX graph.
MODEL is the target as it runs: what was made is compared on its states with a slow implementation, the .npz first as
floats, which must agree, then as it is stored, whose loss is told. Without --model a .gguf is not compared.

Supported layouts: that of the method's authors, SpecForge and AngelSlim (`midlayer.*`), and that of `speculators`
(`layers.0.*`, the layer's settings nested). A head without embeddings uses its target's.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import Engine
from edgespec.engines.head import DraftHead
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.onnx.file_heads import load_eagle
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import ConfigError, EdgespecError, ModelFileError
from edgespec.export.check import (
    PROBE_TEXTS,
    Comparison,
    ExportRefused,
    Limits,
    compare_logits,
    limits_of,
    open_engine,
)
from edgespec.export.gguf.convert import (
    OUTPUT_TYPES,
    Tensors,
    rotary_tensors,
    write_gguf,
    write_hyperparameters,
)
from edgespec.export.gguf.tokenizer import write_tokenizer
from edgespec.formats.architectures import (
    Architecture,
    Sizes,
    interleave_rotary,
    llama3_frequency_factors,
    read_sizes,
    rotary_settings,
)
from edgespec.formats.checkpoint import Checkpoint, Config, Weights
from edgespec.formats.gguf.heads import DRAFTED, EAGLE3, EAGLE3_LAYERS
from edgespec.formats.head_file import HeadFile, HeadManifest, Matrix, Table, read_head_file, write_head_file
from edgespec.types import Batch

PREFIXES = ("midlayer.", "layers.0.")
NESTED = "transformer_layer_config"  # key under which `speculators` checkpoints nest the layer's settings
PROBE_TOKENS, CHECKED_TOKENS = 12, 96
CONTEXT = 320
DRAFT_LENGTH = 5  # tokens of a draft that such heads are trained for
ROWS_AT_ONCE = 4096
FLOATS = Limits(0.99, 1e-4)  # keys and values have half precision
STORED = Limits(0.90, 0.05)  # of weights and inputs in 8 bits

# Hugging Face name -> (GGUF name, shape); t: target layers concatenated, w: draft vocabulary, i: embedding + state
OUTER: Mapping[str, tuple[str, str]] = {
    "fc.weight": ("fc.weight", "d t"),
    "input_norm.weight": ("enc.output_norm.weight", "t"),
    "norm.weight": ("output_norm.weight", "d"),
    "lm_head.weight": ("output.weight", "w d"),
    "embed_tokens.weight": ("token_embd.weight", "v d"),
}
LAYER: Mapping[str, tuple[str, str]] = {
    "input_layernorm.weight": ("attn_norm.weight", "d"),
    "hidden_norm.weight": ("attn_norm_2.weight", "d"),
    "self_attn.q_proj.weight": ("attn_q.weight", "q i"),
    "self_attn.k_proj.weight": ("attn_k.weight", "k i"),
    "self_attn.v_proj.weight": ("attn_v.weight", "k i"),
    "self_attn.o_proj.weight": ("attn_output.weight", "d q"),
    "post_attention_layernorm.weight": ("ffn_norm.weight", "d"),
    "mlp.gate_proj.weight": ("ffn_gate.weight", "f d"),
    "mlp.up_proj.weight": ("ffn_up.weight", "f d"),
    "mlp.down_proj.weight": ("ffn_down.weight", "d f"),
}
OPTIONAL = ("enc.output_norm.weight", "output.weight", "token_embd.weight")
NOT_NEEDED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """A head, matched with its target. `layers`: target layers whose inputs it reads; `tensors`: GGUF name -> source.

    `drafted` [draft vocabulary]: target ids of the tokens that it can propose; None: all.
    """

    checkpoint: Checkpoint
    sizes: Sizes
    layers: tuple[int, ...]
    target_width: int
    tensors: Mapping[str, str]
    drafted: NDArray[np.int64] | None

    @property
    def shares_weights(self) -> bool:
        """Whether it uses the target's embeddings or output head."""
        return not {"token_embd.weight", "output.weight"} <= self.tensors.keys()

    def weights(self, name: str) -> Weights:
        """A tensor by its GGUF name. Raises ModelFileError for one that is damaged."""
        source = self.tensors[name]
        weights = self.checkpoint.weights(source)
        if not np.isfinite(weights).all():
            raise ModelFileError(f"{self.checkpoint.tensors[source].file}: tensor {source} contains infinity or NaN")
        return weights


def head_config(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """All settings on one level. Raises ModelFileError if the folder is not an EAGLE-3 head."""
    nested = config.get(NESTED)
    found = {**config, **nested} if isinstance(nested, dict) else dict(config)
    if "draft_vocab_size" not in config or found.get("num_hidden_layers") != 1:
        raise ModelFileError(
            f"{folder} is not an EAGLE-3 head: its config.json has no draft_vocab_size or more than one layer"
        )
    return found


def plan_head(folder: Path, target_folder: Path) -> HeadPlan:
    """Read a head's headers. Raises ModelFileError if it is not an EAGLE-3 head, is damaged, or does not fit the
    target in `target_folder`.
    """
    found, target = Checkpoint.open(folder), Checkpoint.open(target_folder)
    checkpoint = replace(found, config=head_config(found.config, folder))
    vocabulary = target.count("vocab_size")
    sizes = replace(read_sizes(checkpoint), vocabulary=vocabulary)
    _check_settings(checkpoint, target)
    width = target.count("hidden_size")
    drafted = _drafted(checkpoint, vocabulary)
    layers = _layers(checkpoint.config, target.count("num_hidden_layers"), folder)
    numbers = {"t": EAGLE3_LAYERS * width, "w": vocabulary if drafted is None else drafted.size, "i": 2 * sizes.width}
    tensors = _tensors(checkpoint, sizes, numbers)
    return HeadPlan(checkpoint, sizes, layers, width, tensors, drafted)


def shared_names(target: Checkpoint) -> dict[str, str]:
    """Names of the target's tables by those in a head."""
    embeddings = next(name for name in target.names() if name.endswith("embed_tokens.weight"))
    head = "lm_head.weight" if "lm_head.weight" in target.tensors else embeddings
    return {"token_embd.weight": embeddings, "output.weight": head}


def _check_settings(checkpoint: Checkpoint, target: Checkpoint) -> None:
    folder, config = checkpoint.folder, checkpoint.config
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelFileError(f"{folder} has hidden_act {act!r:.40}; allowed: silu")
    if (kind := rotary_settings(config)["rope_type"]) not in ("default", "linear", "llama3"):
        raise ModelFileError(f"{folder} has rotary scaling {kind!r:.40}; allowed: default, linear, llama3")
    wanted = config.get("target_hidden_size")
    if wanted is not None and wanted != target.count("hidden_size"):
        raise ModelFileError(
            f"{folder} is a head for a target of width {wanted!r:.20}; {target.folder.name} has width "
            f"{target.count('hidden_size')}: give the target that it was trained for"
        )


def _layers(config: Config, num_layers: int, folder: Path) -> tuple[int, ...]:
    """The target's layers whose inputs the head reads, from its config or the defaults of the method's authors."""
    nested = config.get("eagle_config")
    named = config.get("eagle_aux_hidden_state_layer_ids")
    if named is None and isinstance(nested, dict):
        named = nested.get("eagle_aux_hidden_state_layer_ids")
    layers = [2, num_layers // 2, num_layers - 3] if named is None else named
    sound = isinstance(layers, list) and all(type(layer) is int and 0 <= layer < num_layers for layer in layers)
    if not sound or len(set(layers)) != EAGLE3_LAYERS or len(layers) != EAGLE3_LAYERS:
        raise ModelFileError(
            f"{folder} reads the target's layers {layers!r:.60}; it must read {EAGLE3_LAYERS} different ones of 0.."
            f"{num_layers - 1}"
        )
    return tuple(layers)


def _tensors(checkpoint: Checkpoint, sizes: Sizes, numbers: Mapping[str, int]) -> dict[str, str]:
    """GGUF name -> name in the checkpoint. Raises ModelFileError for a missing or unknown tensor or a wrong shape."""
    found: dict[str, str] = {}
    for source in checkpoint.names():
        name = source.removeprefix("model.")
        if name in NOT_NEEDED or name == DRAFTED:
            continue
        rest = next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), None)
        placed = OUTER.get(name) if rest is None else LAYER.get(rest)
        if placed is None:
            raise ModelFileError(f"{checkpoint.tensors[source].file}: tensor {source} has no place in an EAGLE-3 head")
        shape = tuple(numbers[part] if part in numbers else sizes.shape(part)[0] for part in placed[1].split())
        if checkpoint.shape(source) != shape:
            raise ModelFileError(
                f"{checkpoint.tensors[source].file}: tensor {source} has the shape {checkpoint.shape(source)}, the "
                f"configs of head and target imply {shape}"
            )
        found[placed[0] if rest is None else f"blk.0.{placed[0]}"] = source
    needed = [name for name, _ in OUTER.values() if name not in OPTIONAL] + [f"blk.0.{n}" for n, _ in LAYER.values()]
    if checkpoint.config.get("norm_before_fc"):
        needed.append("enc.output_norm.weight")
    if missing := [name for name in needed if name not in found]:
        raise ModelFileError(f"{checkpoint.folder} lacks {len(missing)} tensors of an EAGLE-3 head: {missing[0]} ...")
    return found


def _drafted(checkpoint: Checkpoint, vocabulary: int) -> NDArray[np.int64] | None:
    """Target ids [draft vocabulary] of the head's tokens, from `d2t`, which stores id minus index; None without it."""
    tensor = checkpoint.tensors.get(DRAFTED)
    if tensor is None:
        return None
    kinds = {"I64": "<i8", "I32": "<i4"}
    if tensor.dtype not in kinds or len(tensor.shape) != 1 or not tensor.shape[0]:
        raise ModelFileError(
            f"{tensor.file}: tensor {DRAFTED} is {tensor.dtype} {tensor.shape}; it must be a list of I64 or I32"
        )
    offsets: NDArray[Any] = np.fromfile(tensor.file, kinds[tensor.dtype], tensor.shape[0], offset=tensor.offset)
    ids: NDArray[np.int64] = offsets.astype(np.int64) + np.arange(offsets.size)
    if ids.min() < 0 or ids.max() >= vocabulary or np.unique(ids).size < ids.size:
        raise ModelFileError(f"{tensor.file}: {DRAFTED} must name different tokens of the target's {vocabulary}")
    if "lm_head.weight" not in checkpoint.tensors:
        raise ModelFileError(f"{checkpoint.folder} has {DRAFTED} but no lm_head.weight for these tokens")
    return ids


# the slow implementation


class NumpyHead:
    """A slow implementation in float32. `target_weights`: the target's embeddings and head [vocabulary, width]."""

    def __init__(self, plan: HeadPlan, target_weights: Mapping[str, Matrix] | None = None) -> None:
        own = {name: plan.checkpoint.weights(source) for name, source in plan.tensors.items()}
        self._weights: Mapping[str, Matrix] = {**(target_weights or {}), **own}
        self._plan, self._sizes = plan, plan.sizes
        config = plan.checkpoint.config
        self._epsilon = float(config["rms_norm_eps"])
        self._norms_residual, self._norms_features = config.get("norm_before_residual"), config.get("norm_before_fc")
        self._frequencies = rotary_frequencies(config, plan.sizes.head_dim)
        self._keys: list[NDArray[np.float32]] = []
        self._values: list[NDArray[np.float32]] = []
        self.start = self.end = 0

    @classmethod
    def of(cls, plan: HeadPlan, target_folder: Path) -> NumpyHead:
        """The head of a plan, with the weights that it shares with the model in `target_folder`."""
        target = Checkpoint.open(target_folder)
        names = shared_names(target) if plan.shares_weights else {}
        return cls(plan, {name: target.weights(source) for name, source in names.items()})

    def encode(self, features: Matrix) -> Matrix:
        fused = self._norm(features, "enc.output_norm") if self._norms_features else features
        return fused @ self._weights["fc.weight"].T

    def decode(self, token_ids: NDArray[np.int32], states: Matrix) -> tuple[Matrix, Matrix]:
        for token_id, state in zip(token_ids.tolist(), states, strict=True):
            last = self._pair(token_id, state)
        head = self._weights["output.weight"] @ self._norm(last, "output_norm")
        drafted = self._plan.drafted
        if drafted is None:
            return head, last
        logits = np.full(self._sizes.vocabulary, -np.inf, np.float32)
        logits[drafted] = head
        return logits, last

    def _pair(self, token_id: int, state: Matrix) -> Matrix:
        """Append one (token, state) pair to the cache; returns the head's state [width] after it."""
        sizes, weights = self._sizes, self._weights
        normed = self._norm(state, "blk.0.attn_norm_2")
        embedding = self._norm(weights["token_embd.weight"][token_id], "blk.0.attn_norm")
        both = np.concatenate((embedding, normed))
        queries = self._rotated((weights["blk.0.attn_q.weight"] @ both).reshape(sizes.heads, sizes.head_dim))
        self._keys.append(self._rotated((weights["blk.0.attn_k.weight"] @ both).reshape(sizes.kv_heads, -1)))
        self._values.append((weights["blk.0.attn_v.weight"] @ both).reshape(sizes.kv_heads, -1))
        self.end += 1
        grouped = queries.reshape(sizes.kv_heads, -1, sizes.head_dim)
        scores = np.einsum("kgh,nkh->kgn", grouped, np.stack(self._keys)) / np.sqrt(np.float32(sizes.head_dim))
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        seen = np.einsum("kgn,nkh->kgh", shares / shares.sum(axis=-1, keepdims=True), np.stack(self._values))
        joined = weights["blk.0.attn_output.weight"] @ seen.reshape(-1)
        joined = joined + (normed if self._norms_residual else state)
        inner = self._norm(joined, "blk.0.ffn_norm")
        gate = weights["blk.0.ffn_gate.weight"] @ inner
        up = weights["blk.0.ffn_up.weight"] @ inner
        found: Matrix = joined + weights["blk.0.ffn_down.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        return found

    def _norm(self, values: Matrix, name: str) -> Matrix:
        scale = np.sqrt((values * values).mean(axis=-1, keepdims=True) + np.float32(self._epsilon))
        found: Matrix = values / scale * self._weights[f"{name}.weight"]
        return found

    def _rotated(self, heads: NDArray[np.float32]) -> NDArray[np.float32]:
        """[heads, head_dim] rotated to the next position; Hugging Face stores rotary pairs as two halves."""
        half = heads.shape[-1] // 2
        angles = (self.end * self._frequencies).astype(np.float32)
        cosine, sine = np.cos(angles), np.sin(angles)
        first, second = heads[:, :half], heads[:, half:]
        return np.concatenate((first * cosine - second * sine, second * cosine + first * sine), axis=1)

    def rollback(self, to_end: int) -> None:
        count = to_end - self.start
        del self._keys[count:], self._values[count:]
        self.end = to_end

    def drop_before(self, start: int) -> None:
        count = start - self.start
        del self._keys[:count], self._values[:count]
        self.start = start

    def restart(self, position: int) -> None:
        self._keys, self._values = [], []
        self.start = self.end = position


def rotary_frequencies(config: Mapping[str, Any], head_dim: int) -> NDArray[np.float64]:
    """The frequencies [head_dim / 2] of a head's rotary embedding."""
    settings = rotary_settings(dict(config))
    found = float(settings["rope_theta"]) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if settings["rope_type"] == "linear":
        return found / float(settings["factor"])
    if settings["rope_type"] == "llama3":
        return found / llama3_frequency_factors(settings, head_dim)
    return found


# a GGUF

HEAD = Architecture(EAGLE3, {}, {})


def convert_head(folder: Path, target_folder: Path, output: Path, quant: str = "q8_0") -> Path:
    """Write the head of `folder` for the target of `target_folder` to `output`, atomically; norms are F32.

    Raises the errors of `plan_head`, ConfigError for a `quant` that is not in OUTPUT_TYPES, StateError if `output`
    cannot be written.
    """
    if quant not in OUTPUT_TYPES:
        raise ConfigError(f"an EAGLE-3 head cannot be written as {quant}; allowed: {', '.join(OUTPUT_TYPES)}")
    plan = plan_head(folder, target_folder)
    tensors: Tensors = {
        tensor: (plan.checkpoint.shape(source), partial(_interleaved, plan, tensor))
        for tensor, source in plan.tensors.items()
    }

    def describe(writer: gguf.GGUFWriter) -> None:
        write_hyperparameters(writer, plan.checkpoint, HEAD, plan.sizes)
        _write_head(writer, plan)
        write_tokenizer(writer, Checkpoint.open(target_folder), plan.sizes.vocabulary)

    tensors |= rotary_tensors(plan.checkpoint, plan.sizes)
    indices = {} if plan.drafted is None else {DRAFTED: plan.drafted}
    return write_gguf(output, EAGLE3, folder.name, describe, tensors, quant, indices=indices)


def _write_head(writer: gguf.GGUFWriter, plan: HeadPlan) -> None:
    config = plan.checkpoint.config
    writer.add_array(f"{EAGLE3}.target_layers", list(plan.layers))
    writer.add_uint32(f"{EAGLE3}.target_hidden_size", plan.target_width)
    for setting in ("norm_before_residual", "norm_before_fc"):
        writer.add_bool(f"{EAGLE3}.{setting}", bool(config.get(setting, False)))


def _interleaved(plan: HeadPlan, name: str) -> Weights:
    weights = plan.weights(name)
    heads = {"blk.0.attn_q.weight": plan.sizes.heads, "blk.0.attn_k.weight": plan.sizes.kv_heads}.get(name)
    return weights if heads is None else interleave_rotary(weights, heads)


# a heads file

ARRAYS = {  # of a heads file, by their GGUF names
    "fc": "fc.weight",
    "embedding_norm": "blk.0.attn_norm.weight",
    "state_norm": "blk.0.attn_norm_2.weight",
    "q_proj": "blk.0.attn_q.weight",
    "k_proj": "blk.0.attn_k.weight",
    "v_proj": "blk.0.attn_v.weight",
    "o_proj": "blk.0.attn_output.weight",
    "mlp_norm": "blk.0.ffn_norm.weight",
    "gate_proj": "blk.0.ffn_gate.weight",
    "up_proj": "blk.0.ffn_up.weight",
    "down_proj": "blk.0.ffn_down.weight",
    "norm": "output_norm.weight",
}


OpenTarget = Callable[[tuple[int, ...]], Engine]


def write_heads(folder: Path, target_folder: Path, open_target: OpenTarget, output: Path) -> None:
    """Write the head of `folder`, made for the model in `target_folder`, to `output`.

    `open_target(layers)`: the exported target, giving hidden states and the inputs of these layers. Raises
    ModelFileError for a head that is damaged or of another target, StateError where it cannot be written.
    """
    plan = plan_head(folder, target_folder)
    with open_target(tuple(sorted(plan.layers))) as target:
        token_ids = _probe_ids(target)[:PROBE_TOKENS]
        states = states_of(target, token_ids)
    write_head_file(output, heads_of(plan, target_folder, token_ids, states))


def check_heads(folder: Path, target_folder: Path, open_target: OpenTarget, path: Path) -> dict[str, Comparison]:
    """Compare the heads in `path` with the slow implementation. Raises ExportRefused."""
    plan = plan_head(folder, target_folder)
    with open_target(tuple(sorted(plan.layers))) as target:
        token_ids = _probe_ids(target)
        states, vocabulary = states_of(target, token_ids), target.vocabulary
    wanted, stored = _wanted(plan, target_folder, token_ids, states), read_head_file(path)
    floats, found = heads_of(plan, target_folder, token_ids[:1], states[:1]), {}
    floats = replace(floats, embedding=_embedding_of(plan, Checkpoint.open(target_folder), token_ids))
    for name, heads, kind, limits in (("as floats", floats, "F32", FLOATS), ("as stored", stored, "Q8_0", STORED)):
        with load_eagle(heads, vocabulary, heads.manifest.layers, threads=1, kind=kind) as head:
            found[name] = _compared(token_ids, wanted, head, states)
        refuse(found[name], limits, path)
    return found


def heads_of(plan: HeadPlan, target_folder: Path, probe_ids: NDArray[np.int32], probe_states: Matrix) -> HeadFile:
    """The heads of a plan as floats, their embedding in 8 bits; tables that they share come from `target_folder`."""
    sizes, target = plan.sizes, Checkpoint.open(target_folder)
    arrays = {name: plan.weights(source) for name, source in ARRAYS.items()}
    arrays["fc"] = _ascending(arrays["fc"], plan)
    arrays["frequencies"] = rotary_frequencies(plan.checkpoint.config, sizes.head_dim).astype(np.float32)
    manifest = _manifest(plan, target_folder)
    if manifest.norms_features:
        arrays["feature_norm"] = _ascending(plan.weights("enc.output_norm.weight"), plan)
    drafted = np.arange(sizes.vocabulary) if plan.drafted is None else plan.drafted
    order = np.argsort(drafted)
    own = "output.weight" in plan.tensors
    rows = plan.weights("output.weight") if own else target.weights(shared_names(target)["output.weight"])
    ids = drafted[order].astype(np.int32)
    return HeadFile(manifest, arrays, rows[order], ids, probe_ids, probe_states, embedding=_embedding(plan, target))


def _manifest(plan: HeadPlan, target_folder: Path) -> HeadManifest:
    sizes, config = plan.sizes, plan.checkpoint.config
    return HeadManifest(
        kind="eagle",
        depth=DRAFT_LENGTH,
        hidden_size=sizes.width,
        vocabulary_size=sizes.vocabulary,
        target=target_folder.name,
        target_sha256=hashlib.sha256((target_folder / "config.json").read_bytes()).hexdigest(),
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        ffn=sizes.inner,
        norm_eps=float(config["rms_norm_eps"]),
        feature_size=(len(plan.layers) + 1) * plan.target_width,
        layers=tuple(sorted(plan.layers)),
        generation=3,
        norms_residual=bool(config.get("norm_before_residual", False)),
        norms_features=bool(config.get("norm_before_fc", False)),
    )


def _ascending(weights: Matrix, plan: HeadPlan) -> Matrix:
    """Weights [..., layers * target width] with the layers in ascending order, as a target gives them."""
    parts = np.split(weights, len(plan.layers), axis=-1)
    return np.concatenate([parts[place] for place in np.argsort(plan.layers)], axis=-1)


def _place_of_embedding(plan: HeadPlan, target: Checkpoint) -> tuple[Checkpoint, str]:
    own = plan.tensors.get("token_embd.weight")
    return (plan.checkpoint, own) if own else (target, shared_names(target)["token_embd.weight"])


def _embedding(plan: HeadPlan, target: Checkpoint) -> Table:
    """In 8 bits, some rows at a time: it is the largest table."""
    checkpoint, name = _place_of_embedding(plan, target)
    count, width = checkpoint.shape(name)
    codes, scales = np.empty((count, width), np.int8), np.empty(count, np.float32)
    for start in range(0, count, ROWS_AT_ONCE):
        rows = checkpoint.rows_of(name, start, min(start + ROWS_AT_ONCE, count))
        if not np.isfinite(rows).all():
            raise ModelFileError(f"{checkpoint.tensors[name].file}: tensor {name} contains infinity or NaN")
        part = Table.of(rows)
        codes[start : start + len(rows)], scales[start : start + len(rows)] = part.codes, part.scales
    return Table(codes, scales)


def _probe_ids(target: Engine) -> NDArray[np.int32]:
    ids = target.vocabulary.encode("".join(PROBE_TEXTS.values()))
    return np.array(ids[: min(CHECKED_TOKENS, target.facts.context_length)], np.int32)


def states_of(target: Engine, token_ids: NDArray[np.int32]) -> Matrix:
    """The states [n, all layers given and the last] of a text behind an empty cache, which is left empty."""
    target.give_hidden_states(True)
    try:
        target.forward(Batch.chain(token_ids, last_only=True))
        return target.hidden_states().copy()
    finally:
        target.rollback(0)
        target.give_hidden_states(False)


def _embedding_of(plan: HeadPlan, target: Checkpoint, token_ids: NDArray[np.int32]) -> Table:
    """The embeddings as floats, filled in for `token_ids` only: untouched rows take no memory."""
    checkpoint, name = _place_of_embedding(plan, target)
    rows = np.zeros(checkpoint.shape(name), np.float32)
    for token_id in np.unique(token_ids).tolist():
        rows[token_id] = checkpoint.rows_of(name, token_id, token_id + 1)[0]
    return Table(rows)


def _wanted(plan: HeadPlan, target_folder: Path, token_ids: NDArray[np.int32], states: Matrix) -> Matrix:
    """What the slow implementation scores behind every pair of a text, by the tokens that it can draft."""
    slow, width = NumpyHead.of(plan, target_folder), plan.target_width
    places = [sorted(plan.layers).index(layer) for layer in plan.layers]
    encoded = slow.encode(np.concatenate([states[:, place * width : (place + 1) * width] for place in places], axis=1))
    rows = [slow.decode(token_ids[at : at + 1], encoded[at - 1 : at])[0].copy() for at in range(1, token_ids.size)]
    return np.stack(rows)


def _compared(token_ids: NDArray[np.int32], wanted: Matrix, head: DraftHead, states: Matrix) -> Comparison:
    encoded = head.encode(states)
    rows = [head.decode(token_ids[at : at + 1], encoded[at - 1 : at])[0].copy() for at in range(1, token_ids.size)]
    drafted = np.isfinite(wanted[0])
    found = np.stack(rows)[:, : wanted.shape[1]]
    return compare_logits(wanted[:, drafted], found[:, drafted])


def compare_head(plan: HeadPlan, target_folder: Path, target: LlamaCppEngine, path: Path) -> Comparison:
    """Compare the GGUF head in `path`, on an open target, with the slow implementation."""
    token_ids, cached = _probe_ids(target), CachedSequence(target)
    with target.load_head(path) as head:
        cached.keep_features(True)
        cached.feed(token_ids)
        features = cached.features
        assert features is not None
        behind = range(1, token_ids.size)
        wanted, found = (
            np.stack([one.decode(token_ids[at : at + 1], states[at - 1 : at])[0].copy() for at in behind])
            for one, states in ((one, one.encode(features)) for one in (NumpyHead.of(plan, target_folder), head))
        )
    drafted = np.isfinite(wanted[0])
    return compare_logits(wanted[:, drafted], found[:, drafted])


def refuse(found: Comparison, limits: Limits, path: Path) -> None:
    """Remove the file and raise ExportRefused if the comparison is not within its limits."""
    if complaint := found.complaint(limits):
        path.unlink()
        raise ExportRefused(f"{path} is wrong and was removed: compared with numpy, {complaint}")


def _opened_graph(path: Path, layers: tuple[int, ...]) -> Engine:
    from edgespec.engines.onnx import OnnxEngine

    return OnnxEngine.load(path, context_length=CONTEXT, reproducible=False, hidden_states=True, state_layers=layers)


def _make_gguf(given: argparse.Namespace) -> None:
    convert_head(given.head, given.target, given.output, given.quant)
    if given.model is None:
        return
    plan = plan_head(given.head, given.target)
    with open_engine("gguf", given.model, CONTEXT, None) as engine:
        assert isinstance(engine, LlamaCppEngine)
        found = compare_head(plan, given.target, engine, given.output)
    # A shared table has the type that it has in the target's file.
    refuse(found, limits_of("q8_0" if plan.shares_weights else given.quant), given.output)
    print(found.figures())


def _make_heads(given: argparse.Namespace) -> None:
    if given.model is None:
        raise ConfigError("--model is missing: an .npz holds what its target's graph computes for a few tokens")
    opened = partial(_opened_graph, given.model)
    write_heads(given.head, given.target, opened, given.output)
    for name, found in check_heads(given.head, given.target, opened, given.output).items():
        print(name, found.figures())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path, help="folder of the published head")
    parser.add_argument("target", type=Path, help="folder of its target's checkpoint")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file to write: .gguf or .npz")
    parser.add_argument("--model", type=Path, help="the exported target: a GGUF, or model.onnx")
    parser.add_argument("--quant", default="q8_0", help=f"of a .gguf: {', '.join(OUTPUT_TYPES)} (default %(default)s)")
    given = parser.parse_args(arguments)
    try:
        _make_gguf(given) if given.output.suffix == ".gguf" else _make_heads(given)
    except EdgespecError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    print(f"{given.output}: {given.output.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
