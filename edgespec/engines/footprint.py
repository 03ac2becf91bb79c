"""The memory that one loaded model takes, by part; each engine computes it in its own `footprint` module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a loaded model once its context is full.

    `mapped`: weights that stay in the file and come through the page cache, which the system may drop and read again;
    `read_once`: the part of these that is only read while the model is opened, so that dropping it costs nothing.
    All other parts are memory of the process's own. `packed`: weights copied in another order (llama.cpp's repacking,
    ONNX Runtime's prepacking); `cache`: keys and values; `compute`: results of a pass; `logits`: rows of scores;
    `vocabulary`: tokens and the tokenizer's tables; `device`: what lies on another device instead.
    `loading`, `loading_mapped`: what is needed only while the model is opened, of either kind; `reading`: only while
    its tokenizer is read, after that; `reserved`: addresses beyond those used.
    `context_length`: tokens of the full context, of which there are `sequences`.
    """

    mapped: int = 0
    read_once: int = 0
    packed: int = 0
    cache: int = 0
    compute: int = 0
    logits: int = 0
    vocabulary: int = 0
    device: int = 0
    loading: int = 0
    loading_mapped: int = 0
    reading: int = 0
    reserved: int = 0
    context_length: int = 0
    sequences: int = 1

    @property
    def own(self) -> int:
        """Memory of the process's own, which cannot be dropped."""
        return self.packed + self.cache + self.compute + self.logits + self.vocabulary
