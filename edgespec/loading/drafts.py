"""Draft models for a target: whether its vocabulary lets a draft model draft for it.

A draft's cache counts in the target's token ids, or is mapped to them. `comparing` compares in the same way by files
alone, before any model is loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from edgespec.drafters.mapped import MappedSequence, VocabularyMap, map_vocabulary
from edgespec.engines.base import Engine
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import CapabilityError, EdgespecError, VocabularyMismatch
from edgespec.formats.gguf.check import HEAD_NAMES, main_layers
from edgespec.formats.gguf.header import keeping_headers, read_header
from edgespec.formats.gguf.heads import check_cache, head_kind_of, read_head
from edgespec.formats.manifest import ModelFile
from edgespec.loading.sample_prompts import PROMPTS
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


class Comparison(NamedTuple):
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
                if draft.is_gguf and head_kind_of(draft.path):
                    return check_head(target, draft)
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


def check_head(target: ModelFile, head: ModelFile) -> Comparison:
    """How a head in GGUF compares, by headers alone. Raises CapabilityError for one of another target."""
    kind = head_kind_of(head.path) or "mtp"  # which a file of that name should be: reading it says what it is
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
    is_gguf = path.suffix == ".gguf"
    try:
        from edgespec.engines.onnx.graph import read_graph
        from edgespec.engines.onnx.source import open_source
        from edgespec.engines.onnx.tokenizer import TokenizerFile

        source = open_source(path)
        size = len(read_header(path).tokens) if is_gguf else read_graph(source).vocabulary_size
        return TokenizerFile(source.folder, size)
    except CapabilityError:  # an architecture, or a tokenizer, that only llama.cpp has
        if not is_gguf:
            return None
    try:
        from edgespec.engines.llamacpp.tokenizer import VocabularyFile

        return stack.enter_context(VocabularyFile(path))
    except CapabilityError:
        return None
