"""Draft heads on our kernels: an engine of a layer that predicts a further token, with states as an input.

EAGLE-3's reads a state that an encoder of its own makes of the inputs of the target's layers.

Its passes take rows of several texts and trees at little more than the cost of one row, as the target's do. It has
keys and values of its own, which stay behind when the target drops a draft: those of guesses are never kept. Gemma 4's
drafter has none, and reads those of its target.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.head import Confidences, DraftHead, HeadFacts, States
from edgespec.engines.model_use import DEFAULT_CONTEXT
from edgespec.engines.onnx.graph import HIDDEN, read_graph
from edgespec.engines.onnx.kernel_engine import KernelEngine
from edgespec.engines.onnx.library import open_session
from edgespec.engines.onnx.source import GgufFile
from edgespec.errors import BatchError, CapabilityError, VocabularyMismatch
from edgespec.formats.gguf.check import is_gemma4_drafter
from edgespec.formats.gguf.header import read_header
from edgespec.formats.gguf.heads import HeadSizes, check_cache, read_head
from edgespec.formats.onnx.tiles import FEATURES, ROWS
from edgespec.types import Batch, Logits, TokenIds

# Of a large vocabulary a layer scores the first tokens. A text of which so many of the latest are others gets these
# scored, too: then what is right more often is worth the time (with Qwen2.5's 62% in Chinese, 3% in English).
_LATEST, _MANY = 256, 0.25


class _Rest:
    """Scores the tokens that the layer of `engine` leaves out. Its session is made when a text first needs it."""

    def __init__(self, engine: KernelEngine) -> None:
        self._engine = engine
        self._session: Any = None

    def is_needed(self, token_ids: TokenIds) -> bool:
        source, latest = self._engine.source, token_ids[-_LATEST:]
        assert isinstance(source, GgufFile)
        if not (latest.size and source.num_unscored) or np.mean(latest >= source.model.config.vocab_size) < _MANY:
            return False
        if self._session is None and (made := source.rest_of_head()):
            self._session = open_session(made[0], source.folder, arrays=made[1])
        return self._session is not None

    def scores(self, states: States) -> Logits:
        return self._engine.run_beside(self._session, {HIDDEN: states})[0]


def columns(given: Sequence[int], read: Sequence[int], width: int) -> NDArray[np.intp]:
    """Places of the states that are `read` among those that are `given`, each `width` wide: of layers; -1: the last."""
    return np.concatenate([np.arange(width) + width * given.index(each) for each in read])


class KernelHead(DraftHead):
    """One text's view of `engine`, which is closed with the head of the first text. Make it with `load_drafter`.

    `sizes` of a file of its own; of its `drafted_ids` it has scores alone.
    """

    _encoder: Any = None  # a session of what makes one state of those of layers

    def __init__(self, engine: KernelEngine, sizes: HeadSizes | None = None) -> None:
        width, facts = engine.features.shape[1], engine.facts
        self._engine, self._slot, self._rest, self._scores_all = engine, 0, _Rest(engine), False
        self._drafted = np.array(sizes.drafted_ids if sizes else (), np.intp)
        self.start = self.end = 0
        self.facts = HeadFacts(
            context_length=facts.context_length,
            layers=(),
            feature_width=width,
            width=width,
            end_ids=engine.vocabulary.end_ids,
            num_bytes=facts.weight_bytes + facts.max_sequences * facts.context_length * facts.kv_bytes_per_token,
            can_tree=True,
            keeps_oldest=True,
        )

    def follow(self, token_ids: TokenIds) -> None:
        self._scores_all = self._rest.is_needed(token_ids)

    def read_layers(self, sizes: HeadSizes, given_layers: tuple[int, ...]) -> None:
        """Read states of a target which gives the inputs of these layers, and the last state behind them."""
        self._encoder = self._part("encoder", self._engine.facts.context_length)
        self._columns = columns(given_layers, sizes.layers, sizes.target_width)
        feature_width = (len(given_layers) + 1) * sizes.target_width
        self.facts = replace(self.facts, layers=sizes.layers, feature_width=feature_width)

    def _part(self, name: Literal["encoder", "chain"], cells: int) -> Any:
        source = self._engine.source
        assert isinstance(source, GgufFile)
        graph = source.part(name, cells)
        return open_session(graph, source.folder, arrays=source.arrays())

    def encode(self, features: States) -> States:
        self._check_features(features)
        return features if self._encoder is None else self._encoded(features)

    def _encoded(self, features: States, **rows: NDArray[np.int32]) -> States:
        """One state of each row of `features`; of a block's head nothing, which it writes into the cache."""
        return self._engine.run_beside(self._encoder, {FEATURES: features[:, self._columns], **rows})[0]

    def decode(self, token_ids: TokenIds, states: States) -> tuple[Logits, States]:
        self._check_pairs(token_ids, states)
        before, most = self.end, self._engine.facts.max_batch
        try:
            for first in range(0, token_ids.size, most):
                part = Batch.chain(token_ids[first : first + most], sequence=self._slot, last_only=True)
                logits = self._pass(part, self._read(token_ids[first : first + most], states[first : first + most]))
                self.end += part.width
        except BaseException:
            self.rollback(before)
            raise
        return logits[0], self._engine.hidden_states()[part.width - 1]

    def branch(
        self, token_ids: TokenIds, states: States, parents: list[int], wanted: list[int]
    ) -> tuple[Logits, States]:
        self._check_pairs(token_ids, states)
        outputs = np.zeros(token_ids.size, np.bool_)
        outputs[wanted] = True
        sequences = np.full(token_ids.size, self._slot, np.int32)
        batch = Batch(token_ids, np.array(parents, np.int32), sequences, outputs)
        try:
            return self._pass(batch, self._read(token_ids, states)), self._engine.hidden_states()[wanted]
        finally:
            self.rollback(self.end)

    def _read(self, token_ids: TokenIds, states: States) -> States:
        """What the rows of a pass read, of states [n, width] and the tokens after them [n]."""
        return states

    def _pass(self, batch: Batch, read: States) -> Logits:
        self._engine.features[: batch.width] = read
        found = self._engine.forward(batch)
        if self._scores_all:
            return np.concatenate((found, self._rest.scores(self._engine.hidden_states()[batch.outputs])), axis=1)
        return self._spread(found)

    def _spread(self, scores: Logits) -> Logits:
        """Scores [n, drafted tokens] as [n, vocabulary]."""
        if not self._drafted.size:
            return scores
        found = np.full((len(scores), self._engine.vocabulary.size), -np.inf, np.float32)
        found[:, self._drafted] = scores
        return found

    def rollback(self, to_end: int) -> None:
        self._check_position(to_end)
        self._engine.rollback(to_end - self.start, self._slot)
        self.end = to_end

    def drop_before(self, start: int) -> None:
        """All of them, or none: their places in the text are those in the cache."""
        if start not in (self.start, self.end):
            raise BatchError(f"the head's cache holds entries {self.start}..{self.end}, of which it can drop all")
        if start > self.start:
            self.restart(start)

    def restart(self, position: int) -> None:
        self._engine.rollback(0, self._slot)
        self.start = self.end = position

    def set_threads(self, threads: int) -> None:
        self._engine.set_threads(min(threads, self._engine.facts.threads))

    def cancel(self) -> None:
        self._engine.cancel()

    def clear_cancel(self) -> None:
        self._engine.clear_cancel()

    def another(self, sequence: int) -> Self:
        found = copy(self)
        found._slot, found._scores_all = sequence, False
        found.start = found.end = 0
        return found

    def close(self) -> None:
        if self._slot == 0:
            self._engine.close()


