"""Draft models for a target: whether its vocabulary lets a draft model draft for it, and which one to name to a user.

A draft's cache counts in the target's token ids, or is mapped to them. `comparing` compares in the same way by files
alone, before any model is loaded. A hint names a model that lies beside a GGUF, or a small one of its family.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgespec.drafters.mapped import MappedSequence, VocabularyMap, map_vocabulary
from edgespec.engines.base import Engine
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import CapabilityError, EdgespecError, ModelFileError, VocabularyMismatch
from edgespec.formats.gguf.check import HEAD_NAMES, HeadKind, has_mtp, main_layers, may_have_mtp
from edgespec.formats.gguf.header import GgufHeader, keeping_headers, read_header
from edgespec.formats.gguf.heads import GEMMA4, check_cache, head_kind_of, read_head
from edgespec.formats.manifest import ModelFile, ModelPair
from edgespec.installation import quoted
from edgespec.loading.catalogue import entries
from edgespec.loading.registry import is_known
from edgespec.loading.sample_prompts import PROMPTS
from edgespec.platform import disk_cache
from edgespec.vocabulary import Vocabulary, check_same_vocabulary

LEAST_OVERLAP = 0.5  # share of a text's tokens that a draft with another vocabulary must have


def draft_cache(target: Engine, draft: Engine, name: str) -> tuple[CachedSequence, str]:
    """The draft's cache in token ids of the target, and a note for the user where the vocabularies differ.

    Raises VocabularyMismatch naming the first token that differs, where too few tokens of a text can be drafted.
    """
    why = difference(target.vocabulary, draft.vocabulary)
    if not why:
        return CachedSequence(draft), ""
    mapping = map_vocabulary(target.vocabulary, draft)
    in_text = mapping.share_of(target.vocabulary.encode(" ".join(prompt.text for prompt in PROMPTS)))
    overlap = f"{name} has {mapping.share:.1%} of the target's tokens, and {in_text:.1%} of those in ordinary text"
    if in_text < LEAST_OVERLAP:
        raise VocabularyMismatch(
            f"{why}. {overlap}; at least {LEAST_OVERLAP:.0%} of the latter are needed. Use a draft of the same model "
            "family, or --drafter ngram, which needs none"
        )
    return MappedSequence(draft, mapping), f"{why}. {overlap}; it proposes no others"


def difference(target: Vocabulary, draft: Vocabulary) -> str:
    """How the draft's token ids differ from the target's; empty when they mean the same, padding aside."""
    try:
        check_same_vocabulary(target, draft)
    except VocabularyMismatch as exc:
        return str(exc).partition(". Use")[0]
    if any(map(target.piece, range(draft.size, target.size))):
        return f"target and draft have different vocabularies: the draft ends with token {draft.size - 1}"
    return ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a draft's vocabulary compares with the target's. `why_not`: why it cannot draft; empty where it can."""

    text: str
    is_same: bool = False
    why_not: str = ""


@contextlib.contextmanager
def comparing(target: ModelFile) -> Iterator[Callable[[ModelFile], Comparison]]:
    """A function that compares a draft with `target`. Raises ModelNotFound and ModelFileError for the target only."""
    with contextlib.ExitStack() as stack, keeping_headers():
        ours = _vocabulary(target.path, stack)

        def compare(draft: ModelFile) -> Comparison:
            try:
                if draft.is_gguf and (kind := head_kind_of(draft.path)):
                    return _compare_head(target, draft, kind)
                with contextlib.ExitStack() as own:
                    theirs = _vocabulary(draft.path, own)
                    if ours is None or theirs is None:
                        return Comparison("not compared: its engine is not installed")
                    return _compare(ours, theirs)
            except EdgespecError as exc:
                return Comparison("", why_not=" ".join(str(exc).split()))

        yield compare


def _compare(ours: Vocabulary, theirs: Vocabulary) -> Comparison:
    differs = difference(ours, theirs)
    if not differs:
        return Comparison("the same", is_same=True)
    differs = differs.removeprefix("target and draft have different vocabularies: ")
    text = ours.encode(" ".join(prompt.text for prompt in PROMPTS))
    share = VocabularyMap(ours, theirs).share_of(text)
    why_not = "too different" if share < LEAST_OVERLAP else ""
    return Comparison(f"{differs}; {share:.0%} of the tokens of ordinary text can be drafted", why_not=why_not)


