"""What the header of a draft head in GGUF says, checked where llama.cpp does not when it loads one.

EAGLE-3 (arXiv 2503.01840): one Llama layer over a token's embedding and three of the target's layers. DFlash
(2602.06036): Qwen3 layers that denoise a block of mask tokens at once, over projected inputs of the target's layers;
DSpark (2607.05147) adds a Markov head, which moves the scores of a token by the one before it, and may add a confidence
head; DFlash2 adds convolutions over a block, and moves the scores of a few candidates by the token before them. A
multi-token prediction layer names the architecture of its model (Qwen3.5) and holds, of all tensors, the layer's own,
embeddings, final norm and head (llama.cpp's mtp-*.gguf). Gemma 4's drafter (google/gemma-4-*-it-assistant) has a few
layers without keys and values of their own: they attend to those of the target's last two layers.

Heads may lack embeddings and output, which are then the target's own, and may know a part of the vocabulary alone,
which the tensor `d2t` lists.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edgespec.errors import CapabilityError, ModelFileError
from edgespec.formats.gguf.check import HEAD_NAMES, HeadKind, check_gguf, head_kind, is_gemma4_drafter, main_layers
from edgespec.formats.gguf.header import GgufHeader, MetadataReader, TensorInfo, read_header

HeadForm = Literal["eagle3", "dflash", "mtp", "gemma4"]
EAGLE3_LAYERS = 3  # of the target that an EAGLE-3 head reads: llama.cpp knows no other number
GEMMA4 = "gemma4"  # the architecture of the targets
HALF_BYTES = 2  # per cached number
EMBEDDINGS, OUTPUT, DRAFTED = "token_embd.weight", "output.weight", "d2t"
MAX_BLOCK = 64  # tokens that a DFlash head denoises at once
# Those of a DSpark head, whose Markov chain takes 24 nodes of llama.cpp's graph for each: it has 1024, of which a layer
# takes up to 70, and ends the process when they are used up.
MAX_CHAIN, MAX_CHAIN_LAYERS = 16, 8
_SECOND = {"num_candidates": "selector_top_k", "kernel_size": "conv_kernel_size", "group_size": "conv_group_size"}
_SELECTOR = "selector_hidden.weight"
_MARKOV_FROM, _CONFIDENCE = "markov_w1.weight", "conf_proj.weight"
_SLIDING, _SECTIONS = "attention.sliding_window_pattern", "rope.dimension_sections"
_FIX = "give the head that was trained for it"


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Sizes of a sound head, in bytes and tokens."""

    form: HeadForm
    width: int  # of its states
    target_width: int  # of what it reads of the target, for each layer
    vocabulary_size: int  # tokens of its embeddings
    context_length: int  # it was trained for
    weight_bytes: int
    kv_bytes_per_token: int = 0  # of a cache of its own
    layers: tuple[int, ...] = ()  # of the target whose inputs it reads; none: it reads the last hidden state
    drafted_ids: tuple[int, ...] = ()  # the tokens that it can propose, as it scores them; none: all of them
    shares_weights: bool = False  # embeddings or output are the target's
    target_layers: int = 0  # that the target must have; 0: any number
    # of a head that drafts a block
    block_size: int = 0  # tokens that are denoised at once, the last token of the text first
    first_row: int = 0  # of the block, the first one that proposes a token
    mask_id: int = 0  # the token that stands for an unknown one
    inner_width: int = 0
    is_causal: bool = True  # a row does not see those after it
    has_markov: bool = False
    has_confidence: bool = False
    only_kernels: str = ""  # what of it llama.cpp does not run here
    # of DFlash2: tokens that a row proposes, and of its convolutions taps and channels that share their numbers
    num_candidates: int = 0
    kernel_size: int = 0
    group_size: int = 0

    @property
    def num_drafted(self) -> int:
        """How many tokens it can propose."""
        return len(self.drafted_ids) or self.vocabulary_size

    @property
    def feature_width(self) -> int:
        """The width of what it reads for one token: the inputs of its layers side by side, or the hidden state."""
        return (len(self.layers) or 1) * self.target_width

    @property
    def most_drafted(self) -> int:
        """Tokens of the longest draft of a block."""
        return self.block_size - self.first_row

    def check_fits(self, name: str, target_width: int, num_layers: int, vocabulary_size: int) -> None:
        """Raise CapabilityError unless the head `name` can read a target of these sizes."""
        for reason in self._misfits(target_width, num_layers, vocabulary_size):
            raise CapabilityError(f"head {name} {reason}: {_FIX}")

    def _misfits(self, width: int, num_layers: int, vocabulary_size: int) -> Iterator[str]:
        if self.target_width != width:
            yield f"reads a target of width {self.target_width}, this target has {width}"
        if max(self.layers, default=0) >= num_layers:
            yield f"reads layer {max(self.layers)} of its target, this one has 0..{num_layers - 1}"
        if self.vocabulary_size != vocabulary_size:
            yield f"was made for {self.vocabulary_size} tokens, this target has {vocabulary_size}"
        if self.form == "eagle3" and self.shares_weights and self.width != width:
            yield f"is {self.width} wide and lacks embeddings or head, which its target has {width} wide"
        if self.target_layers not in (0, num_layers):
            yield f"was made for a target of {self.target_layers} layers, this one has {num_layers}"


