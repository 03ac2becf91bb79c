"""What the header of a Gemma 4 drafter says (`google/gemma-4-*-it-assistant`; architecture gemma4-assistant).

llama.cpp's converter writes the file. It holds a few layers without keys and values of their own: they attend to those
of the target's last two layers, so a drafter fits a target whose cache has the shape that it was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import CapabilityError
from edgespec.formats.gguf.check import GEMMA4_DRAFTER, check_gguf
from edgespec.formats.gguf.head_reader import EMBEDDINGS, HeadReader, check_target
from edgespec.formats.gguf.header import GgufHeader, GgufNumbers

TARGET = "gemma4"
_SLIDING = "attention.sliding_window_pattern"


@dataclass(frozen=True, slots=True)
class DrafterSizes:
    """Sizes of a sound drafter.

    `width` of the states that it reads and gives: its target's; `vocabulary_size` of its embeddings; `context_length`
    it was trained for; `layers`: it reads the inputs of none; `shares_weights`: with the target, its embeddings.
    """

    width: int
    vocabulary_size: int
    context_length: int
    weight_bytes: int
    layers: tuple[int, ...] = ()
    shares_weights: bool = True

    @property
    def feature_width(self) -> int:
        """The width of what it reads for one token: the target's hidden state."""
        return self.width

    def check_fits(self, name: str, target_width: int, num_layers: int, vocabulary_size: int) -> None:
        """Raise CapabilityError unless the drafter `name` can read a target of these sizes."""
        check_target(name, (), (self.width, target_width), (self.vocabulary_size, vocabulary_size), num_layers)


def read_gemma4_drafter(path: Path) -> DrafterSizes:
    """Raises ModelNotFound, and ModelFileError naming what is wrong with the file or is not such a drafter."""
    return _Reader(path, check_gguf(path)).read()


def check_cache(name: str, drafter: GgufHeader, target: GgufHeader) -> None:
    """Raise CapabilityError unless the keys and values of `target` have the shape that the `drafter` reads.

    llama.cpp would end the process.
    """
    if target.architecture != TARGET:
        raise CapabilityError(
            f"head {name} drafts for a Gemma 4, and this target is a {target.architecture!r}: give the head that was "
            "trained for it"
        )
    last = _layers(target) - 1
    read = {True: last - 1, False: last}  # by whether a layer attends to a window only
    for layer in range(_layers(drafter)):
        is_sliding = _is_sliding(drafter, layer)
        own, its = _cache_shape(drafter, layer), _cache_shape(target, read[is_sliding])
        if own != its or _is_sliding(target, read[is_sliding]) != is_sliding:
            raise CapabilityError(
                f"head {name} reads keys and values of the shape {own}, layer {read[is_sliding]} of this target has "
                f"{its}: give the head that was trained for it"
            )


def _layers(header: GgufHeader) -> int:
    found = header.metadata.get(f"{header.architecture}.block_count")
    return found if isinstance(found, int) else 0


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
    found = header.metadata.get(f"{header.architecture}.{name}")
    if isinstance(found, GgufNumbers):
        return found.items[layer] if 0 <= layer < len(found.items) else None
    return found


class _Reader(HeadReader):
    what = "Gemma 4 drafter"

    def read(self) -> DrafterSizes:
        if self._header.architecture != GEMMA4_DRAFTER:
            raise self._wrong(f"it is a {self._header.architecture!r}")
        count = self._count("block_count")
        if self._count("nextn_predict_layers") != count:
            raise self._wrong(f"its nextn_predict_layers differ from its {count} layers")
        if len(self._items(_SLIDING)) != count:
            raise self._wrong(f"its {_SLIDING} has {len(self._items(_SLIDING))} entries for {count} layers")
        self._check_heads()
        own_width, vocabulary_size = self._count("embedding_length"), self._vocabulary_size()
        self._check_shapes({EMBEDDINGS: (own_width, vocabulary_size)})
        return DrafterSizes(
            width=self._count("embedding_length_out"),
            vocabulary_size=vocabulary_size,
            context_length=self._count("context_length"),
            weight_bytes=sum(tensor.num_bytes for tensor in self._header.tensors),
        )

    def _check_heads(self) -> None:
        for ending in ("", "_swa"):
            size, rotated = self._count(f"attention.key_length{ending}"), self._value(f"rope.dimension_count{ending}")
            if isinstance(rotated, int) and (rotated > size or rotated % 2):
                raise self._wrong(f"it rotates {rotated} of {size} numbers of a head")
