"""Ranks draft models and heads for a target: those on this machine, which are compared with it, and those to pull.

The speed is a forecast: from the target's costs as they were measured when it last ran here, else guessed from its
size, the draft's likewise, and an acceptance that is assumed. Heads count as the models that they are as large as.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from edgespec.control.cost import CostCurve, DraftCost, guessed_plain_s
from edgespec.control.costs import file_curve
from edgespec.control.prices import expected_speedup
from edgespec.errors import ConfigError, EdgespecError
from edgespec.formats.gguf.check import require_language_model
from edgespec.formats.gguf.header import read_header
from edgespec.formats.gguf.heads import head_kind_of
from edgespec.formats.manifest import ModelFile, read_pair
from edgespec.loading.catalogue import Entry, entries
from edgespec.loading.drafts import Comparison, comparing
from edgespec.loading.engine_choice import has_fast_kernels, runs_on_kernels
from edgespec.loading.own_models import files_of, fits
from edgespec.loading.registry import is_known, models_folder, registered_folders, resolve

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
    one family; another one costs acceptance that nobody can foretell. `speedup`: forecast over plain decoding at
    `draft_length`; `fits`: whether both fit into memory; `keeps_kernels`: the target stays on our kernels with it.
    """

    name: str
    bytes: int
    share: float
    vocabulary: str
    is_same: bool
    why_not: str
    speedup: float
    draft_length: int
    fits: bool | None
    path: Path | None = None
    is_head: bool = False
    keeps_kernels: bool = True

    @property
    def is_here(self) -> bool:
        return self.path is not None

    @property
    def why(self) -> str:
        """What speaks for it, in words."""
        head = "it reads the target's own states, so more of its tokens are accepted than of a small model's"
        said = [head if self.is_head else f"its vocabulary: {self.vocabulary}"]
        said += [f"a token costs {self.share:.0%} of the target's bytes"] if self.bytes else []
        said += [] if self.keeps_kernels else ["llama.cpp runs the target with it"]
        return "; ".join(said)


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
        usable = bool(c.why_not), not c.is_same, c.fits is False
        return *usable, not c.is_here, not c.keeps_kernels, not c.is_head and not c.is_here, -c.speedup

    return sorted(found, key=order)


def _here(aim: Aim) -> Iterator[Candidate]:
    """Drafts among the files of this machine; each is compared with the target where that is here too."""
    if aim.file is None:
        return
    with comparing(aim.file) as compare:
        for name, file in _files_here(aim.file).items():
            if (size := file.all_bytes) <= MOST_SHARE * aim.bytes:
                found = compare(file)
                if found.is_same or not _is_built_in(file.path):
                    yield _candidate(aim, name, size, found, file)


def _is_built_in(path: Path) -> bool:
    """Whether a file is one of the demo family: with another vocabulary than its own it drafts nothing of use."""
    built_in = [folder for folder in registered_folders().values() if folder.parent != models_folder()]
    return any(path.is_relative_to(folder.resolve()) for folder in built_in)


def _files_here(target: ModelFile) -> dict[str, ModelFile]:
    """Model files beside the target and in registered models, by the name to give for them; not the target's own."""
    seen = {target.path.resolve()}
    found: dict[str, ModelFile] = {}
    for (name, folder), engine in product(registered_folders().items(), ("llamacpp", "onnx")):
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
        is_smaller = entry.guessed_bytes() <= MOST_SHARE * aim.bytes
        is_compared = aim.file is not None and is_known(entry.name)
        if entry.family == aim.entry.family and is_smaller and not is_compared:
            found = Comparison(f"family {entry.family}, compared once it is on this machine", is_same=True)
            yield _candidate(aim, entry.name, entry.guessed_bytes(), found, None)


def _heads_to_pull(aim: Aim) -> Iterator[Candidate]:
    """Heads that were published for the target."""
    if aim.entry is None:
        return
    for head in aim.entry.heads:
        why_not = "" if head.gguf else f"to be converted first: {head.command(aim.entry.name)}"
        found = Comparison(f"{head.kind} head made for {head.target}", is_same=True, why_not=why_not)
        yield _candidate(aim, head.gguf or head.repo, 0, found, None, is_head=True, on_kernels=head.kind == "mtp")


def _candidate(
    aim: Aim,
    name: str,
    size: int,
    found: Comparison,
    file: ModelFile | None,
    *,
    is_head: bool = False,
    on_kernels: bool = False,
) -> Candidate:
    on_kernels = on_kernels or (file is not None and runs_on_kernels(file.path))
    is_head = is_head or (file is not None and file.is_gguf and not found.why_not and bool(head_kind_of(file.path)))
    speedup, length = _forecast(aim, size or int(UNKNOWN_HEAD_SHARE * aim.bytes), file)
    return Candidate(
        name=name,
        bytes=size,
        share=size / aim.bytes,
        is_head=is_head,
        keeps_kernels=not is_head or on_kernels or not has_fast_kernels(),
        vocabulary=found.text,
        is_same=found.is_same,
        why_not=found.why_not,
        speedup=0.0 if found.why_not else speedup,
        draft_length=length,
        fits=fits(aim.bytes + size),
        path=None if file is None else file.path,
    )


def _forecast(aim: Aim, size: int, file: ModelFile | None) -> tuple[float, int]:
    """The best expected speedup over draft lengths, and that length; 1 and 0 where no length gains."""
    curve = _known_curve(aim.file) or CostCurve.guessed(guessed_plain_s(aim.bytes))
    pass_s = curve.table()
    own = _known_curve(file)
    token_s = own.at(1) if own is not None else DraftCost.guessed(size / aim.bytes).token_s * pass_s[1]
    found = [(expected_speedup(ASSUMED_ACCEPTANCE, length, pass_s, token_s), length) for length in range(1, 13)]
    return max((1.0, 0), *found)


def has_run(aim: Aim) -> bool:
    """Whether the forecast rests on costs that were measured on this machine."""
    return _known_curve(aim.file) is not None


def _known_curve(file: ModelFile | None) -> CostCurve | None:
    return None if file is None else file_curve([part.path for part in file.all_files]) or file_curve([file.path])
