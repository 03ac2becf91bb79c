"""The registry of model pairs: a name, a folder or a single model file becomes a `ModelPair`.

Folders with a manifest are looked for, in this order, in the user's own folder (`EDGESPEC_MODELS`, or the platform's
data folder), in `models/` of a source checkout, and inside the installed package.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from edgespec.errors import CapabilityError, ModelFileError, ModelNotFound, shown
from edgespec.formats.files import exists, expanded, is_file, is_folder, resolved, user_folder
from edgespec.formats.manifest import MANIFEST, ModelFile, ModelPair, read_pair

logger = logging.getLogger("edgespec")
GRAPH = "model.onnx"
SUFFIXES = (".gguf", ".onnx")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.gguf)(?<!\.onnx)")


def models_folder() -> Path:
    """Where a user's own pairs live: `EDGESPEC_MODELS`, or `models` in the user's data folder."""
    chosen = os.environ.get("EDGESPEC_MODELS")
    return Path(chosen) if chosen else user_folder("data") / "models"


def _registry_folders() -> tuple[Path, ...]:
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent
    # Installed, the parent is site-packages, where a folder `models` would be somebody else's.
    own = (checkout / "models",) if is_file(checkout / "pyproject.toml") else ()
    return models_folder(), *own, package / "data" / "models"


def _named_folders() -> Iterator[tuple[str, Path]]:
    for registry in _registry_folders():
        try:
            folders = sorted(registry.iterdir()) if is_folder(registry) else []
        except OSError as exc:
            logger.warning("the models in %s cannot be listed: %s", registry, exc.strerror or exc)
            continue
        for folder in folders:
            if is_file(folder / MANIFEST):
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


def _looks_like_path(text: str) -> bool:
    return text.endswith(SUFFIXES) or "/" in text or os.sep in text or text.startswith((".", "~"))


def _not_found(text: str) -> ModelNotFound:
    names = sorted(registered_folders())
    near = difflib.get_close_matches(text, names, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ModelNotFound(
        f"no model {shown(text)}: {hint}known names: {', '.join(names) or 'none'}; or give a .gguf or .onnx file, or a "
        "folder with one"
    )


def is_known(text: str) -> bool:
    """Whether there is a registered model, a file or a folder of this name."""
    return text in registered_folders() or exists(expanded(text))


def model_in(path: Path) -> Path:
    """The model file of a folder without a manifest: its `model.onnx`, or the only .gguf or .onnx file in it.

    Any other path comes back as it is. Raises ModelFileError for a folder without a model file, with the command that
    converts a Hugging Face model, and for one with several.
    """
    if not is_folder(path) or is_file(path / MANIFEST):
        return path
    if is_file(path / GRAPH):
        return path / GRAPH
    try:
        names = sorted(each.name for each in path.iterdir() if each.suffix in SUFFIXES)
    except OSError as exc:
        raise ModelFileError(f"folder {shown(str(path))} cannot be read: {exc.strerror or exc}") from exc
    if len(names) == 1:
        return path / names[0]
    if names:
        raise ModelFileError(
            f"folder {shown(str(path))} holds several models, give one of the files: {', '.join(names)}"
        )
    if is_file(path / "config.json"):
        raise ModelFileError(
            f"{shown(str(path))} is a Hugging Face model, convert it first: edgespec export {shlex.quote(str(path))}"
        )
    raise ModelFileError(
        f"folder {shown(str(path))} holds no {MANIFEST} and no .gguf or .onnx file: give one that does"
    )


def _local_pair(text: str, engine: str, *, check_hashes: bool) -> ModelPair:
    path = model_in(expanded(text))
    if is_folder(path):
        return read_pair(path, engine, check_hashes=check_hashes)
    if not is_file(path):
        hub = (
            f", or if it is a Hugging Face hub id, convert it first: edgespec export {text}"
            if _HUB_ID.fullmatch(text)
            else ""
        )
        raise ModelNotFound(
            f"no file {shown(text)}: give a .gguf or .onnx file, a folder with one, or a registered name{hub}"
        )
    if path.suffix not in SUFFIXES:
        raise ModelFileError(f"{text} is no .gguf or .onnx file; convert a Hugging Face folder first: edgespec export")
    file = ModelFile(path)
    if engine not in ("auto", file.engine):
        raise CapabilityError(f"{text} is a {path.suffix} file, which {engine!r} cannot run: use --engine auto")
    name = resolved(path.parent).name if path.name == GRAPH else path.stem
    return ModelPair(name, MappingProxyType({"target": file}), (file.engine,))


def resolve(
    name_or_path: str,
    draft: Path | None = None,
    engine: str = "auto",
    medium: Path | None = None,
    *,
    check_hashes: bool = True,
) -> ModelPair:
    """The pair of a registered name or a path; `draft` and `medium` replace the pair's own.

    `engine` "auto", or the one whose files are wanted. `check_hashes`: compare files with their checksums, too.

    Raises ModelNotFound for an unknown name (with the nearest known one) and for a path that does not exist,
    ModelFileError for a bad manifest, and for a file that is missing or not the one its manifest describes,
    CapabilityError for an engine that this model has no files for.
    """
    folders = registered_folders()
    if name_or_path in folders:
        pair = read_pair(folders[name_or_path], engine, check_hashes=check_hashes)
    elif _looks_like_path(name_or_path) or exists(name_or_path):
        pair = _local_pair(name_or_path, engine, check_hashes=check_hashes)
    else:
        raise _not_found(name_or_path)
    given = {"draft": draft, "medium": medium}
    own = {role: _given_file(role, path) for role, path in given.items() if path is not None}
    return replace(pair, files=MappingProxyType({**pair.files, **own})) if own else pair


def _given_file(role: str, given: Path) -> ModelFile:
    path = expanded(given)
    if is_folder(path):
        path = path / GRAPH
    if not is_file(path) or path.suffix not in SUFFIXES:
        raise ModelNotFound(f"no {role} file {shown(str(given))}: give the path of a .gguf or .onnx file")
    return ModelFile(path)
