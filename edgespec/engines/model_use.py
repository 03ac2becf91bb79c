"""How a model is opened, for the plan of its memory and for its load alike; and the memory that it takes, by part."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from edgespec.errors import ConfigError
from edgespec.platform.machine import default_threads

DEFAULT_CONTEXT = 4096
MAX_BATCH, MAX_BRANCHES, WIDEST = 512, 16, 63
MOST_CHECKPOINTS = 2  # of a sequence with a running state
LOGITS_BYTES = 32 << 20
WINDOW = 512  # latest tokens of which states are kept for heads; at three layers of 4096 these are 24 MiB
BYTES_PER_FEATURE = 4 * 4  # of these: two windows, and the copies of the library and of a pass


@dataclass(frozen=True, slots=True)
class ModelUse:
    """The options of a load, unchecked: each engine's settings check them. None: the engine's default."""

    context_length: int | None = None  # tokens per sequence; None: the trained number, up to `default_context`
    default_context: int = DEFAULT_CONTEXT
    threads: int | None = None  # None: the fast cores
    max_sequences: int = 1
    max_batch: int = MAX_BATCH
    max_branches: int = MAX_BRANCHES  # side branches of all trees in a batch; 0: each sequence has cells of its own
    widest: int = WIDEST  # pass of a width class
    rows: int = 64  # widest pass that asks for logits of all its rows, of a plan only
    reproducible: bool | None = None  # True demands equal bits; None: where they cost nothing, and else says so once
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    state_layers: tuple[int, ...] = ()  # whose inputs come with hidden states
    # of llama.cpp
    speculates: bool = True  # keep what a running state needs to drop the end of a draft
    gpu_layers: int = 0  # -1: all
    devices: tuple[str, ...] | None = None  # of these layers; None: all GPUs; none: the CPU
    endpoints: tuple[str, ...] = ()  # RPC servers (HOST:PORT) that hold the layers, behind a child process
    overrides: tuple[tuple[str, str], ...] = ()  # (pattern of tensors, device) that come before the layers' devices
    flash_attention: bool | None = None
    check_tensors: bool = False  # read all weights and refuse NaN
    is_repacked: bool = True  # False: weights stay as they are in the file, which loads faster and computes slower
    is_draft: bool = False  # its weights may be coarser: a draft's exact values do not matter
    has_mtp: bool = False  # with the multi-token prediction layers
    # of ONNX Runtime
    provider: str = "auto"  # auto, cpu, cuda
    exit_layer: int | None = None  # its first layers, so many, draft beside it, in a plan only
    hidden_states: bool = False  # allow `give_hidden_states`

    def length_for(self, name: str, longest: int | None) -> int:
        """Tokens per sequence of the model `name`: as asked, or the `longest` that it was trained for.

        Raises ConfigError beyond that, where the model would write nonsense.
        """
        if self.context_length is None:
            return min(longest or self.default_context, self.default_context)
        if longest is not None and self.context_length > longest:
            raise ConfigError(
                f"a context of {self.context_length} tokens was requested, but {name} was trained for {longest}: give "
                "at most that, or -c max"
            )
        return self.context_length

    def settled(self, **given: Any) -> dict[str, Any]:
        """The fields of an engine's settings: these ones, a number of threads, and those that are `given`."""
        fields_here = {each.name: getattr(self, each.name) for each in fields(ModelUse)}
        return {**fields_here, "threads": self.threads or default_threads(), **given}

    @property
    def max_rows(self) -> int:
        """Rows of the widest pass."""
        return max(self.max_batch, self.widest)

    def max_outputs(self, vocabulary_size: int) -> int:
        """Rows with logits per pass; bounded so that a wide batch over a large vocabulary stays small."""
        return max(min(max(LOGITS_BYTES // (4 * vocabulary_size), 64), self.max_rows), self.max_sequences)


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
    `context_length`: tokens of the full context, of which there are `sequences`; `grows`: their cache takes memory as
    texts grow, and nothing before; `cache_type` of keys and values, for people.
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
    grows: bool = False
    cache_type: str = ""

    @property
    def own(self) -> int:
        """Memory of the process's own, which cannot be dropped."""
        return self.packed + self.cache + self.compute + self.logits + self.vocabulary
