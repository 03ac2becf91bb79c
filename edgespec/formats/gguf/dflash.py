"""What the header of a DFlash or DSpark head says, checked: llama.cpp ends the process on much that does not fit.

A DFlash head (arXiv 2602.06036) is some Qwen3 layers that denoise a block of mask tokens at once; their attention also
reads the target, whose layer inputs are projected into its cache. DSpark (arXiv 2607.05147) adds a Markov head, which
moves the scores of a token by the one before it, and may add a confidence head. A GGUF of either has the architecture
`dflash`; it may lack embeddings and head, which are then the target's own.

Two variants are refused. DFlash2 answers with a lattice of candidates, which has to be searched, and not with scores.
Heads with DeepSeek-V4's layers need that target, whose layer inputs are not read here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import CapabilityError
from edgespec.formats.gguf.check import check_gguf
from edgespec.formats.gguf.head_reader import DRAFTED, EMBEDDINGS, HALF_BYTES, OUTPUT, HeadReader, check_target

ARCHITECTURE = "dflash"
MAX_BLOCK = 64  # tokens; the longest draft that can be asked for
MARKOV_FROM, MARKOV_TO, CONFIDENCE = "markov_w1.weight", "markov_w2.weight", "conf_proj.weight"
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
# Nodes of llama.cpp's graph at most, which ends the process when it is full: of the Markov head for one token of the
# block, of a layer, and of the rest. It makes room for _LEAST_NODES, or _TENSOR_NODES per tensor if that is more.
_MARKOV_NODES, _LAYER_NODES, _OTHER_NODES = 24, 70, 40
_LEAST_NODES, _TENSOR_NODES = 1024, 8


@dataclass(frozen=True, slots=True)
class DFlashSizes:
    """Sizes of a sound head.

    `width` of its states and of its target's; `num_layers` of its own; `layers`, those of the target whose inputs it
    reads; `vocabulary_size` of its embeddings' tokens, `num_drafted` of them it can propose; `mask_id`: the token that
    stands for an unknown one; `block_size` tokens are denoised at once, the last token of the text first;
    `first_row`: of the block, the first one that proposes a token; `is_causal`: a row does not see those after it;
    `has_markov`, `has_confidence`: DSpark's heads; `shares_weights`: embeddings or head are the target's.
    `context_length` in tokens, sizes in bytes.
    """

    width: int
    num_layers: int
    layers: tuple[int, ...]
    vocabulary_size: int
    num_drafted: int
    mask_id: int
    block_size: int
    first_row: int
    is_causal: bool
    has_markov: bool
    has_confidence: bool
    shares_weights: bool
    inner_width: int
    context_length: int
    weight_bytes: int
    kv_bytes_per_token: int

    @property
    def feature_width(self) -> int:
        """The width of what it reads for one token: the inputs of its layers side by side."""
        return len(self.layers) * self.width

    @property
    def most_drafted(self) -> int:
        """Tokens of the longest draft."""
        return self.block_size - self.first_row

    def check_fits(self, name: str, target_width: int, num_layers: int, vocabulary_size: int) -> None:
        """Raise CapabilityError unless the head `name` can read a target of these sizes."""
        check_target(name, self.layers, (self.width, target_width), (self.vocabulary_size, vocabulary_size), num_layers)


def read_dflash(path: Path) -> DFlashSizes:
    """Raises ModelNotFound, CapabilityError for a variant that is not supported, and ModelFileError naming what is
    wrong with the file or is not a DFlash head."""
    return _Reader(path, check_gguf(path)).read()


class _Reader(HeadReader):
    what = "DFlash head"

    def read(self) -> DFlashSizes:
        if self._header.architecture != ARCHITECTURE:
            raise self._wrong(f"it is a {self._header.architecture!r}, a DFlash head is needed")
        for variant in self._unsupported():
            raise CapabilityError(
                f"{self._path.name} is {variant}, which edgespec does not run: give a DFlash or DSpark head for a text "
                "model with its own layers, or a draft model"
            )
        width, num_layers, layers = self._count("embedding_length"), self._count("block_count"), self._layers()
        vocabulary_size = self._vocabulary_size()
        num_drafted = self._num_drafted(vocabulary_size)
        kv_width = self._check_layers(width, num_layers)
        self._check_shapes({
            "fc.weight": (len(layers) * width, width),
            "enc.output_norm.weight": (width,),
            "output_norm.weight": (width,),
        })  # fmt: skip
        for tensor in self._header.tensors:
            if tensor.name.endswith((".scale", ".bias")) and tensor.kind != "F32":
                raise self._wrong(f"its tensor {tensor.name!r} is {tensor.kind}, F32 is needed")
        self._check_shapes({EMBEDDINGS: (width, vocabulary_size), OUTPUT: (width, num_drafted)}, may_lack=True)
        has_markov, has_confidence = self._markov(width, vocabulary_size, num_drafted)
        has_table, has_output = EMBEDDINGS in self._tensors, OUTPUT in self._tensors
        return DFlashSizes(
            width=width,
            num_layers=num_layers,
            layers=layers,
            vocabulary_size=vocabulary_size,
            num_drafted=num_drafted,
            mask_id=self._mask_id(vocabulary_size),
            block_size=self._block_size(num_layers, has_markov=has_markov),
            first_row=0 if has_markov and self._flag("sample_from_anchor", default=True) else 1,
            is_causal=self._flag("attention.causal", default=False),
            has_markov=has_markov,
            has_confidence=has_confidence,
            shares_weights=not has_table or (DRAFTED in self._tensors and not has_output),
            inner_width=self._count("feed_forward_length"),
            context_length=self._count("context_length"),
            weight_bytes=sum(tensor.num_bytes for tensor in self._header.tensors),
            kv_bytes_per_token=2 * num_layers * kv_width * HALF_BYTES,
        )

    def _unsupported(self) -> Iterator[str]:
        """What kind of head it is that has the same architecture."""
        if self._value("hyper_connection.count"):
            yield "a DSpark head with DeepSeek-V4's layers (hyper connections)"
        keys = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
        names = ("selector_", "attn_conv_", "ffn_conv_")
        if any(self._value(key) for key in keys) or any(
            name.removeprefix("blk.").lstrip("0123456789.").startswith(names) for name in self._tensors
        ):
            yield "a DFlash2 head (with convolutions and a selector)"
        if self._value("rope.dimension_sections") is not None and any(self._items("rope.dimension_sections") or (1,)):
            yield "a head for a target that also reads images (with rotary sections)"

    def _layers(self) -> tuple[int, ...]:
        items = self._items("target_layers")
        layers = tuple(item for item in items if isinstance(item, int) and 0 <= item < 1 << 16)
        if not layers or len(set(layers)) != len(items):
            raise self._wrong(f"its target_layers are {list(items)!r:.60}, one or more different ones are needed")
        return layers

    def _mask_id(self, vocabulary_size: int) -> int:
        found = self._header.metadata.get("tokenizer.ggml.mask_token_id")
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < vocabulary_size:
            raise self._wrong(
                f"its tokenizer.ggml.mask_token_id is {found!r:.60}, a token of 0..{vocabulary_size - 1} is needed"
            )
        return found

    def _block_size(self, num_layers: int, *, has_markov: bool) -> int:
        size = self._count("block_size")
        if not 2 <= size <= MAX_BLOCK:
            raise self._wrong(f"its block_size is {size}, 2..{MAX_BLOCK} is possible")
        room = max(_LEAST_NODES, _TENSOR_NODES * len(self._tensors)) - _LAYER_NODES * num_layers - _OTHER_NODES
        if has_markov and size > room // _MARKOV_NODES:
            raise CapabilityError(
                f"{self._path.name} is a DSpark head with blocks of {size} tokens; llama.cpp has room for "
                f"{room // _MARKOV_NODES} with its {num_layers} layers: give a head with smaller blocks"
            )
        return size

    def _flag(self, name: str, *, default: bool) -> bool:
        found = self._value(name)
        if found is not None and not isinstance(found, bool):
            raise self._wrong(f"its {name} is {found!r:.60}, true or false is needed")
        return default if found is None else found

    def _check_layers(self, width: int, num_layers: int) -> int:
        """Check its own layers; the width of a layer's keys."""
        heads = self._count("attention.head_count")
        kv_heads = self._count("attention.head_count_kv", heads)
        size, hidden = self._head_size(width, heads), self._count("feed_forward_length")
        self._check_window(num_layers, size)
        needed = {
            "attn_norm": (width,),
            "attn_q": (width, heads * size),
            "attn_k": (width, kv_heads * size),
            "attn_output": (heads * size, width),
            "attn_q_norm": (size,),
            "attn_k_norm": (size,),
            "ffn_norm": (width,),
            "ffn_gate": (width, hidden),
            "ffn_up": (width, hidden),
            "ffn_down": (hidden, width),
        }
        optional = {
            "attn_v": (width, kv_heads * size),
            "attn_sinks": (heads,),
            "post_attention_norm": (width,),
            "post_ffw_norm": (width,),
            "layer_output_scale": (1,),
        }
        for layer in range(num_layers):
            self._check_shapes({f"blk.{layer}.{name}.weight": shape for name, shape in needed.items()})
            self._check_shapes({f"blk.{layer}.{name}.weight": at for name, at in optional.items()}, may_lack=True)
        activation = self._value("hidden_activation")
        if activation is not None and activation not in _ACTIVATIONS:
            raise self._wrong(f"its hidden_activation is {activation!r:.60}, known are {', '.join(_ACTIVATIONS)}")
        return kv_heads * size

    def _check_window(self, num_layers: int, size: int) -> None:
        """Layers with a sliding window have the sizes of the others, since the graph takes one for all."""
        for key in ("attention.key_length_swa", "attention.value_length_swa"):
            if self._count(key, size) != size:
                raise self._wrong("its layers with a sliding window have heads of another size")
        if not self._value("attention.sliding_window"):
            return
        self._count("attention.sliding_window")
        pattern = self._items("attention.sliding_window_pattern")
        if len(pattern) != num_layers or any(isinstance(item, float) or item not in (0, 1) for item in pattern):
            raise self._wrong("its sliding_window_pattern does not say for each layer whether it has a window")
        if not any(pattern):  # llama.cpp ends the process
            raise self._wrong("it names a sliding window, and none of its layers has one")

    def _markov(self, width: int, vocabulary_size: int, num_drafted: int) -> tuple[bool, bool]:
        """Whether there are a Markov and a confidence head."""
        first = self._tensors.get(MARKOV_FROM)
        if first is None:
            if MARKOV_TO in self._tensors or CONFIDENCE in self._tensors:
                raise self._wrong(f"it has a part of a Markov head and no {MARKOV_FROM}")
            return False, False
        rank = first.shape[0]
        self._check_shapes({MARKOV_FROM: (rank, vocabulary_size), MARKOV_TO: (rank, num_drafted)})
        found = self._tensors.get(CONFIDENCE)
        if found is not None and found.shape not in ((width + rank,), (width + rank, 1)):
            raise self._wrong(f"its tensor {CONFIDENCE!r} has the shape {found.shape}, {(width + rank, 1)} is needed")
        return True, found is not None