class CacheHead(KernelHead):
    """Gemma 4's drafter: all steps of a draft are at the place behind the text, and read the target's cache alone."""

    def step(self, token_id: int, state: States, position: int, sequence: int = 0) -> tuple[Logits, States]:
        self._check_state(state)
        engine, last = self._engine, position - 1
        if not 0 <= token_id < engine.vocabulary.size or not 0 <= last < self.facts.context_length:
            raise BatchError(f"token {token_id} at {position} is outside the head's vocabulary or context")
        engine.features[0] = state
        logits = engine.score(np.array([token_id]), np.array([[sequence, last, last, -1]], np.int32))
        return logits[0], engine.hidden_states()[0]


class BlockHead(KernelHead):
    """A DFlash or DSpark head: its cache has what its encoder makes of the target's states, and no row of a block."""

    def __init__(self, engine: KernelEngine, sizes: HeadSizes, given_layers: tuple[int, ...]) -> None:
        super().__init__(engine, sizes)
        self.facts = replace(self.facts, width=sizes.width, most_drafted=sizes.most_drafted, can_tree=False)
        self.read_layers(sizes, given_layers)
        self._sizes = sizes
        self._ids = np.full(sizes.block_size, sizes.mask_id, np.int32)
        places = np.arange(sizes.block_size)
        parents = places - 1 if sizes.is_causal else places - sizes.block_size  # or they see all behind them
        self._rows = np.stack((0 * places, places, places, parents), axis=1).astype(np.int32)
        self._chain = self._part("chain", 1) if sizes.has_markov or sizes.num_candidates else None

    def inject(self, features: States) -> None:
        self._check_features(features)
        self._check_room(len(features), "tokens")
        places = np.arange(self.end - self.start, self.end - self.start + len(features))
        parents = np.arange(-1, len(features) - 1)
        rows = np.stack((np.full_like(places, self._slot), places, places, parents), axis=1)
        self._encoded(features, **{ROWS: rows.astype(np.int32)})
        self.end += len(features)

    def block(self, token_id: int, most: int | None = None) -> tuple[Logits, Confidences | None]:
        engine, first = self._engine, self._sizes.first_row
        if not 0 <= token_id < engine.vocabulary.size:
            raise BatchError(f"token id {token_id} is outside the head's vocabulary 0..{engine.vocabulary.size - 1}")
        self._ids[0], self._rows[:, 0] = token_id, self._slot
        rows = self._rows + np.array([0, 1, 1, 0], np.int32) * np.int32(self.end - self.start)
        scores = engine.score(self._ids, rows, first, None if most is None else first + most)
        confidences = self._chained(token_id, scores) if self._chain is not None else None
        return self._spread(scores), confidences

    def _chained(self, token_id: int, scores: Logits) -> Confidences | None:
        """Move each row of `scores` by the likeliest token of the row before; the confidences in these tokens.

        Of a row of DFlash2 only the likeliest few have a score then.
        """
        sizes, most, found = self._sizes, self._sizes.num_candidates, []
        tokens = self._drafted if self._drafted.size else np.arange(scores.shape[1])
        for row, state in zip(scores, self._engine.hidden_states()[sizes.first_row :], strict=False):
            best = np.argpartition(row, -most)[-most:] if most else np.empty(0, np.intp)
            inputs: dict[str, NDArray[Any]] = {"input_ids": np.array([[token_id, *tokens[best]]])}
            if sizes.has_confidence or most:
                inputs[FEATURES] = state[None, None]
            moved, *confidence = self._engine.run_beside(self._chain, inputs)
            if most:
                kept = row[best] + moved[0, 1:]
                row[:] = -np.inf
                row[best] = kept
            else:
                row += moved[0, 0]
            token_id = int(tokens[row.argmax()])
            found += [float(each[0, 0, 0]) for each in confidence]
        return np.array(found, np.float32) if found else None

    def rollback(self, to_end: int) -> None:
        self._check_position(to_end)
        self.end = to_end

    def restart(self, position: int) -> None:
        self.start = self.end = position


