"""The kinds of heads in GGUF files, by what a file's header says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.engines.llamacpp.dflash import DFlashHead
from edgespec.engines.llamacpp.eagle3 import Eagle3Head
from edgespec.engines.llamacpp.gemma4_drafter import Gemma4Drafter
from edgespec.engines.llamacpp.head_file import HeadOfFile
from edgespec.engines.llamacpp.mtp import MtpFileHead
from edgespec.formats.gguf.check import HeadKind, is_gemma4_drafter
from edgespec.formats.gguf.head_reader import head_kind_of
from edgespec.formats.gguf.header import read_header

KINDS: Mapping[HeadKind, type[HeadOfFile[Any]]] = {"eagle3": Eagle3Head, "dflash": DFlashHead, "mtp": MtpFileHead}


def head_class(path: Path) -> type[HeadOfFile[Any]] | None:
    """What opens the head in a file; None for a model. Raises ModelNotFound, ModelFileError for a damaged GGUF."""
    kind = head_kind_of(path)
    if kind == "mtp" and is_gemma4_drafter(read_header(path)):
        return Gemma4Drafter
    return None if kind is None else KINDS[kind]
