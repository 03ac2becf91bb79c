"""What the header of an EAGLE-3 head says, checked: llama.cpp ends the process on much that does not fit.

An EAGLE-3 head (arXiv 2503.01840) is one Llama layer over a token's embedding and three of the target's layers. Its
GGUF has the architecture `eagle3`; it may lack embeddings and head, which are then the target's own, and it may know
a part of the vocabulary alone, which its tensor `d2t` lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import CapabilityError
from edgespec.formats.gguf.check import check_gguf
from edgespec.formats.gguf.head_reader import EMBEDDINGS, HALF_BYTES, OUTPUT, HeadReader, check_target

ARCHITECTURE = "eagle3"
NUM_LAYERS_READ = 3  # llama.cpp knows no other number


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

    @property
    def shares_weights(self) -> bool:
        """Whether some of its weights are the target's."""
        return self.shares_embeddings or self.shares_output

    def check_fits(self, name: str, target_width: int, num_layers: int, vocabulary_size: int) -> None:
        """Raise CapabilityError unless the head `name` can read a target of these sizes."""
        widths, sizes = (self.target_width, target_width), (self.vocabulary_size, vocabulary_size)
        check_target(name, self.layers, widths, sizes, num_layers)
        if self.shares_weights and self.width != target_width:
            raise CapabilityError(
                f"head {name} is {self.width} wide and lacks embeddings or head, which its target has {target_width} "
                "wide: give the head that was trained for it"
            )


def read_eagle3(path: Path) -> Eagle3Sizes:
    """Raises ModelNotFound, and ModelFileError naming what is wrong with the file or is not an EAGLE-3 head."""
    return _Reader(path, check_gguf(path)).read()


class _Reader(HeadReader):
    what = "EAGLE-3 head"

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
        self._check_shapes({"fc.weight": (len(layers) * target_width, width), "output_norm.weight": (width,)})
        if self._value("norm_before_fc") is True:
            self._check_shapes({"enc.output_norm.weight": (len(layers) * target_width,)})
        self._check_shapes({EMBEDDINGS: (width, vocabulary_size), OUTPUT: (width, num_drafted)}, may_lack=True)
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
        items = self._items("target_layers")
        layers = tuple(item for item in items if isinstance(item, int) and 0 <= item < 1 << 16)
        if len(layers) != NUM_LAYERS_READ or len(items) != NUM_LAYERS_READ or len(set(layers)) != NUM_LAYERS_READ:
            raise self._wrong(f"its target_layers are {list(items)!r:.60}, {NUM_LAYERS_READ} different ones are needed")
        return layers

    def _check_layer(self, width: int) -> int:
        """Check the one layer; the width of its keys."""
        heads, kv_heads = self._count("attention.head_count"), self._count("attention.head_count_kv")
        size = self._head_size(width, heads)
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
        self._check_shapes({f"blk.0.{name}.weight": shape for name, shape in shapes.items()})
        return kv_heads * size
