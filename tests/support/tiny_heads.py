"""Heads made without training: for table engines, whose states are their logits, and at random for any engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec import Sampling
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.heads import EagleDrafter, HeadDrafter, MedusaDrafter
from edgespec.engines.base import Engine
from edgespec.engines.head import Confidences, DraftHead, HeadFacts, States
from edgespec.engines.model_use import WINDOW
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import BatchError, Cancelled, ContextFull
from edgespec.formats.head_file import HeadFile, HeadManifest
from edgespec.kernels.library import library_path
from edgespec.sampling.sampler import Sampler
from edgespec.types import Batch, Logits, TokenIds
from table_engine import LetterVocabulary, TableEngine
from trainlib.head_files import write_head_file

KINDS = ("medusa", "eagle")
VOCABULARY = 10
LAYERS = 0, 2  # whose inputs an OpenHead reads
LARGE = 100.0  # where SiLU is the identity, and a state is small beside a row


def table_heads(kind: str, target: TableEngine, depth: int = 3) -> HeadFile:
    """Heads that know a table of order 1: the first token exactly (medusa), or the best token of every step (eagle)."""
    size = target.vocabulary.size
    rows = np.stack([target.row([token_id]) for token_id in range(size)])
    # The identity is the table's head; its rows have a mean square of 1 / size, so inputs are one-hot times its root.
    inputs = (LARGE * (rows + 10.0) / np.sqrt(size)).T.astype(np.float32)
    blank = np.zeros((size, size), np.float32)
    if kind == "medusa":
        arrays = {f"weight.{head}.0": np.concatenate((blank, inputs), axis=1) for head in range(depth)}
        arrays |= {f"bias.{head}.0": np.zeros(size, np.float32) for head in range(depth)}
        return _heads(target, arrays, kind="medusa", depth=depth, scale=1 / LARGE, blocks=1)
    ones = np.ones(size, np.float32)
    arrays = {
        "fc": np.concatenate((blank, inputs), axis=1),
        **dict.fromkeys(("attention_norm", "mlp_norm"), ones),
        "norm": 20 * ones,
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), np.ones((16, size), np.float32)),
        "o_proj": np.zeros((size, 16), np.float32),
        **dict.fromkeys(("gate_proj", "up_proj"), np.ones((1, size), np.float32)),
        "down_proj": np.zeros((size, 1), np.float32),
    }
    return _heads(target, arrays, kind="eagle", depth=depth, heads=1, kv_heads=1, head_dim=16, ffn=1)


def random_heads(kind: str, engine: Engine, hidden_size: int, *, draft_vocabulary: int = 64) -> HeadFile:
    """Heads of random weights for any engine that gives hidden states; its cache is emptied."""
    sizes = {"blocks": 2} if kind == "medusa" else {"heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 24}
    manifest = HeadManifest(kind, 3, hidden_size, engine.vocabulary.size, "random", "-", **sizes)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in manifest.shapes().items()}
    token_ids = np.sort(rng.permutation(engine.vocabulary.size)[:draft_vocabulary]).astype(np.int32)
    vocabulary = rng.normal(0, 0.1, (draft_vocabulary, hidden_size)).astype(np.float32)
    probe_ids = np.arange(8, dtype=np.int32)
    return HeadFile(manifest, arrays, vocabulary, token_ids, probe_ids, states_of(engine, probe_ids))


def states_of(engine: Engine, token_ids: np.ndarray) -> np.ndarray:
    engine.give_hidden_states(True)
    engine.forward(Batch.chain(token_ids))
    states = engine.hidden_states().copy()
    engine.rollback(0)
    engine.give_hidden_states(False)
    return states


def _heads(target: TableEngine, arrays: dict[str, np.ndarray], *, kind: str, depth: int, **given: float) -> HeadFile:
    size = target.vocabulary.size
    manifest = HeadManifest(kind, depth, size, size, "table", "-", **given)  # type: ignore[arg-type]
    ids = np.arange(size, dtype=np.int32)
    return HeadFile(manifest, arrays, np.eye(size, dtype=np.float32), ids, ids[:4], states_of(target, ids[:4]))


def drafter_of(
    heads: HeadFile, vocabulary_size: int, given_layers: tuple[int, ...] = (), end_ids: frozenset[int] = frozenset()
) -> HeadDrafter:
    vocabulary = LetterVocabulary(vocabulary_size)
    vocabulary.end_ids = end_ids
    if library_path() is None:
        pytest.skip("the kernels have not been built")
    from edgespec.engines.onnx.file_heads import load_eagle, load_medusa

    if heads.manifest.kind == "medusa":
        return MedusaDrafter(load_medusa(heads, vocabulary, given_layers), WINDOW)
    return EagleDrafter(load_eagle(heads, vocabulary, given_layers, threads=1), WINDOW)


def write(heads: HeadFile, path: Path) -> Path:
    write_head_file(path, heads, "f16")
    return path


class OpenCache(DraftHead):
    """A cache that is a list; `table` [vocabulary, vocabulary] of logits by the last token."""

    most_drafted = 0

    def __init__(self, context_length: int, end_ids: frozenset[int] = frozenset(), vocabulary: int = 10) -> None:
        self.facts = HeadFacts(
            context_length, LAYERS, len(LAYERS) * vocabulary, vocabulary, end_ids, 1000, self.most_drafted
        )
        self.table: States = np.random.default_rng(2).standard_normal((vocabulary, vocabulary)).astype(np.float32)
        self.share_of_state = 0.3
        self.pairs: list[tuple[int, float]] = []
        self.start = self.end = 0
        self.is_cancelled = False

    def heed_cancel(self) -> None:
        if self.is_cancelled:
            self.is_cancelled = False
            raise Cancelled("as asked")

    def append(self, entries: list[tuple[int, float]]) -> None:
        if len(self.pairs) + len(entries) > self.facts.context_length:
            raise ContextFull("too many entries")
        self.pairs += entries
        self.end += len(entries)

    def rollback(self, to_end: int) -> None:
        if not self.start <= to_end <= self.end:
            raise BatchError("outside")
        del self.pairs[to_end - self.start :]
        self.end = to_end

    def drop_before(self, start: int) -> None:
        if not self.start <= start <= self.end:
            raise BatchError("outside")
        del self.pairs[: start - self.start]
        self.start = start

    def restart(self, position: int) -> None:
        self.pairs, self.start, self.end = [], position, position

    def cancel(self) -> None:
        self.is_cancelled = True

    def clear_cancel(self) -> None:
        self.is_cancelled = False

    def close(self) -> None:
        self.pairs = []


class OpenHead(OpenCache):
    """Its cache holds (token, first number of the state); its logits are a table's row and a part of the state."""

    def encode(self, features: States) -> States:
        assert features.shape[1] == self.facts.feature_width
        return features[:, : self.facts.width]

    def decode(self, token_ids: TokenIds, states: States) -> tuple[Logits, States]:
        self.heed_cancel()
        assert len(token_ids) == len(states) > 0
        self.append(list(zip(token_ids.tolist(), states[:, 0].tolist(), strict=True)))
        logits = self.table[token_ids[-1]] + self.share_of_state * states[-1]
        return logits, logits


