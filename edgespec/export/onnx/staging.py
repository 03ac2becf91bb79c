"""A folder that appears whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgespec.errors import ModelFileError


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """A fresh folder `NAME.partial` that becomes `output` when the block ends well and is removed when it does not.

    What a killed run left behind is cleaned first. An older export in `output` is replaced, anything else is refused
    with ModelFileError.
    """
    partial = output.with_name(output.name + ".partial")
    replaced = output.with_name(output.name + ".replaced")
    if replaced.is_dir() and not output.exists():
        replaced.rename(output)  # killed between the two renames below
    if output.exists() and not _is_ours(output):
        raise ModelFileError(f"{output} exists and is no ONNX export: name a folder that does not exist yet")
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if output.exists():
            output.rename(replaced)
        partial.rename(output)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    return folder.is_dir() and ((folder / "model.onnx").is_file() or not any(folder.iterdir()))
