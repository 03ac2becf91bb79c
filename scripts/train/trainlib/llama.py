"""A target of the Llama family in torch: whole texts at once, or one step for many texts, each in a place of a cache.

Read from a GGUF or a Hugging Face folder, whatever edgespec's own ONNX writer reads, except for models with sliding
windows and Gemma's.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from edgespec.errors import CapabilityError
from edgespec.export.gguf.convert import convert, own_precision
from edgespec.export.onnx.writer import GgufWeights, open_gguf
from edgespec.formats.gguf.tokenizer import write_tokenizer_files
from edgespec.formats.onnx.forms import EMBEDDING, HEAD, RowWeights
from edgespec.formats.onnx.llama_config import LlamaConfig

LEAST_SQUARE = 1e-6  # as in edgespec.drafters.states
UNSEEN = -1e9
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Weights:
    """Matrices in `dtype`, vectors in float32, by the names of Hugging Face. Raises as opening the file does."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu") -> None:
        self.device, self.dtype = torch.device(device), dtype
        with _opened(path) as (self.config, rows):
            _check(self.config, path)
            self.embedding = self._matrix(rows, EMBEDDING)
            self.head = self.embedding if rows.is_tied else self._matrix(rows, HEAD)
            self.norm = self._vector(rows, "model.norm.weight")
            self.layers = [self._layer(rows, f"model.layers.{index}.") for index in range(self.config.num_layers)]

    def _layer(self, rows: RowWeights, prefix: str) -> dict[str, Tensor]:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        found = {
            "attention_norm": self._vector(rows, f"{prefix}input_layernorm.weight"),
            "queries_keys_values": torch.cat([self._matrix(rows, f"{attention}{kind}_proj.weight") for kind in "qkv"]),
            "mixed": self._matrix(rows, f"{attention}o_proj.weight"),
            "mlp_norm": self._vector(rows, f"{prefix}post_attention_layernorm.weight"),
            "gate_up": torch.cat([self._matrix(rows, f"{mlp}{kind}_proj.weight") for kind in ("gate", "up")]),
            "down": self._matrix(rows, f"{mlp}down_proj.weight"),
        }
        if self.config.has_head_norms:
            found |= {f"{kind}_norm": self._vector(rows, f"{attention}{kind}_norm.weight") for kind in "qk"}
        if "q_proj" in self.config.biases:
            found["biases"] = torch.cat([self._vector(rows, f"{attention}{kind}_proj.bias") for kind in "qkv"])
        return found

    def _matrix(self, rows: RowWeights, name: str) -> Tensor:
        return torch.from_numpy(np.concatenate(list(rows.rows(name)))).to(self.device, self.dtype)

    def _vector(self, rows: RowWeights, name: str) -> Tensor:
        return torch.from_numpy(np.array(rows.vector(name), np.float32)).to(self.device)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[LlamaConfig, RowWeights]]:
    with tempfile.TemporaryDirectory(prefix="edgespec-") as work:
        if path.is_dir():
            path = convert(path, Path(work) / "weights.gguf", own_precision(path))
        model = open_gguf(path)
        yield model.config, GgufWeights(model)


def tokenizer_folder(path: Path, work: Path) -> Path:
    """The folder with the tokenizer of a model; that of a GGUF is written to `work`."""
    if path.is_dir():
        return path
    folder = work / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer_files(open_gguf(path).header, folder)
    return folder


def _check(config: LlamaConfig, path: Path) -> None:
    """Raise CapabilityError for what this module does not compute."""
    others = config.biases - {"q_proj", "k_proj", "v_proj"}
    is_plain = config.activation == "silu" and config.embedding_scale == 1 and config.attention_scale is None
    if config.windowed_layers or config.has_post_norms or others or not is_plain or config.logit_cap is not None:
        raise CapabilityError(f"{path} has sliding windows, or is no Llama, Qwen 2 or 3 or SmolLM3: no heads for it")