def load_drafter(target: KernelEngine, path: Path | None = None, context_length: int | None = None) -> KernelHead:
    """The layer of `target` that predicts a further token, in its own file or in `path`; of another head what is there.

    It attends to `context_length` pairs of each text, or to the target's cache. Raises ModelNotFound, ModelFileError,
    VocabularyMismatch, and CapabilityError for a drafter of another model.
    """
    whole, vocabulary, sizes = target.source, target.vocabulary, None
    if not isinstance(whole, GgufFile):
        raise CapabilityError("this draft head reads a model in GGUF: run the file that the export was made from")
    if path is not None:
        config, header = whole.model.config, read_header(path)
        if is_gemma4_drafter(header):
            check_cache(path.name, header, whole.model.header)
        sizes = read_head(path)
        sizes.check_fits(path.name, config.hidden_size, config.num_layers, vocabulary.size)
        if list(header.tokens) != list(whole.model.header.tokens):
            raise VocabularyMismatch(f"{path.name} has other tokens than its target: give the file made for this model")
    source = whole.drafter(path)
    length = target.facts.context_length
    if not source.reads_cache:
        length = min(context_length or DEFAULT_CONTEXT, length, source.model.config.max_positions)
    graph = read_graph(source, cells=length, hidden_states=True)
    settings = replace(target.settings, context_length=length)
    engine = KernelEngine(source, graph, settings, vocabulary)
    if source.reads_cache:
        engine.read_cache_of(target)
        return CacheHead(engine)
    if sizes and sizes.block_size:
        return BlockHead(engine, sizes, target.state_layers)
    head = KernelHead(engine, sizes)
    if sizes and sizes.layers:
        head.read_layers(sizes, target.state_layers)
    return head
