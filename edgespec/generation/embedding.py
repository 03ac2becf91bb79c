"""Embeddings of texts: what is embedded of them, and when the model is used for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.config.options import LoadOptions
from edgespec.errors import Cancelled, CapabilityError, EngineError, PromptError, PromptTooLong, shown
from edgespec.generation.executor import Executor
from edgespec.generation.request import checked_ids
from edgespec.types import PoolingName, TokenIds

_KNOWN: tuple[PoolingName, ...] = ("mean", "cls", "last")
Text = str | Sequence[int]


class TextEmbedder:
    """Embeds with the model of `executor`, loaded with `options`."""

    def __init__(self, executor: Executor, options: LoadOptions) -> None:
        self._executor, self._options = executor, options

    def pooling(self) -> PoolingName:
        """Which hidden states are an embedding. Raises CapabilityError where nobody says, or the engine gives none."""
        facts = self._executor.target.facts
        if facts.name != "llamacpp":
            raise CapabilityError(
                f"the {facts.name} engine gives no embeddings: load an embedding model, whose file names a "
                f"{facts.architecture}.pooling_type, or a GGUF with --pooling mean or last"
            )
        if self._options.rpc:
            raise CapabilityError("a model on RPC servers gives no embeddings: load it without --rpc")
        found = self._options.pooling or next((name for name in _KNOWN if name == facts.pooling), None)
        if found is not None:
            return found
        if facts.pooling:
            raise CapabilityError(f"this model's file asks for pooling {facts.pooling}, which gives no embeddings")
        raise CapabilityError(
            f"this model generates text: its file names no {facts.architecture}.pooling_type. Load an embedding model, "
            "or give --pooling mean or last"
        )

    def encode(self, texts: Sequence[Text], *, truncate: bool) -> list[TokenIds]:
        """The token ids of each text as it is embedded; token ids are taken as they are.

        `truncate`: leave out the end of a text that is too long, but not the tokens that end all texts. Raises
        PromptError.
        """
        found = []
        with self._executor.vocabulary() as vocabulary:
            before, behind = vocabulary.embedded_ends()
            most = self._executor.target.facts.context_length
            for index, text in enumerate(texts):
                if isinstance(text, str):
                    own = vocabulary.encode(text)
                    room = max(most - len(before) - len(behind), 0)
                    ids = np.array([*before, *(own[:room] if truncate else own), *behind], np.int32)
                else:
                    ids = checked_ids(text, vocabulary.size)
                    ids = ids[:most] if truncate else ids
                if not ids.size:
                    raise PromptError(f"text {index} is empty: give at least one character")
                if ids.size > most:
                    raise PromptTooLong(
                        f"text {index} has {ids.size} tokens and the context holds {most}: split it, truncate it, or "
                        "load the model with a larger --ctx-size",
                        ids.size,
                        most,
                    )
                found.append(ids)
        return found

    def embed(self, texts: Sequence[TokenIds], is_wanted: Callable[[], bool] = lambda: True) -> NDArray[np.float32]:
        """Embeddings [n, size] of encoded texts, each of length 1. `is_wanted` is asked before each.

        Raises as `Model.embed`, and Cancelled once they are not wanted.
        """
        pooling = self.pooling()
        found = []
        for text in texts:
            if not is_wanted():
                raise Cancelled("nobody waits for the embeddings any more")
            with self._executor.exclusive():
                try:
                    found.append(self._executor.target.embed(text, pooling))
                except Cancelled:
                    self._executor.turn.require_open()
                    raise
        vectors = np.stack(found)
        if not np.isfinite(vectors).all():
            raise EngineError("this model's embeddings are not numbers: its weights may be damaged")
        return normalised(vectors)


def normalised(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each row at length 1; zeros stay."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    return (vectors / np.where(lengths == 0, 1, lengths)).astype(np.float32)


def as_texts(given: object) -> list[Text]:
    """`given`, a text or a list of texts or token ids, as a list. Raises PromptError for anything else."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray) or not given:
        raise PromptError(f"texts must be a text or a list of at least one, got {shown(given)}")
    if any(isinstance(each, int) for each in given):
        raise PromptError("texts holds a number: put the token ids of a text into a list of their own")
    return list(given)
