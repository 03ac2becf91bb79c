"""Quantises GGUF files with llama.cpp, and exports a Hugging Face folder to a quantised GGUF.

An importance matrix tells which input channels of a model's matrices quantisation should keep precise: for every weight
matrix, by its GGUF name, the mean squared input per channel [channels] over all tokens of a text.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.llamacpp.library import complaints, forget_complaints, library, listening, uninterrupted
from edgespec.errors import ConfigError, ModelFileError, UsageError
from edgespec.export.gguf.convert import OUTPUT_TYPES, Conversion, OutputType, convert
from edgespec.export.reference import in_transformers, read_tokenizer
from edgespec.formats.architectures import architecture_of
from edgespec.formats.checkpoint import Checkpoint
from edgespec.formats.gguf.check import check_gguf
from edgespec.formats.gguf.header import GgufHeader, read_header
from edgespec.platform.files import atomic_file
from edgespec.platform.machine import physical_cores
from edgespec.types import Progress, no_progress

# Name -> llama.cpp's file type number (llama_ftype).
FILE_TYPES = {
    "q8_0": 7,
    "q6_k": 18,
    "q5_k_m": 17,
    "q5_k_s": 16,
    "q5_1": 9,
    "q5_0": 8,
    "q4_k_m": 15,
    "q4_k_s": 14,
    "q4_1": 3,
    "q4_0": 2,
    "iq4_nl": 25,
    "iq4_xs": 30,
    "q3_k_l": 13,
    "q3_k_m": 12,
    "q3_k_s": 11,
    "iq3_m": 27,
    "iq3_s": 26,
    "iq3_xs": 22,
    "iq3_xxs": 23,
    "q2_k": 10,
    "q2_k_s": 21,
    "iq2_m": 29,
    "iq2_s": 28,
    "iq2_xs": 20,
    "iq2_xxs": 19,
    "iq1_m": 31,
    "iq1_s": 24,
}
GGUF_QUANTS: tuple[str, ...] = ("f32", "f16", "bf16", *FILE_TYPES)
NEEDS_IMPORTANCE = frozenset({"iq3_xs", "iq3_xxs", "q2_k_s", "iq2_m", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s"})
_TENSOR_LINE = re.compile(r"\[\s*(\d+)/\s*(\d+)\]\s+(\S+)")
Importance = Mapping[str, NDArray[np.float32]]


def export_gguf(
    folder: Path,
    output: Path,
    quant: str,
    *,
    importance: Importance | None = None,
    name: str | None = None,
    licence: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Convert the Hugging Face model of `folder` to `output`, quantised to one of GGUF_QUANTS.

    `importance`: as `measure_importance` gives it, required below 3.5 bits. A temporary file in the
    checkpoint's precision is written beside `output`. Raises the errors of `convert` and `quantise`.
    """
    report = progress or no_progress
    check_quant(quant, has_importance=importance is not None)
    if quant in OUTPUT_TYPES:
        return convert(folder, output, quant, name=name, licence=licence, progress=report)
    between = output.with_name(f"{output.name}.source.tmp")
    try:
        source = convert(folder, between, _own_precision(folder), name=name, licence=licence, progress=report)
        types = quantise(between, output, quant, importance=importance, threads=threads, progress=report)
    finally:
        between.unlink(missing_ok=True)
    return Conversion(output, source.architecture, types)


def check_quant(quant: str, *, has_importance: bool = False) -> None:
    """Raise ConfigError for an unknown type, or if the type needs an importance matrix and none is given."""
    if quant not in GGUF_QUANTS:
        raise ConfigError(f"the quantisation {quant!r} is not known; allowed: {', '.join(GGUF_QUANTS)}")
    if quant in NEEDS_IMPORTANCE and not has_importance:
        raise ConfigError(f"{quant} needs an importance matrix: give a text to measure one on, or use q3_k_m")


def _own_precision(folder: Path) -> OutputType:
    """The smallest type that stores a checkpoint's weights without loss."""
    kinds = {tensor.dtype for tensor in Checkpoint.open(folder).tensors.values() if len(tensor.shape) > 1}
    narrow: dict[str, Literal["f16", "bf16"]] = {"F16": "f16", "BF16": "bf16"}
    return narrow.get(kinds.pop(), "f32") if len(kinds) == 1 else "f32"


