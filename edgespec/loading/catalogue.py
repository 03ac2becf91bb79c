"""The models that edgespec knows where to get: `models/*.toml`, one file per family.

An entry names a source (a repository of the hub, a Python package, or weights to convert), the model that drafts for
it, its licence, advice, and figures where somebody measured them. Sizes and checksums that are not written down come
from the hub when a model is pulled. What this module does not know: what is installed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError
from edgespec.platform.files import shipped_models

CATALOGUE_FORMAT = 1
CONVERTED = "eagle3"  # the kind of published heads that `export` converts; llama.cpp converts dspark
# Bits per weight of whole files as llama.cpp writes them, embeddings and scales included: a guess of a size, no more.
_BITS = {"Q4_0": 4.6, "Q4_1": 5.1, "Q4_K_M": 4.9, "Q5_K_M": 5.7, "Q6_K": 6.6, "Q8_0": 8.5, "F16": 16.0, "BF16": 16.0}
_BITS["MXFP4"] = 4.6


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a source whose contents are known: size in bytes and checksum."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Pieces:
    """The entry's file in `count` Python packages, for a network without the hub. `package` and `path` in it are filled
    with the number of the piece, from 1; `bytes`: the size of every piece but the last."""

    package: str
    revision: str
    path: str
    count: int
    bytes: int

    @property
    def summary(self) -> str:
        return f"{self.package.format(1)} to {self.count}, version {self.revision}"


@dataclass(frozen=True, slots=True)
class HeadSource:
    """Heads of `kind` for a model: their hub repository, with that of the `target` they were trained on.

    `licence` as its page states it; empty: none is known.
    """

    kind: str
    repo: str
    target: str
    licence: str = ""

    @property
    def command(self) -> str:
        """What converts them."""
        if self.kind == CONVERTED:
            return f"edgespec export {self.target} --draft {self.repo} --to gguf"
        return "llama.cpp's convert_hf_to_gguf.py (then -md HEAD.gguf)"


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure that was measured, and `where`. `speedup` over plain decoding; `acceptance_rate` from 0 to 1."""

    where: str
    drafter: str = ""
    speedup: float | None = None
    acceptance_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A model to pull. One of `repo` (hub), `package` (Python index) and `convert` (hub id for export) is given.

    `weights`: hub id of the original weights, as vLLM and the like read them; empty: that of `convert`.
    `family`: models of one family have the same vocabulary; `draft`: the entry that drafts for it; `draft_only`: it is
    no use alone; `quant`: which of the repository's files, in `pieces` elsewhere, too; `verified`: what was tried here,
    empty for nothing; `sampling`: what its makers recommend, by names of `Sampling`.
    """

    name: str
    family: str
    licence: str
    description: str
    parameters: int
    repo: str = ""
    package: str = ""
    convert: str = ""
    weights: str = ""
    revision: str = ""
    quant: str = ""
    files: tuple[SourceFile, ...] = ()
    pieces: Pieces | None = None
    draft: str = ""
    draft_only: bool = False
    heads: tuple[HeadSource, ...] = ()
    advice: str = ""
    verified: str = ""
    measured: tuple[Measured, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def source(self) -> str:
        """Where it comes from, as manifests of pulled models say it."""
        return self.repo or f"{self.package}=={self.revision}" if not self.convert else self.convert

    @property
    def original(self) -> str:
        """Hub id of the original weights."""
        return self.weights or self.convert

    @property
    def known_bytes(self) -> int | None:
        """The size of its files where that is known before it is pulled."""
        return sum(file.bytes for file in self.files) or None

    def guessed_bytes(self, quant: str = "") -> int:
        """The size of its files, by its parameters where it is not known."""
        return self.known_bytes or round(self.parameters * _BITS.get((quant or self.quant).upper(), 8.5) / 8)


@cache
def entries() -> Mapping[str, Entry]:
    """Every entry by name. Raises ModelFileError for a file that is damaged."""
    return {entry.name: entry for path in sorted(shipped_models().glob("*.toml")) for entry in _read(path)}


def _read(path: Path) -> Iterator[Entry]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        if table["format"] != CATALOGUE_FORMAT:
            raise ValueError(f"its format is {table['format']!r}, this edgespec reads {CATALOGUE_FORMAT}")
        shared = {key: table[key] for key in ("family", "licence")}
        for name, values in table["models"].items():
            yield Entry(name=name, **{**shared, **_with_tables(values)})
    except (OSError, ValueError, TypeError, KeyError) as exc:
        raise ModelFileError(f"{path} is damaged: {exc}; install edgespec again") from exc


def _with_tables(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of an entry with its lists of tables as dataclasses."""
    kinds: dict[str, Any] = {"files": SourceFile, "heads": HeadSource, "measured": Measured}
    made = {key: tuple(kind(**table) for table in values.get(key, ())) for key, kind in kinds.items()}
    return {**values, **made, "pieces": Pieces(**values["pieces"]) if "pieces" in values else None}
