"""A pair of models and the manifest that describes it: `manifest.toml` in a folder becomes a `ModelPair`.

`[files.ROLE]` holds the GGUF of a role, `[onnx.ROLE]` its ONNX export; `parts` are the further files that one needs.
`[heads.KIND]` holds heads on the target's states, for either engine. The files lie beside the manifest, or in the
folder that `location` names. Every file is checked to be the one described. What this module does not know: whether a
file loads.
"""

from __future__ import annotations

import difflib
import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edgespec.errors import CapabilityError, ModelFileError
from edgespec.installation import has_engine
from edgespec.platform.files import absolute, read_text, resolved

MANIFEST = "manifest.toml"
MANIFEST_FORMAT = 1
ROLES = ("target", "draft", "medium")
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
TEXT_KEYS = ("name", "description", "licence", "banner", "source")
ENGINE_TABLES = {"llamacpp": "files", "onnx": "onnx"}
HEADS, HEAD_KINDS = "heads", ("medusa", "eagle")
TABLES = (*ENGINE_TABLES.values(), HEADS, "sampling", "figures")
FILE_KEYS = ("path", "bytes", "sha256", "parameters", "parts")
# Larger files are hashed where the result can be kept, once.
MAX_HASHED_BYTES = 16 * 2**20
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

    @property
    def is_verified(self) -> bool:
        """Whether reading the manifest compared the contents with a known checksum."""
        return all(
            file.sha256 is not None and file.bytes is not None and file.bytes <= MAX_HASHED_BYTES
            for file in self.all_files
        )


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


