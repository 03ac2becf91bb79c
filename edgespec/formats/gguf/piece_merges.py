"""The merges by which the library `tokenizers` splits text as llama.cpp does with a SentencePiece vocabulary.

llama.cpp joins the two neighbours whose text is the token with the best score, of equal scores the first in the text,
whatever kind of token it is. The library joins the pair of the lowest rank. No merge ever crosses the ends of a token
that is made later, so a token is always made of the same two parts: those that are left when its own text is split.
With one rank for each token, in the order of scores, both do the same.

Ranks are never equal. Tokens of equal scores can have an order only if a text never decides between them otherwise.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from graphlib import CycleError, TopologicalSorter
from itertools import groupby, pairwise

from edgespec.errors import ModelFileError

Scores = Mapping[str, float]
Parts = Mapping[str, tuple[str, str]]


def merges_of(scores: Scores, alone: Set[str], unused: Set[str]) -> list[tuple[str, str]]:
    """Pairs of tokens in the order of their ranks.

    `scores`: of all tokens, by text; `alone`: tokens that are cut out of a text before anything is joined; `unused`:
    tokens that the library does not know. Raises ModelFileError for a vocabulary that it cannot use as llama.cpp does.
    """
    parts = {text: found for text in scores if text not in alone and (found := _parts(text, scores))}

    def is_made(text: str) -> bool:
        return (text in parts or len(text) == 1) and not any(name in text for name in alone)

    for text in filter(is_made, unused):
        raise refused(f"its token {text!r} is marked as unused, and llama.cpp makes it of text all the same")
    for text, pair in parts.items():
        if not scores.keys() >= {*pair} and is_made(text):
            raise refused(f"its token {text!r} has a letter that is no token")
    known = scores.keys() - unused
    ranked = sorted((text for text, pair in parts.items() if known >= {text, *pair}), key=lambda text: -scores[text])
    ordered: list[str] = []
    for _, texts in groupby(ranked, key=scores.__getitem__):
        equal = list(texts)
        ordered += _ordered(list(filter(is_made, equal)), parts, scores) if len(equal) > 1 else equal
    return [parts[text] for text in ordered]


def _parts(text: str, scores: Scores) -> tuple[str, str] | None:
    """The last two parts of which llama.cpp makes this text; None if it never does."""
    left, never = list(text), -math.inf
    joined = [scores.get(one + other, never) for one, other in pairwise(left)]
    while len(joined) > 1:
        at = joined.index(best := max(joined))
        if best == never:
            return None
        left[at : at + 2] = [left[at] + left[at + 1]]
        del joined[at]
        if at:
            joined[at - 1] = scores.get(left[at - 1] + left[at], never)
        if at < len(joined):
            joined[at] = scores.get(left[at] + left[at + 1], never)
    return (left[0], left[1]) if joined else None


def _ordered(texts: list[str], parts: Parts, scores: Scores) -> Iterable[str]:
    """Tokens of equal scores, each before those that begin with the part that it ends with.

    If joining one of them can lead to joining more before the others are looked at, it matters where they are.
    """
    if len(texts) < 2:
        return texts
    ending = defaultdict(list)
    for text in texts:
        ending[parts[text][1]].append(text)
    before = {text: [other for other in ending[parts[text][0]] if other != text] for text in texts}
    goes_on = {part for text, pair in parts.items() for part in pair if scores[text] >= scores.get(part, math.inf)}
    try:
        if not goes_on.isdisjoint(texts):
            raise CycleError
        return list(TopologicalSorter(before).static_order())
    except CycleError as exc:
        raise refused(
            f"{len(texts)} of its tokens have equal scores, such as {texts[0]!r} and {texts[1]!r}, and llama.cpp joins "
            "those that come first in a text"
        ) from exc


def refused(reason: str) -> ModelFileError:
    return ModelFileError(
        f"the GGUF's vocabulary has no tokenizer.json that splits text as llama.cpp does: {reason}. Run the GGUF as it "
        "is, or export the folder of the original model"
    )
