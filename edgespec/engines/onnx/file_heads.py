"""Heads of a file on our kernels, for a target on any engine: EAGLE's layer is a draft head like any other.

Tokens outside the heads' vocabulary are never proposed; the target can still sample them. Matrices are 8 bits a weight:
a draft of one row costs the bytes that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgespec.engines.head import Confidences, DraftHead, HeadFacts, States
from edgespec.engines.model_use import ModelUse
from edgespec.engines.onnx.graph import read_graph
from edgespec.engines.onnx.kernel_engine import KernelEngine
from edgespec.engines.onnx.kernel_head import KernelHead, columns
from edgespec.engines.onnx.library import Translated, open_session, run_options
from edgespec.engines.onnx.settings import ModelConfig, OnnxSettings
from edgespec.engines.onnx.source import TILE_ROWS, GraphSource, packed_tiles
from edgespec.errors import CapabilityError, EngineError, ModelFileError
from edgespec.formats.head_file import PROJECT, HeadFile
from edgespec.formats.onnx.eagle import EagleConfig
from edgespec.formats.onnx.graph import MemoryWriter, Nodes
from edgespec.formats.onnx.llama import llama_graph
from edgespec.formats.onnx.tiles import Tiles, q8_0
from edgespec.kernels import interface
from edgespec.kernels.library import library_path, why_missing
from edgespec.types import Logits, TokenIds
from edgespec.vocabulary import Vocabulary

CONTEXT = 2048  # pairs that it attends to
THREADS = 2  # reading the weights is most of a pass, and two cores read faster; more take longer to wake
HEAD_MULTIPLE = 16  # of the size of attention heads
ROWS_AT_ONCE = 1024  # quantised
_LEAST_SQUARE = np.float32(1e-6)
NEVER = np.float32(-1e30)  # a logit; finite, so that no bias makes it NaN
NAMES = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm", "lm_head": "rows"}


class HeadText:
    """What heads of a file read of the target's states and of tokens, and which tokens they score, for one text.

    Frequent tokens are scored always, others once they occur in the text. A draft pays for every row of the target's
    head that it reads. Rare words of an answer mostly come from the prompt or from the answer so far: in SmolLM2's
    answers to Spec-Bench 8,192 frequent tokens are 90% of all, and 97% with those that occurred before; 16,384 are 95%
    (FR-Spec, arXiv 2502.14856, keeps frequent ones only).
    `given_layers`: of the target, whose inputs precede the last state in what it gives, the heads' own among them.
    """

    def __init__(self, heads: HeadFile, vocabulary_size: int, given_layers: tuple[int, ...] = ()) -> None:
        """Raises ModelFileError where the rows of the heads' vocabulary are all zero, or too large to be scaled."""
        manifest = heads.manifest
        self._columns, self._num_inputs = columns_of(heads, given_layers), len(manifest.layers)
        self._is_projected = PROJECT in heads.arrays
        self.feature_width = manifest.feature_size // (len(manifest.layers) + 1) * (len(given_layers) + 1)
        # The rows of the head are the input embeddings too, scaled to unit size; a token without one is zero.
        with np.errstate(over="ignore"):
            size = float(np.linalg.norm(heads.vocabulary) / np.sqrt(heads.vocabulary.size))
        if not 0 < size < np.inf:
            raise ModelFileError(
                f"the {manifest.kind} heads' vocabulary has rows of mean size {size:g}: train them again "
                "(scripts/train/heads.py), or leave them out"
            )
        self._size, self._scale = np.float32(1.0 / size), np.float32(manifest.scale)
        no_row = np.zeros((1, heads.vocabulary.shape[1]), np.float16)  # the last: that of slot -1
        self._rows = np.concatenate((heads.vocabulary.astype(np.float16), no_row))
        self._token_ids = heads.token_ids
        self._frequent = np.arange(heads.token_ids.size) if heads.frequent is None else heads.frequent
        self._slots = np.full(vocabulary_size, -1, np.int32)
        self._slots[heads.token_ids] = np.arange(heads.token_ids.size)
        self._row_size = manifest.vocabulary_size  # without the target's padding
        self._met_rows: States = np.empty((0, self._rows.shape[1]), np.float32)
        self.begin()

    def another(self) -> HeadText:
        """The same for another text; the rows of the head are shared."""
        found = copy(self)
        found._met_rows = self._met_rows[:0]
        found.begin()
        return found

    def begin(self) -> None:
        """A new text."""
        self._num_read = self._num_met = 0
        self._is_known = np.zeros(self._token_ids.size, np.bool_)  # scored already
        self._is_known[self._frequent] = True
        self._ids = self._token_ids[self._frequent]
        self._row = np.full((1, self._row_size), NEVER)

    def follow(self, token_ids: TokenIds) -> None:
        """Score the tokens of the text `token_ids` [n] from now on; it is the last one, continued, or another one."""
        if self._frequent.size == self._token_ids.size:
            return
        if token_ids.size < self._num_read:
            self.begin()
        slots = self._slots[token_ids[self._num_read :]]
        self._num_read = token_ids.size
        # Not np.unique, whose first call imports numpy.ma: 65 ms of a first answer.
        new = np.array(sorted(set(slots[(slots >= 0) & ~self._is_known[slots]].tolist())), np.intp)
        if not new.size:
            return
        self._is_known[new] = True
        first, self._num_met = self._num_met, self._num_met + new.size
        if self._num_met > len(self._met_rows):  # new memory takes longer than all else here, so it is kept for good
            more = np.empty((2 * self._num_met, self._met_rows.shape[1]), np.float32)
            more[:first] = self._met_rows[:first]
            self._met_rows = more
        self._met_rows[first : self._num_met] = self._rows[new].astype(np.float32) * self._scale
        self._ids = np.concatenate((self._ids, self._token_ids[new]))

    def read(self, features: States) -> States:
        """The target's states [n, all given ones] as the heads read them [n, all of theirs].

        Inputs of layers grow with the depth and are scaled to unit size; the last state has been through a norm.
        """
        states = np.take(features, self._columns, axis=1)
        if self._is_projected and self._num_inputs:
            inputs = states.reshape(len(states), self._num_inputs + 1, -1)[:, :-1]
            mean_square = np.einsum("rls,rls->rl", inputs, inputs) / inputs.shape[2]  # np.square would need new memory
            inputs /= np.sqrt(mean_square[:, :, None] + _LEAST_SQUARE)
        return states

    def embed(self, token_ids: TokenIds) -> States:
        """Input rows [n, hidden size] of `token_ids` [n]."""
        rows: States = self._rows[self._slots[token_ids]].astype(np.float32) * self._size
        return rows

    def logits(self, states: States, scores: States) -> Logits:
        """Logits [n, the heads' vocabulary], until the next call, of `states` [n, width], given `scores` [n, frequent].

        Raises EngineError for scores that are not finite: finite weights may have products that overflow.
        """
        if self._num_met:
            # Not by BLAS: its threads spin for more work, and would take cores from the target's next pass.
            with np.errstate(over="ignore", invalid="ignore"):
                met = np.einsum("nd,md->nm", states, self._met_rows[: self._num_met])
            scores = np.concatenate((scores, met), axis=1)
        if not np.isfinite(scores).all():
            raise EngineError(
                "the heads gave scores that are not finite: they are damaged, or overflow with this target. Train them "
                "again (scripts/train/heads.py), or use another drafter"
            )
        rows = self._row if len(scores) == 1 else np.full((len(scores), self._row_size), NEVER)
        rows[:, self._ids] = scores
        return rows

    @property
    def num_bytes(self) -> int:
        arrays = self._rows, self._slots, self._is_known, self._row, self._ids
        return sum(array.nbytes for array in arrays)


