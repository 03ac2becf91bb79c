"""Texts that come with edgespec, to draft from: what models usually write, in the vocabulary of the target.

Small models wrote them (models/texts/NOTICE). They are encoded behind the first answer in a vocabulary, and kept.
"""

from __future__ import annotations

import gzip
import logging
from collections.abc import Callable
from contextlib import suppress
from time import sleep

import numpy as np

from edgespec.corpus.index import SuffixIndex, sorted_places
from edgespec.corpus.texts import read_index, write_arrays
from edgespec.errors import StateError
from edgespec.platform.disk_cache import key_of
from edgespec.platform.files import exists, shipped_models, user_folder
from edgespec.types import TokenIds
from edgespec.vocabulary import Vocabulary

logger = logging.getLogger("edgespec")
_LEAST_VOCABULARY = 1 << 14  # a smaller one, such as the demo's, is of a model that writes about something else
_BLOCK = 100_000  # characters encoded at once; other threads run meanwhile
_SAMPLED = 256  # tokens that tell vocabularies apart; taking one for another would make bad drafts and nothing else


class CommonTexts:
    """`index`: of the texts in the vocabulary; None until `encode` made it, in this run or an earlier one."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.index: SuffixIndex | None = None
        self._source, self._size = shipped_models() / "texts" / "texts.txt.gz", vocabulary.size
        self._is_wanted = self._size >= _LEAST_VOCABULARY and exists(self._source)
        if self._is_wanted:
            names = [vocabulary.token_name(token_id) for token_id in range(0, self._size, self._size // _SAMPLED)]
            key = key_of(self._source.stat().st_size, self._size, names)
            self._path = user_folder("cache") / "common texts" / f"{key}.npz"
            with suppress(StateError):  # of a damaged file, which is written anew
                if exists(self._path):
                    self.index, self._is_wanted = read_index(self._path, self._size), False

    def begin(self) -> bool:
        """Whether `encode` is to be called, which is true once."""
        is_wanted, self._is_wanted = self._is_wanted, False
        return is_wanted

    def encode(self, vocabulary: Vocabulary, is_busy: Callable[[], bool]) -> None:
        """Encode the texts and keep them: one to three seconds of a core in all, a twentieth while not `is_busy`.

        Raises what `vocabulary` does.
        """
        parts = list[TokenIds]()
        with gzip.open(self._source, "rt", encoding="utf-8") as source:
            while block := source.read(_BLOCK):
                while is_busy():
                    sleep(0.02)
                parts.append(np.array(vocabulary.encode(block), np.int32))
        order = sorted_places(ids := np.concatenate(parts))
        self.index = SuffixIndex(ids, order)
        try:
            write_arrays(self._path, durable=False, ids=ids, order=order)
        except StateError as exc:
            logger.debug("the encoded texts are not kept: %s", exc)
