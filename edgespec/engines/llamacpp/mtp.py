"""Multi-token prediction layers of a target's own file (Qwen3.5): a layer that drafts from the target's hidden states.

A pair's state is the target's hidden state behind its final norm; the layer joins it with the embedding of the token
behind it (DeepSeek-V3, arXiv 2412.19437, 2.2). It runs in a context of its own over the target's model, whose
embeddings and head it shares.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from edgespec.engines.head import HeadFacts, States
from edgespec.engines.llamacpp.head_context import create_context, widest_step
from edgespec.engines.llamacpp.library import library
from edgespec.engines.llamacpp.pair_head import PairHead
from edgespec.errors import BatchError
from edgespec.vocabulary import Vocabulary

DEFAULT_CONTEXT = 2048
_CONTEXT_TYPE = 1  # LLAMA_CONTEXT_TYPE_MTP
_CACHE_BYTES = 2  # of a number in its cache


def _cached_numbers(model: Any) -> int:
    """Of a pair, in keys and values together: at most as many as the model is wide, for each of both."""
    return 2 * int(library().llama_model_n_embd(model))


class MtpHead(PairHead):
    """The layer of a model that was loaded with it; the model must outlive it."""

    last_only = True

    @classmethod
    def load(
        cls, model: Any, vocabulary: Vocabulary, *, threads: int, context_length: int = DEFAULT_CONTEXT
    ) -> MtpHead:
        """`context_length`: most pairs it attends to.

        Raises CapabilityError for a model without such layers.
        """
        length = context_length
        width = int(library().llama_model_n_embd(model))
        make = partial(
            create_context,
            model,
            "of its own layers",
            length,
            threads,
            widest_step(vocabulary.size),
            None,
            _CONTEXT_TYPE,
        )
        facts = HeadFacts(
            context_length=length,
            layers=(),
            feature_width=width,
            width=width,
            end_ids=vocabulary.end_ids,
            num_bytes=length * _cached_numbers(model) * _CACHE_BYTES,
        )
        return cls(make, facts, vocabulary.size)

    def encode(self, features: States) -> States:
        """The target's hidden states are the head's own."""
        self._require_open()
        if features.ndim != 2 or features.shape[1] != self.facts.feature_width:
            raise BatchError(f"features of the shape [n, {self.facts.feature_width}] are needed, got {features.shape}")
        return features
