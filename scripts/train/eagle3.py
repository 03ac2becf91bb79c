"""Convert a published EAGLE-3 head, in Hugging Face format, to a heads file for its ONNX target. Needs no torch.

    python scripts/train/eagle3.py HEAD TARGET -o heads.npz --model exported/onnx/target/model.onnx

HEAD and TARGET are folders of checkpoints, MODEL is the target as it runs: what was made is compared on its states with
the definition, first as floats, which must agree, then as it is stored, whose loss is told. For llama.cpp its own
convert_hf_to_gguf.py makes a GGUF: HEAD --target-model-dir TARGET.

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

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import Engine
from edgespec.engines.onnx.file_heads import load_eagle
from edgespec.errors import ConfigError, EdgespecError, ModelFileError
from edgespec.export.check import PROBE_TEXTS, Comparison, ExportRefused, Limits, compare_logits
from edgespec.formats.architectures import (
    Sizes,
    llama3_frequency_factors,
    read_sizes,
    rotary_settings,
)
from edgespec.formats.checkpoint import Checkpoint, Config, Weights
from edgespec.formats.gguf.heads import DRAFTED, EAGLE3_LAYERS
from edgespec.formats.head_file import HeadFile, HeadManifest, Matrix, Table, read_head_file
from edgespec.types import Batch
from trainlib.eagle_definition import layer, normed
from trainlib.head_files import in_bytes, write_head_file

PREFIXES = ("midlayer.", "layers.0.")
NESTED = "transformer_layer_config"  # key under which `speculators` checkpoints nest the layer's settings
PROBE_TOKENS, CHECKED_TOKENS = 12, 96
CONTEXT = 320
DRAFT_LENGTH = 5  # tokens of a draft that such heads are trained for
ROWS_AT_ONCE = 4096
FLOATS = Limits(0.99, 1e-4)  # keys and values have half precision
STORED = Limits(0.90, 0.05)  # of weights and inputs in 8 bits

# Hugging Face name -> (name in a heads file, shape); t: target layers concatenated, w: draft vocabulary, i: embedding +
# state. The last two are tables, which a head may share with its target.
OUTER: Mapping[str, tuple[str, str]] = {
    "fc.weight": ("fc", "d t"),
    "input_norm.weight": ("feature_norm", "t"),
    "norm.weight": ("norm", "d"),
    "lm_head.weight": ("head", "w d"),
    "embed_tokens.weight": ("embedding", "v d"),
}
LAYER: Mapping[str, tuple[str, str]] = {
    "input_layernorm.weight": ("embedding_norm", "d"),
    "hidden_norm.weight": ("state_norm", "d"),
    "self_attn.q_proj.weight": ("q_proj", "q i"),
    "self_attn.k_proj.weight": ("k_proj", "k i"),
    "self_attn.v_proj.weight": ("v_proj", "k i"),
    "self_attn.o_proj.weight": ("o_proj", "d q"),
    "post_attention_layernorm.weight": ("mlp_norm", "d"),
    "mlp.gate_proj.weight": ("gate_proj", "f d"),
    "mlp.up_proj.weight": ("up_proj", "f d"),
    "mlp.down_proj.weight": ("down_proj", "d f"),
}
OPTIONAL = ("feature_norm", "head", "embedding")
NOT_NEEDED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """A head, matched with its target. `layers`: target layers whose inputs it reads; `tensors`: our name -> source.

    `drafted` [draft vocabulary]: target ids of the tokens that it can propose.
    """

    checkpoint: Checkpoint
    sizes: Sizes
    layers: tuple[int, ...]
    target_width: int
    tensors: Mapping[str, str]
    drafted: NDArray[np.int64]

    def weights(self, name: str) -> Weights:
        """A tensor by our name. Raises ModelFileError for one that is damaged."""
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
    tensors = _tensors(checkpoint, sizes, {"t": len(layers) * width, "w": drafted.size, "i": 2 * sizes.width})
    return HeadPlan(checkpoint, sizes, layers, width, tensors, drafted)


def shared_names(target: Checkpoint) -> dict[str, str]:
    """Names of the target's tables by those in a head."""
    embeddings = next(name for name in target.names() if name.endswith("embed_tokens.weight"))
    head = "lm_head.weight" if "lm_head.weight" in target.tensors else embeddings
    return {"embedding": embeddings, "head": head}


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
    """Our name -> name in the checkpoint. Raises ModelFileError for a missing or unknown tensor or a wrong shape."""
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
        found[placed[0]] = source
    needed = [name for name, _ in (*OUTER.values(), *LAYER.values()) if name not in OPTIONAL]
    if checkpoint.config.get("norm_before_fc"):
        needed.append("feature_norm")
    if missing := [name for name in needed if name not in found]:
        raise ModelFileError(f"{checkpoint.folder} lacks {len(missing)} tensors of an EAGLE-3 head: {missing[0]} ...")
    return found


def _drafted(checkpoint: Checkpoint, vocabulary: int) -> NDArray[np.int64]:
    """Target ids [draft vocabulary] of the head's tokens, from `d2t`, which stores id minus index; all without it."""
    tensor = checkpoint.tensors.get(DRAFTED)
    if tensor is None:
        return np.arange(vocabulary)
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


