"""EAGLE-3 heads in Hugging Face format -> the file of heads that drafts for an ONNX target, without torch.

The file carries the head's own tables, those that it shares with its target included, and a probe: what the exported
target computes for a few tokens. It is checked against a slow implementation on the target's states, first as floats,
which must agree, then as it is stored, whose loss is told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.eagle import LayersEagleDrafter
from edgespec.engines.base import Engine
from edgespec.engines.onnx.eagle import OnnxLayer
from edgespec.errors import ModelFileError
from edgespec.export.accuracy import HEAD_TOKENS, Comparison, ExportRefused, Limits, compare_logits, limits_of
from edgespec.export.eagle3_plan import HeadPlan, plan_head, shared_names
from edgespec.export.eagle3_reference import NumpyHead, rotary_frequencies
from edgespec.export.reference import Reference
from edgespec.export.tokens import PROBE_TEXTS
from edgespec.formats.checkpoint import Checkpoint
from edgespec.formats.head_file import HeadFile, HeadManifest, Matrix, Table, read_head_file, write_head_file
from edgespec.types import Batch

PROBE_TOKENS = 12
OpenTarget = Callable[[tuple[int, ...]], Engine]
DRAFT_LENGTH = 5  # tokens of a draft that such heads are trained for
ROWS_AT_ONCE = 4096
STORED = Limits(None, 0.90, 0.05)  # of weights and inputs in 8 bits
ARRAYS = {
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
    """Compare the heads in `path`, as floats and as stored, with the slow implementation. Raises ExportRefused."""
    plan = plan_head(folder, target_folder)
    with open_target(tuple(sorted(plan.layers))) as target:
        token_ids = _probe_ids(target)
        states, num_tokens = states_of(target, token_ids), target.vocabulary.size
    reference = _reference(plan, target_folder, token_ids, states)
    floats = heads_of(plan, target_folder, token_ids[:1], states[:1])
    floats = replace(floats, embedding=_embedding_of(plan, Checkpoint.open(target_folder), token_ids))
    layers = floats.manifest.layers
    exact = _compared(reference, LayersEagleDrafter(floats, num_tokens, frozenset(), layers), states)
    _refuse(exact, limits_of("fp32"), folder)
    stored = read_head_file(path)
    layer = OnnxLayer(stored, threads=1)
    found = _compared(reference, LayersEagleDrafter(stored, num_tokens, frozenset(), layers, layer), states)
    _refuse(found, STORED, folder)
    return {"onnx": found, "onnx_fp32": exact}


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


def _embedding_of(plan: HeadPlan, target: Checkpoint, token_ids: NDArray[np.int32]) -> Table:
    """The embeddings as floats, filled in for `token_ids` only: untouched rows take no memory."""
    checkpoint, name = _place_of_embedding(plan, target)
    rows = np.zeros(checkpoint.shape(name), np.float32)
    for token_id in np.unique(token_ids).tolist():
        rows[token_id] = checkpoint.rows_of(name, token_id, token_id + 1)[0]
    return Table(rows)


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


# the check


def _probe_ids(target: Engine) -> NDArray[np.int32]:
    ids = target.vocabulary.encode("".join(PROBE_TEXTS.values()))
    return np.array(ids[: min(HEAD_TOKENS, target.facts.context_length)], np.int32)


def states_of(target: Engine, token_ids: NDArray[np.int32]) -> Matrix:
    """The states [n, all layers given and the last] of a text behind an empty cache, which is left empty."""
    target.give_hidden_states(True)
    try:
        target.forward(Batch.chain(token_ids, last_only=True))
        return target.hidden_states().copy()
    finally:
        target.rollback(0)
        target.give_hidden_states(False)


def _reference(plan: HeadPlan, target_folder: Path, token_ids: NDArray[np.int32], states: Matrix) -> Reference:
    """What the slow implementation scores behind every pair of a text, by the tokens that it can draft."""
    slow, width = NumpyHead.of(plan, target_folder), plan.target_width
    places = [sorted(plan.layers).index(layer) for layer in plan.layers]
    encoded = slow.encode(np.concatenate([states[:, place * width : (place + 1) * width] for place in places], axis=1))
    rows = [slow.decode(token_ids[at : at + 1], encoded[at - 1 : at])[0].copy() for at in range(1, token_ids.size)]
    return Reference((token_ids,), (np.stack(rows),), None, "numpy")


def _compared(reference: Reference, drafter: LayersEagleDrafter, states: Matrix) -> Comparison:
    (token_ids,), (wanted,) = reference.token_ids, reference.logits
    with closing(drafter):
        rows = [drafter.scores_behind(token_ids[: at + 1], states[:at]).copy() for at in range(1, token_ids.size)]
    drafted = np.isfinite(wanted[0])
    found = np.stack(rows)[:, : wanted.shape[1]]
    return compare_logits(replace(reference, logits=(wanted[:, drafted],)), [found[:, drafted]])


def _refuse(found: Comparison, limits: Limits, folder: Path) -> None:
    if complaint := found.complaint(limits):
        raise ExportRefused(
            f"the heads made of {folder.name} are wrong and were removed: compared with numpy, {complaint}. Please "
            "report this with the model's name"
        )
