"""Makes the drafters that own no model, for the table in `spec`: from nothing, or from the draft model.

Each is imported when it is made: the table is also read by commands that load nothing, which do without numpy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from edgespec.config import DrafterName, LoadOptions
from edgespec.errors import StateError
from edgespec.platform.files import is_folder

if TYPE_CHECKING:
    from edgespec.corpus.index import SuffixIndex
    from edgespec.corpus.learnt import LearntTexts
    from edgespec.drafters.base import Drafter
    from edgespec.vocabulary import Vocabulary

    Opened = Mapping[DrafterName, Drafter]

logger = logging.getLogger("edgespec")


def make_ngram(options: LoadOptions, vocabulary: Vocabulary, opened: Opened) -> Drafter:
    from edgespec.drafters.ngram import NgramDrafter

    return NgramDrafter()


def make_suffix(options: LoadOptions, vocabulary: Vocabulary, opened: Opened) -> Drafter:
    from edgespec.drafters.suffix import SuffixDrafter

    found = user_corpus(vocabulary) if options.corpus else None
    return SuffixDrafter(corpora=[] if found is None else [found])


def make_cache(options: LoadOptions, vocabulary: Vocabulary, opened: Opened) -> Drafter:
    from edgespec.drafters.cache import CacheDrafter

    return CacheDrafter(vocabulary.size, learnt_texts(vocabulary).read() if options.recall else ())


def make_lookahead(options: LoadOptions, vocabulary: Vocabulary, opened: Opened) -> Drafter:
    from edgespec.drafters.lookahead import LookaheadDrafter

    return LookaheadDrafter()


def make_tree(options: LoadOptions, vocabulary: Vocabulary, opened: Opened) -> Drafter:
    from edgespec.drafters.model import ModelDrafter
    from edgespec.drafters.tree import TreeDrafter

    model = opened["model"]
    assert isinstance(model, ModelDrafter)
    return TreeDrafter(model)


def learnt_texts(vocabulary: Vocabulary) -> LearntTexts:
    """What models wrote in `vocabulary` in earlier runs."""
    from edgespec.corpus.learnt import LearntTexts
    from edgespec.corpus.store import vocabulary_key

    return LearntTexts(vocabulary_key(vocabulary), vocabulary.size)


def user_corpus(vocabulary: Vocabulary) -> SuffixIndex | None:
    """The user's corpus in `vocabulary`; None when there is none, or when it cannot be used, which is logged."""
    from edgespec.corpus.database import Corpus
    from edgespec.corpus.store import texts_folder, vocabulary_key

    if not is_folder(texts_folder()):
        return None
    try:
        return Corpus(vocabulary_key(vocabulary), vocabulary.size).index()
    except StateError as exc:
        logger.warning("%s", exc)
        return None
