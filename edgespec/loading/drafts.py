"""Draft models and heads for a target: whether their vocabulary lets them draft for it, and which there are, ranked.

A draft's cache counts in the target's token ids, or is mapped to them. The ranking compares by files alone, before any
model is loaded: by what a draft gains if as many of its tokens are right as of its kind often are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from edgespec.drafters.mapped import MappedSequence, VocabularyMap, map_vocabulary
from edgespec.engines.base import Engine
from edgespec.engines.sequence import CachedSequence
from edgespec.engines.trial import files_of
from edgespec.errors import CapabilityError, ConfigError, EdgespecError, VocabularyMismatch
from edgespec.formats.gguf.check import HEAD_NAMES, main_layers, require_language_model
from edgespec.formats.gguf.header import keeping_headers, read_header
from edgespec.formats.gguf.heads import check_cache, head_kind_of, read_head
from edgespec.formats.gguf.tables import EXPERT_KEYS
from edgespec.formats.manifest import ModelFile, read_pair
from edgespec.loading.catalogue import Entry, entries
from edgespec.loading.own_models import fits
from edgespec.loading.registry import is_known, models_folder, registered_folders, resolve
from edgespec.loading.requirements import has_fast_kernels, runs_on_kernels
from edgespec.platform.files import shipped_models
from edgespec.vocabulary import Vocabulary, check_same_vocabulary

LEAST_OVERLAP = 0.5  # share of a text's tokens that a draft with another vocabulary must have
MOST_SHARE = 0.5  # of the target's bytes: a larger draft hardly gains
# Shares of drafted tokens that are right, by which drafts are ranked. Published ones of one family have 0.6 to 0.8;
# of other families nobody tells, so that they count as clearly worse.
RIGHT_OF_FAMILY, RIGHT_OF_OTHERS = 0.7, 0.5
LEAST_COST = 0.05  # of a target's pass: what lies between two passes of a tiny draft
BLOCKS, BLOCK_COST = ("dflash", "dspark"), 0.17  # of five layers beside a 1.5B, a token of the first four of a block
LEAST_GAIN = 1.1  # over plain decoding; lookups, which cost nothing, gain as much
_LONGEST = 8  # tokens of a draft that are thought of
_NARROW_BITS, _NARROWED_FROM = 4.5, 256 << 20  # of a weight in Q4_0, which the kernels make of a large draft's
_MOST_NEIGHBOURS = 20


class Prompt(NamedTuple):
    """A text of one of several domains. `is_raw`: no chat template goes around it."""

    domain: str
    text: str
    is_raw: bool = False


# For checks of any model without a data set.
PROMPTS: tuple[Prompt, ...] = (
    Prompt("dialogue", "Hi, can you find me a restaurant in San Jose that serves Italian food?"),
    Prompt("dialogue", "I need a one-way bus ticket for two people, leaving next Friday morning."),
    Prompt("arithmetic", "A box holds 12 pencils. Tom has 4 full boxes and gives away 9 pencils. How many are left?"),
    Prompt("arithmetic", "A train travels 60 miles in the first hour and 45 in the second. How far is that in all?"),
    Prompt(
        "code",
        "Write the Python function below.\ndef is_palindrome(text):\nReturn True if text reads the same backwards.",
    ),
    Prompt("code", "Write a Python function that returns the largest element of a list of numbers."),
    Prompt(
        "copying",
        "Repeat this list without changes: red, green, blue, yellow, orange, purple, brown, black, white, grey, pink.",
    ),
    Prompt("prose", "Tell me in a few sentences why the sky is blue during the day and red in the evening."),
)


def draft_cache(target: Engine, draft: Engine, name: str) -> tuple[CachedSequence, str]:
    """The draft's cache in token ids of the target, and a note for the user where the vocabularies differ.

    Raises VocabularyMismatch naming the first token that differs, where too few tokens of a text can be drafted.
    """
    why = difference(target.vocabulary, draft.vocabulary)
    if not why:
        return CachedSequence(draft), ""
    mapping = map_vocabulary(target.vocabulary, draft)
    in_text = _share_of_text(target.vocabulary, mapping)
    in_all = mapping.share(range(target.vocabulary.size))
    overlap = f"{name} has {in_all:.1%} of the target's tokens, and {in_text:.1%} of those in ordinary text"
    if in_text < LEAST_OVERLAP:
        raise VocabularyMismatch(
            f"{why}. {overlap}; at least {LEAST_OVERLAP:.0%} of the latter are needed. Use a draft of the same model "
            "family, or --drafter ngram, which needs none"
        )
    return MappedSequence(draft, mapping), f"{why}. {overlap}; it proposes no others"


def _share_of_text(target: Vocabulary, mapping: VocabularyMap) -> float:
    """The share of the tokens of ordinary text that the draft has."""
    return mapping.share(target.encode(" ".join(prompt.text for prompt in PROMPTS)))


def difference(target: Vocabulary, draft: Vocabulary) -> str:
    """How the draft's token ids differ from the target's; empty when they mean the same, padding aside."""
    try:
        check_same_vocabulary(target, draft)
    except VocabularyMismatch as exc:
        return str(exc).partition(". Use")[0]
    if any(map(target.piece, range(draft.size, target.size))):
        return f"target and draft have different vocabularies: the draft ends with token {draft.size - 1}"
    return ""


def check_head(target: ModelFile, head: ModelFile) -> str:
    """What a head in GGUF is, by headers alone. Raises CapabilityError for one of another target."""
    kind = head_kind_of(head.path) or "mtp"  # which a file of that name should be: reading it says what it is
    if not target.is_gguf:
        raise CapabilityError(f"{head.path.name} is {HEAD_NAMES[kind]}, which needs a GGUF target")
    header = read_header(target.path)
    width = header.value("embedding_length")
    sizes = read_head(head.path)
    if sizes.form == "gemma4":
        check_cache(head.path.name, read_header(head.path), header)
    sizes.check_fits(head.path.name, width if isinstance(width, int) else 0, main_layers(header), len(header.tokens))
    return HEAD_NAMES[kind]


@contextlib.contextmanager
def open_vocabulary(file: ModelFile) -> Iterator[Vocabulary]:
    """The vocabulary of a model without its weights: as our kernels read it, of other GGUFs as llama.cpp does.

    Raises ModelNotFound, ModelFileError, and CapabilityError where a library is missing.
    """
    with contextlib.ExitStack() as stack:
        try:
            found = _own_tokenizer(file)
        except CapabilityError:  # an architecture, or a tokenizer, that only llama.cpp has
            if not file.is_gguf:
                raise
            from edgespec.engines.llamacpp.tokenizer import VocabularyFile

            found = stack.enter_context(VocabularyFile(file.path))
        yield found


def _own_tokenizer(file: ModelFile) -> Vocabulary:
    from edgespec.engines.onnx.graph import read_graph
    from edgespec.engines.onnx.source import open_source
    from edgespec.engines.onnx.tokenizer import TokenizerFile

    source = open_source(file.path)
    size = len(read_header(file.path).tokens) if file.is_gguf else read_graph(source).vocabulary_size
    return TokenizerFile(source.folder, size)


# Which drafts there are for a target


@dataclass(frozen=True)
class Aim:
    """The target that drafts are sought for: a file on this machine, or an entry that is not pulled yet.

    `own_draft`: the draft that it runs with where none is named; `token_bytes`: what a token reads of its weights.
    """

    name: str
    bytes: int
    file: ModelFile | None
    entry: Entry | None
    own_draft: Path | None = None

    @cached_property
    def token_bytes(self) -> float:
        return _token_bytes(self.file) if self.file else self.bytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft model or head for the target. `vocabulary`: how it compares; `why_not`: empty for one that can be used.

    `bytes`: 0 for a head to pull, whose size only the hub knows. `path`: where it is here. `leaves_kernels`: it has
    llama.cpp run a target that our kernels would run. `cost`: of a token, over one of the target's. `right`: the share
    of its tokens that is thought right. `gain`: how many times as fast as plain decoding that would be.
    """

    name: str
    bytes: int
    vocabulary: str
    why_not: str = ""
    path: Path | None = None
    is_head: bool = False
    leaves_kernels: bool = False
    cost: float = LEAST_COST
    right: float = RIGHT_OF_FAMILY
    gain: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gain", expected_gain(self.cost, self.right))

    @property
    def is_worth_it(self) -> bool:
        return not self.why_not and self.gain >= LEAST_GAIN