class Llama:
    """`weights` and a cache for `places` texts of up to `room` tokens.

    What heads read of a token: the inputs of `read_layers`, of unit size unless `is_scaled` is false, and its last
    state, side by side.
    """

    def __init__(
        self, weights: Weights, places: int = 0, room: int = 0, read_layers: Sequence[int] = (), is_scaled: bool = True
    ) -> None:
        config = weights.config
        self.weights, self.config, self.room, self.device = weights, config, room, weights.device
        self._read, self._is_scaled = tuple(read_layers), is_scaled
        shape = (config.num_layers, places, config.num_kv_heads, room, config.head_dim)
        self._dtype = weights.embedding.dtype
        self._keys, self._values = (torch.zeros(shape, dtype=self._dtype, device=self.device) for _ in range(2))
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=self.device)
        self._frequencies = config.rope_theta ** -(half / config.head_dim)
        if config.rope_divisors:
            self._frequencies /= torch.tensor(config.rope_divisors, device=self.device)

    @torch.no_grad()
    def read(self, token_ids: Tensor, places: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Whole texts [n, length], padded at their ends: features and states [n, length, ...].

        They are kept in the cache where `places` [n] are given.
        """
        count, length = token_ids.shape
        cos, sin = self._angles(torch.arange(length, device=self.device))

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = self._rotated(index, q.transpose(1, 2), cos, sin), self._rotated(index, k.transpose(1, 2), cos, sin)
            q, k, v = q.to(self._dtype), k.to(self._dtype), v.transpose(1, 2)
            if places is not None:
                self._keys[index, places, :, :length], self._values[index, places, :, :length] = k, v
            groups = self.config.num_heads // self.config.num_kv_heads
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return mixed.transpose(1, 2).reshape(count, length, -1)

        return self._run(token_ids, attend)

    @torch.no_grad()
    def step(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """The next token [places] of every text, at `positions` [places]: its states [places, hidden]."""
        count, config = len(token_ids), self.config
        cos, sin = (table[:, None] for table in self._angles(positions))
        hidden = torch.arange(self.room, device=self.device)[None, :] > positions[:, None]
        bias = torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, UNSEEN)[:, None, None]
        every = torch.arange(count, device=self.device)

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._keys[index], self._values[index]
            keys[every, :, positions] = self._rotated(index, k, cos, sin).to(self._dtype)
            values[every, :, positions] = v
            grouped = self._rotated(index, q, cos, sin).to(self._dtype)
            grouped = grouped.view(count, config.num_kv_heads, -1, config.head_dim)
            # the whole room: a slice of the cache would be copied first
            scores = (grouped @ keys.transpose(2, 3)).float() / math.sqrt(config.head_dim) + bias
            return (scores.softmax(dim=-1).to(self._dtype) @ values).reshape(count, -1)

        return self._run(token_ids, attend)[1]

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states.to(self._dtype), self.weights.head).float()

    def _run(self, token_ids: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        config, weights = self.config, self.weights
        x = F.embedding(token_ids, weights.embedding).float()
        features = []
        for index, layer in enumerate(weights.layers):
            if index in self._read:
                features.append(F.rms_norm(x, (config.hidden_size,), eps=LEAST_SQUARE) if self._is_scaled else x)
            found = F.linear(self._normed(x, layer["attention_norm"]), layer["queries_keys_values"])
            if "biases" in layer:
                found = found + layer["biases"].to(found.dtype)
            found = found.view(*x.shape[:-1], -1, config.head_dim)
            q, k, v = found.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=-2)
            q, k = self._head_normed(q.float(), layer.get("q_norm")), self._head_normed(k.float(), layer.get("k_norm"))
            x = x + F.linear(attend(index, q, k, v), layer["mixed"]).float()
            gate, up = F.linear(self._normed(x, layer["mlp_norm"]), layer["gate_up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer["down"]).float()
        states = F.rms_norm(x, (config.hidden_size,), weights.norm, config.norm_epsilon)
        return torch.cat((*features, states), dim=-1), states

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.hidden_size,), weight, self.config.norm_epsilon).to(self._dtype)

    def _head_normed(self, heads: Tensor, weight: Tensor | None) -> Tensor:
        return heads if weight is None else F.rms_norm(heads, (self.config.head_dim,), weight, self.config.norm_epsilon)

    def _rotated(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x if layer in self.config.unrotated_layers else rotated(x, cos, sin)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[..., None] * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
