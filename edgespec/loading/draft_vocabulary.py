"""A draft model's cache in token ids of the target: with the same vocabulary, or mapped from another."""

from __future__ import annotations

from edgespec.drafters.mapped import MappedSequence, map_vocabulary
from edgespec.engines.base import Engine
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import VocabularyMismatch
from edgespec.loading.sample_prompts import PROMPTS
from edgespec.vocabulary import Vocabulary, check_same_vocabulary

LEAST_OVERLAP = 0.5  # of the tokens of a text, that a draft with another vocabulary must have


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