def head_kind_of(path: Path) -> HeadKind | None:
    """What head a file holds; None for a model. Raises ModelNotFound, ModelFileError for a damaged GGUF."""
    return None if path.suffix == ".onnx" else head_kind(read_header(path))


def read_head(path: Path) -> HeadSizes:
    """Raises ModelNotFound, CapabilityError for a variant that is not supported, and ModelFileError naming what is
    wrong with the file or is no head."""
    return _Reader(path, check_gguf(path)).read()


def check_cache(name: str, drafter: GgufHeader, target: GgufHeader) -> None:
    """Raise CapabilityError unless the keys and values of `target` have the shape that a Gemma 4 `drafter` reads.

    llama.cpp would end the process.
    """
    if target.architecture != GEMMA4:
        raise CapabilityError(f"head {name} drafts for a Gemma 4, and this target is a {target.architecture!r}: {_FIX}")
    last = main_layers(target) - 1
    read = {True: last - 1, False: last}  # by whether a layer attends to a window only
    for layer in range(len(drafter.listed(_SLIDING))):
        is_sliding = _is_sliding(drafter, layer)
        own, its = _cache_shape(drafter, layer), _cache_shape(target, read[is_sliding])
        if own != its or _is_sliding(target, read[is_sliding]) != is_sliding:
            raise CapabilityError(
                f"head {name} reads keys and values of the shape {own}, layer {read[is_sliding]} of this target has "
                f"{its}: {_FIX}"
            )


def _cache_shape(header: GgufHeader, layer: int) -> tuple[object, ...]:
    """(heads, numbers of a key, of a value) of a layer."""
    ending = "_swa" if _is_sliding(header, layer) else ""
    return (
        _of_layer(header, "attention.head_count_kv", layer),
        *(_of_layer(header, f"attention.{part}_length{ending}", layer) for part in ("key", "value")),
    )


def _is_sliding(header: GgufHeader, layer: int) -> bool:
    return bool(_of_layer(header, _SLIDING, layer))


def _of_layer(header: GgufHeader, name: str, layer: int) -> object:
    """A number of all layers, or one of a list; None where there is none."""
    found = header.listed(name)
    return found[layer] if 0 <= layer < len(found) else found[0] if len(found) == 1 else None