def find_aim(text: str) -> Aim:
    """The target that `text` names. Raises ModelNotFound, ConfigError for a draft without a target."""
    if is_known(text) or text.lower() not in entries():
        pair = resolve(text)
        file = pair.files["target"]
        made = file if file.parts else _model_of(file.path)
        entry = _entry_like(pair.name) or _entry_like(pair.target.name)
        return Aim(pair.name, made.all_bytes, made, entry, pair.draft)
    entry = entries()[text.lower()]
    if entry.draft_only:
        raise ConfigError(f"{entry.name} is only useful as a draft: give the target that it is for")
    return Aim(entry.name, entry.guessed_bytes(), None, entry)


def _model_of(path: Path) -> ModelFile:
    first, *others = files_of(path)
    return ModelFile(first, parts=tuple(map(ModelFile, others)))


def _entry_like(name: str) -> Entry | None:
    """The entry whose name stands in that of a model or file, such as Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf."""
    found = [entry for entry in entries().values() if entry.name in name.lower()]
    return max(found, key=lambda entry: len(entry.name), default=None)


def expected_gain(cost: float, right: float) -> float:
    """Tokens in the time of one plain token, with drafts of the best length (Leviathan et al., 2023, theorem 3.8).

    `cost` of a drafted token in plain ones; `right`: the share of them that is accepted. That a pass checks several
    tokens in the time of one is nearly so on the kernels; elsewhere all drafts gain less, in the same order.
    """
    return max((1 - right ** (n + 1)) / ((1 - right) * (1 + n * cost)) for n in range(1, _LONGEST + 1))


