"""What an EAGLE-3 head in Hugging Face format holds, matched with its target, for both engines' files.

Supported layouts: that of the method's authors, SpecForge and AngelSlim (`midlayer.*`), and that of `speculators`
(`layers.0.*`, the layer's settings nested). A head without embeddings uses its target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError
from edgespec.formats.architectures import Sizes, read_sizes, rotary_settings
from edgespec.formats.checkpoint import PREFIXES, Checkpoint, Config, Weights, head_config
from edgespec.formats.gguf.heads import DRAFTED, EAGLE3_LAYERS

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