def columns_of(heads: HeadFile, given_layers: tuple[int, ...]) -> NDArray[np.intp]:
    """Places of the states that `heads` read among those of all `given_layers` and the last."""
    manifest = heads.manifest
    width = manifest.feature_size // (len(manifest.layers) + 1)
    return columns((*given_layers, -1), (*manifest.layers, -1), width)


class HeadTiles:
    """`TiledWeights` of heads, by the names of a Llama of one layer."""

    is_tied = False

    def __init__(self, heads: HeadFile) -> None:
        rows = heads.frequent_rows * np.float32(heads.manifest.scale)
        arrays = {name.replace(".", "_"): array for name, array in heads.arrays.items()}
        self._arrays: Mapping[str, NDArray[np.float32]] = {**arrays, "rows": rows}

    def vector(self, name: str) -> NDArray[np.float32]:
        last = name.removesuffix(".weight").rpartition(".")[2]
        return self._arrays[NAMES.get(last, last)]

    def shape(self, name: str) -> tuple[int, int]:
        outputs, inputs = self.vector(name).shape
        return outputs, inputs

    def _kind(self, name: str) -> str:
        return "F32" if self.shape(name)[1] % 32 else "Q8_0"

    def type_number(self, name: str) -> int:
        return interface.TYPES[self._kind(name)]

    def num_bytes(self, name: str) -> int:
        found = interface.packed_bytes(self._kind(name), *self.shape(name))
        assert found is not None
        return found

    def pack(self, name: str, out: NDArray[np.uint8]) -> list[Callable[[], None]]:
        whole, kind = self.vector(name), self._kind(name)
        tile_bytes = self.num_bytes(name) // -(-len(whole) // TILE_ROWS)

        def fill(start: int) -> None:
            rows = np.ascontiguousarray(whole[start : start + ROWS_AT_ONCE])
            place = out[start // TILE_ROWS * tile_bytes :][: -(-len(rows) // TILE_ROWS) * tile_bytes]
            if not interface.pack(kind, q8_0(rows) if kind == "Q8_0" else rows.view(np.uint8), rows.shape[1], place):
                raise ModelFileError(f"the heads hold weights in {name} that are too large: train them again")

        return [partial(fill, start) for start in range(0, len(whole), ROWS_AT_ONCE)]


class HeadLayer(GraphSource):
    """The layer of `heads` as the source of an engine."""

    is_drafter = True
    max_positions = 1 << 20  # rotary tables are made as long as they are needed

    def __init__(self, heads: HeadFile, weights: HeadTiles) -> None:
        self.path = self.folder = Path()
        self.files = ()
        self._heads, self._weights = heads, weights

    def forget(self) -> None:
        """Let go of the floats, which nobody needs once there is a session."""
        del self._heads, self._weights, self._data

    def config(self) -> ModelConfig:
        return ModelConfig("eagle", self.max_positions, self._heads.manifest.head_dim)

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        later, self._data.later = self._data.later, {}  # what fills tiles refers to the floats, and they to it
        return {**self._data.arrays, **packed_tiles(later)}

    def graph(self, cells: int = 0) -> Any:
        sizes, self._data = self._heads.manifest, MemoryWriter()
        config = EagleConfig(
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.ffn,
            num_layers=1,
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            vocab_size=len(self._heads.frequent_rows),
            max_positions=max(cells, 1),
            norm_epsilon=sizes.norm_eps,
            rope_theta=sizes.rope_theta,
        )
        return llama_graph(config, self._data, lambda nodes: Tiles(self._weights, nodes))


class EagleHead(KernelHead):
    """One text's view of the layer. Make it with `load_eagle`."""

    def __init__(self, engine: KernelEngine, text: HeadText, projection: _HeadGraph | None) -> None:
        super().__init__(engine)
        self._text, self._projection = text, projection
        width = self.facts.width // 2  # a pair is a state and an embedding
        own = self.facts.num_bytes + text.num_bytes + (0 if projection is None else projection.num_bytes)
        self.facts = replace(self.facts, feature_width=text.feature_width, width=width, num_bytes=own)

    def follow(self, token_ids: TokenIds) -> None:
        self._text.follow(token_ids)

    def encode(self, features: States) -> States:
        self._check_features(features)
        found = self._text.read(features)
        if self._projection is None:
            return found
        return self._projection.run(features=found)[0]

    def decode(self, token_ids: TokenIds, states: States) -> tuple[Logits, States]:
        scores, state = super().decode(token_ids, states)
        return self._text.logits(state[None], scores[None])[0], state

    def branch(
        self, token_ids: TokenIds, states: States, parents: list[int], wanted: list[int]
    ) -> tuple[Logits, States]:
        scores, found = super().branch(token_ids, states, parents, wanted)
        return self._text.logits(found, scores), found

    def _read(self, token_ids: TokenIds, states: States) -> States:
        return np.concatenate((states, self._text.embed(token_ids)), axis=1)

    def another(self, sequence: int) -> Self:
        found = super().another(sequence)
        found._text = self._text.another()
        return found


class MedusaHead(DraftHead):
    """Medusa (arXiv 2401.10774): one small head per drafted token, all on the target's last hidden state.

    A head knows the state and the token that was sampled from it, not what the heads before it propose. Make it with
    `load_medusa`.
    """

    def __init__(self, heads: HeadFile, text: HeadText, graph: _HeadGraph, end_ids: frozenset[int]) -> None:
        self._text, self._graph = text, graph
        self._state = np.zeros((1, heads.manifest.feature_size), np.float32)
        self.start = self.end = 0
        self.facts = HeadFacts(
            context_length=1,
            layers=(),
            feature_width=text.feature_width,
            width=heads.manifest.hidden_size,
            end_ids=end_ids,
            num_bytes=graph.num_bytes + text.num_bytes,
            most_drafted=heads.manifest.depth,
        )

    def follow(self, token_ids: TokenIds) -> None:
        self._text.follow(token_ids)

    def inject(self, features: States) -> None:
        """The last state alone is read."""
        self._check_features(features)
        self._state = self._text.read(features[-1:])

    def block(self, token_id: int, most: int | None = None) -> tuple[Logits, Confidences | None]:
        states, scores = self._graph.run(state=self._state, embedded=self._text.embed(np.array([token_id])))
        return self._text.logits(states, scores), None

    def another(self, sequence: int) -> MedusaHead:
        found = copy(self)
        found._text = self._text.another()
        return found


class _HeadGraph:
    """A session of some products. `widths` of its inputs, each of which has rows [n, width]."""

    def __init__(self, nodes: Nodes, data: MemoryWriter, inputs: dict[str, int], outputs: dict[str, int]) -> None:
        self.widths = inputs
        given, made = (
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, f"{name} rows", width]) for name, width in of]
            for of in (inputs.items(), outputs.items())
        )
        arrays = {**data.arrays, **packed_tiles(data.later)}
        graph = nodes.model(given, made).SerializeToString()
        self._session = open_session(graph, Path(), threads=THREADS, arrays=arrays)
        self._options, self.num_bytes = run_options(), sum(array.nbytes for array in arrays.values())

    def run(self, **rows: States) -> list[States]:
        """Rows of each output."""
        given = {name: np.ascontiguousarray(each[None]) for name, each in rows.items()}
        with Translated(self._options):
            return [found[0] for found in self._session.run(None, given, self._options)]


