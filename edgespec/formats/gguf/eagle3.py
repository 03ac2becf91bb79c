"""What the header of an EAGLE-3 head says, checked: llama.cpp ends the process on much that does not fit.

An EAGLE-3 head (arXiv 2503.01840) is one Llama layer over a token's embedding and three of the target's layers. Its
GGUF has the architecture `eagle3`; it may lack embeddings and head, which are then the target's own, and it may know
a part of the vocabulary alone, which its tensor `d2t` lists.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import CapabilityError, ModelFileError
from edgespec.formats.gguf.check import check_gguf
from edgespec.formats.gguf.header import GgufHeader, TensorInfo, read_header
from edgespec.formats.gguf.values import GgufNumbers, GgufStrings, Value

ARCHITECTURE = "eagle3"
NUM_LAYERS_READ = 3  # llama.cpp knows no other number
HALF_BYTES = 2  # per cached number
EMBEDDINGS, OUTPUT, DRAFTED = "token_embd.weight", "output.weight", "d2t"


@dataclass(frozen=True, slots=True)
class Eagle3Sizes:
    """Sizes of a sound head.

    `width` of its states; `layers`, those of the target's layers whose inputs it reads, each `target_width` wide;
    `vocabulary_size` of its embeddings' tokens, `num_drafted` of them it can propose; `context_length` it was trained
    for, in tokens; `shares_embeddings`, `shares_output`: they are the target's. Sizes in bytes.
    """

    width: int
    target_width: int
    layers: tuple[int, ...]
    vocabulary_size: int
    num_drafted: int
    context_length: int
    shares_embeddings: bool
    shares_output: bool
    weight_bytes: int
    kv_bytes_per_token: int

    @property
    def feature_width(self) -> int:
        """The width of what it reads for one token: the inputs of its layers side by side."""
        return len(self.layers) * self.target_width

    def check_fits(self, name: str, target_width: int, num_layers: int, vocabulary_size: int) -> None:
        """Raise CapabilityError unless the head `name` can read a target of these sizes."""
        if self.target_width != target_width:
            raise CapabilityError(
                f"head {name} reads a target of width {self.target_width}, this target has {target_width}: give the "
                "head that was trained for it"
            )
        if max(self.layers) >= num_layers:
            raise CapabilityError(
                f"head {name} reads layer {max(self.layers)} of its target, this one has 0..{num_layers - 1}: give the "
                "head that was trained for it"
            )
        if (self.shares_embeddings or self.shares_output) and self.width != target_width:
            raise CapabilityError(
                f"head {name} is {self.width} wide and lacks embeddings or head, which its target has {target_width} "
                "wide: give the head that was trained for it"
            )
        if self.vocabulary_size != vocabulary_size:
            raise CapabilityError(
                f"head {name} was made for {self.vocabulary_size} tokens, this target has {vocabulary_size}: give the "
                "head that was trained for it"
            )


def is_eagle3(path: Path) -> bool:
    """Whether a file is a GGUF of an EAGLE-3 head. Raises ModelNotFound, ModelFileError for a damaged GGUF."""
    return path.suffix == ".gguf" and read_header(path).architecture == ARCHITECTURE


def read_eagle3(path: Path) -> Eagle3Sizes:
    """Raises ModelNotFound, and ModelFileError naming what is wrong with the file or is not an EAGLE-3 head."""
    return _Reader(path, check_gguf(path)).read()


class _Reader:
    def __init__(self, path: Path, header: GgufHeader) -> None:
        self._path, self._header = path, header
        self._tensors = {tensor.name: tensor for tensor in header.tensors}

    def read(self) -> Eagle3Sizes:
        if self._header.architecture != ARCHITECTURE:
            raise self._wrong(f"it is a {self._header.architecture!r}, an EAGLE-3 head is needed")
        if self._count("block_count") != 1:
            raise self._wrong(f"it has {self._count('block_count')} layers, an EAGLE-3 head has one")
        width, target_width, layers = self._count("embedding_length"), self._count("target_hidden_size"), self._layers()
        if self._count("embedding_length_out", width) != width:
            raise self._wrong("its states and its embeddings differ in width")
        vocabulary_size = self._vocabulary_size()
        num_drafted = self._num_drafted(vocabulary_size)
        keys = self._check_layer(width)
        self._check_shape("fc.weight", (len(layers) * target_width, width))
        self._check_shape("output_norm.weight", (width,))
        if self._value("norm_before_fc") is True:
            self._check_shape("enc.output_norm.weight", (len(layers) * target_width,))
        self._check_tables(width, vocabulary_size, num_drafted)
        return Eagle3Sizes(
            width=width,
            target_width=target_width,
            layers=layers,
            vocabulary_size=vocabulary_size,
            num_drafted=num_drafted,
            context_length=self._count("context_length"),
            shares_embeddings=EMBEDDINGS not in self._tensors,
            shares_output=OUTPUT not in self._tensors,
            weight_bytes=sum(tensor.num_bytes for tensor in self._header.tensors),
            kv_bytes_per_token=2 * keys * HALF_BYTES,
        )

    def _layers(self) -> tuple[int, ...]:
        found = self._value("target_layers")
        items = found.items if isinstance(found, GgufNumbers) else ()
        layers = tuple(item for item in items if isinstance(item, int) and 0 <= item < 1 << 16)
        if len(layers) != NUM_LAYERS_READ or len(items) != NUM_LAYERS_READ or len(set(layers)) != NUM_LAYERS_READ:
            raise self._wrong(f"its target_layers are {list(items)!r:.60}, {NUM_LAYERS_READ} different ones are needed")
        return layers

    def _vocabulary_size(self) -> int:
        tokens = self._header.metadata.get("tokenizer.ggml.tokens")
        return len(tokens) if isinstance(tokens, GgufStrings) else 0

    def _num_drafted(self, vocabulary_size: int) -> int:
        """How many tokens it can propose; what lists them is read, since a wrong id would end the process."""
        tensor = self._tensors.get(DRAFTED)
        if tensor is None:
            return vocabulary_size
        if tensor.kind != "I64" or len(tensor.shape) != 1:
            raise self._wrong(f"its {DRAFTED} is {tensor.kind} {tensor.shape}, a list of I64 is needed")
        if OUTPUT not in self._tensors:
            raise self._wrong(f"it has {DRAFTED} but no {OUTPUT} of that many tokens")
        ids = self._numbers(tensor)
        if min(ids) < 0 or max(ids) >= vocabulary_size or len(set(ids)) < len(ids):
            raise self._wrong(f"its {DRAFTED} must name different tokens of 0..{vocabulary_size - 1}")
        return len(ids)

    def _numbers(self, tensor: TensorInfo) -> tuple[int, ...]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._header.data_start + tensor.offset)
                data = file.read(8 * tensor.shape[0])
        except OSError as exc:
            raise ModelFileError(f"{self._path} cannot be read: {exc.strerror}") from exc
        return struct.unpack(f"<{len(data) // 8}q", data)

    def _check_layer(self, width: int) -> int:
        """Check the one layer; the width of its keys."""
        heads, kv_heads = self._count("attention.head_count"), self._count("attention.head_count_kv")
        size = self._count("attention.key_length", width // heads)
        if self._count("attention.value_length", width // heads) != size:
            raise self._wrong("keys and values of its heads differ in width")
        rotated = self._count("rope.dimension_count", size)
        if rotated > size or rotated % 2:
            raise self._wrong(f"it rotates {rotated} of {size} numbers of a head")
        hidden = self._count("feed_forward_length")
        shapes = {
            "attn_norm": (width,),
            "attn_norm_2": (width,),
            "attn_q": (2 * width, heads * size),
            "attn_k": (2 * width, kv_heads * size),
            "attn_v": (2 * width, kv_heads * size),
            "attn_output": (heads * size, width),
            "ffn_norm": (width,),
            "ffn_gate": (width, hidden),
            "ffn_up": (width, hidden),
            "ffn_down": (hidden, width),
        }
        for name, shape in shapes.items():
            self._check_shape(f"blk.0.{name}.weight", shape)
        return kv_heads * size

    def _check_tables(self, width: int, vocabulary_size: int, num_drafted: int) -> None:
        if EMBEDDINGS in self._tensors:
            self._check_shape(EMBEDDINGS, (width, vocabulary_size))
        if OUTPUT in self._tensors:
            self._check_shape(OUTPUT, (width, num_drafted))

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._tensors:
            raise self._wrong(f"it lacks the tensor {name!r}")
        if self._tensors[name].shape != shape:
            raise self._wrong(f"its tensor {name!r} has the shape {self._tensors[name].shape}, {shape} is needed")

    def _value(self, name: str) -> Value | None:
        return self._header.metadata.get(f"{ARCHITECTURE}.{name}")

    def _count(self, name: str, default: int = 0) -> int:
        """A number above 0; `default` where there is none."""
        found = self._value(name)
        value = default if found is None else found
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(f"its {name} is {found!r:.60}, a number above 0 is needed")
        return value

    def _wrong(self, reason: str) -> ModelFileError:
        return ModelFileError(f"{self._path} is not a usable EAGLE-3 head: {reason}. Download or export it again")