def quantise(
    source: Path,
    output: Path,
    quant: str,
    *,
    importance: Importance | None = None,
    threads: int | None = None,
    may_requantise: bool = False,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Quantise a GGUF of f32, f16 or bf16 to one of FILE_TYPES. Returns the number of tensors by stored type.

    `may_requantise`: the source may be quantised, too, such as to write its weights as f32.

    The types are read from the written file: llama.cpp silently uses another type for rows that are not a multiple of
    its block (256 values for the k types). Raises ModelFileError with llama.cpp's message, ConfigError for an unknown
    type or a missing importance matrix, StateError if the disk is full.
    """
    check_quant(quant, has_importance=importance is not None)
    header, weights = check_gguf(source), importance or {}
    _check_importance(header, weights)
    llama = library()
    params = llama.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[quant] if quant in FILE_TYPES else int(OUTPUT_TYPES[cast(OutputType, quant)][1])
    params.nthread = threads or physical_cores()
    params.allow_requantize = may_requantise
    entries = _importance_entries(llama, weights)
    if weights:
        params.imatrix = entries
    with atomic_file(output) as temporary:
        _run(llama, source, temporary, params, progress or no_progress)
    return dict(Counter(tensor.kind for tensor in read_header(output).tensors))


def _run(llama: Any, source: Path, temporary: Path, params: Any, progress: Progress) -> None:
    """Call the library. An exception of `progress` is raised after the call, which cannot be interrupted."""
    raised: list[BaseException] = []

    def hear(line: str) -> None:
        if not raised and (found := _TENSOR_LINE.match(line)):
            try:
                progress(int(found[1]), int(found[2]), found[3])
            except BaseException as error:  # must not propagate through the C library; raised below
                raised.append(error)

    forget_complaints()
    with listening(hear):
        names = os.fsencode(source), os.fsencode(temporary)
        failed = uninterrupted(lambda: llama.llama_model_quantize(*names, ctypes.byref(params)), lambda _: None)
    if raised:
        raise raised[0]
    if failed:
        raise _failure(source, temporary)


def _failure(source: Path, temporary: Path) -> Exception:
    reason = complaints()
    if "iostream" in reason or "basic_ios" in reason:
        return OSError(None, "the disk is full or the file may not grow", str(temporary))
    return ModelFileError(f"{source} cannot be quantised by llama.cpp: {reason}")


def _check_importance(header: GgufHeader, weights: Importance) -> None:
    """Raise ModelFileError for a matrix of another model: llama.cpp would fail late or ignore it."""
    columns = {tensor.name: tensor.shape[0] for tensor in header.tensors}
    if weights and not columns.keys() & weights.keys():
        raise ModelFileError("the importance matrix has no values for the model's tensors: it is of another model")
    for name, values in weights.items():
        if name in columns and values.size != columns[name]:
            raise ModelFileError(
                f"the importance matrix has {values.size} numbers for {name}, the model {columns[name]}: it is of "
                "another model"
            )


def _importance_entries(llama: Any, weights: Importance) -> Any:
    """A C array of (name, values, count) with an empty last entry; the values are not copied from `weights`."""
    entries = (llama.llama_model_imatrix_data * (len(weights) + 1))()
    for entry, (name, values) in zip(entries, weights.items(), strict=False):
        entry.name = name.encode()
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entry.size = values.size
    return entries


# importance

CHUNK_TOKENS = 512
MAX_CHUNKS = 256


def measure_importance(
    folder: Path,
    text: Path,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    max_chunks: int = MAX_CHUNKS,
    progress: Progress = no_progress,
) -> Importance:
    """The importance matrix of the model in `folder`, which transformers runs on `text`.

    Uses at most `max_chunks` pieces of `chunk_tokens` tokens. Raises UsageError if the text cannot be read or has
    fewer than two tokens, ModelFileError for an unsupported model, CapabilityError without torch and transformers.
    """
    checkpoint = Checkpoint.open(folder)
    names = _linear_names(checkpoint)
    sums: dict[str, Any] = {}
    counts: dict[str, int] = {}
    with in_transformers(folder, None) as (torch, _, model):
        chunks = list(_chunks(read_tokenizer(folder), text, chunk_tokens))[:max_chunks]
        _watch(model, names, sums, counts, torch)
        for done, ids in enumerate(chunks):
            progress(done, len(chunks), "measuring importance")
            model(torch.tensor([ids]), use_cache=False)
    found = {name: (sums[name] / counts[name]).to(torch.float32).numpy() for name in sums}
    progress(len(chunks), len(chunks), "done")
    return found


def _linear_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Name of each linear module -> GGUF name of its matrix."""
    found = architecture_of(checkpoint)
    is_tied = found.is_tied(checkpoint.config)
    names = {"lm_head": "token_embd.weight" if is_tied else "output.weight"}
    for layer in range(found.sizes(checkpoint).layers):
        for rest, tensor in found.layer.items():
            if rest.endswith(".weight") and len(tensor.shape.split()) == 2:
                names[f"{found.layer_prefix}{layer}.{rest.removesuffix('.weight')}"] = f"blk.{layer}.{tensor.name}"
    return names


def _chunks(tokenizer: Any, text: Path, chunk_tokens: int) -> Iterator[list[int]]:
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{text} cannot be read as UTF-8 text: {error}") from error
    ids: list[int] = tokenizer.encode(content, add_special_tokens=False).ids
    if len(ids) < 2:
        raise UsageError(f"{text} has {len(ids)} tokens; give some pages of text similar to later use")
    for start in range(0, len(ids), chunk_tokens):
        yield ids[start : start + chunk_tokens]


def _watch(model: Any, names: dict[str, str], sums: dict[str, Any], counts: dict[str, int], torch: Any) -> None:
    """Register hooks that sum the squared inputs per channel. Raises ModelFileError if a module is not found."""
    modules = dict(model.named_modules())
    if missing := [module for module in names if module not in modules]:
        raise ModelFileError(f"transformers' model has no module {missing[0]}: this version is not supported")

    def watch(name: str) -> Callable[..., None]:
        def add(_module: Any, inputs: tuple[Any, ...], _output: Any) -> None:
            rows = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).to(torch.float64)
            sums[name] = sums.get(name, 0) + (rows * rows).sum(0)
            counts[name] = counts.get(name, 0) + rows.shape[0]

        return add

    for module, name in names.items():
        modules[module].register_forward_hook(watch(name))
