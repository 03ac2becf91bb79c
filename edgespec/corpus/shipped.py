"""Texts that come with edgespec: what a known model wrote by itself (`models/NAME/text.npz`), to draft from.

They serve every model with the same vocabulary, in any format; siblings of one family write much alike.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from edgespec.corpus.index import SuffixIndex
from edgespec.corpus.store import vocabulary_key
from edgespec.formats.head_file import UNREADABLE_NPZ
from edgespec.platform.files import shipped_models
from edgespec.types import TokenIds
from edgespec.vocabulary import Vocabulary

logger = logging.getLogger("edgespec")
TEXT = "text.npz"
BORDER = 0xFFFF  # in a file, where the index has END_OF_TEXT


def shipped_text(vocabulary: Vocabulary, folder: Path | None = None) -> SuffixIndex | None:
    """The index of the text in `vocabulary`; None without one. A file that cannot be read is logged and left out."""
    for path in sorted((folder or shipped_models()).glob(f"*/{TEXT}")):
        try:
            with path.open("rb") as contents, np.load(contents) as file:
                # The size first: making the key takes longer than all the rest.
                if int(file["size"]) == vocabulary.size and str(file["key"]) == vocabulary_key(vocabulary):
                    return SuffixIndex(*_checked(file["tokens"], file["order"], vocabulary.size))
        except UNREADABLE_NPZ as exc:
            logger.warning("the text in %s is not drafted from: %s", path, exc)
    return None


def write_shipped(path: Path, tokens: TokenIds, order: TokenIds, key: str, size: int) -> None:
    """Write `tokens` [n], with END_OF_TEXT after each text, their `order` [n] and the vocabulary that they are in."""
    if size > BORDER:
        raise ValueError(f"{size} tokens do not fit into 16 bits")
    packed = np.where(tokens < 0, BORDER, tokens).astype(np.uint16)
    np.savez_compressed(path, tokens=packed, order=order.astype(np.int32), key=np.array(key), size=np.array(size))


def _checked(packed: np.ndarray, order: np.ndarray, size: int) -> tuple[TokenIds, TokenIds]:
    """(tokens, order), each [n]. Raises ValueError where they are no index of a vocabulary of `size`."""
    tokens = packed.astype(np.int32)
    tokens[packed == BORDER] = -1
    is_sound = tokens.ndim == 1 and order.shape == tokens.shape and tokens.max(initial=-1) < size
    if not (is_sound and order.min(initial=0) >= 0 and order.max(initial=-1) < tokens.size):
        raise ValueError("it is damaged")
    return tokens, order