def _token_bytes(file: ModelFile, *, is_draft: bool = False) -> float:
    """What a token reads of the weights: of experts those that it takes, of an embedding that is no head one row.

    A draft's as our kernels pack them, where they run it.
    """
    if not file.is_gguf:
        return file.all_bytes
    header, found = read_header(file.path), 0.0
    used, count = (header.metadata.get(f"{header.architecture}.{key}") for key in EXPERT_KEYS[1::-1])
    taken = used / count if isinstance(used, int) and isinstance(count, int) and count else 1.0
    has_head = any(tensor.name == "output.weight" for tensor in header.tensors)
    is_large = file.all_bytes >= _NARROWED_FROM
    is_narrow = is_draft and is_large and has_fast_kernels() and runs_on_kernels(file.path)
    for tensor in header.tensors:
        is_table = tensor.name.endswith("token_embd.weight")
        if not (is_table and has_head):
            is_narrowed = is_narrow and not is_table and tensor.name != "output.weight"
            narrow = math.prod(tensor.shape) * _NARROW_BITS / 8 if is_narrowed else math.inf
            found += min(tensor.num_bytes, narrow) * (taken if "_exps." in tensor.name else 1.0)
    return found


def rank(aim: Aim) -> list[Candidate]:
    """The drafts for a target: those that are here and gain something come first, then by what they should gain."""
    found = [*_here(aim), *_to_pull(aim)]
    too_large = "too large for the free memory beside the target"
    found = [replace(c, why_not=c.why_not or too_large) if fits(aim.bytes + c.bytes) is False else c for c in found]
    return sorted(found, key=lambda c: (not c.is_worth_it, bool(c.why_not), c.path is None, c.leaves_kernels, -c.gain))


