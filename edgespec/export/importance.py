"""Importance matrices: which input channels of a model's matrices quantisation should keep precise.

An importance matrix holds, for every weight matrix, the mean squared input per channel over all tokens of a text.
Stored as .npz: one float32 array [channels] per GGUF tensor name.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError, UsageError
from edgespec.export.reference import in_transformers
from edgespec.export.tokens import read_tokenizer
from edgespec.formats.checkpoint import Checkpoint
from edgespec.platform.files import atomic_file
from edgespec.types import Progress, no_progress

Importance = dict[str, NDArray[np.float32]]
CHUNK_TOKENS = 512
MAX_CHUNKS = 256


def measure_importance(
    folder: Path,
    text: Path,
    output: Path,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    max_chunks: int = MAX_CHUNKS,
    progress: Progress = no_progress,
) -> Importance:
    """Run the model in `folder` on `text` with transformers and write its importance matrix to `output` (.npz).

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
    with atomic_file(output) as temporary, temporary.open("wb") as file:
        np.savez(file, **found)
    progress(len(chunks), len(chunks), "done")
    return found


def read_importance(path: Path) -> Importance:
    """Read a file of `measure_importance`. Raises ModelFileError for anything else."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            found = {name: np.ascontiguousarray(stored[name], dtype=np.float32) for name in stored.files}
    except FileNotFoundError as error:
        raise ModelFileError(f"{path} does not exist; measure an importance matrix first") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise ModelFileError(f"{path} is not an importance matrix (.npz): {error}") from error
    for name, values in found.items():
        if values.ndim != 1 or not np.isfinite(values).all() or (values < 0).any():
            raise ModelFileError(f"{path} has values for {name} that are not finite numbers of at least 0")
    if not found:
        raise ModelFileError(f"{path} is an empty importance matrix")
    return found


def _linear_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Name of each linear module -> GGUF name of its matrix."""
    from edgespec.formats.architectures import architecture_of

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
