"""The models in a user's own folder: one writer at a time, what is added, listed and removed.

A model is a folder NAME with a manifest, which is written when all of its files are there and checked. A model that
stays where it is (`edgespec add`) has a manifest alone, which says under `location` where its files are.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from edgespec.engines.trial import FileTrial, files_of
from edgespec.errors import Busy, ConfigError, EdgespecError, ModelFileError, ModelNotFound, shown, shown_path
from edgespec.formats.manifest import MANIFEST, ModelFile, ModelPair, read_pair, read_table, write_manifest
from edgespec.loading.catalogue import Entry, check_name, entries
from edgespec.loading.download import PART, checksummed
from edgespec.loading.hub import library
from edgespec.loading.registry import (
    folder_of,
    found_elsewhere,
    model_in,
    models_folder,
    name_in,
    registered_folders,
    resolve,
)
from edgespec.platform.files import expanded, is_file, is_folder, resolved, write_atomically, write_errors
from edgespec.platform.memory import free_memory

_LOCKS, UNFINISHED = ".locks", ".unfinished"  # the latter is in a folder whose files are still to come


@contextlib.contextmanager
def one_writer(name: str, on_wait: Callable[[], None] | None = None) -> Iterator[Path]:
    """The folder of `name`, which no other process changes for as long as the block lasts.

    While another one does, this waits, after `on_wait()`; without that, raises Busy. The lock ends with its process.
    """
    folder = models_folder() / check_name(name)
    locks = models_folder() / _LOCKS
    with write_errors(locks, fix="set EDGESPEC_MODELS to a folder of yours"):
        locks.mkdir(parents=True, exist_ok=True)
    lock = library().utils.WeakFileLock
    from filelock import Timeout  # what huggingface_hub locks with

    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock(locks / f"{name}.lock", timeout=0.2))
        except Timeout:
            if on_wait is None:
                raise Busy(f"another edgespec process is changing {name}: try again when it is done") from None
            on_wait()
            stack.enter_context(lock(locks / f"{name}.lock"))
        yield folder


def add(path: Path, name: str = "", draft: Path | None = None) -> str:
    """Register a model file, or a folder with one or with a manifest, where it is; the name that it has from now on.

    Raises ModelNotFound, ModelFileError for a model that cannot be used, ConfigError for a name that is taken, Busy.
    """
    where = _absolute(path)
    if not is_file(where) and not is_folder(where):
        raise ModelNotFound(f"no file or folder {shown_path(path)}: give a .gguf or .onnx file, or a folder with one")
    found = model_in(where)
    chosen = check_name(name or _name_for(where))
    with one_writer(chosen) as folder:
        if chosen in registered_folders():
            raise ConfigError(f"the name {chosen} is taken by {registered_folders()[chosen]}: give another with --name")
        if is_folder(found):
            if draft is not None:
                raise ConfigError(f"{path} has a manifest, which names its draft: add it without --draft")
            read_pair(found)
            table = {"location": str(found)} | read_table(found / MANIFEST)
            write_atomically(folder / MANIFEST, tomli_w.dumps(table), parents=True)
            return chosen
        roles = {"target": _described(found)}
        if draft is not None:
            roles["draft"] = _described(model_in(_absolute(draft)))
        try:
            root = os.path.commonpath([each.path.parent for file in roles.values() for each in file.all_files])
        except ValueError as exc:  # Windows
            raise ConfigError("the files of one model are on different drives: move them to one") from exc
        write_manifest(folder, {"location": root}, roles.items())
    return chosen


def remove(name: str) -> int:
    """Remove a model that was pulled or added, an unfinished one too; the bytes that were freed, 0 for an added one.

    Raises ModelNotFound for a name that is not there, ConfigError for a model that came otherwise, Busy.
    """
    found = folder_of(name)
    if found is not None and found.parent == models_folder():
        name = found.name  # it may go by what it was pulled as
    with one_writer(name) as folder:
        if not is_folder(folder):
            known = ", ".join(sorted(own_folders())) or "none"
            raise ModelNotFound(f"no model {shown(name)} was pulled or added: {models_folder()} has {known}")
        table = _table_of(folder)
        if table is None:
            raise ConfigError(f"{folder} was neither pulled nor added: delete the folder by hand if it is not needed")
        sizes = (path.stat().st_size for path in folder.rglob("*") if path.is_file())  # those of linked files count too
        freed = 0 if "location" in table else sum(sizes)
        with write_errors(folder, fix="close the program that uses it, or delete the folder by hand"):
            # Renamed first: what is half removed must not load, and Windows refuses that while a file is in use.
            gone = folder.with_name(f".{name}.removed")
            shutil.rmtree(gone, ignore_errors=True)
            folder.rename(gone)
            shutil.rmtree(gone)
    return freed


def own_folders() -> dict[str, Path]:
    """The folders in the user's own folder, those of unfinished downloads too."""
    home = models_folder()
    found = sorted(home.iterdir()) if is_folder(home) else []
    return {path.name: path for path in found if is_folder(path) and not path.name.startswith(".")}