def _projection(heads: HeadFile, weights: HeadTiles) -> _HeadGraph:
    """The matrix that makes one state of several of the target's."""
    data = MemoryWriter()
    nodes = Nodes(data)
    Tiles(weights, nodes).product("/project/MatMul", "features", [f"model.{PROJECT}.weight"], "states")
    return _HeadGraph(nodes, data, {"features": heads.manifest.feature_size}, {"states": heads.manifest.hidden_size})


def _medusa(heads: HeadFile, weights: HeadTiles) -> _HeadGraph:
    """States and scores of all heads: a head adds to the state what its blocks make of it, and of the token first."""
    sizes, data = heads.manifest, MemoryWriter()
    nodes, state = Nodes(data), "state"
    form = Tiles(weights, nodes)
    if sizes.is_projected:
        form.product("/project/MatMul", "state", [f"model.{PROJECT}.weight"], "projected")
        state = "projected"
    nodes.add("Concat", [state, "embedded"], ["first"], "first", axis=-1)
    found = []
    for head in range(sizes.depth):
        value, given = state, "first"
        for block in range(sizes.blocks):
            here = f"/head{head}/block{block}"
            bias = nodes.store(f"bias{here}", heads.arrays[f"bias.{head}.{block}"])
            form.products(f"{here}/MatMul", given, [f"model.weight_{head}_{block}.weight"], [f"{here}/x"], bias)
            nodes.add("Sigmoid", [f"{here}/x"], [f"{here}/gate"], f"{here}/Sigmoid")
            nodes.add("Mul", [f"{here}/x", f"{here}/gate"], [f"{here}/silu"], f"{here}/Mul")
            nodes.add("Add", [value, f"{here}/silu"], [f"{here}/state"], f"{here}/Add")
            value = given = f"{here}/state"
        found.append(value)
    nodes.add("Concat", found, ["states"], "states", axis=1)
    form.product("/rows/MatMul", "states", ["lm_head.weight"], "scores")
    widths = {"states": sizes.hidden_size, "scores": len(heads.frequent_rows)}
    return _HeadGraph(nodes, data, {"state": sizes.feature_size, "embedded": sizes.hidden_size}, widths)


