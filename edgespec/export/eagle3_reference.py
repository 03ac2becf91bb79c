"""Reference implementation of an EAGLE-3 head in numpy float32, read from its checkpoint; exported GGUFs are checked
against it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.head import DraftHead, HeadFacts, States
from edgespec.errors import BatchError, ContextFull
from edgespec.export.eagle3_plan import HeadPlan, shared_names
from edgespec.formats.architectures import llama3_frequency_factors, rotary_settings
from edgespec.formats.checkpoint import Checkpoint
from edgespec.types import Logits, TokenIds

Weights = Mapping[str, NDArray[np.float32]]


class NumpyHead(DraftHead):
    """The head of a plan. `target_weights`: the target's embeddings and head [vocabulary, width], if shared."""

    def __init__(self, plan: HeadPlan, target_weights: Weights | None = None, context_length: int = 1 << 16) -> None:
        own = {name: plan.checkpoint.weights(source) for name, source in plan.tensors.items()}
        self._weights: Weights = {**(target_weights or {}), **own}
        self._plan, self._sizes = plan, plan.sizes
        config = plan.checkpoint.config
        self._epsilon = float(config["rms_norm_eps"])
        self._norms_residual, self._norms_features = config.get("norm_before_residual"), config.get("norm_before_fc")
        self._frequencies = rotary_frequencies(config, plan.sizes.head_dim)
        self._keys: list[NDArray[np.float32]] = []
        self._values: list[NDArray[np.float32]] = []
        self.start = self.end = 0
        self.facts = HeadFacts(
            context_length=context_length,
            layers=plan.layers,
            feature_width=len(plan.layers) * plan.target_width,
            width=plan.sizes.width,
            end_ids=frozenset(),
            num_bytes=sum(weights.nbytes for weights in self._weights.values()),
        )

    @classmethod
    def of(cls, plan: HeadPlan, target_folder: Path, context_length: int = 1 << 16) -> Self:
        """The head of a plan, with the weights that it shares with the model in `target_folder`."""
        target = Checkpoint.open(target_folder)
        names = shared_names(target) if plan.shares_weights else {}
        return cls(plan, {name: target.weights(source) for name, source in names.items()}, context_length)

    def encode(self, features: States) -> States:
        if features.ndim != 2 or features.shape[1] != self.facts.feature_width:
            raise BatchError(f"features must have the shape [n, {self.facts.feature_width}], got {features.shape}")
        fused = self._norm(features, "enc.output_norm") if self._norms_features else features
        return fused @ self._weights["fc.weight"].T

    def decode(self, token_ids: TokenIds, states: States) -> tuple[Logits, States]:
        if states.shape != (token_ids.size, self.facts.width) or not token_ids.size:
            raise BatchError(f"decode needs one state per token, got {token_ids.size} tokens and states {states.shape}")
        if self.end - self.start + token_ids.size > self.facts.context_length:
            raise ContextFull(f"the head's context holds {self.facts.context_length} pairs")
        for token_id, state in zip(token_ids.tolist(), states, strict=True):
            last = self._pair(token_id, state)
        head = self._weights["output.weight"] @ self._norm(last, "output_norm")
        drafted = self._plan.drafted
        if drafted is None:
            return head, last
        logits = np.full(self._sizes.vocabulary, -np.inf, np.float32)
        logits[drafted] = head
        return logits, last

    def _pair(self, token_id: int, state: States) -> States:
        """Append one (token, state) pair to the cache; returns the head's state [width] after it."""
        sizes, weights = self._sizes, self._weights
        normed = self._norm(state, "blk.0.attn_norm_2")
        embedding = self._norm(weights["token_embd.weight"][token_id], "blk.0.attn_norm")
        both = np.concatenate((embedding, normed))
        queries = self._rotated((weights["blk.0.attn_q.weight"] @ both).reshape(sizes.heads, sizes.head_dim))
        self._keys.append(self._rotated((weights["blk.0.attn_k.weight"] @ both).reshape(sizes.kv_heads, -1)))
        self._values.append((weights["blk.0.attn_v.weight"] @ both).reshape(sizes.kv_heads, -1))
        self.end += 1
        grouped = queries.reshape(sizes.kv_heads, -1, sizes.head_dim)
        scores = np.einsum("kgh,nkh->kgn", grouped, np.stack(self._keys)) / np.sqrt(np.float32(sizes.head_dim))
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        seen = np.einsum("kgn,nkh->kgh", shares / shares.sum(axis=-1, keepdims=True), np.stack(self._values))
        joined = weights["blk.0.attn_output.weight"] @ seen.reshape(-1)
        joined = joined + (normed if self._norms_residual else state)
        inner = self._norm(joined, "blk.0.ffn_norm")
        gate = weights["blk.0.ffn_gate.weight"] @ inner
        up = weights["blk.0.ffn_up.weight"] @ inner
        found: States = joined + weights["blk.0.ffn_down.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        return found

    def _norm(self, values: States, name: str) -> States:
        scale = np.sqrt((values * values).mean(axis=-1, keepdims=True) + np.float32(self._epsilon))
        found: States = values / scale * self._weights[f"{name}.weight"]
        return found

    def _rotated(self, heads: NDArray[np.float32]) -> NDArray[np.float32]:
        """[heads, head_dim] rotated to the next position; Hugging Face stores rotary pairs as two halves."""
        half = heads.shape[-1] // 2
        angles = (self.end * self._frequencies).astype(np.float32)
        cosine, sine = np.cos(angles), np.sin(angles)
        first, second = heads[:, :half], heads[:, half:]
        return np.concatenate((first * cosine - second * sine, second * cosine + first * sine), axis=1)

    def rollback(self, to_end: int) -> None:
        self._check_position(to_end)
        count = to_end - self.start
        del self._keys[count:], self._values[count:]
        self.end = to_end

    def drop_before(self, start: int) -> None:
        self._check_position(start)
        count = start - self.start
        del self._keys[:count], self._values[:count]
        self.start = start

    def restart(self, position: int) -> None:
        self._keys, self._values = [], []
        self.start = self.end = position

    def _check_position(self, position: int) -> None:
        if not self.start <= position <= self.end:
            raise BatchError(f"the head's cache holds positions {self.start}..{self.end}; {position} is outside")

    def cancel(self) -> None:
        """Does nothing: passes are short."""

    def clear_cancel(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing: there are only arrays to free."""


def rotary_frequencies(config: Mapping[str, Any], head_dim: int) -> NDArray[np.float64]:
    """The frequencies [head_dim / 2] of a head's rotary embedding."""
    settings = rotary_settings(dict(config))
    found = float(settings["rope_theta"]) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if settings["rope_type"] == "linear":
        return found / float(settings["factor"])
    if settings["rope_type"] == "llama3":
        return found / llama3_frequency_factors(settings, head_dim)
    return found
