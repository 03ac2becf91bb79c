"""What is on this machine and what can be pulled, with sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgespec.errors import EdgespecError
from edgespec.formats.manifest import ModelPair, read_pair
from edgespec.loading.catalogue import Entry, entries
from edgespec.loading.download import PART
from edgespec.loading.elsewhere import found_elsewhere
from edgespec.loading.own_models import own_folders
from edgespec.loading.registry import registered_folders
from edgespec.loading.room import fits


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
    """Models on this machine by name, damaged and unfinished ones too."""
    found = registered_folders()
    for name, folder in sorted(found.items()):
        try:
            pair = read_pair(folder, check_hashes=False)
        except EdgespecError as exc:
            yield Listed(name, "damaged", 0, False, None, "", str(exc))
            continue
        size = pair_bytes(pair)
        yield Listed(name, "here", size, False, fits(size), drafted_from(pair), pair.description)
    for name, folder in own_folders().items():
        size = sum(
            path.stat().st_size for path in folder.rglob("*") if path.suffix in (PART, ".gguf", ".data", ".onnx")
        )
        if name not in found and size:
            yield Listed(name, "unfinished", size, False, None, "", f"edgespec pull {name} resumes it")


def list_elsewhere() -> Iterator[Listed]:
    """Models that other programs keep on this machine, which run under these names."""
    for each in found_elsewhere():
        yield Listed(each.name, f"in {each.program}", each.bytes, False, fits(each.bytes), "", str(each.path))


def list_known(here: set[str]) -> Iterator[Listed]:
    """Models of the catalogue that are not `here`; the size and whether it fits are those with its draft."""
    for entry in entries().values():
        if entry.name not in here:
            size = entry_bytes(entry)
            state = "to convert" if entry.convert else "to pull"
            yield Listed(entry.name, state, size, not entry.known_bytes, fits(size), entry.draft, entry.description)


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
