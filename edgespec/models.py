"""The registry of model pairs: a name, a folder with a manifest, or a single GGUF file becomes a `ModelPair`.

A pair is a folder with `manifest.toml`. Folders are looked for, in this order, in the user's own folder
(`EDGESPEC_MODELS`, or the platform's data folder), in `models/` of a source checkout, and inside the installed
package. What this module does not know: whether a file loads; it checks that it exists and is the one that the
manifest describes.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edgespec.errors import ModelFileError, ModelNotFound

MANIFEST = "manifest.toml"
MANIFEST_FORMAT = 1
ROLES = ("target", "draft", "medium")
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
TEXT_KEYS = ("name", "description", "licence", "banner")
TABLES = ("files", "sampling", "figures")
# Hashing is for files that ship with the package or the like; a file of many gigabytes is checked by its size.
MAX_HASHED_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file of a pair: where it is, and what is known of it. `bytes` and `sha256` are None for a bare path."""

    path: Path
    bytes: int | None = None
    sha256: str | None = None

    @property
    def is_verified(self) -> bool:
        """Whether `resolve` compared the contents with a known checksum."""
        return self.sha256 is not None and self.bytes is not None and self.bytes <= MAX_HASHED_BYTES


@dataclass(frozen=True, slots=True)
class ModelPair:
    """A target and what goes with it. `recommended` holds sampling settings by their name in `Sampling`.

    `banner` is shown before a chat and may be empty; `figures` are the publisher's own measurements.
    """

    name: str
    files: Mapping[str, ModelFile]
    description: str = ""
    licence: str = ""
    banner: str = ""
    context_length: int | None = None
    recommended: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    figures: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def target(self) -> Path:
        return self.files["target"].path

    @property
    def draft(self) -> Path | None:
        return self.files["draft"].path if "draft" in self.files else None

    @property
    def medium(self) -> Path | None:
        return self.files["medium"].path if "medium" in self.files else None

    @property
    def sha256s(self) -> dict[str, str | None]:
        """Known checksums by role."""
        return {role: file.sha256 for role, file in self.files.items()}


def user_folder() -> Path:
    """Where a user's own pairs live: `EDGESPEC_MODELS`, `models` in `EDGESPEC_HOME`, or the platform's data folder."""
    if chosen := os.environ.get("EDGESPEC_MODELS"):
        return Path(chosen)
    if home := os.environ.get("EDGESPEC_HOME"):
        return Path(home) / "models"
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "edgespec" / "models"


def _registry_folders() -> tuple[Path, ...]:
    package = Path(__file__).resolve().parent
    checkout = package.parent
    # Installed, the parent is site-packages, where a folder `models` would be somebody else's.
    own = (checkout / "models",) if (checkout / "pyproject.toml").is_file() else ()
    return user_folder(), *own, package / "data" / "models"


def _named_folders() -> Iterator[tuple[str, Path]]:
    for registry in _registry_folders():
        if registry.is_dir():
            for folder in sorted(registry.iterdir()):
                if (folder / MANIFEST).is_file():
                    yield folder.name, folder


def registered_folders() -> dict[str, Path]:
    """Folder of every known name; a name in an earlier place hides the same one in a later place."""
    found: dict[str, Path] = {}
    for name, folder in _named_folders():
        found.setdefault(name, folder)
    return found


def list_models() -> list[ModelPair]:
    """Every registered pair, by name. Files are not hashed. Raises ModelFileError for a bad manifest."""
    return [read_pair(folder, check_hashes=False) for _, folder in sorted(registered_folders().items())]