class _Manifest:
    """Typed access to one manifest; every complaint names the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = read_table(path)
        self.is_elsewhere = "location" in self.values
        self.folder = self.absolute(self.get(self.values, "location", str) if self.is_elsewhere else path.parent)

    def absolute(self, path: str | Path) -> Path:
        """A path from the root. Files that a user added may be links out of their folder, as in the hub's cache."""
        return absolute(path) if self.is_elsewhere else resolved(path)

    def fail(self, key: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {key} {problem}")

    def only(self, table: str, values: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
        for key in values:
            if key not in allowed:
                near = difflib.get_close_matches(key, allowed, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(allowed)}"
                raise self.fail(f"{table}{key}", f"is not a known key; {hint}")

    def get(self, table: Mapping[str, Any], key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A value of `table` under the last part of the dotted `key`; without a default it must be there."""
        value = table.get(key.rpartition(".")[2], default)
        if value is None:
            raise self.fail(key, "is missing")
        if not isinstance(value, kind) or isinstance(value, bool):
            names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise self.fail(key, f"must be {names}, got {value!r}")
        return value


def _read_file(manifest: _Manifest, key: str, entry: Any) -> ModelFile:
    if not isinstance(entry, dict):
        raise manifest.fail(key, f"must be a table, got {entry!r}")
    manifest.only(f"{key}.", entry, FILE_KEYS)
    relative = Path(manifest.get(entry, f"{key}.path", str))
    if "\0" in str(relative):
        raise manifest.fail(f"{key}.path", f"must be a path, got {str(relative)!r}")
    path = manifest.absolute(manifest.folder / relative)
    if not path.is_relative_to(manifest.folder):
        raise manifest.fail(f"{key}.path", f"must stay inside the folder, got {str(relative)!r}")
    sha256 = manifest.get(entry, f"{key}.sha256", str).lower()
    if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
        raise manifest.fail(f"{key}.sha256", f"must be 64 hexadecimal digits, got {sha256!r}")
    parts = manifest.get(entry, f"{key}.parts", list, [])
    belonging = tuple(_read_file(manifest, f"{key}.parts[{i}]", part) for i, part in enumerate(parts))
    return ModelFile(path, manifest.get(entry, f"{key}.bytes", int), sha256, belonging)


def _read_files(manifest: _Manifest, tables: Mapping[str, Any], engine: str) -> dict[str, dict[str, ModelFile]]:
    """The files of every role by engine. Raises CapabilityError when `engine` has no target here."""
    found: dict[str, dict[str, ModelFile]] = {}
    for name, table in ENGINE_TABLES.items():
        manifest.only(f"{table}.", tables[table], ROLES)
        found[name] = {role: _read_file(manifest, f"{table}.{role}", entry) for role, entry in tables[table].items()}
    if not any("target" in roles for roles in found.values()):
        raise manifest.fail("files.target", "is missing")
    on_kernels = engine == "onnx" and "target" in found["llamacpp"]  # where they can: the choice of engines says
    if engine != "auto" and "target" not in found[engine] and not on_kernels:
        others = ", ".join(name for name, roles in found.items() if "target" in roles)
        raise CapabilityError(
            f"{manifest.path.parent.name} has no target for the engine {engine!r}, only for: {others}. Use --engine "
            f"auto, or export one: edgespec export --to {'onnx' if engine == 'onnx' else 'gguf'}"
        )
    return found


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def check_file(file: ModelFile, *, hashed: bool = True, is_large_too: bool = False, fix: str = RESTORE) -> None:
    """Raise ModelFileError when a file is missing, with what to do then, or is not the one described.

    It is hashed up to MAX_HASHED_BYTES, or whatever its size when `is_large_too`.
    """
    try:
        size = file.path.stat().st_size
    except OSError as error:
        raise ModelFileError(f"{file.path} is missing: {fix}") from error
    if file.bytes is not None and size != file.bytes:
        raise ModelFileError(
            f"{file.path} has {size} bytes, the manifest says {file.bytes}: it was truncated or replaced"
        )
    if hashed and file.sha256 is not None and (is_large_too or size <= MAX_HASHED_BYTES):
        found = sha256_of(file.path)
        if found != file.sha256:
            raise ModelFileError(
                f"{file.path} has SHA-256 {found[:12]}..., the manifest says {file.sha256[:12]}...: the file is "
                "damaged or was replaced; restore it"
            )


def read_pair(folder: Path, engine: str = "auto", *, check_hashes: bool = True) -> ModelPair:
    """The pair that `folder/manifest.toml` describes, its files checked.

    `engine` chooses among the files of a role; "auto" takes GGUF where there is one and llama.cpp is installed; a role
    that the chosen engine lacks is taken from the other. Raises ModelFileError, CapabilityError for an engine without a
    target.
    """
    manifest = _Manifest(folder / MANIFEST)
    values = manifest.values
    manifest.only("", values, ("format", "context_length", "location", "revision", *TEXT_KEYS, *TABLES))
    if (version := manifest.get(values, "format", int)) != MANIFEST_FORMAT:
        raise manifest.fail("format", f"is {version}; this edgespec reads {MANIFEST_FORMAT}")
    tables = {name: manifest.get(values, name, dict, {}) for name in TABLES}
    manifest.only("sampling.", tables["sampling"], SAMPLING_KEYS)
    recommended = {k: manifest.get(tables["sampling"], f"sampling.{k}", (int, float)) for k in tables["sampling"]}
    by_engine = _read_files(manifest, tables, engine)
    engines = tuple(name for name, roles in by_engine.items() if "target" in roles)
    runnable = [name for name in engines if has_engine(name)] or engines
    chosen = runnable[0] if engine == "auto" or engine not in engines else engine
    files = {role: file for name in by_engine for role, file in by_engine[name].items()} | by_engine[chosen]
    manifest.only(f"{HEADS}.", tables[HEADS], HEAD_KINDS)
    heads = {kind: _read_file(manifest, f"{HEADS}.{kind}", entry) for kind, entry in tables[HEADS].items()}
    unregister = f"restore the file, or unregister the model with: edgespec rm {folder.name}"
    fix = unregister if manifest.is_elsewhere else RESTORE
    for file in (*files.values(), *heads.values()):
        for part in file.all_files:
            check_file(part, hashed=check_hashes, fix=fix)
    texts = {key: manifest.get(values, key, str, "") for key in TEXT_KEYS}
    return ModelPair(
        name=texts["name"] or folder.name,
        files=MappingProxyType(files),
        engines=engines,
        description=texts["description"],
        licence=texts["licence"],
        banner=texts["banner"],
        source=texts["source"],
        context_length=manifest.get(values, "context_length", int) if "context_length" in values else None,
        recommended=MappingProxyType(recommended),
        figures=MappingProxyType(tables["figures"]),
        heads=MappingProxyType(heads),
    )