def _table_of(folder: Path) -> Mapping[str, Any] | None:
    """The manifest of a folder that `edgespec pull` or `add` made, empty where it is damaged or not there yet."""
    if folder.is_symlink():  # what it links to is the user's own
        return None
    if not is_file(folder / MANIFEST):
        return {} if is_file(folder / UNFINISHED) else None
    try:
        table = read_table(folder / MANIFEST)
    except ModelFileError:  # a model that cannot be used is no loss
        return {}
    return table if table.get("source") or table.get("location") else None


def _absolute(path: Path) -> Path:
    """`path` from the root. A file that is a link stays one: in the hub's cache it has the model's name, not a hash."""
    here = expanded(path)
    return resolved(here) if is_folder(here) else resolved(here.parent) / here.name


def _name_for(where: Path) -> str:
    stem = name_in(where) if where.is_file() else where.name
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in stem).strip("._-") or "model"


def _described(path: Path) -> ModelFile:
    """A model file that can be used, with its checksums and those of the files that belong to it."""
    files = files_of(path)
    FileTrial({path: False}).require_sound()
    return checksummed(files)


_BESIDE_WEIGHTS = 1.1  # weights with caches and buffers, over the weights alone


def fits(num_bytes: int) -> bool | None:
    """Whether models of `num_bytes` fit into the memory that is available now; None if that is unknown."""
    available = free_memory()
    return None if available is None else num_bytes * _BESIDE_WEIGHTS <= available


@dataclass(frozen=True, slots=True)
class Listed:
    """A model of the list. `state`: here, in another program, unfinished, damaged or to pull.

    `is_guess`: its size is not known yet; `draft`: the draft model, or the heads, that come with it.
    """

    name: str
    state: str
    bytes: int
    is_guess: bool
    fits: bool | None
    draft: str
    description: str


def list_here() -> Iterator[Listed]:
    """Models on this machine by name, damaged and unfinished ones too, and those that other programs keep."""
    found = registered_folders()
    for name in sorted(found):
        try:
            pair = resolve(name)
        except EdgespecError as exc:
            yield Listed(name, "damaged", 0, False, None, "", str(exc))
            continue
        size = pair_bytes(pair)
        yield Listed(name, "here", size, False, fits(size), drafted_from(pair), pair.description)
    for name, folder in own_folders().items():
        kinds = (PART, ".gguf", ".data", ".onnx")
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.suffix in kinds)
        if name not in found and size:
            yield Listed(name, "unfinished", size, False, None, "", f"edgespec pull {name} resumes it")
    for each in found_elsewhere():
        yield Listed(each.name, f"in {each.program}", each.bytes, False, fits(each.bytes), "", str(each.path))


def list_known(here: set[str]) -> Iterator[Listed]:
    """Models of the catalogue that are not `here`; the size and whether it fits are those with its draft."""
    for entry in entries().values():
        if entry.name not in here:
            size, heads = entry_bytes(entry), (f"{head.kind} head" for head in entry.heads if head.gguf)
            draft, is_guess = entry.draft or next(heads, ""), not entry.known_bytes
            yield Listed(entry.name, "to pull", size, is_guess, fits(size), draft, entry.description)


def drafted_from(pair: ModelPair) -> str:
    """The name of its draft model, else its heads, which draft where there is none."""
    return pair.draft.name if pair.draft else ", ".join(f"{kind} heads" for kind in pair.heads)


def pair_bytes(pair: ModelPair) -> int:
    """The size of the files of the target and of what drafts for it."""
    used = [pair.files[role] for role in ("target", "draft") if role in pair.files]
    used += () if pair.draft else pair.heads.values()
    sizes = {part.path: part.bytes or part.path.stat().st_size for file in used for part in file.all_files}
    return sum(sizes.values())


def entry_bytes(entry: Entry) -> int:
    """The size of an entry with its draft, guessed where it is not known."""
    draft = entries().get(entry.draft)
    return entry.guessed_bytes() + (draft.guessed_bytes() if draft else 0)