def _compare_head(target: ModelFile, head: ModelFile, kind: HeadKind) -> Comparison:
    """Raises CapabilityError for a head of another target."""
    if not target.is_gguf:
        raise CapabilityError(f"{head.path.name} is {HEAD_NAMES[kind]}, which needs a GGUF target")
    header = read_header(target.path)
    width = header.metadata.get(f"{header.architecture}.embedding_length")
    sizes = read_head(head.path)
    if sizes.form == "gemma4":
        check_cache(head.path.name, read_header(head.path), header)
    sizes.check_fits(head.path.name, width if isinstance(width, int) else 0, main_layers(header), len(header.tokens))
    return Comparison(f"{HEAD_NAMES[kind]} that fits", is_same=True)


def _vocabulary(path: Path, stack: contextlib.ExitStack) -> Vocabulary | None:
    """The vocabulary of a model without its weights, open as long as `stack`; None without its engine's library."""
    try:
        if path.suffix == ".gguf":
            from edgespec.engines.llamacpp.tokenizer import VocabularyFile

            return stack.enter_context(VocabularyFile(path))
        from edgespec.engines.onnx.graph import read_graph
        from edgespec.engines.onnx.source import open_source
        from edgespec.engines.onnx.tokenizer import TokenizerFile

        return TokenizerFile(path.parent, read_graph(open_source(path)).vocabulary_size)
    except CapabilityError:
        return None


# A draft pays where its passes are much cheaper than the target's; below half a gigabyte a target is too cheap itself.
_LEAST_TARGET_BYTES, _LEAST_RATIO = 500 << 20, 4
_MOST_NEIGHBOURS = 20  # headers that are read: each holds a whole vocabulary
# Pattern of "architecture name tokenizer", and the smallest model of that family in the catalogue.
_FAMILIES = (
    (r"\bsmollm2\b", "smollm2-135m"),
    (r"^qwen3\b", "qwen3-0.6b"),
    (r"^qwen2\b", "qwen2.5-0.5b"),
    (r"^gemma3\b", "gemma-3-270m"),
    (r"^llama\b.*\bllama-bpe$", "llama-3.2-1b"),
)


def new_draft_hint(pair: ModelPair) -> str | None:
    """`draft_hint`, the first time that it is asked for this file on this machine; None from then on."""
    path = pair.files["target"].path
    key = disk_cache.key_of("draft hint", disk_cache.file_key(path))
    if disk_cache.is_marked("hints", key):
        return None
    disk_cache.mark("hints", key, path)
    return draft_hint(pair)


def draft_hint(pair: ModelPair) -> str | None:
    """One line that says which draft would speed this pair up; None where it has one or a draft would not gain."""
    file = pair.files["target"]
    if pair.draft is not None or pair.heads or not file.is_gguf:
        return None
    try:
        num_bytes = file.path.stat().st_size
        if num_bytes < _LEAST_TARGET_BYTES:
            return None
        header = read_header(file.path)
        if has_mtp(header):
            return None
        neighbour = _neighbour(file.path, header, num_bytes)
    except (OSError, ModelFileError):
        return None
    if neighbour is not None:
        flag = f"-md {quoted(str(neighbour))}"
        return f"{pair.name} has no draft model; {neighbour.name} in the same folder fits: {flag}"
    if may_have_mtp(header):
        return (
            f"{pair.name} has no draft model; GGUF files of such models that were converted with their multi-token "
            "prediction layer (mostly named MTP) draft for themselves, and the layer alone (mtp-*.gguf) drafts with -md"
        )
    if header.architecture == GEMMA4:
        return (
            f"{pair.name} has no draft; the drafter that Google trained for it (mtp-*.gguf, converted from "
            "google/gemma-4-*-it-assistant) drafts with -md"
        )
    family = _family(header, num_bytes)
    if family is None:
        return None
    get = "" if is_known(family) else f"edgespec pull {family}, then "
    return f"{pair.name} has no draft model; {family} usually makes it faster: {get}-md {family}"


def _neighbour(path: Path, header: GgufHeader, num_bytes: int) -> Path | None:
    """The largest .gguf in the same folder that is small enough and has the same vocabulary."""
    sizes = {each: each.stat().st_size for each in path.parent.glob("*.gguf") if each != path and each.is_file()}
    small = sorted((each for each in sizes if sizes[each] * _LEAST_RATIO <= num_bytes), key=lambda each: -sizes[each])
    for each in small[:_MOST_NEIGHBOURS]:
        try:
            if header.shares_vocabulary(read_header(each)):
                return each
        except (OSError, ModelFileError):
            continue
    return None


def _family(header: GgufHeader, num_bytes: int) -> str | None:
    names = (header.metadata.get(key, "") for key in ("general.name", "general.basename", "tokenizer.ggml.pre"))
    described = " ".join((header.architecture, *map(str, names))).lower()
    for pattern, name in _FAMILIES:
        if re.search(pattern, described):
            return name if entries()[name].guessed_bytes() * _LEAST_RATIO <= num_bytes else None
    return None
