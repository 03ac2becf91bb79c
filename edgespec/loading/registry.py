"""The registry of model pairs: a name, a folder or a single model file becomes a `ModelPair`.

A name is that of a folder, or the one that a model was pulled by: `qwen3-8b:Q8_0`, `Qwen/Qwen3-8B-GGUF`, here or by
another program. Folders with a manifest are searched for, in this order, in the user's own folder (`EDGESPEC_MODELS`,
or the platform's data folder), in `models/` of a source checkout, and inside the installed package.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from edgespec.errors import CapabilityError, ModelFileError, ModelNotFound, shown, shown_path
from edgespec.formats.gguf.check import SPLIT_NAME, split_names
from edgespec.formats.manifest import MANIFEST, ModelFile, ModelPair, read_pair, read_table
from edgespec.installation import quoted
from edgespec.kernels.library import library_path
from edgespec.loading.catalogue import ModelReference, entries, parse, without_hub
from edgespec.loading.hub import NO_MODEL, HubFile, choose, gguf_groups
from edgespec.platform.files import exists, expanded, is_file, is_folder, resolved, shipped_models, user_folder

logger = logging.getLogger("edgespec")
GRAPH = "model.onnx"
SUFFIXES = (".gguf", ".onnx")


def models_folder() -> Path:
    """Where a user's own pairs live: `EDGESPEC_MODELS`, or `models` in the user's data folder."""
    chosen = os.environ.get("EDGESPEC_MODELS")
    return expanded(chosen) if chosen else user_folder("data") / "models"


def registered_folders() -> dict[str, Path]:
    """Folder of every known name; a name in an earlier place hides the same one in a later place."""
    found: dict[str, Path] = {}
    for registry in (models_folder(), shipped_models()):
        try:
            folders = sorted(registry.iterdir()) if is_folder(registry) else []
        except OSError as exc:
            logger.warning("the models in %s cannot be listed: %s", registry, exc.strerror or exc)
            continue
        for folder in folders:
            if is_file(folder / MANIFEST):
                found.setdefault(folder.name, folder)
    return found


def folder_of(text: str) -> Path | None:
    """The folder of a registered name, or of what such a model was pulled as; None for anything else."""
    folders = registered_folders()
    name = text if text in folders else _pulled_name(text, folders)
    return None if name is None else folders[name]


def _looks_like_path(text: str) -> bool:
    return text.endswith(SUFFIXES) or "/" in text or os.sep in text or text.startswith((".", "~"))


def _not_found(text: str, role: str = "model") -> ModelNotFound:
    """An error that says how to get what `text` names, or what is like it here."""
    path, names = expanded(text), sorted(registered_folders())
    beside = [each.name for each in path.parent.glob("*") if each.suffix in SUFFIXES] if is_folder(path.parent) else []
    files = difflib.get_close_matches(path.name, beside, 1) or [each for each in beside if each.startswith(path.name)]
    near = [str(path.with_name(each)) for each in files]
    reference = None if near else _reference(text)
    if reference is not None:
        other = "" if reference.entry else f", edgespec export {reference.repo} converts other weights"
        return ModelNotFound(f"{text} is not on this machine: edgespec pull {text} fetches it from the hub{other}")
    if not near and not _looks_like_path(text):
        known = [*names, *entries()]
        near = difflib.get_close_matches(text, known, 1) or [each for each in known if each.startswith(text.lower())]
    hint = f"did you mean {' or '.join(map(repr, near[:3]))}? " if near else ""
    said = shown_path(text) if _looks_like_path(text) else shown(text)
    return ModelNotFound(
        f"no {role} {said}: {hint}known names: {', '.join(names) or 'none'}; edgespec ls --all lists those that can be "
        "pulled; or give a .gguf or .onnx file, or a folder with one"
    )


def _reference(text: str) -> ModelReference | None:
    """What `text` means to `edgespec pull`; None for a path or an unknown name."""
    base = without_hub(text).partition(":")[0]
    with contextlib.suppress(ModelNotFound):
        return None if base.endswith(SUFFIXES) or "://" in text else parse(text)
    return None


def _pulled_name(text: str, folders: Mapping[str, Path]) -> str | None:
    """The name of the folder that `edgespec pull text` made; None where there is none."""
    reference = None if exists(expanded(text)) else _reference(text)
    if reference is None or reference.name not in folders:
        return None
    source = read_table(folders[reference.name] / MANIFEST).get("source", "")
    is_it = reference.entry is not None or str(source).startswith(f"{reference.repo}@")
    return reference.name if is_it else None


def is_known(text: str) -> bool:
    """Whether there is a registered model, a file or a folder of this name."""
    return exists(expanded(text)) or folder_of(text) is not None


def model_in(path: Path) -> Path:
    """The model file of a folder without a manifest: its `model.onnx`, or the only .gguf or .onnx model in it.

    A split GGUF counts once, and an mmproj or a LoRA adapter not at all beside a model.

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
        raise ModelFileError(f"folder {shown_path(path)} cannot be read: {exc.strerror or exc}") from exc
    split = {name: SPLIT_NAME.fullmatch(name) for name in names}
    names = [name for name, parts in split.items() if parts is None or int(parts["number"]) == 1]
    names = [name for name in names if not NO_MODEL.search(name)] or names
    if len(names) == 1:
        return path / names[0]
    if names:
        raise ModelFileError(
            f"folder {shown_path(path)} holds several models, give one of the files: {', '.join(names)}"
        )
    if is_file(path / "config.json"):
        raise ModelFileError(
            f"{shown_path(path)} is a Hugging Face model, convert it first: edgespec export {quoted(str(path))}"
        )
    raise ModelFileError(
        f"folder {shown_path(path)} holds no {MANIFEST} and no .gguf or .onnx file: give one that does"
    )


