"""Reads all weights of a GGUF and says which are damaged, without loading the model."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.engines.llamacpp.library import library, open_model
from edgespec.errors import EdgespecError, ModelFileError
from edgespec.formats.gguf.check import model_files
from edgespec.formats.gguf.header import NUMBER_OF_TYPE, read_header


def check_weights(path: Path) -> None:
    """Raises ModelFileError naming the first tensor that holds NaN or infinity, in any of the model's files.

    The check is the library's own (`check_tensors`). It is called tensor by tensor, since a load with that option reads
    the vocabulary once more, which takes longer than the weights of a small model.
    """
    is_sound = _library_check()
    if is_sound is None:
        library().llama_model_free(open_model(path, check_tensors=True))
        return
    for file in model_files(path):
        header = read_header(file)
        data = np.memmap(file, np.uint8, "r")
        for tensor in header.tensors:
            start = data.ctypes.data + header.data_start + tensor.offset
            if not is_sound(NUMBER_OF_TYPE[tensor.kind], start, tensor.num_bytes):
                reason = f"tensor {tensor.name!r} has invalid data"
                raise ModelFileError(f"{file} is not a usable model: {reason}. Download or export it again")


def try_weights(path: Path) -> str | None:
    """What `check_weights` finds, or None."""
    try:
        check_weights(path)
    except EdgespecError as exc:
        return str(exc)
    return None


@cache
def _library_check() -> Callable[[int, int, int], bool] | None:
    """ggml's check of one tensor: its type, the address and the number of bytes. None where the build hides it."""
    found: Any = getattr(library()._lib, "ggml_validate_row_data", None)  # of a library that libllama needs
    if found is None:
        return None
    found.argtypes, found.restype = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_bool
    checked: Callable[[int, int, int], bool] = found
    return checked
