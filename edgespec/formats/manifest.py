"""A pair of models and the manifest that describes it: `manifest.toml` in a folder becomes a `ModelPair`.

`[files.ROLE]` holds the GGUF of a role, `[onnx.ROLE]` its ONNX export; `parts` are the further files that one needs.
`[heads.KIND]` holds heads on the target's states, for either engine. The files lie beside the manifest, or in the
folder that `location` names. What this module does not know: whether a file is the one described beyond its size, and
loads.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
import tomli_w
from msgspec import Meta, Struct

from edgespec.errors import CapabilityError, ModelFileError
from edgespec.installation import has_engine
from edgespec.platform.files import absolute, read_text, resolved, write_atomically

MANIFEST = "manifest.toml"
MANIFEST_FORMAT = 1
ROLES = ("target", "draft", "medium")
ENGINE_TABLES = {"llamacpp": "files", "onnx": "onnx"}
HEADS, HEAD_KINDS = "heads", ("medusa", "eagle")
RESTORE = "restore it, or install edgespec again"


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One model of a pair: its file, what is known of it, and the files that belong to it.

    `bytes` and `sha256` are None for a bare path. `runs_on`: the engine of a GGUF, llama.cpp unless it was chosen;
    `note`: why it was, for the user.
    """

    path: Path
    bytes: int | None = None
    sha256: str | None = None
    parts: tuple[ModelFile, ...] = ()
    runs_on: str = ""
    note: str = ""

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix != ".onnx"

    @property
    def engine(self) -> str:
        """The engine that runs it."""
        return self.runs_on or ("llamacpp" if self.is_gguf else "onnx")

    @property
    def all_files(self) -> tuple[ModelFile, ...]:
        return self, *self.parts

    @property
    def all_bytes(self) -> int:
        """The size of all its files."""
        return sum(file.bytes or file.path.stat().st_size for file in self.all_files)


@dataclass(frozen=True, slots=True)
class ModelPair:
    """A target and what goes with it. `recommended` holds sampling settings by their name in `Sampling`.

    `files`: one model per role, of the chosen engine where it has one; `engines`: those that have a target;
    `banner` is shown before a chat and may be empty; `source`: where it was pulled from, empty for other models;
    `figures` are the publisher's own measurements; `heads` by kind.
    """

    name: str
    files: Mapping[str, ModelFile]
    engines: tuple[str, ...] = ("llamacpp",)
    description: str = ""
    licence: str = ""
    banner: str = ""
    source: str = ""
    context_length: int | None = None
    recommended: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    figures: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    heads: Mapping[str, ModelFile] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def target(self) -> Path:
        return self.files["target"].path

    @property
    def draft(self) -> Path | None:
        return self.files["draft"].path if "draft" in self.files else None

    @property
    def medium(self) -> Path | None:
        return self.files["medium"].path if "medium" in self.files else None

    def paths(self, role: str) -> tuple[Path, ...]:
        """All files of one role's model."""
        return tuple(file.path for file in self.files[role].all_files)


def read_table(path: Path) -> dict[str, Any]:
    """A manifest as it is written. Raises ModelFileError when it cannot be read."""
    try:
        return tomllib.loads(read_text(path))
    except FileNotFoundError as error:
        hint = "give a .gguf or .onnx file, or a folder with one"
        raise ModelFileError(f"{path.parent} has no {MANIFEST}: {hint}") from error
    except (OSError, ValueError, RecursionError) as error:  # ValueError: TOML, UTF-8, an integer without end
        raise ModelFileError(f"{path} cannot be read: {error}") from error


def write_manifest(folder: Path, about: Mapping[str, Any], files: Iterable[tuple[str, ModelFile]]) -> None:
    """Make `folder` a model: from now on it is found by its name. Raises StateError.

    `about`: texts, `location` where its files are, `sampling` that is recommended, `figures`; `files` with their roles
    or kinds of heads.
    """
    root = Path(about.get("location", folder))
    table: dict[str, Any] = {"format": MANIFEST_FORMAT, "name": folder.name, **{k: v for k, v in about.items() if v}}
    for role, file in files:
        table.setdefault(HEADS if role in HEAD_KINDS else ENGINE_TABLES[file.engine], {})[role] = _entry(root, file)
    write_atomically(folder / MANIFEST, tomli_w.dumps(table), parents=True)


def _entry(root: Path, file: ModelFile) -> dict[str, Any]:
    made: dict[str, Any] = {"path": file.path.relative_to(root).as_posix(), "bytes": file.bytes, "sha256": file.sha256}
    if file.parts:
        made["parts"] = [_entry(root, part) for part in file.parts]
    return made


class _File(Struct, forbid_unknown_fields=True):
    path: Annotated[str, Meta(pattern=r"^[^\0]+\Z")]
    bytes: int
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]
    parameters: int = 0
    parts: tuple[_File, ...] = ()