def name_in(file: Path) -> str:
    """What a model is called that has no manifest: by its folder for `model.onnx`, without the number of its part."""
    if file.name == GRAPH:
        return file.parent.name
    parts = SPLIT_NAME.fullmatch(file.name)
    return parts["stem"] if parts else file.stem


def _found(text: str, role: str = "model") -> Path:
    """The folder with a manifest, or the model file, at the path `text`. Raises ModelNotFound, ModelFileError."""
    path = model_in(expanded(text))
    if is_folder(path) or (is_file(path) and (path.suffix in SUFFIXES or _begins_as_gguf(path))):
        return path
    if is_file(path):
        raise ModelFileError(
            f"{text} is not a .gguf or .onnx file; convert a Hugging Face folder first: edgespec export"
        )
    raise _not_found(text, role)


def _pair_called(text: str, engine: str, role: str = "model") -> ModelPair:
    """The pair of a registered name, of another program's, or at a path. Raises as `resolve`."""
    known = folder_of(text)
    elsewhere = None if known or exists(expanded(text)) else path_elsewhere(text)
    path = known or elsewhere or _found(text, role)
    if is_folder(path):
        pair = read_pair(path, engine, has_kernels=library_path() is not None)
        # The name that it goes by here; what was added or converted may describe itself by another.
        return replace(pair, name=path.name) if known else pair
    # With the others of a model that is split, where all are there: loading says which one is not.
    others = [path.with_name(name) for name in split_names(path.name)[1:]]
    file = ModelFile(path, parts=tuple(map(ModelFile, others)) if all(map(is_file, others)) else ())
    if role == "model" and engine not in ("auto", file.engine) and not (engine == "onnx" and file.is_gguf):
        raise CapabilityError(f"{text} is a file for {file.engine}, which {engine!r} cannot run: use --engine auto")
    name = resolved(path.parent).name if path.name == GRAPH else name_in(path)
    if elsewhere is not None:
        name = re.sub(r"[^\w.-]", "-", text)  # a file of Ollama's is called by its checksum
    return ModelPair(name, MappingProxyType({"target": file}), (file.engine,))


def _begins_as_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def resolve(
    name_or_path: str, draft: Path | None = None, engine: str = "auto", medium: Path | None = None
) -> ModelPair:
    """The pair of a registered name or a path; `draft` and `medium` replace the pair's own.

    `engine` "auto", or the one whose files are wanted. Raises ModelNotFound for an unknown name (with the nearest known
    one) and for a path that does not exist, ModelFileError for a bad manifest, and for a file that is missing or has
    another size, CapabilityError for an engine that this model has no files for.
    """
    pair = _pair_called(name_or_path, engine)
    given = {role: path for role, path in (("draft", draft), ("medium", medium)) if path is not None}
    own = {role: _pair_called(path.as_posix(), engine, role).files["target"] for role, path in given.items()}
    return replace(pair, files=MappingProxyType({**pair.files, **own})) if own else pair


# GGUF models that other programs keep: Ollama, LM Studio and the cache of the Hugging Face hub. They run where they are
# and are never changed. A repository goes by its name there, a model of Ollama's by Ollama's. Formats:
# https://github.com/ollama/ollama/blob/main/docs/faq.mdx (folders), the manifests of OCI images, and
# https://huggingface.co/docs/huggingface_hub/guides/manage-cache
OLLAMA, LM_STUDIO, HUB = "Ollama", "LM Studio", "hub's cache"
_OWN_HOST, _OWN_NAMESPACE, _USUAL_TAG = "registry.ollama.ai", "library", "latest"
_WEIGHTS = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A model of another program's. `path`: its file, the first one of a split model."""

    name: str
    program: str
    path: Path
    bytes: int


