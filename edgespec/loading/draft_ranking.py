"""Ranks draft models and heads for a target: those on this machine, which are compared with it, and those to pull.

The speed is a forecast from sizes and an acceptance that is assumed. Heads count as the models that they are as large
as.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from edgespec.control.cost import CostCurve, DraftCost, guessed_plain_s
from edgespec.control.prices import expected_speedup
from edgespec.errors import ConfigError, EdgespecError
from edgespec.formats.gguf.check import require_language_model
from edgespec.formats.gguf.header import read_header
from edgespec.formats.gguf.heads import head_kind_of
from edgespec.formats.manifest import ModelFile, read_pair
from edgespec.loading.catalogue import Entry, entries
from edgespec.loading.drafts import comparing
from edgespec.loading.engine_choice import has_fast_kernels, runs_on_kernels
from edgespec.loading.own_models import files_of, fits
from edgespec.loading.registry import is_known, models_folder, registered_folders, resolve
from edgespec.platform.files import shipped_models

ASSUMED_ACCEPTANCE = 0.7
UNKNOWN_HEAD_SHARE = 0.05  # of the target's bytes: a layer or a few, and embeddings
MOST_SHARE = 0.6  # of the target's bytes: a larger draft cannot gain
_MOST_NEIGHBOURS = 20


@dataclass(frozen=True, slots=True)
class Aim:
    """The target that drafts are sought for: a file on this machine, or an entry that is not pulled yet.

    `own_draft`: the draft that it runs with where none is named.
    """

    name: str
    bytes: int
    file: ModelFile | None
    entry: Entry | None
    own_draft: Path | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft model or head for the target. `vocabulary`: how it compares; `why_not`: empty for one that can be used.

    `bytes`: 0 for a head to pull, whose size only the hub knows. `is_same`: both have the same vocabulary, or are of
    one family; another one costs acceptance that nobody can foretell. `speedup`: forecast over plain decoding; `fits`:
    whether both fit into memory; `keeps_kernels`: the target stays on our kernels with it; `path`: where it is here.
    """

    name: str
    bytes: int
    vocabulary: str
    is_same: bool
    why_not: str
    speedup: float
    fits: bool | None
    path: Path | None = None
    is_head: bool = False
    keeps_kernels: bool = True


def find_aim(text: str) -> Aim:
    """The target that `text` names. Raises ModelNotFound, ConfigError for a draft without a target."""
    if is_known(text) or text.lower() not in entries():
        pair = resolve(text)
        file = pair.files["target"]
        made = file if file.parts else files_of(file.path)
        entry = _entry_like(pair.name) or _entry_like(pair.target.name)
        return Aim(pair.name, made.all_bytes, made, entry, pair.draft)
    entry = entries()[text.lower()]
    if entry.draft_only:
        raise ConfigError(f"{entry.name} is only useful as a draft: give the target that it is for")
    return Aim(entry.name, entry.guessed_bytes(), None, entry)


def _entry_like(name: str) -> Entry | None:
    """The entry whose name stands in that of a model or file, such as Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf."""
    found = [entry for entry in entries().values() if entry.name in name.lower()]
    return max(found, key=lambda entry: len(entry.name), default=None)


def rank(aim: Aim) -> list[Candidate]:
    """The drafts for a target: usable ones of its vocabulary that fit and are here come first; then by forecast."""
    found = [*_here(aim), *_heads_to_pull(aim), *_to_pull(aim)]

    def order(c: Candidate) -> tuple[object, ...]:
        is_here = c.path is not None
        usable = bool(c.why_not), not c.is_same, c.fits is False
        return *usable, not is_here, not c.keeps_kernels, not c.is_head and not is_here, -c.speedup

    return sorted(found, key=order)


def _here(aim: Aim) -> Iterator[Candidate]:
    """Drafts among the files of this machine; each is compared with the target where that is here too."""
    if aim.file is None:
        return
    with comparing(aim.file) as compare:
        for name, file in _files_here(aim.file).items():
            if (size := file.all_bytes) <= MOST_SHARE * aim.bytes:
                text, is_same, why_not = compare(file)
                is_head = file.is_gguf and not why_not and bool(head_kind_of(file.path))
                keeps_kernels = not is_head or runs_on_kernels(file.path) or not has_fast_kernels()
                speedup = 0.0 if why_not else _forecast(size / aim.bytes, aim)
                rest = fits(aim.bytes + size), file.path, is_head, keeps_kernels
                yield Candidate(name, size, text, is_same, why_not, speedup, *rest)


def _files_here(target: ModelFile) -> dict[str, ModelFile]:
    """Model files beside the target and in registered models, by the name to give for them; not the target's own.

    Those of the demo family, which draft for nothing else, only for a target of it.
    """
    own = None if target.path.is_relative_to(shipped_models()) else models_folder()
    folders = {name: folder for name, folder in registered_folders().items() if own in (None, folder.parent)}
    seen = {target.path.resolve()}
    found: dict[str, ModelFile] = {}
    for (name, folder), engine in product(folders.items(), ("llamacpp", "onnx")):
        with contextlib.suppress(EdgespecError):  # a damaged pair, or one without files for this engine
            for role, file in read_pair(folder, engine, check_hashes=False).files.items():
                if file.path.resolve() not in seen and file.engine == engine:
                    seen.add(file.path.resolve())
                    found[name if role == "target" and name not in found else str(file.path)] = file
    beside = [path for path in target.path.parent.glob("*.gguf") if path.resolve() not in seen]
    for path in sorted(beside, key=lambda each: each.stat().st_size)[:_MOST_NEIGHBOURS]:
        with contextlib.suppress(EdgespecError):  # an mmproj or an embedding model, which is no draft of anything
            require_language_model(path, read_header(path))
            found[str(path)] = files_of(path)
    return found


def _to_pull(aim: Aim) -> Iterator[Candidate]:
    """Smaller models of the target's family that `_here` does not compare."""
    if aim.entry is None:
        return
    for entry in entries().values():
        size = entry.guessed_bytes()
        is_compared = aim.file is not None and is_known(entry.name)
        if entry.family == aim.entry.family and size <= MOST_SHARE * aim.bytes and not is_compared:
            said = f"family {entry.family}, compared once it is on this machine"
            yield Candidate(entry.name, size, said, True, "", _forecast(size / aim.bytes, aim), fits(aim.bytes + size))


def _heads_to_pull(aim: Aim) -> Iterator[Candidate]:
    """Heads that were published for the target."""
    if aim.entry is None:
        return
    for head in aim.entry.heads:
        why_not = "" if head.gguf else f"to be converted first: {head.command(aim.entry.name)}"
        yield Candidate(
            name=head.gguf or head.repo,
            bytes=0,
            vocabulary=f"{head.kind} head made for {head.target}",
            is_same=True,
            why_not=why_not,
            speedup=0.0 if why_not else _forecast(UNKNOWN_HEAD_SHARE, aim),
            fits=fits(aim.bytes),
            is_head=True,
            keeps_kernels=head.kind == "mtp" or not has_fast_kernels(),
        )


def _forecast(share: float, aim: Aim) -> float:
    """The best expected speedup over draft lengths, 1 where no length gains, of a draft of that share of the target."""
    pass_s = CostCurve(guessed_plain_s(aim.bytes)).table()
    token_s = DraftCost.guessed(share).token_s * pass_s[1]
    lengths = range(1, 13)
    return max(1.0, *(expected_speedup(ASSUMED_ACCEPTANCE, length, pass_s, token_s) for length in lengths))
