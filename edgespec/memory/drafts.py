"""Which smaller models on this machine can draft in place of a pair's draft model, by their headers alone.

A draft never changes a text, so another one may be taken where a budget is too small for the pair's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.formats.gguf.check import check_gguf
from edgespec.formats.gguf.head_reader import head_kind_of
from edgespec.formats.gguf.header import GgufHeader, keeping_headers
from edgespec.formats.gguf.split import is_early_exit, model_files
from edgespec.formats.manifest import ModelPair, read_pair
from edgespec.loading.registry import registered_folders

_MOST_FILES = 8  # most headers to read: each holds a whole vocabulary


@keeping_headers()
def smaller_drafts(pair: ModelPair) -> list[Path]:
    """GGUF files with the target's vocabulary that are smaller than the pair's draft model, the largest first.

    Those beside its files, and those of registered models. None for a pair whose draft is no GGUF model of its own.
    """
    target, draft = pair.files["target"].path, pair.draft
    if draft is None or {target.suffix, draft.suffix} != {".gguf"}:
        return []
    own = {file.path.resolve() for file in pair.files.values()}
    sizes: dict[Path, int] = {}
    for path in _files_here(target, draft):
        with contextlib.suppress(EdgespecError, OSError):
            if path.resolve() not in own and (size := _num_bytes(path)) < _num_bytes(draft):
                sizes[path.resolve()] = size
    if not sizes:
        return []
    try:
        header = check_gguf(target)
        if head_kind_of(draft) or is_early_exit(draft, target):
            return []
    except EdgespecError:  # whoever loads them says best what is wrong
        return []
    largest = sorted(sizes, key=lambda path: -sizes[path])[:_MOST_FILES]
    return [path for path in largest if _can_draft(path, target, header)]


def _files_here(target: Path, draft: Path) -> Iterator[Path]:
    for folder in {target.parent, draft.parent}:
        yield from folder.glob("*.gguf")
    for folder in registered_folders().values():
        with contextlib.suppress(EdgespecError):  # a damaged pair
            files = read_pair(folder, check_hashes=False).files.values()
            yield from (file.path for file in files if file.path.suffix == ".gguf")


def _num_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in model_files(path))


def _can_draft(path: Path, target: Path, header: GgufHeader) -> bool:
    try:
        found = check_gguf(path)
        if head_kind_of(path) or is_early_exit(path, target):
            return False
    except EdgespecError:
        return False
    return found.shares_vocabulary(header)
