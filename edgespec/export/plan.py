"""Estimates what an export needs, from headers alone: parameters, disk and memory.

Estimates are upper limits: weights by the quantisation's bits per weight, and embedding tables that are not quantised
at their full size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError
from edgespec.export.hub import Source
from edgespec.export.onnx.convert import TILED
from edgespec.export.reference import has_transformers
from edgespec.export.request import ExportRequest, Format
from edgespec.formats.architectures import is_tied
from edgespec.formats.checkpoint import DEFAULTS, Checkpoint, is_head_config, named_architecture
from edgespec.formats.hub_folder import read_json

# Bits per weight, block scales included; for mixtures, of their heavier tensors.
BITS = {
    "f32": 32, "fp32": 32, "f16": 16, "bf16": 16, "fp16": 16,
    "q8_0": 8.5, "q6_k": 6.6, "q5_k_m": 5.8, "q5_k_s": 5.6, "q5_1": 6, "q5_0": 5.6,
    "q4_k_m": 5, "q4_k_s": 4.7, "q4_1": 5.1, "q4_0": 4.7, "iq4_nl": 4.7, "iq4_xs": 4.5,
    "q3_k_l": 4.4, "q3_k_m": 4.1, "q3_k_s": 3.7, "q2_k": 3.4, "q2_k_s": 3.2,
    "iq3_m": 4, "iq3_s": 3.8, "iq3_xs": 3.7, "iq3_xxs": 3.5, "iq2_m": 3.1, "iq2_s": 2.9, "iq2_xs": 2.8, "iq2_xxs": 2.6,
    "iq1_m": 2.3, "iq1_s": 2.2, "int8": 9, "w8a8": 8.1, "int4": 5.4,
}  # fmt: skip
WIDEST_BITS = 16.0
STRAIGHT_GGUF = ("f32", "f16", "bf16", "q8_0")  # written directly; others are quantised from a 16-bit file
PROGRAM_BYTES = 400 * 2**20  # the interpreter and its libraries
TORCH_BYTES = 500 * 2**20
PROBE_TOKENS = 800  # their logits are held twice
SPARE = 1.05


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of one model from its headers. A tied embedding table is counted once.

    `num_parameters`, `table_parameters` (input embedding) and `largest_parameters` (largest tensor) are numbers of
    weights; `stored_bytes`: size on disk; `context_length`: tokens.
    """

    architecture: str
    num_parameters: int
    table_parameters: int
    largest_parameters: int
    stored_bytes: int
    num_layers: int
    vocabulary_size: int
    context_length: int | None
    rotary_bytes: int = 0  # tables of a graph, for every position

    def output_bytes(self, wanted: Format, quant: str) -> int:
        bits = BITS.get(quant, WIDEST_BITS)
        if wanted == "gguf":
            return round(self.num_parameters * bits / 8 * SPARE)
        # ONNX graphs have a separate embedding table, which only w8a8 and tiles quantise.
        wide = self.table_parameters * {"fp16": 2, "w8a8": 1.1, **dict.fromkeys(TILED, 1.1)}.get(quant, 4)
        return round((self.num_parameters * bits / 8 + wide) * SPARE) + self.rotary_bytes

    def temporary_bytes(self, wanted: Format, quant: str) -> int:
        if wanted == "gguf":
            return 0 if quant in STRAIGHT_GGUF else self.num_parameters * 2
        if quant == "w8a8":  # made from a float32 graph
            return self.output_bytes(wanted, "fp32")
        return self.output_bytes(wanted, quant)

    def memory_bytes(self, wanted: Format, quant: str, *, with_imatrix: bool) -> int:
        if wanted == "onnx":
            table = self.table_parameters * 4 if quant == "w8a8" else 0  # the float32 graph has a separate table
            return PROGRAM_BYTES + TORCH_BYTES + self.num_parameters * 4 + table + self.output_bytes(wanted, quant)
        resident = TORCH_BYTES + self.num_parameters * 4 if with_imatrix else 0
        return PROGRAM_BYTES + 12 * self.largest_parameters + resident

    def written_bytes(self, quant: str) -> int:
        """Memory for edgespec's own writer, in bytes: the largest matrix; for w8a8 also a first graph, which runs."""
        graph = self.output_bytes("onnx", quant) if quant == "w8a8" else 0
        return PROGRAM_BYTES + max(5 * self.largest_parameters, 2 * self.rotary_bytes, graph)

    def graph_check_bytes(self, quant: str) -> int:
        """Memory for the comparison of a written graph with llama.cpp, in bytes; both are opened one by one."""
        opened = max(self.output_bytes("onnx", quant), self.stored_bytes)
        return PROGRAM_BYTES + opened + PROBE_TOKENS * self.vocabulary_size * 12

    def check_bytes(self) -> int:
        """Memory for the comparison with transformers, in bytes. The exported file is opened after it is freed."""
        return PROGRAM_BYTES + TORCH_BYTES + self.num_parameters * 4 + PROBE_TOKENS * self.vocabulary_size * 8


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes on the disks of the output and of the hub's cache, and peak memory."""

    output_bytes: int
    temporary_bytes: int
    download_bytes: int
    memory_bytes: int


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model. Raises ModelFileError if it cannot be read or the model is already quantised."""
    config = read_json(folder / "config.json")
    if settings := config.get("quantization_config"):
        method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings
        raise ModelFileError(f"{folder} is already quantised ({method}): give the original model")
    return config


def read_facts(source: Source) -> Facts:
    """Facts of a model: exact if its weights are fetched, else estimated from the file sizes.

    Raises ModelFileError if config.json cannot be read or a safetensors file is truncated or corrupt.
    """
    config = read_config(source.folder)
    kind = named_architecture(config)
    nested = config.get("text_config")
    text = {**DEFAULTS.get(kind, {}), **config, **(nested if isinstance(nested, dict) else {})}
    stored = sum(source.weights.values())
    table = _number(text, "vocab_size") * _number(text, "hidden_size", "n_embd")
    sizes = _estimated_sizes(text, stored, table) if source.missing else _sizes(Checkpoint.open(source.folder))
    return Facts(
        architecture=kind,
        num_parameters=sum(sizes.values()),
        table_parameters=table,
        largest_parameters=max(sizes.values()),
        stored_bytes=stored,
        num_layers=_number(text, "num_hidden_layers", "n_layer"),
        vocabulary_size=_number(text, "vocab_size"),
        context_length=_number(text, "max_position_embeddings", "n_positions", "n_ctx") or None,
        rotary_bytes=_rotary_bytes(text, num_tables=2 if kind == "Gemma3ForCausalLM" else 1),
    )


def _rotary_bytes(config: Mapping[str, Any], num_tables: int) -> int:
    """Cosines and sines of half a head for every position, twice where windows have tables of their own."""
    heads = _number(config, "num_attention_heads") or 1
    head_dim = _number(config, "head_dim") or _number(config, "hidden_size") // heads
    return num_tables * 4 * head_dim * _number(config, "max_position_embeddings")


def _sizes(checkpoint: Checkpoint) -> dict[str, int]:
    """Number of weights by tensor, without a head that is tied to the embeddings."""
    sizes = {name: math.prod(checkpoint.shape(name)) for name in checkpoint.names()}
    if not sizes:
        raise ModelFileError(f"{checkpoint.folder} has no tensors")
    if is_tied(checkpoint.architecture, checkpoint.config) and len(sizes) > 1:
        sizes.pop("lm_head.weight", None)
    return sizes


def _estimated_sizes(config: Mapping[str, Any], stored_bytes: int, table: int) -> dict[str, int]:
    width = 4 if config.get("dtype", config.get("torch_dtype")) == "float32" else 2
    return {"table": table, "others": max(stored_bytes // width - table, 0)}


def _number(config: Mapping[str, Any], *keys: str) -> int:
    found = next((config[key] for key in keys if isinstance(config.get(key), int)), 0)
    return int(found)


def needs_of(request: ExportRequest, models: Mapping[str, tuple[Source, Facts]]) -> Needs:
    """Needs of an export; `models`: the models to convert, by role. A pruned draft counts like its target."""
    outputs, temporary, memory = 0, [0], [0]
    for role, (source, facts) in models.items():
        is_written = "onnx" in request.formats and (
            is_head_config(read_json(source.folder / "config.json"))
            or request.exporter_of(role, facts.architecture) == "edgespec"
        )
        for wanted in request.formats:
            quant = request.quant_of(role, wanted)
            outputs += facts.output_bytes(wanted, quant)
            if wanted == "onnx" and is_written:
                memory.append(facts.written_bytes(quant))
                continue
            temporary.append(facts.temporary_bytes(wanted, quant))
            memory.append(facts.memory_bytes(wanted, quant, with_imatrix=request.imatrix is not None))
        if request.check and is_written and request.formats == ("onnx",) and not has_transformers():
            memory.append(facts.graph_check_bytes(request.quant_of(role, "onnx")))
            temporary.append(facts.stored_bytes)  # the same weights for llama.cpp
        elif request.check:
            memory.append(facts.check_bytes())
    target = models["target"][1]
    derived = 0
    if request.derivation is not None:  # pruning writes a checkpoint of these layers, an early exit rewrites the file
        derived = target.stored_bytes * len(request.derivation.kept) // max(target.num_layers, 1)
        if "gguf" in request.quants:
            derived += target.output_bytes("gguf", request.quants["gguf"])
    return Needs(
        output_bytes=outputs,
        temporary_bytes=max(temporary) + derived,
        download_bytes=sum(source.missing_bytes for source, _ in models.values()),
        memory_bytes=max(memory),
    )