def _require_kernels() -> None:
    if library_path() is None:
        raise CapabilityError(f"heads of a file run on edgespec's own kernels, which are missing here: {why_missing()}")


def load_medusa(heads: HeadFile, vocabulary: Vocabulary, given_layers: tuple[int, ...] = ()) -> MedusaHead:
    """`heads` of the kind medusa. Arguments and errors as of `load_eagle`."""
    _require_kernels()
    text = HeadText(heads, vocabulary.size, given_layers)
    return MedusaHead(heads, text, _medusa(heads, HeadTiles(heads)), vocabulary.end_ids)


def load_eagle(
    heads: HeadFile,
    vocabulary: Vocabulary,
    given_layers: tuple[int, ...] = (),
    *,
    sequences: int = 1,
    threads: int = THREADS,
) -> EagleHead:
    """The layer of `heads` of the kind eagle, for a target with this `vocabulary`.

    `given_layers`: as of `HeadText`. Raises CapabilityError without the kernels, or for a size that they do not have,
    ModelFileError for weights that are no use.
    """
    sizes = heads.manifest
    _require_kernels()
    if sizes.head_dim % HEAD_MULTIPLE:
        raise CapabilityError(
            f"these heads have {sizes.head_dim} values in a head of attention; allowed: multiples of 16"
        )
    text = HeadText(heads, vocabulary.size, given_layers)
    weights = HeadTiles(heads)
    source = HeadLayer(heads, weights)
    graph = read_graph(source, cells=CONTEXT, hidden_states=True)
    use = ModelUse(CONTEXT, threads=threads, max_sequences=sequences, provider="cpu")
    settings = OnnxSettings.checked(graph, source.config(), use)
    projection = _projection(heads, weights) if sizes.is_projected else None
    engine = KernelEngine(source, graph, settings, vocabulary)
    source.forget()
    return EagleHead(engine, text, projection)
