"""Makes the drafters that own no model, for the table in `spec`: from nothing, or from the draft model."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from edgespec.config import DrafterName, LoadOptions
from edgespec.corpus.database import Corpus
from edgespec.corpus.index import SuffixIndex
from edgespec.corpus.learnt import LearntTexts
from edgespec.corpus.store import texts_folder, vocabulary_key
from edgespec.drafters.base import Drafter
from edgespec.drafters.cache import CacheDrafter
from edgespec.drafters.lookahead import LookaheadDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.suffix import SuffixDrafter
from edgespec.drafters.tree import TreeDrafter
from edgespec.errors import StateError
from edgespec.formats.files import is_folder
from edgespec.vocabulary import Vocabulary

logger = logging.getLogger("edgespec")
Opened = Mapping[DrafterName, Drafter]


def make_ngram(options: LoadOptions, vocabulary: Vocabulary, opened: Opened) -> Drafter:
    return NgramDrafter()


def make_suffix(options: LoadOptions, vocabulary: Vocabulary, opened: Opened) -> Drafter:
    return SuffixDrafter(corpus=user_corpus(vocabulary) if options.corpus else None)


def make_cache(options: LoadOptions, vocabulary: Vocabulary, opened: Opened) -> Drafter:
    return CacheDrafter(vocabulary.size, learnt_texts(vocabulary).read() if options.recall else ())


def make_lookahead(options: LoadOptions, vocabulary: Vocabulary, opened: Opened) -> Drafter:
    return LookaheadDrafter()


def make_tree(options: LoadOptions, vocabulary: Vocabulary, opened: Opened) -> Drafter:
    model = opened["model"]
    assert isinstance(model, ModelDrafter)
    return TreeDrafter(model)


def learnt_texts(vocabulary: Vocabulary) -> LearntTexts:
    """What models wrote in `vocabulary` in earlier runs."""
    return LearntTexts(vocabulary_key(vocabulary), vocabulary.size)


def user_corpus(vocabulary: Vocabulary) -> SuffixIndex | None:
    """The user's corpus in `vocabulary`; None when there is none, or when it cannot be used, which is logged."""
    if not is_folder(texts_folder()):
        return None
    try:
        return Corpus(vocabulary_key(vocabulary), vocabulary.size).index()
    except StateError as exc:
        logger.warning("%s", exc)
        return None