class _Reader(MetadataReader):
    """A head's numbers and the shapes of its tensors, checked."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        super().__init__(path, header)
        self._form: HeadForm | None = "gemma4" if is_gemma4_drafter(header) else head_kind(header)
        self._vocabulary_size = len(header.tokens)

    def read(self) -> HeadSizes:
        readers = {"eagle3": self._eagle3, "dflash": self._dflash, "mtp": self._mtp, "gemma4": self._gemma4}
        if self._form is None:
            raise self._wrong(f"it is a {self._header.architecture!r}, and a draft head is needed")
        return readers[self._form]()

    def _sizes(self, form: HeadForm, **others: Any) -> HeadSizes:
        """With the sizes that heads of every form tell alike."""
        return HeadSizes(
            form=form,
            vocabulary_size=self._vocabulary_size,
            context_length=self._size("context_length"),
            weight_bytes=sum(tensor.num_bytes for tensor in self._header.tensors),
            **others,
        )

    # -- the forms

    def _eagle3(self) -> HeadSizes:
        if self._size("block_count") != 1:
            raise self._wrong(f"it has {self._size('block_count')} layers, an EAGLE-3 head has one")
        width, kv_heads = self._size("embedding_length"), self._size("attention.head_count_kv")
        self._check_embeddings(width)
        return self._sizes(
            "eagle3",
            width=width,
            target_width=self._size("target_hidden_size"),
            layers=self._target_layers(EAGLE3_LAYERS),
            drafted_ids=self._drafted_ids(),
            shares_weights=EMBEDDINGS not in self._infos or OUTPUT not in self._infos,
            kv_bytes_per_token=2 * kv_heads * self._head_size(width) * HALF_BYTES,
        )

    def _mtp(self) -> HeadSizes:
        width = self._size("embedding_length")
        return self._sizes(
            "mtp",
            width=width,
            target_width=width,
            target_layers=main_layers(self._header),
            kv_bytes_per_token=2 * width * HALF_BYTES,  # at most: keys and values as wide as the model
        )

    def _gemma4(self) -> HeadSizes:
        count = self._size("block_count")
        if self._size("nextn_predict_layers") != count:
            raise self._wrong(f"its nextn_predict_layers differ from its {count} layers")
        if len(self._items(_SLIDING)) != count:
            raise self._wrong(f"its {_SLIDING} has {len(self._items(_SLIDING))} entries for {count} layers")
        for ending in ("", "_swa"):
            size, rotated = self._size(f"attention.key_length{ending}"), self._value(f"rope.dimension_count{ending}")
            if isinstance(rotated, int):
                self._check_rotated(rotated, size)
        self._check_embeddings(self._size("embedding_length"))
        width = self._size("embedding_length_out")  # of the states that it reads and gives: its target's
        return self._sizes("gemma4", width=width, target_width=width, shares_weights=True)

    def _dflash(self) -> HeadSizes:
        for variant in self._unsupported():
            raise CapabilityError(
                f"{self._path.name} is {variant}, which edgespec does not run: give a DFlash or DSpark head for a text "
                "model with its own layers, or a draft model"
            )
        width, num_layers = self._size("embedding_length"), self._size("block_count")
        self._check_embeddings(width)
        self._check_window(num_layers)
        for tensor in self._header.tensors:
            if tensor.name.endswith((".scale", ".bias")) and tensor.kind != "F32":
                raise self._wrong(f"its tensor {tensor.name!r} is {tensor.kind}, F32 is needed")
        has_markov = _MARKOV_FROM in self._infos
        has_table, has_output = EMBEDDINGS in self._infos, OUTPUT in self._infos
        kv_heads = self._size("attention.head_count_kv", self._size("attention.head_count"))
        return self._sizes(
            "dflash",
            width=width,
            target_width=width,
            layers=self._target_layers(),
            drafted_ids=self._drafted_ids(),
            mask_id=self._mask_id(),
            block_size=self._block_size(num_layers, has_markov=has_markov),
            first_row=0 if has_markov and self._flag("sample_from_anchor", default=True) else 1,
            is_causal=self._flag("attention.causal", default=False),
            has_markov=has_markov,
            has_confidence=has_markov and _CONFIDENCE in self._infos,
            only_kernels=self._only_kernels(),
            **({name: self._size(key) for name, key in _SECOND.items()} if self._is_second() else {}),
            shares_weights=not has_table or (DRAFTED in self._infos and not has_output),
            inner_width=self._size("feed_forward_length"),
            kv_bytes_per_token=2 * num_layers * kv_heads * self._head_size(width) * HALF_BYTES,
        )

    # -- of DFlash

    def _unsupported(self) -> Iterator[str]:
        """What kind of head it is that has the same architecture."""
        if self._value("hyper_connection.count"):
            yield "a DSpark head with DeepSeek-V4's layers (hyper connections)"
        # Those of a text's positions alone are as none.
        if self._has_sections() and any(self._items(_SECTIONS)[1:] or (1,)):
            yield "a head for a target that also reads images (with rotary sections)"

    def _has_sections(self) -> bool:
        return self._value(_SECTIONS) is not None and any(self._items(_SECTIONS) or (1,))

    def _is_second(self) -> bool:
        return bool(self._value("selector_top_k")) or _SELECTOR in self._infos

    def _only_kernels(self) -> str:
        """Of llama.cpp's pass each row would need four positions, of DFlash2 the path through its candidates."""
        return "rotary sections" if self._has_sections() else "DFlash2's selector" if self._is_second() else ""

    def _mask_id(self) -> int:
        found = self._header.metadata.get("tokenizer.ggml.mask_token_id")
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < self._vocabulary_size:
            raise self._wrong(
                f"its tokenizer.ggml.mask_token_id is {found!r:.60}, a token of 0..{self._vocabulary_size - 1} is "
                "needed"
            )
        return found

    def _block_size(self, num_layers: int, *, has_markov: bool) -> int:
        size = self._size("block_size")
        if not 2 <= size <= MAX_BLOCK:
            raise self._wrong(f"its block_size is {size}, 2..{MAX_BLOCK} is possible")
        if has_markov and (size > MAX_CHAIN or num_layers > MAX_CHAIN_LAYERS):
            raise CapabilityError(
                f"{self._path.name} is a DSpark head of {num_layers} layers with blocks of {size} tokens; allowed: "
                f"{MAX_CHAIN_LAYERS} layers and {MAX_CHAIN} tokens"
            )
        return size

    def _check_window(self, num_layers: int) -> None:
        """A window that no layer has ends the process."""
        pattern = self._items(_SLIDING)
        if self._value("attention.sliding_window") and (len(pattern) != num_layers or not any(pattern)):
            raise self._wrong("it names a sliding window, and not for each layer, or for none, that it has one")

    # -- of several

    def _target_layers(self, wanted: int = 0) -> tuple[int, ...]:
        """The target's layers that it reads, `wanted` of them; 0: any number."""
        items = self._items("target_layers")
        layers = tuple(item for item in items if isinstance(item, int) and 0 <= item < 1 << 16)
        if not layers or len(set(layers)) != len(items) or (wanted and len(layers) != wanted):
            needed = f"{wanted} different ones are" if wanted else "one or more different ones are"
            raise self._wrong(f"its target_layers are {list(items)!r:.60}, {needed} needed")
        return layers

    def _drafted_ids(self) -> tuple[int, ...]:
        """The tokens that it can propose; none: all. A wrong one would end the process."""
        tensor = self._infos.get(DRAFTED)
        if tensor is None:
            return ()
        if tensor.kind != "I64" or len(tensor.shape) != 1:
            raise self._wrong(f"its {DRAFTED} is {tensor.kind} {tensor.shape}, a list of I64 is needed")
        if OUTPUT not in self._infos:
            raise self._wrong(f"it has {DRAFTED} but no {OUTPUT} of that many tokens")
        ids = self._listed(tensor)
        if min(ids) < 0 or max(ids) >= self._vocabulary_size or len(set(ids)) < len(ids):
            raise self._wrong(f"its {DRAFTED} must name different tokens of 0..{self._vocabulary_size - 1}")
        return ids

    def _listed(self, tensor: TensorInfo) -> tuple[int, ...]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._header.data_start + tensor.offset)
                data = file.read(8 * tensor.shape[0])
        except OSError as exc:
            raise ModelFileError(f"{self._path} cannot be read: {exc.strerror}") from exc
        return struct.unpack(f"<{len(data) // 8}q", data)

    def _head_size(self, width: int) -> int:
        """Numbers of a key of one attention head."""
        size = self._size("attention.key_length", width // self._size("attention.head_count"))
        self._check_rotated(self._size("rope.dimension_count", size), size)
        return size

    def _check_rotated(self, rotated: int, size: int) -> None:
        if rotated > size or rotated % 2:
            raise self._wrong(f"it rotates {rotated} of {size} numbers of a head")

    def _check_embeddings(self, width: int) -> None:
        """llama.cpp checks the shapes of all tensors, but not the number of tokens here."""
        found = self._infos.get(EMBEDDINGS)
        if found is not None and found.shape != (width, self._vocabulary_size):
            raise self._wrong(
                f"its tensor {EMBEDDINGS!r} has the shape {found.shape}, {(width, self._vocabulary_size)} is needed"
            )

    def _wrong(self, reason: str) -> ModelFileError:
        kind = head_kind(self._header)
        what = "draft head" if kind is None else HEAD_NAMES[kind].partition(" ")[2]
        return ModelFileError(f"{self._path} is not a usable {what}: {reason}. Download or export it again")