def found_elsewhere() -> Iterator[Elsewhere]:
    """Every model of other programs that this user may read."""
    yield from _ollamas()
    for repo, program, folder in _repositories():
        for group in gguf_groups(_files_in(folder).values()):
            if not group.is_draft:
                name = f"{repo}:{group.quant}" if group.quant else repo
                yield Elsewhere(name, program, folder / group.files[0].path, group.bytes)


def path_elsewhere(text: str) -> Path | None:
    """The file of the model that another program keeps under this name; None if there is none."""
    tagged = text if ":" in text else f"{text}:{_USUAL_TAG}"
    blob = next((each.path for each in _ollamas() if each.name == tagged), None)
    if blob is not None:
        return blob
    wanted_repo, _, wanted = without_hub(text).partition(":")
    for repo, _, folder in _repositories():
        if repo.lower() == wanted_repo.lower():
            with contextlib.suppress(ModelNotFound, ModelFileError):  # another quantisation than the one that is here
                target = choose(repo, _files_in(folder), wanted).target
                if target.engine == "llamacpp":
                    return folder / target.files[0].path
    return None


def _ollamas() -> Iterator[Elsewhere]:
    chosen = os.environ.get("OLLAMA_MODELS")
    for root in map(expanded, [chosen] if chosen else ["~/.ollama/models", "/usr/share/ollama/.ollama/models"]):
        manifests = root / "manifests"
        with contextlib.suppress(OSError):  # another user's
            for path in sorted(manifests.rglob("*")):
                is_named = len(path.relative_to(manifests).parts) > 2  # by host, names and tag
                if is_named and is_file(path) and (blob := _blob_of(root, path)) is not None:
                    host, *names, tag = path.relative_to(manifests).parts
                    if host != _OWN_HOST:
                        names.insert(0, host)
                    elif names[:1] == [_OWN_NAMESPACE]:
                        names = names[1:]
                    yield Elsewhere(f"{'/'.join(names)}:{tag}", OLLAMA, blob, blob.stat().st_size)


def _blob_of(root: Path, manifest: Path) -> Path | None:
    """The weights that a manifest names, if they are a GGUF file on this machine."""
    try:
        layers = json.loads(manifest.read_bytes())["layers"]
        (digest,) = {layer["digest"] for layer in layers if layer["mediaType"] == _WEIGHTS}
        if not _DIGEST.fullmatch(digest):
            return None
        blob = root / "blobs" / digest.replace(":", "-")
        return blob if _begins_as_gguf(blob) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # damaged, or models of several parts
        return None


def _repositories() -> Iterator[tuple[str, str, Path]]:
    """(OWNER/NAME, program, folder of its files) of each repository of the hub that a program keeps."""
    for folder in _folders(expanded("~/.lmstudio/models"), "*/*"):
        yield "/".join(folder.parts[-2:]), LM_STUDIO, folder
    for folder in _folders(_hub_cache(), "models--*--*"):
        _, owner, name = folder.name.split("--", 2)
        if (snapshot := _snapshot(folder)) is not None:
            yield f"{owner}/{name}", HUB, snapshot


def _folders(root: Path, pattern: str) -> list[Path]:
    try:
        return sorted(each for each in root.glob(pattern) if is_folder(each))
    except OSError:
        return []


def _hub_cache() -> Path:
    """Where huggingface_hub keeps files; asking the library takes 100 ms."""
    for name, below in (("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")):
        if chosen := os.environ.get(name):
            return expanded(chosen) / below
    return expanded("~/.cache/huggingface/hub")


def _snapshot(folder: Path) -> Path | None:
    """The state of a repository's main branch, else the latest that is there."""
    with contextlib.suppress(OSError, ValueError):
        commit = (folder / "refs" / "main").read_text().strip()
        if commit.isalnum() and is_folder(folder / "snapshots" / commit):
            return folder / "snapshots" / commit
    found = _folders(folder / "snapshots", "*")
    return max(found, key=lambda each: each.stat().st_mtime, default=None)


def _files_in(folder: Path) -> dict[str, HubFile]:
    paths = sorted(filter(is_file, folder.rglob("*.gguf")))  # a link into the cache may lead nowhere
    files = (HubFile(path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths)
    return {file.path: file for file in files}
