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
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgespec.bench.shapes import Shape
from edgespec.bench.tensors import (
    CONSTANT,
    GAIN,
    Floats,
    Indices,
    TensorPlan,
    cancelling_shares_of,
    shares_of,
    write_shard,
)
from edgespec.errors import ModelFileError
from edgespec.formats.manifest import sha256_of

if TYPE_CHECKING:
    from edgespec.export.checkpoint import Checkpoint

Progress = Callable[[int, int, str], None]

FORMAT = 3  # part of the fingerprint: a change of what is written makes older files stale
BLOCK = 256  # columns of a K-quant's block, the widest of all
PLAN_FILE = "expansion.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


@dataclass(frozen=True)
class Expansion:
    """From the checkpoint `small` to `shape`. `sigma` adds that many deviations of noise to the head's real weights.

    With `is_random`, what should be zero is random as well: the outputs mean nothing, the cost is what is compared.
    """

    small: Checkpoint
    shape: Shape
    seed: int = 0
    sigma: float = 0.0
    is_random: bool = False

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
        """Noise in the head must not reach the embedding, so it unties them."""
        return bool(self.small.config.get("tie_word_embeddings", False)) and not self.sigma

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

    def _outer(self) -> Iterator[TensorPlan]:
        small, big = self.small_shape, self.shape
        padded_from = small.vocab_size if self.is_padded else None
        embedding = self.small.weights("model.embed_tokens.weight")
        names = {"model.embed_tokens.weight": embedding}
        if not self.is_tied:
            head = embedding if self.small.config.get("tie_word_embeddings") else self.small.weights("lm_head.weight")
            noise = np.random.default_rng([self.seed, 1]).standard_normal(head.shape, np.float32)
            names["lm_head.weight"] = head + np.float32(self.sigma * head.std()) * noise
        tokens = np.full(big.vocab_size, -1, np.int64)
        tokens[: small.vocab_size] = np.arange(small.vocab_size)
        for name, source in names.items():
            yield TensorPlan(
                name,
                (big.vocab_size, big.hidden_size),
                None if self.is_random else source,
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
            None if self.is_random else source,
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

    def fingerprint(self) -> str:
        """What the files depend on, as a hash."""
        files = sorted((*self.small.folder.glob("model*.safetensors"), self.small.folder / "config.json"))
        parts = [FORMAT, asdict(self.shape), self.seed, self.sigma, self.is_random, [sha256_of(file) for file in files]]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _block_end(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def expand(expansion: Expansion, output: Path, progress: Progress | None = None) -> Path:
    """Write the big model as a Hugging Face folder: matrices float16, norms float32; memory stays at a few row blocks.

    Files that an interrupted run with the same settings finished are kept; config.json comes last, so a folder that has
    it is whole. Raises ModelFileError when the small model does not fit the shape.
    """
    output.mkdir(parents=True, exist_ok=True)
    wanted = expansion.fingerprint()
    plan_file = output / PLAN_FILE
    if not plan_file.is_file() or plan_file.read_text(encoding="utf-8") != wanted:
        for stale in (*output.glob("model*.safetensors*"), output / "config.json"):
            stale.unlink(missing_ok=True)
        _write_text(plan_file, wanted)
    total = expansion.shape.num_layers + 1
    weight_map: dict[str, str] = {}
    for number, plans in enumerate(expansion.shards(), 1):
        path = output / f"model-{number:05}-of-{total:05}.safetensors"
        if progress is not None:
            progress(number - 1, total, path.name)
        if not path.exists():
            write_shard(path, plans, expansion.seed)
        weight_map |= dict.fromkeys((plan.name for plan in plans), path.name)
    for name in TOKENIZER_FILES:
        if (expansion.small.folder / name).is_file():
            shutil.copyfile(expansion.small.folder / name, output / name)
    size = sum(path.stat().st_size for path in output.glob("model-*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    _write_text(output / "model.safetensors.index.json", json.dumps(index, indent=1))
    _write_text(output / "config.json", json.dumps(expansion.config(), indent=2) + "\n")
    if progress is not None:
        progress(total, total, "done")
    return output
