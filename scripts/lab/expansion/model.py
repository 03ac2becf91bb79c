"""A small trained Llama becomes a big one that computes the same function: real cost without real weights.

Everything is there several times: the residual stream holds copies of the small model's values, heads and neurons are
copies too, and whoever reads copies gives each a share, so that the shares' sum is what the small model reads. So no
activation is zero that would not be in a real model: mostly zero ones made one token of llama.cpp 17% too fast. Shares
are powers of two and real columns share no block of 256 with others, so quantised blocks are those of the small model.
New layers read and compute like real ones, and write with shares that cancel.

A root mean square over D dimensions with C copies of d0 is smaller by sqrt(C d0 / D); norm weights and epsilon make up
for it. Padded vocabulary rows must score far below real ones, and a Llama has no bias: the last dimension of the
stream, which nothing writes to, carries one small constant per token that only the head reads. Epsilon takes its share
back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError

Indices = NDArray[np.int64]
Floats = NDArray[np.float32]

ROWS_AT_ONCE = 4096
FAINT = 2.0**-6  # 4-bit types round the two signs of a weight differently; the remainder must stay negligible

# A padded row scores -CONSTANT * PUSH * GAIN / rms, where rms is that of the small model's last residual (13 to 37 for
# the demo target), so -770 to -2200. Tied real rows gain CONSTANT^2 * GAIN / rms, all alike and below 2e-4. The gain
# makes the constant large enough in the state that the head reads not to be zero where that has 8 bits per row.
CONSTANT, PUSH, GAIN = 2.0**-10, 2.0**15, 896.0

BLOCK = 256  # columns of a K-quant's block, the widest of all


@dataclass(frozen=True)
class TensorPlan:
    """How one tensor of the big model is filled. One of one dimension is `source`.

    Row r of a matrix is row `rows[r]` of `source`, its column c is column `columns[c]` times `shares[c]`. What has no
    source (index -1) is random of deviation `std`, or zero with `quiet_rows`, `quiet_columns`. `padded_from`: rows
    from there on hold the push in their last column.
    """

    name: str
    shape: tuple[int, ...]
    source: Floats
    rows: Indices = field(default_factory=lambda: np.empty(0, np.int64))
    columns: Indices = field(default_factory=lambda: np.empty(0, np.int64))
    shares: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    std: float = 0.0
    quiet_rows: bool = False
    quiet_columns: bool = False
    padded_from: int | None = None

    def random(self, seed: int) -> np.random.Generator:
        key = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "little")
        return np.random.default_rng([seed, key])

    def blocks(self, seed: int) -> Iterator[Floats]:
        """The tensor in row blocks, float32; the same for the same `seed`."""
        if len(self.shape) == 1:
            yield self.source
            return
        random = self.random(seed)
        for start in range(0, self.shape[0], ROWS_AT_ONCE):
            yield self._block(random, start, min(start + ROWS_AT_ONCE, self.shape[0]))

    def _block(self, random: np.random.Generator, start: int, stop: int) -> Floats:
        block = random.standard_normal((stop - start, self.shape[1]), np.float32) * np.float32(self.std)
        rows = self.rows[start:stop]
        old, new = np.flatnonzero(rows >= 0), np.flatnonzero(rows < 0)
        known = np.flatnonzero(self.columns >= 0)
        if self.quiet_columns:
            block[np.ix_(old, np.flatnonzero(self.columns < 0))] = 0
        if self.quiet_rows:
            block[new] = 0
        block[np.ix_(old, known)] = self.source[np.ix_(rows[old], self.columns[known])] * self.shares[known]
        if self.padded_from is not None:
            # Real tokens carry the constant, and padded rows read it; those are never an input.
            first_padded = max(self.padded_from - start, 0)
            block[:first_padded, -1] = CONSTANT
            block[first_padded:, -1] = -PUSH
        return block


def shares_of(owners: Indices) -> Floats:
    """Shares of equal `owners`, which sum to 1 for each owner; powers of two, so that scaled weights quantise alike."""
    shares = np.zeros(owners.size, np.float32)
    for owner in np.unique(owners[owners >= 0]):
        places = np.flatnonzero(owners == owner)
        parts = [1.0]
        while len(parts) < places.size:
            parts[:1] = [parts[0] / 2] * 2
            parts.sort(reverse=True)
        shares[places] = parts
    return shares


def cancelling_shares_of(owners: Indices) -> Floats:
    """Shares that sum to 0 for each owner, and are small: what reads equal values through them adds nothing."""
    shares = np.zeros(owners.size, np.float32)
    for owner in np.unique(owners[owners >= 0]):
        places = np.flatnonzero(owners == owner)
        signs = np.where(np.arange(places.size) % 2, -1.0, 1.0)
        if places.size % 2:
            signs[-1] = 0.0
        shares[places] = signs * FAINT
    return shares


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama. `head_dim` is that of the model which is expanded: rotary positions must stay the same."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    head_dim: int = 64

    @property
    def group_size(self) -> int:
        """Query heads that read one key-value head."""
        return self.num_heads // self.num_kv_heads

    def parameters(self, *, tied: bool = True) -> int:
        """Weights, norms included; with `tied` the head is the embedding and counts once."""
        attention = 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim
        per_layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        heads = self.vocab_size * self.hidden_size * (1 if tied else 2)
        return self.num_layers * per_layer + heads + self.hidden_size


class Source(Protocol):
    """A small Llama: its config.json and its weights by their Hugging Face names, matrices as [outputs, inputs]."""

    @property
    def folder(self) -> Path: ...

    @property
    def config(self) -> dict[str, Any]: ...

    def require(self, key: str) -> Any:
        """A value of `config` that must be there. Raises ModelFileError."""

    def weights(self, name: str) -> Floats: ...


@dataclass(frozen=True)
class Expansion:
    """From the model `small` to `shape`. Raises ModelFileError for a model or a shape that does not allow it."""

    small: Source
    shape: Shape
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_kind()
        self._check_room()

    def _check_kind(self) -> None:
        config = self.small.config
        if config.get("architectures") != ["LlamaForCausalLM"]:
            raise ModelFileError(
                f"{self.small.folder} is a {config.get('architectures')}: only a Llama can be expanded"
            )
        for key in ("attention_bias", "mlp_bias"):
            if config.get(key):
                raise ModelFileError(f"{self.small.folder} has {key}: only a Llama without biases can be expanded")

    def _check_room(self) -> None:
        small, big = self.small_shape, self.shape
        if big.head_dim != small.head_dim:
            raise ModelFileError(f"heads have {small.head_dim} dimensions and must keep them, {big.head_dim} was given")
        for key in ("hidden_size", "intermediate_size", "num_layers", "num_kv_heads", "group_size", "vocab_size"):
            if getattr(big, key) < getattr(small, key):
                raise ModelFileError(f"{key} {getattr(big, key)} is below the model's own {getattr(small, key)}")
        if big.num_heads % big.num_kv_heads or big.hidden_size % BLOCK or big.intermediate_size % BLOCK:
            raise ModelFileError(
                f"a shape needs widths in multiples of {BLOCK} and whole groups of heads, got {asdict(big)}"
            )
        if self.is_padded and big.hidden_size < _block_end(small.hidden_size) + BLOCK:
            raise ModelFileError(
                f"a padded vocabulary needs a hidden size of at least {_block_end(small.hidden_size) + BLOCK}, "
                f"{big.hidden_size} was given"
            )

    @property
    def small_shape(self) -> Shape:
        config, require = self.small.config, self.small.require
        heads = int(require("num_attention_heads"))
        return Shape(
            hidden_size=int(require("hidden_size")),
            intermediate_size=int(require("intermediate_size")),
            num_layers=int(require("num_hidden_layers")),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            vocab_size=int(require("vocab_size")),
            head_dim=int(config.get("head_dim") or require("hidden_size") // heads),
        )

    @property
    def is_padded(self) -> bool:
        return self.shape.vocab_size > self.small_shape.vocab_size

    @property
    def is_tied(self) -> bool:
        return bool(self.small.config.get("tie_word_embeddings", False))

    @property
    def num_copies(self) -> int:
        """How many times the residual stream holds the small one's; a block of its own stays free for the constant."""
        free = BLOCK if self.is_padded else 0
        return (self.shape.hidden_size - free) // self.small_shape.hidden_size

    @property
    def dims(self) -> Indices:
        """The small model's dimension of every one of the big stream, -1 for those that stay zero."""
        small = self.small_shape.hidden_size
        found = np.full(self.shape.hidden_size, -1, np.int64)
        found[: self.num_copies * small] = np.tile(np.arange(small), self.num_copies)
        return found

    def config(self) -> dict[str, Any]:
        """config.json of the big model. Weights are to be read as float32: norm weights need it."""
        big, small = self.shape, self.small_shape
        epsilon_sum = float(self.small.require("rms_norm_eps")) * small.hidden_size * self.num_copies
        carried = CONSTANT**2 if self.is_padded else 0.0
        changes = {
            "hidden_size": big.hidden_size,
            "intermediate_size": big.intermediate_size,
            "num_hidden_layers": big.num_layers,
            "num_attention_heads": big.num_heads,
            "num_key_value_heads": big.num_kv_heads,
            "head_dim": big.head_dim,
            "vocab_size": big.vocab_size,
            "rms_norm_eps": max(epsilon_sum - carried, 0.0) / big.hidden_size,
            "tie_word_embeddings": self.is_tied,
            "torch_dtype": "float32",
        }
        return {key: value for key, value in self.small.config.items() if key != "dtype"} | changes

    def shards(self) -> Iterator[list[TensorPlan]]:
        """The tensors of each file: what stands outside the layers, then one layer each."""
        yield list(self._outer())
        places = {place: index for index, place in enumerate(self.places())}
        last = 0
        for layer in range(self.shape.num_layers):
            last = places.get(layer, last)
            yield list(self._layer(layer, last, layer in places))

    def places(self) -> list[int]:
        """The big layer of every small one, spread evenly: a share of the depth does the same share of the work."""
        small, big = self.small_shape.num_layers, self.shape.num_layers
        return [index * big // small for index in range(small)]

    def tables(self) -> dict[str, Floats]:
        """The small model's embedding, and its head where that is another table."""
        tables = {"model.embed_tokens.weight": self.small.weights("model.embed_tokens.weight")}
        return tables if self.is_tied else tables | {"lm_head.weight": self.small.weights("lm_head.weight")}

    def _outer(self) -> Iterator[TensorPlan]:
        small, big = self.small_shape, self.shape
        padded_from = small.vocab_size if self.is_padded else None
        tokens = np.full(big.vocab_size, -1, np.int64)
        tokens[: small.vocab_size] = np.arange(small.vocab_size)
        for name, source in self.tables().items():
            yield TensorPlan(
                name,
                (big.vocab_size, big.hidden_size),
                source,
                tokens,
                self.dims,
                np.ones(big.hidden_size, np.float32),
                std=float(source.std()),
                quiet_columns=True,
                padded_from=padded_from,
            )
        # The head reads every copy in full, since it may be the embedding: its norm shares them out.
        share = 1 / self.num_copies
        yield self._norm("model.norm.weight", "model.norm.weight", share, carries=GAIN if self.is_padded else 0.0)

    def _norm(self, name: str, small_name: str, share: float = 1.0, carries: float = 0.0) -> TensorPlan:
        small, big = self.small_shape.hidden_size, self.shape.hidden_size
        weights = np.ones(big, np.float32)
        weights[self.dims >= 0] = np.tile(self.small.weights(small_name), self.num_copies) * np.float32(share)
        if self.is_padded:
            weights[-1] = carries  # no layer may read the constant
        return TensorPlan(name, (big,), weights * np.float32(np.sqrt(self.num_copies * small / big)))

    def _layer(self, layer: int, index: int, is_real: bool) -> Iterator[TensorPlan]:
        """Layer `layer`, which is the small model's `index`, or one that computes the same and adds nothing."""
        here, there = f"model.layers.{layer}.", f"model.layers.{index}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield self._norm(f"{here}{norm}.weight", f"{there}{norm}.weight")
        keys = np.arange(self.shape.num_kv_heads) % self.small_shape.num_kv_heads
        owners = {"q": self._head_dims(self._query_heads()), "kv": self._head_dims(keys), "mlp": self._neurons()}
        readers = {"self_attn.q_proj": "q", "self_attn.k_proj": "kv", "self_attn.v_proj": "kv"}
        readers |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "mlp")
        for name, kind in readers.items():
            source = self.small.weights(f"{there}{name}.weight")
            yield self._matrix(f"{here}{name}.weight", source, owners[kind], self.dims, shares_of(self.dims))
        shares = shares_of if is_real else cancelling_shares_of
        for name, kind in (("self_attn.o_proj", "q"), ("mlp.down_proj", "mlp")):
            source = self.small.weights(f"{there}{name}.weight")
            yield self._matrix(f"{here}{name}.weight", source, self.dims, owners[kind], shares(owners[kind]))

    def _matrix(self, name: str, source: Floats, rows: Indices, columns: Indices, shares: Floats) -> TensorPlan:
        return TensorPlan(
            name,
            (rows.size, columns.size),
            source,
            rows,
            columns,
            shares,
            std=float(source.std()),
            quiet_rows=True,
        )

    def _query_heads(self) -> Indices:
        """The small model's query head for every big one: of the group whose key-value head it reads, in turns."""
        small, big = self.small_shape, self.shape
        groups, places = np.divmod(np.arange(big.num_heads), big.group_size)
        found: Indices = (groups % small.num_kv_heads) * small.group_size + places % small.group_size
        return found

    def _neurons(self) -> Indices:
        return np.resize(np.arange(self.small_shape.intermediate_size), self.shape.intermediate_size)

    def _head_dims(self, heads: Indices) -> Indices:
        found: Indices = heads[:, None] * self.shape.head_dim + np.arange(self.shape.head_dim)
        return found.reshape(-1)


def _block_end(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
