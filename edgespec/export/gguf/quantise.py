"""Quantises GGUF files with llama.cpp, and exports a Hugging Face folder to a quantised GGUF.

Types that llama.cpp writes with an importance matrix only are left to its own llama-imatrix and llama-quantize.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal, cast

from edgespec.engines.llamacpp.library import complaints, forget_complaints, library, listening, uninterrupted
from edgespec.errors import ConfigError, ModelFileError
from edgespec.export.gguf.convert import OUTPUT_TYPES, Conversion, OutputType, convert
from edgespec.formats.checkpoint import Checkpoint
from edgespec.formats.gguf.check import check_gguf
from edgespec.formats.gguf.header import read_header
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
    "q2_k": 10,
}
GGUF_QUANTS: tuple[str, ...] = ("f32", "f16", "bf16", *FILE_TYPES)
_TENSOR_LINE = re.compile(r"\[\s*(\d+)/\s*(\d+)\]\s+(\S+)")


def export_gguf(
    folder: Path,
    output: Path,
    quant: str,
    *,
    name: str | None = None,
    licence: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Convert the Hugging Face model of `folder` to `output`, quantised to one of GGUF_QUANTS.

    A temporary file in the checkpoint's precision is written beside `output`. Raises the errors of `convert` and
    `quantise`.
    """
    report = progress or no_progress
    check_quant(quant)
    if quant in OUTPUT_TYPES:
        return convert(folder, output, quant, name=name, licence=licence, progress=report)
    between = output.with_name(f"{output.name}.source.tmp")
    try:
        source = convert(folder, between, _own_precision(folder), name=name, licence=licence, progress=report)
        types = quantise(between, output, quant, threads=threads, progress=report)
    finally:
        between.unlink(missing_ok=True)
    return Conversion(output, source.architecture, types)


def check_quant(quant: str) -> None:
    """Raise ConfigError for an unknown type."""
    if quant not in GGUF_QUANTS:
        raise ConfigError(f"the quantisation {quant!r} is not known; allowed: {', '.join(GGUF_QUANTS)}")


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
    threads: int | None = None,
    may_requantise: bool = False,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Quantise a GGUF of f32, f16 or bf16 to one of FILE_TYPES. Returns the number of tensors by stored type.

    `may_requantise`: the source may be quantised, too, such as to write its weights as f32.

    The types are read from the written file: llama.cpp silently uses another type for rows that are not a multiple of
    its block (256 values for the k types). Raises ModelFileError with llama.cpp's message, ConfigError for an unknown
    type, StateError if the disk is full.
    """
    check_quant(quant)
    check_gguf(source)
    llama = library()
    params = llama.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[quant] if quant in FILE_TYPES else int(OUTPUT_TYPES[cast(OutputType, quant)][1])
    params.nthread = threads or physical_cores()
    params.allow_requantize = may_requantise
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
