"""GGUF models that other programs keep on this machine: Ollama, LM Studio, and the cache of the Hugging Face hub.

They run where they are and are never changed. A repository goes by its name, as for `edgespec pull`:
`Qwen/Qwen3-8B-GGUF:Q4_K_M`; a model of Ollama's by the one it has there: `qwen3:8b`.

Formats: https://github.com/ollama/ollama/blob/main/docs/faq.mdx (folders), the manifests of OCI images, and
https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import ModelFileError, ModelNotFound
from edgespec.loading.catalogue import without_hub
from edgespec.loading.hub import HubFile, choose, gguf_groups
from edgespec.platform.files import (
    TEMPORARY,
    absolute,
    expanded,
    is_file,
    is_folder,
    replace_file,
    user_folder,
    write_errors,
)

OLLAMA, LM_STUDIO, HUB = "Ollama", "LM Studio", "hub's cache"
_OWN_HOST, _OWN_NAMESPACE, _USUAL_TAG = "registry.ollama.ai", "library", "latest"
_WEIGHTS = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MOST_BYTES = 1 << 20  # of a manifest


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
        return _with_suffix(blob, tagged)
    wanted_repo, _, wanted = without_hub(text).partition(":")
    for repo, _, folder in _repositories():
        if repo.lower() == wanted_repo.lower():
            with contextlib.suppress(ModelNotFound, ModelFileError):  # another quantisation than the one that is here
                target = choose(repo, _files_in(folder), wanted).target
                if target.engine == "llamacpp":
                    return folder / target.files[0].path
    return None


def _with_suffix(blob: Path, name: str) -> Path:
    """A link to a blob, whose name ends in .gguf and says what it is: engines tell models by their names.

    Raises StateError where it cannot be made.
    """
    stem = re.sub(r"[^\w.-]", "-", name)
    link = user_folder("cache") / "linked" / blob.name[-16:] / f"{stem}.gguf"
    if not is_file(link):
        with write_errors(link):
            link.parent.mkdir(parents=True, exist_ok=True)
            new = link.with_name(f".{secrets.token_hex(8)}{TEMPORARY}")  # other processes may link it, too
            try:
                new.symlink_to(absolute(blob))
            except OSError:  # Windows keeps symbolic links for developers
                os.link(blob, new)
            replace_file(new, link)
    return link


def _ollamas() -> Iterator[Elsewhere]:
    roots = [*_in_home(".ollama/models"), Path("/usr/share/ollama/.ollama/models")]
    if chosen := os.environ.get("OLLAMA_MODELS"):
        roots = [Path(chosen)]
    for root in roots:
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
        if manifest.stat().st_size > _MOST_BYTES:
            return None
        layers = json.loads(manifest.read_bytes())["layers"]
        (digest,) = {layer["digest"] for layer in layers if layer["mediaType"] == _WEIGHTS}
        if not _DIGEST.fullmatch(digest):
            return None
        blob = root / "blobs" / digest.replace(":", "-")
        with blob.open("rb") as file:
            return blob if file.read(4) == b"GGUF" else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # damaged, or models of several parts
        return None


def _repositories() -> Iterator[tuple[str, str, Path]]:
    """(OWNER/NAME, program, folder of its files) of each repository of the hub that a program keeps."""
    for root in _in_home(".lmstudio/models", ".cache/lm-studio/models"):
        for folder in _folders(root, "*/*"):
            yield "/".join(folder.parts[-2:]), LM_STUDIO, folder
    for folder in (each for root in _hub_caches() for each in _folders(root, "models--*--*")):
        _, owner, name = folder.name.split("--", 2)
        if (snapshot := _snapshot(folder)) is not None:
            yield f"{owner}/{name}", HUB, snapshot


def _folders(root: Path, pattern: str) -> list[Path]:
    try:
        return sorted(each for each in root.glob(pattern) if is_folder(each))
    except OSError:
        return []


def _hub_caches() -> list[Path]:
    """Where huggingface_hub keeps files; asking the library takes 100 ms."""
    for name, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if chosen := os.environ.get(name):
            return [expanded(chosen) / below]
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return [expanded(chosen) / "huggingface" / "hub"]
    return _in_home(".cache/huggingface/hub")


def _in_home(*names: str) -> list[Path]:
    try:
        return [Path.home() / name for name in names]
    except RuntimeError:  # the user has none
        return []


def _snapshot(folder: Path) -> Path | None:
    """The state of a repository's main branch, else the latest that is there."""
    with contextlib.suppress(OSError, ValueError):
        commit = (folder / "refs" / "main").read_text().strip()
        if commit.isalnum() and is_folder(folder / "snapshots" / commit):
            return folder / "snapshots" / commit
    found = _folders(folder / "snapshots", "*")
    return max(found, key=lambda each: each.stat().st_mtime, default=None)


def _files_in(folder: Path) -> dict[str, HubFile]:
    found = {}
    with contextlib.suppress(OSError):
        for path in sorted(folder.rglob("*.gguf")):
            if is_file(path):  # a link into the cache may lead nowhere
                name = path.relative_to(folder).as_posix()
                found[name] = HubFile(name, path.stat().st_size)
    return found
