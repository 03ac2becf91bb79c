"""Makes the drafters that own no model: those that copy, and those that draft with the draft model in another way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from edgespec.config import DrafterName, LoadOptions
from edgespec.corpus.database import Corpus
from edgespec.corpus.index import SuffixIndex
from edgespec.corpus.learnt import LearntTexts
from edgespec.corpus.store import texts_folder, vocabulary_key
from edgespec.drafters.base import Drafter
from edgespec.drafters.cache import CacheDrafter
from edgespec.drafters.hybrid import HybridDrafter
from edgespec.drafters.lookahead import LookaheadDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.suffix import SuffixDrafter
from edgespec.drafters.tree import TreeDrafter
from edgespec.errors import CapabilityError, StateError
from edgespec.formats.files import is_folder
from edgespec.vocabulary import Vocabulary

logger = logging.getLogger("edgespec")


def _suffix(options: LoadOptions, vocabulary: Vocabulary) -> Drafter:
    return SuffixDrafter(corpus=user_corpus(vocabulary) if options.corpus else None)


def _cache(options: LoadOptions, vocabulary: Vocabulary) -> Drafter:
    return CacheDrafter(vocabulary.size, learnt_texts(vocabulary).read() if options.recall else ())


FREE_DRAFTERS: dict[DrafterName, Callable[[LoadOptions, Vocabulary], Drafter]] = {
    "ngram": lambda options, vocabulary: NgramDrafter(),
    "suffix": _suffix,
    "cache": _cache,
}
MANY_ROWS: tuple[DrafterName, ...] = ("tree", "lookahead")
COPYING: tuple[DrafterName, ...] = ("suffix", "ngram")  # what a hybrid has before its draft model
# Left to be asked for: beside its parts a hybrid gains nothing in `auto`, which chooses between them by the round.
BY_NAME_ONLY: frozenset[DrafterName] = frozenset({"hybrid"})
_AT_LOADING: dict[DrafterName, str] = {
    "hierarchical": "needs a draft and a medium, and {pair!r} was loaded without the medium",
    "early-exit": "was not prepared when {pair!r} was loaded",
}


_NEEDS: dict[DrafterName, tuple[str, str]] = {
    "medusa": ("heads", "--heads (heads=...)"),
    "eagle": ("heads", "--heads (heads=...)"),
    "eagle3": ("an EAGLE-3 head", "-md/--model-draft (draft=...)"),
}


def check_makeable(name: DrafterName, opened: Mapping[DrafterName, Drafter], pair: str) -> None:
    """Raises CapabilityError for a drafter that needs what was not loaded; arguments as `made`'s."""
    if name in FREE_DRAFTERS or name == "lookahead":
        return
    if name in ("tree", "hybrid") and isinstance(opened.get("model"), ModelDrafter):
        return
    if name in _AT_LOADING:
        reason = _AT_LOADING[name].format(pair=pair)
        raise CapabilityError(f"drafter {name!r} {reason}: load it with --drafter {name}, or use --drafter auto")
    what, flag = _NEEDS.get(name, ("a draft model", "-md/--model-draft (draft=...)"))
    raise CapabilityError(
        f"drafter {name!r} needs {what} and {pair!r} was loaded without: give {flag}, or use --drafter ngram"
    )


def made(
    name: DrafterName,
    options: LoadOptions,
    vocabulary: Vocabulary,
    opened: Mapping[DrafterName, Drafter],
    pair: str,
) -> Drafter:
    """The drafter `name`, given those that were `opened` with the models of the pair called `pair`.

    Raises CapabilityError for one that needs what was not loaded.
    """
    check_makeable(name, opened, pair)
    if name in FREE_DRAFTERS:
        return FREE_DRAFTERS[name](options, vocabulary)
    if name == "lookahead":
        return LookaheadDrafter()
    model = opened["model"]
    assert isinstance(model, ModelDrafter)
    if name == "tree":
        return TreeDrafter(model)
    return HybridDrafter([FREE_DRAFTERS[each](options, vocabulary) for each in COPYING], model)


def learnt_texts(vocabulary: Vocabulary) -> LearntTexts:
    """What models wrote in `vocabulary` in earlier runs."""
    return LearntTexts(vocabulary_key(vocabulary), vocabulary.size)


def user_corpus(vocabulary: Vocabulary) -> SuffixIndex | None:
    """The user's corpus in `vocabulary`; None when there is none, or when it cannot be used, which is said."""
    if not is_folder(texts_folder()):
        return None
    try:
        return Corpus(vocabulary_key(vocabulary), vocabulary.size).index()
    except StateError as exc:
        logger.info("%s", exc)
        return None