def _here(aim: Aim) -> Iterator[Candidate]:
    """Drafts among the files of this machine; each is compared with the target where that is here too."""
    if aim.file is None:
        return
    with keeping_headers(), open_vocabulary(aim.file) as ours:
        for name, file in _files_here(aim.file).items():
            if file.all_bytes <= MOST_SHARE * aim.bytes:
                cost = max(_token_bytes(file, is_draft=True) / aim.token_bytes, LEAST_COST)
                yield _compared(Candidate(name, file.all_bytes, "", path=file.path, cost=cost), aim.file, ours, file)


def _compared(candidate: Candidate, target: ModelFile, ours: Vocabulary, file: ModelFile) -> Candidate:
    try:
        if file.is_gguf and head_kind_of(file.path):
            leaves_kernels = has_fast_kernels() and not runs_on_kernels(file.path)
            said = f"{check_head(target, file)} that fits"
            return replace(candidate, vocabulary=said, is_head=True, leaves_kernels=leaves_kernels)
        with open_vocabulary(file) as theirs:
            if not (differs := difference(ours, theirs)):
                return replace(candidate, vocabulary="the same")
            differs = differs.removeprefix("target and draft have different vocabularies: ")
            share = _share_of_text(ours, VocabularyMap(ours, theirs))
        said = f"{differs}; {share:.0%} of the tokens of ordinary text can be drafted"
        why_not = "too different" if share < LEAST_OVERLAP else ""
        return replace(candidate, vocabulary=said, right=share * RIGHT_OF_OTHERS, why_not=why_not)
    except EdgespecError as exc:
        return replace(candidate, why_not=" ".join(str(exc).split()))


def _files_here(target: ModelFile) -> dict[str, ModelFile]:
    """Model files in registered models and beside the target, by the name to give for them; not the target's own.

    Those of the demo family, which draft for nothing else, only for a target of it.
    """
    own = None if target.path.is_relative_to(shipped_models()) else models_folder()
    seen = {target.path.resolve()}
    found: dict[str, ModelFile] = {}
    for name, folder in registered_folders().items():
        with contextlib.suppress(EdgespecError):  # a damaged pair
            pair = read_pair(folder) if own in (None, folder.parent) else None
            for role, file in pair.files.items() if pair else ():
                if file.path.resolve() not in seen:
                    seen.add(file.path.resolve())
                    found[name if role == "target" else str(file.path)] = file
    beside = [path for path in target.path.parent.glob("*.gguf") if path.resolve() not in seen]
    for path in sorted(beside, key=lambda each: each.stat().st_size)[:_MOST_NEIGHBOURS]:
        with contextlib.suppress(EdgespecError):  # an mmproj or an embedding model, which is no draft of anything
            require_language_model(path, read_header(path))
            found[str(path)] = _model_of(path)
    return found


def _to_pull(aim: Aim) -> Iterator[Candidate]:
    """Heads that were published for the target, and models that `_here` does not compare: smaller ones of its family,
    and the best of another family, if that is thought to gain more than these.
    """
    if aim.entry is None:
        return
    for head in aim.entry.heads:
        why_not = "" if head.gguf else f"to be converted first: {head.command(aim.entry.name)}"
        said, cost = f"{head.kind} head made for {head.target}", BLOCK_COST if head.kind in BLOCKS else LEAST_COST
        yield Candidate(head.gguf or head.repo, 0, said, why_not, is_head=True, cost=cost)
    family: list[Candidate] = []
    others: list[Candidate] = []
    for entry in entries().values():
        size, is_own = entry.guessed_bytes(), entry.family == aim.entry.family
        is_compared = aim.file is not None and is_known(entry.name)
        if size <= MOST_SHARE * aim.bytes and not is_compared and (is_own or not entry.draft_only):
            said = f"{'' if is_own else 'another '}family {entry.family}, compared once it is on this machine"
            cost, right = max(size / aim.token_bytes, LEAST_COST), RIGHT_OF_FAMILY if is_own else RIGHT_OF_OTHERS
            (family if is_own else others).append(Candidate(entry.name, size, said, cost=cost, right=right))
    yield from family
    best = max(others, key=lambda each: (each.gain, -each.bytes), default=None)
    if best is not None and all(best.gain > each.gain for each in family):
        yield best
