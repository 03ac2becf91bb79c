"""What the header of a multi-token prediction layer without its model says.

llama.cpp's converter writes it as `mtp-*.gguf`. The file names the architecture of its model (Qwen3.5) and holds, of
all tensors, the layer's own and those that it shares with the model: embeddings, final norm and head. llama.cpp checks
their shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import CapabilityError
from edgespec.formats.gguf.check import check_gguf, head_kind, main_layers
from edgespec.formats.gguf.head_reader import EMBEDDINGS, HALF_BYTES, HeadReader, check_target


@dataclass(frozen=True, slots=True)
class MtpSizes:
    """Sizes of a sound layer.

    `width` of its states and of its target's; `target_layers` that the target has; `layers`: it reads the inputs of
    none of them; `vocabulary_size` of its embeddings; `context_length` it was trained for, in tokens; `shares_weights`:
    it needs none of the target's. Sizes in bytes.
    """

    width: int
    target_layers: int
    vocabulary_size: int
    context_length: int
    weight_bytes: int
    layers: tuple[int, ...] = ()
    shares_weights: bool = False

    @property
    def feature_width(self) -> int:
        """The width of what it reads for one token: the target's hidden state."""
        return self.width

    @property
    def kv_bytes_per_token(self) -> int:
        """At most: keys and values as wide as the model."""
        return 2 * self.width * HALF_BYTES

    def check_fits(self, name: str, target_width: int, num_layers: int, vocabulary_size: int) -> None:
        """Raise CapabilityError unless the layer `name` can read a target of these sizes."""
        check_target(name, (), (self.width, target_width), (self.vocabulary_size, vocabulary_size), num_layers)
        if self.target_layers != num_layers:
            raise CapabilityError(
                f"head {name} was made for a target of {self.target_layers} layers, this one has {num_layers}: give "
                "the head that was trained for it"
            )


def read_mtp(path: Path) -> MtpSizes:
    """Raises ModelNotFound, and ModelFileError naming what is wrong with the file or is not such a layer alone."""
    return _Reader(path, check_gguf(path)).read()


class _Reader(HeadReader):
    what = "multi-token prediction layer"

    def read(self) -> MtpSizes:
        if head_kind(self._header) != "mtp":
            raise self._wrong(f"it is a {self._header.architecture!r} with more than that, or without such a layer")
        width, vocabulary_size = self._count("embedding_length"), self._vocabulary_size()
        self._check_shapes({EMBEDDINGS: (width, vocabulary_size)})
        return MtpSizes(
            width=width,
            target_layers=main_layers(self._header),
            vocabulary_size=vocabulary_size,
            context_length=self._count("context_length"),
            weight_bytes=sum(tensor.num_bytes for tensor in self._header.tensors),
        )
