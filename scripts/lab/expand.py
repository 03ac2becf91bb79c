"""A synthetic larger model that writes much as a small real one does, and drafts that agree with it less.

    python scripts/lab/expand.py SMALL.gguf BIG-f16.gguf --size 1b
    python scripts/lab/expand.py SMALL.gguf DRAFT-f16.gguf --noise 0.15
    llama-quantize BIG-f16.gguf BIG.gguf Q4_K_M

SMALL is a Llama, quantised or not; the presets suit SmolLM2-135M. Each matrix begins with its rows and columns. What is
added changes nothing:

- Embeddings, and rows of attn_output and ffn_down, are padded with zeros: that part of the residual stream is always 0.
  Columns that meet it are random, so that quantised blocks hold what they usually do. Tied embeddings stay tied.
- Norms are multiplied by sqrt(small / large hidden size), their epsilon by small / large.
- Further heads and neurons have random rows, as large as the real ones, and columns of zeros in attn_output, ffn_down.

In F32 the logits differ by rounding. Quantising is not exact: the real weights get new blocks, and where the small
hidden size is no multiple of 256 (576 is 2.25 blocks) a row's third block mixes real with padded columns. The text
stays fluent; the reference for drafts is the quantised model's own.

--noise adds SIGMA * N(0, 1) * (standard deviation of the output matrix) to its elements; a tied output becomes a tensor
of its own. Of 1,195 greedy tokens of SmolLM2's 1b (20 questions of Spec-Bench) SmolLM2 chooses 0.93, and in Q4_K_M with
SIGMA 0.1, 0.15, 0.2, 0.25, 0.3: 0.81, 0.74, 0.69, 0.64, 0.58.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from edgespec.errors import EdgespecError, ModelFileError, UsageError
from edgespec.platform.files import atomic_file

FILE_TYPES = {"F16": 1, "F32": 0, "BF16": 32}  # general.file_type
OUTPUT, EMBEDDINGS, EPSILON = "output.weight", "token_embd.weight", "llama.attention.layer_norm_rms_epsilon"
SIZE_NAMES = ("embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv")
SIZE_KEYS = tuple(f"llama.{name}" for name in SIZE_NAMES)
LAYOUT = {  # axes of tensors: outputs, inputs
    ("token_embd", "output"): ("kept", "hidden"),
    ("rope_freqs",): ("kept",),
    ("attn_q",): ("queries", "hidden"),
    ("attn_k", "attn_v"): ("keys", "hidden"),
    ("attn_output",): ("hidden", "queries"),
    ("ffn_gate", "ffn_up"): ("ffn", "hidden"),
    ("ffn_down",): ("hidden", "ffn"),
    ("attn_norm", "ffn_norm", "output_norm"): ("hidden",),
}
AXES = {kind: axes for kinds, axes in LAYOUT.items() for kind in kinds}
ZERO_PADDED = ("token_embd", "attn_output", "ffn_down")


class Shape(NamedTuple):
    hidden: int
    ffn: int
    heads: int
    kv_heads: int


# Near Llama 3.2's, with the 30 layers and 49,152 tokens of SmolLM2-135M: 1.11e9 and 3.03e9 parameters.
SIZES = {"1b": Shape(1536, 6144, 24, 8), "3b": Shape(3072, 7680, 48, 16)}


def kind_of(name: str) -> str:
    return name.removesuffix(".weight").split(".")[-1]  # of blk.N.KIND.weight or KIND.weight


class Source:
    """The small model. Raises ModelFileError if it is not a dense Llama without biases."""

    def __init__(self, path: Path) -> None:
        try:
            reader = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError) as exc:
            raise ModelFileError(f"{path} cannot be read as GGUF: {exc}") from exc
        self.fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        architecture, sizes = self.value("general.architecture"), [self.value(key) for key in SIZE_KEYS]
        if architecture != "llama" or EMBEDDINGS not in self.tensors or None in sizes:
            raise ModelFileError(f"{path} is a file of {architecture!r}; allowed: a whole model of 'llama'")
        self.shape = Shape(*sizes)
        self.head_size = self.value("llama.attention.key_length", self.shape.hidden // self.shape.heads)
        for name, tensor in self.tensors.items():
            if not name.endswith(".weight") or self.extents(name, self.shape) != tuple(tensor.shape[::-1]):
                raise ModelFileError(f"{path} has a tensor {name}; allowed: a dense 'llama' without biases")

    def value(self, key: str, default: Any = None) -> Any:
        return self.fields[key].contents() if key in self.fields else default

    def tensor(self, name: str) -> gguf.gguf_reader.ReaderTensor:
        """The one of that name; of a tied output the embeddings."""
        return self.tensors.get(name) or self.tensors[EMBEDDINGS]

    def extents(self, name: str, shape: Shape) -> tuple[int, ...]:
        """Outputs and inputs of a tensor in `shape`; () if that has no such tensor."""
        queries, keys = shape.heads * self.head_size, shape.kv_heads * self.head_size
        axes = {"hidden": shape.hidden, "ffn": shape.ffn, "queries": queries, "keys": keys}
        return tuple(axes.get(axis, int(self.tensor(name).shape[-1])) for axis in AXES.get(kind_of(name), ()))


class Expansion:
    """`source` in a `shape` of at least its sizes, with `noise` on its output. Raises UsageError for another shape."""

    def __init__(self, source: Source, shape: Shape, noise: float, seed: int) -> None:
        small, self._source, self._shape, self._noise, self._seed = source.shape, source, shape, noise, seed
        if any(new < old for new, old in zip(shape, small, strict=True)):
            raise UsageError(f"{shape} is smaller than the model's {small}: give at least its sizes")
        if shape.heads * small.kv_heads != shape.kv_heads * small.heads:
            allowed = f"the same multiple of the model's {small.heads} and {small.kv_heads}"
            raise UsageError(f"--heads {shape.heads} --kv-heads {shape.kv_heads}; allowed: {allowed}")
        if not 0 <= noise < np.inf or seed < 0:
            raise UsageError(f"--noise {noise} --seed {seed}; allowed: 0 or more")
        names = dict.fromkeys([*source.tensors, *([OUTPUT] if noise else [])])
        self._extents = {name: source.extents(name, shape) for name in names}

    def write(self, path: Path, weights: str) -> None:
        """Write matrices in `weights` (F16, F32, BF16), vectors in F32, a tensor at a time. Raises StateError."""
        kinds = {name: Type[weights] if len(e) > 1 else Type.F32 for name, e in self._extents.items()}
        with atomic_file(path) as temporary, closing(gguf.GGUFWriter(temporary, "llama")) as writer:
            self._write_metadata(writer, FILE_TYPES[weights])
            for name, extents in self._extents.items():
                num_bytes = int(np.prod(extents)) * (4 if kinds[name] == Type.F32 else 2)
                writer.add_tensor_info(name, extents, np.dtype(np.float32), num_bytes, kinds[name])
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, values in self._tensors():
                writer.write_tensor_data(gguf.quantize(values, kinds[name]))

    def _write_metadata(self, writer: gguf.GGUFWriter, file_type: int) -> None:
        shape, small, size = self._shape, self._source.shape, self._source.head_size
        label = f"{sum(int(np.prod(extents)) for extents in self._extents.values()) / 1e9:.2f}B"
        name, noise = self._source.value("general.name", "Llama"), f", noise {self._noise:g}" if self._noise else ""
        replaced = {
            "general.name": f"{name} synthetic {label}{noise}",
            "general.size_label": label,
            "general.file_type": file_type,
            **dict(zip(SIZE_KEYS, shape, strict=True)),
            "llama.attention.key_length": size,
            "llama.attention.value_length": size,
            "llama.rope.dimension_count": self._source.value("llama.rope.dimension_count", size),
            EPSILON: self._source.value(EPSILON) * small.hidden / shape.hidden,
        }
        for key, value in ({key: field.contents() for key, field in self._source.fields.items()} | replaced).items():
            if key not in ("general.architecture", "general.quantization_version"):
                new = gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.UINT32
                types = self._source.fields[key].types if key in self._source.fields else [new]
                writer.add_key_value(key, value, types[0], types[-1] if len(types) > 1 else None)

    def _tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        for place, (name, extents) in enumerate(self._extents.items()):
            tensor, random = self._source.tensor(name), np.random.default_rng((self._seed, place))
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            kind, spread = kind_of(name), values.std()
            if name == OUTPUT and self._noise:
                values += np.float32(self._noise) * spread * random.standard_normal(values.shape, np.float32)
            if kind.endswith("norm"):
                values *= np.float32(np.sqrt(len(values) / extents[0]))
                values = np.pad(values, (0, extents[0] - len(values)), constant_values=values.mean())
            elif values.shape != extents:
                is_zero = kind in ZERO_PADDED
                grown = np.zeros(extents, np.float32) if is_zero else random.standard_normal(extents, np.float32)
                grown *= spread
                grown[: values.shape[0], : values.shape[1]] = values
                values = grown
            yield name, values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SMALL.gguf")
    parser.add_argument("output", type=Path, metavar="OUTPUT.gguf")
    parser.add_argument("--size", choices=SIZES, help="a preset of the four sizes")
    for axis in ("hidden", "ffn", "heads", "kv-heads"):
        parser.add_argument(f"--{axis}", type=int, help="default: the preset's or the model's")
    parser.add_argument("--noise", type=float, default=0.0, metavar="SIGMA", help="on the output (default 0)")
    parser.add_argument("--seed", type=int, default=0, help="of noise and padding (default 0)")
    parser.add_argument("--weights", choices=FILE_TYPES, default="F16", help="type to write (default F16)")
    given = parser.parse_args()
    try:
        source = Source(given.source)
        sizes = SIZES.get(given.size, source.shape)._asdict()
        sizes |= {axis: getattr(given, axis) for axis in sizes if getattr(given, axis) is not None}
        Expansion(source, Shape(**sizes), given.noise, given.seed).write(given.output, given.weights)
    except EdgespecError as failure:
        parser.error(str(failure))


if __name__ == "__main__":
    main()
