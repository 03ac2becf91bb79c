"""Multi-token prediction layers (Qwen3.5): a layer that drafts from the target's hidden states.

A pair's state is the target's hidden state behind its final norm; the layer joins it with the embedding of the token
behind it (DeepSeek-V3, arXiv 2412.19437, 2.2). It runs in a context of its own over the target's model, whose
embeddings and head it shares, or over a model of its own where it lies in a file beside the target's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.engines.head import HeadFacts, States
from edgespec.engines.llamacpp.head_context import MTP_CONTEXT, ContextRequest, widest_step
from edgespec.engines.llamacpp.head_file import DEFAULT_CONTEXT, HeadOfFile
from edgespec.engines.llamacpp.hidden_states import AllStates
from edgespec.engines.llamacpp.library import library
from edgespec.engines.llamacpp.pair_head import PairHead
from edgespec.formats.gguf.mtp import MtpSizes, read_mtp
from edgespec.vocabulary import Vocabulary

_CACHE_BYTES = 2  # of a number in its cache


class MtpHead(PairHead):
    """Such a layer, wherever its weights are."""

    last_only = True

    def encode(self, features: States) -> States:
        """The target's hidden states are the head's own."""
        self._require_open()
        self._check_features(features)
        return features


class MtpFileHead(HeadOfFile[MtpSizes], MtpHead):
    """The layer in a file of its own."""

    what = "multi-token prediction layer"
    is_mtp = True
    states = AllStates

    @classmethod
    def read(cls, path: Path) -> MtpSizes:
        return read_mtp(path)

    @classmethod
    def cache_bytes(cls, sizes: MtpSizes, context_length: int) -> int:
        return context_length * sizes.kv_bytes_per_token

    @classmethod
    def pass_bytes(cls, sizes: MtpSizes) -> int:
        """Two copies of the logits, for the widest pass."""
        return 2 * 4 * widest_step(sizes.vocabulary_size) * sizes.vocabulary_size


def mtp_of(model: Any, vocabulary: Vocabulary, *, threads: int, context_length: int = DEFAULT_CONTEXT) -> MtpHead:
    """The layer of a `model` that was loaded with it and must outlive it; it attends to `context_length` pairs.

    Raises CapabilityError for a model without such layers.
    """
    width = int(library().llama_model_n_embd(model))
    rows = widest_step(vocabulary.size)
    request = ContextRequest(model, "of its own layers", context_length, threads, rows, kind=MTP_CONTEXT)
    facts = HeadFacts(
        context_length=context_length,
        layers=(),
        feature_width=width,
        width=width,
        end_ids=vocabulary.end_ids,
        num_bytes=context_length * 2 * width * _CACHE_BYTES,  # keys and values are at most as wide as the model
    )
    return MtpHead(request, facts, vocabulary.size)