def rotary_frequencies(config: Mapping[str, Any], head_dim: int) -> NDArray[np.float64]:
    """The frequencies [head_dim / 2] of a head's rotary embedding."""
    settings = rotary_settings(dict(config))
    found = float(settings["rope_theta"]) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if settings["rope_type"] == "linear":
        return found / float(settings["factor"])
    if settings["rope_type"] == "llama3":
        return found / llama3_frequency_factors(settings, head_dim)
    return found


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
    """Compare the heads in `path` with their definition. Raises ExportRefused."""
    plan = plan_head(folder, target_folder)
    with open_target(tuple(sorted(plan.layers))) as target:
        token_ids = _probe_ids(target)
        states, vocabulary = states_of(target, token_ids), target.vocabulary
    wanted, stored = _defined(plan, target_folder, token_ids, states), read_head_file(path)
    floats, found = heads_of(plan, target_folder, token_ids[:1], states[:1]), {}
    floats = replace(floats, embedding=_embedding_of(plan, Checkpoint.open(target_folder), token_ids))
    for name, heads, kind, limits in (("as floats", floats, "F32", FLOATS), ("as stored", stored, "Q8_0", STORED)):
        with load_eagle(heads, vocabulary, heads.manifest.layers, threads=1, kind=kind) as head:
            encoded, behind = head.encode(states), range(1, token_ids.size)
            rows = [head.decode(token_ids[at : at + 1], encoded[at - 1 : at])[0].copy() for at in behind]
        found[name] = compare_logits(wanted, np.stack(rows)[:, plan.drafted])
        if complaint := found[name].complaint(limits):
            path.unlink()
            raise ExportRefused(f"{path} is wrong and was removed: compared with its definition, {complaint}")
    return found


def heads_of(plan: HeadPlan, target_folder: Path, probe_ids: NDArray[np.int32], probe_states: Matrix) -> HeadFile:
    """The heads of a plan as floats, their embedding in 8 bits; tables that they share come from `target_folder`."""
    sizes, target = plan.sizes, Checkpoint.open(target_folder)
    arrays = {name: plan.weights(name) for name in plan.tensors if name not in OPTIONAL}
    arrays["fc"] = _ascending(arrays["fc"], plan)
    arrays["frequencies"] = rotary_frequencies(plan.checkpoint.config, sizes.head_dim).astype(np.float32)
    manifest = _manifest(plan, target_folder)
    if manifest.norms_features:
        arrays["feature_norm"] = _ascending(plan.weights("feature_norm"), plan)
    order = np.argsort(plan.drafted)
    rows, ids = _head_rows(plan, target)[order], plan.drafted[order].astype(np.int32)
    return HeadFile(manifest, arrays, rows, ids, probe_ids, probe_states, embedding=_embedding(plan, target))


def _head_rows(plan: HeadPlan, target: Checkpoint) -> Matrix:
    """The scored rows [draft vocabulary, width]; a head that drafts all tokens may use its target's."""
    return plan.weights("head") if "head" in plan.tensors else target.weights(shared_names(target)["head"])


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
    own = plan.tensors.get("embedding")
    return (plan.checkpoint, own) if own else (target, shared_names(target)["embedding"])


def _embedding(plan: HeadPlan, target: Checkpoint) -> Table:
    """In 8 bits, some rows at a time: it is the largest table."""
    checkpoint, name = _place_of_embedding(plan, target)
    count, width = checkpoint.shape(name)
    codes, scales = np.empty((count, width), np.int8), np.empty(count, np.float32)
    for start in range(0, count, ROWS_AT_ONCE):
        rows = checkpoint.rows_of(name, start, min(start + ROWS_AT_ONCE, count))
        if not np.isfinite(rows).all():
            raise ModelFileError(f"{checkpoint.tensors[name].file}: tensor {name} contains infinity or NaN")
        part = in_bytes(rows)
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


def _defined(plan: HeadPlan, target_folder: Path, token_ids: NDArray[np.int32], states: Matrix) -> Matrix:
    """What the definition scores behind every pair of a text, by the tokens that it can draft."""
    target, width, sizes = Checkpoint.open(target_folder), plan.target_width, _manifest(plan, target_folder)
    arrays: dict[str, Any] = {name: plan.weights(name) for name in plan.tensors if name not in OPTIONAL}
    arrays["frequencies"] = rotary_frequencies(plan.checkpoint.config, sizes.head_dim)
    places = [sorted(plan.layers).index(each) for each in plan.layers]
    features = np.concatenate([states[:-1, place * width : (place + 1) * width] for place in places], axis=1)
    if sizes.norms_features:
        features = normed(features, plan.weights("feature_norm"), sizes.norm_eps)
    embedded = _embedding_of(plan, target, token_ids).codes[token_ids[1:]]
    sees = np.tri(len(embedded), dtype=np.bool_)
    _, scored = layer(sizes, arrays, features @ arrays["fc"].T, embedded, sees)
    found: Matrix = scored @ _head_rows(plan, target).T
    return found


def _opened_graph(path: Path, layers: tuple[int, ...]) -> Engine:
    from edgespec.engines.onnx import OnnxEngine

    return OnnxEngine.load(path, context_length=CONTEXT, reproducible=False, hidden_states=True, state_layers=layers)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path, help="folder of the published head")
    parser.add_argument("target", type=Path, help="folder of its target's checkpoint")
    parser.add_argument("-o", "--output", type=Path, required=True, help="heads file to write: .npz")
    parser.add_argument("--model", type=Path, required=True, help="the target as exported: model.onnx")
    given = parser.parse_args(arguments)
    opened = partial(_opened_graph, given.model)
    try:
        if given.output.suffix != ".npz":
            raise ConfigError(f"{given.output} is no .npz; for a GGUF use llama.cpp's convert_hf_to_gguf.py")
        write_heads(given.head, given.target, opened, given.output)
        for name, found in check_heads(given.head, given.target, opened, given.output).items():
            print(name, found.figures())
    except EdgespecError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    print(f"{given.output}: {given.output.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