_Files = dict[Literal["target", "draft", "medium"], _File]
_Recommended = Literal["temperature", "top_k", "top_p", "min_p", "repeat_penalty", "frequency_penalty"]


class _Manifest(Struct, forbid_unknown_fields=True):
    """As it is written; `revision`: what was asked of the hub."""

    format: int
    name: str = ""
    description: str = ""
    licence: str = ""
    banner: str = ""
    source: str = ""
    location: str | None = None
    revision: str | None = None
    context_length: int | None = None
    files: _Files = {}
    onnx: _Files = {}
    heads: dict[Literal["medusa", "eagle"], _File] = {}
    sampling: dict[_Recommended, int | float] = {}
    figures: dict[str, Any] = {}


def _read(path: Path) -> _Manifest:
    table = read_table(path)
    if (version := table.get("format")) != MANIFEST_FORMAT:
        raise ModelFileError(f"{path}: format is {version!r}; this edgespec reads {MANIFEST_FORMAT}")
    try:
        found = msgspec.convert(table, _Manifest)
    except msgspec.ValidationError as exc:
        raise ModelFileError(f"{path}: {exc}") from exc
    if not ("target" in found.files or "target" in found.onnx):
        raise ModelFileError(f"{path}: files.target is missing")
    return found


def _model_file(path: Path, entry: _File, root: Path, place: Callable[[Path], Path]) -> ModelFile:
    """What the manifest at `path` says of a file under `root`; `place` makes its path absolute."""
    file = place(root / entry.path)
    if not file.is_relative_to(root):
        raise ModelFileError(f"{path}: a file's path must stay inside the folder, got {entry.path!r}")
    parts = tuple(_model_file(path, part, root, place) for part in entry.parts)
    return ModelFile(file, entry.bytes, entry.sha256.lower(), parts)


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def check_file(file: ModelFile, fix: str = RESTORE) -> None:
    """Raise ModelFileError when a file is missing, with what to do then, or has another size than the one described."""
    try:
        size = file.path.stat().st_size
    except OSError as error:
        raise ModelFileError(f"{file.path} is missing: {fix}") from error
    if file.bytes is not None and size != file.bytes:
        raise ModelFileError(
            f"{file.path} has {size} bytes, the manifest says {file.bytes}: it was truncated or replaced"
        )


def read_pair(folder: Path, engine: str = "auto", *, has_kernels: bool = False) -> ModelPair:
    """The pair that `folder/manifest.toml` describes, whose files are there and have their sizes.

    `engine` chooses among the files of a role; "auto" takes GGUF where there is one and llama.cpp is installed or
    `has_kernels`; a role that the chosen engine lacks is taken from the other. Raises ModelFileError, CapabilityError
    for an engine without a target.
    """
    path = folder / MANIFEST
    values = _read(path)
    # Files that a user added may be links out of their folder, as in the hub's cache.
    place = resolved if values.location is None else absolute
    root = place(path.parent if values.location is None else Path(values.location))
    by_engine = {
        name: {role: _model_file(path, entry, root, place) for role, entry in getattr(values, table).items()}
        for name, table in ENGINE_TABLES.items()
    }
    engines = tuple(name for name, roles in by_engine.items() if "target" in roles)
    on_kernels = engine == "onnx" and "llamacpp" in engines  # where they can: the choice of engines says
    if engine not in ("auto", *engines) and not on_kernels:
        raise CapabilityError(
            f"{folder.name} has no target for the engine {engine!r}, only for: {', '.join(engines)}. Use --engine "
            f"auto, or export one: edgespec export --to {'onnx' if engine == 'onnx' else 'gguf'}"
        )
    runnable = [name for name in engines if has_engine(name) or (has_kernels and name == "llamacpp")] or engines
    chosen = runnable[0] if engine == "auto" or engine not in engines else engine
    files = {role: file for name in by_engine for role, file in by_engine[name].items()} | by_engine[chosen]
    heads = {str(kind): _model_file(path, entry, root, place) for kind, entry in values.heads.items()}
    unregister = f"restore the file, or unregister the model with: edgespec rm {folder.name}"
    for file in (*files.values(), *heads.values()):
        for part in file.all_files:
            check_file(part, RESTORE if values.location is None else unregister)
    return ModelPair(
        name=values.name or folder.name,
        files=MappingProxyType(files),
        engines=engines,
        description=values.description,
        licence=values.licence,
        banner=values.banner,
        source=values.source,
        context_length=values.context_length,
        recommended=MappingProxyType({str(key): value for key, value in values.sampling.items()}),
        figures=MappingProxyType(values.figures),
        heads=MappingProxyType(heads),
    )