class _Manifest:
    """Typed access to one manifest; every complaint names the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ModelFileError(f"{path.parent} has no {MANIFEST}: give a .gguf file or a folder with one") from error
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ModelFileError(f"{path} cannot be read: {error}") from error

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


def _read_file(manifest: _Manifest, role: str, entry: Any) -> ModelFile:
    key = f"files.{role}"
    if not isinstance(entry, dict):
        raise manifest.fail(key, f"must be a table, got {entry!r}")
    manifest.only(f"{key}.", entry, ("path", "bytes", "sha256", "parameters"))
    relative = Path(manifest.get(entry, f"{key}.path", str))
    folder = manifest.path.parent.resolve()
    path = (folder / relative).resolve()
    if not path.is_relative_to(folder):
        raise manifest.fail(f"{key}.path", f"must stay inside the folder, got {str(relative)!r}")
    sha256 = manifest.get(entry, f"{key}.sha256", str).lower()
    if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
        raise manifest.fail(f"{key}.sha256", f"must be 64 hexadecimal digits, got {sha256!r}")
    return ModelFile(path, manifest.get(entry, f"{key}.bytes", int), sha256)


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def check_file(file: ModelFile, *, hashed: bool = True) -> None:
    """Raise ModelFileError when a file is missing or is not the one described; up to MAX_HASHED_BYTES it is hashed."""
    try:
        size = file.path.stat().st_size
    except OSError as error:
        raise ModelFileError(f"{file.path} is missing: restore it, or install edgespec again") from error
    if file.bytes is not None and size != file.bytes:
        raise ModelFileError(
            f"{file.path} has {size} bytes, the manifest says {file.bytes}: it is truncated or replaced"
        )
    if hashed and file.sha256 is not None and size <= MAX_HASHED_BYTES:
        found = sha256_of(file.path)
        if found != file.sha256:
            raise ModelFileError(
                f"{file.path} has SHA-256 {found[:12]}..., the manifest says {file.sha256[:12]}...: the file is "
                "damaged or another one; restore it"
            )


def read_pair(folder: Path, *, check_hashes: bool = True) -> ModelPair:
    """The pair that `folder/manifest.toml` describes, its files checked. Raises ModelFileError."""
    manifest = _Manifest(folder / MANIFEST)
    values = manifest.values
    manifest.only("", values, ("format", "context_length", *TEXT_KEYS, *TABLES))
    if (version := manifest.get(values, "format", int)) != MANIFEST_FORMAT:
        raise manifest.fail("format", f"is {version}; this edgespec reads {MANIFEST_FORMAT}")
    tables = {name: manifest.get(values, name, dict, {}) for name in TABLES}
    manifest.only("files.", tables["files"], ROLES)
    if "target" not in tables["files"]:
        raise manifest.fail("files.target", "is missing")
    manifest.only("sampling.", tables["sampling"], SAMPLING_KEYS)
    recommended = {k: manifest.get(tables["sampling"], f"sampling.{k}", (int, float)) for k in tables["sampling"]}
    files = {role: _read_file(manifest, role, entry) for role, entry in tables["files"].items()}
    for file in files.values():
        check_file(file, hashed=check_hashes)
    texts = {key: manifest.get(values, key, str, "") for key in TEXT_KEYS}
    return ModelPair(
        name=texts["name"] or folder.name,
        files=MappingProxyType(files),
        description=texts["description"],
        licence=texts["licence"],
        banner=texts["banner"],
        context_length=manifest.get(values, "context_length", int) if "context_length" in values else None,
        recommended=MappingProxyType(recommended),
        figures=MappingProxyType(tables["figures"]),
    )


def _looks_like_path(text: str) -> bool:
    return text.endswith(".gguf") or "/" in text or os.sep in text or text.startswith((".", "~"))


def _not_found(text: str) -> ModelNotFound:
    names = sorted(registered_folders())
    near = difflib.get_close_matches(text, names, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ModelNotFound(
        f"no model {text!r}: {hint}known names: {', '.join(names) or 'none'}; or give a .gguf file or a folder with "
        f"{MANIFEST}"
    )


def _local_pair(text: str) -> ModelPair:
    path = Path(text).expanduser()
    if path.is_dir():
        return read_pair(path)
    if not path.is_file():
        raise ModelNotFound(f"no file {text!r}: give a .gguf file, a folder with {MANIFEST}, or a registered name")
    if path.suffix != ".gguf":
        raise ModelFileError(f"{text} is not a .gguf file; convert a Hugging Face folder first: edgespec export")
    return ModelPair(path.stem, MappingProxyType({"target": ModelFile(path)}))


def resolve(name_or_path: str, draft: Path | None = None) -> ModelPair:
    """The pair that a user means by a registered name or a path; `draft` replaces the pair's own draft.

    Raises ModelNotFound for an unknown name (with the nearest known one) and for a path that does not exist,
    ModelFileError for a bad manifest, and for a file that is missing or not the one its manifest describes.
    """
    folders = registered_folders()
    if name_or_path in folders:
        pair = read_pair(folders[name_or_path])
    elif _looks_like_path(name_or_path) or Path(name_or_path).exists():
        pair = _local_pair(name_or_path)
    else:
        raise _not_found(name_or_path)
    if draft is None:
        return pair
    if not draft.expanduser().is_file():
        raise ModelNotFound(f"no draft file {str(draft)!r}: give the path of a .gguf file")
    files = MappingProxyType({**pair.files, "draft": ModelFile(draft.expanduser())})
    return ModelPair(
        pair.name,
        files,
        pair.description,
        pair.licence,
        pair.banner,
        pair.context_length,
        pair.recommended,
        pair.figures,
    )
