"""Converts EAGLE-3 heads in Hugging Face format to GGUF, with the tokenizer of their target."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import cast

import gguf

from edgespec.errors import ConfigError
from edgespec.export.eagle3_plan import HeadPlan, plan_head
from edgespec.export.gguf.convert import (
    OUTPUT_TYPES,
    About,
    Conversion,
    OutputType,
    Tensors,
    rotary_tensors,
    write_gguf,
)
from edgespec.export.gguf.hyperparameters import write_hyperparameters
from edgespec.export.gguf.tokenizer import write_tokenizer
from edgespec.formats.architectures import Architecture, interleave_rotary
from edgespec.formats.checkpoint import Checkpoint, Weights
from edgespec.formats.gguf.heads import DRAFTED, EAGLE3
from edgespec.types import Progress, no_progress

HEAD = Architecture(EAGLE3, {}, {})


def convert_head(
    folder: Path,
    target_folder: Path,
    output: Path,
    quant: str = "q8_0",
    *,
    name: str | None = None,
    licence: str | None = None,
    progress: Progress = no_progress,
) -> Conversion:
    """Write the head of `folder` for the target of `target_folder` to `output`, atomically; norms are F32.

    Raises the errors of `plan_head`, ConfigError for a `quant` that is not in OUTPUT_TYPES, StateError if `output`
    cannot be written.
    """
    check_head_quant(quant)
    plan = plan_head(folder, target_folder)
    tensors: Tensors = {
        tensor: (plan.checkpoint.shape(source), partial(_weights, plan, tensor))
        for tensor, source in plan.tensors.items()
    }

    def describe(writer: gguf.GGUFWriter) -> None:
        write_hyperparameters(writer, plan.checkpoint, HEAD, plan.sizes)
        _write_head(writer, plan)
        write_tokenizer(writer, Checkpoint.open(target_folder), plan.sizes.vocabulary)

    about = About(EAGLE3, name or folder.name, licence, describe)
    tensors |= rotary_tensors(plan.checkpoint, plan.sizes)
    indices = {} if plan.drafted is None else {DRAFTED: plan.drafted}
    return write_gguf(output, about, tensors, cast(OutputType, quant), indices=indices, progress=progress)


def check_head_quant(quant: str) -> None:
    """Raise ConfigError unless `quant` is supported for heads."""
    if quant not in OUTPUT_TYPES:
        raise ConfigError(
            f"an EAGLE-3 head cannot be written as {quant}; allowed: {', '.join(OUTPUT_TYPES)}. Give --draft-quant q8_0"
        )


def _write_head(writer: gguf.GGUFWriter, plan: HeadPlan) -> None:
    config = plan.checkpoint.config
    writer.add_array(f"{EAGLE3}.target_layers", list(plan.layers))
    writer.add_uint32(f"{EAGLE3}.target_hidden_size", plan.target_width)
    for setting in ("norm_before_residual", "norm_before_fc"):
        writer.add_bool(f"{EAGLE3}.{setting}", bool(config.get(setting, False)))


def _weights(plan: HeadPlan, name: str) -> Weights:
    weights = plan.weights(name)
    heads = {"blk.0.attn_q.weight": plan.sizes.heads, "blk.0.attn_k.weight": plan.sizes.kv_heads}.get(name)
    return weights if heads is None else interleave_rotary(weights, heads)