class OpenBlock(OpenCache):
    """Its cache holds (0, first number of the features); each row of a block continues the likeliest chain."""

    most_drafted = 5
    confidences: Confidences | None = None
    num_blocks = 0

    def inject(self, features: States) -> None:
        self.heed_cancel()
        assert features.shape[1] == self.facts.feature_width
        self.append([(0, number) for number in features[:, 0].tolist()])

    def block(self, token_id: int, most: int | None = None) -> tuple[Logits, Confidences | None]:
        self.heed_cancel()
        self.num_blocks += 1
        rows = []
        for _ in range(self.most_drafted):
            rows.append(self.table[token_id] + self.share_of_state * (self.pairs[-1][1] if self.pairs else 0.0))
            token_id = int(rows[-1].argmax())
        return np.stack(rows), self.confidences


# -- requests for drafts from the states of tables


def table(seed: int = 1, order: int = 1, context_length: int = 400) -> TableEngine:
    return TableEngine.random(VOCABULARY, order=order, seed=seed, context_length=context_length)


def with_features(target: TableEngine) -> CachedSequence:
    cached = CachedSequence(target)
    cached.keep_features(True)
    return cached


def request(text: np.ndarray, states: np.ndarray, most: int = 4, temperature: float = 0.0) -> DraftRequest:
    sampler = Sampler(Sampling(temperature=temperature, seed=1), 299)
    return DraftRequest(text, most, sampler, features=states)
