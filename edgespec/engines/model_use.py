"""How a model is opened, for the plan of its memory and for its load alike; and the memory that it takes, by part."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_CONTEXT = 4096
MAX_BATCH, MAX_BRANCHES, WIDEST = 512, 16, 63


@dataclass(frozen=True, slots=True)
class ModelUse:
    """The options of a load, unchecked: each engine's settings check them. None: the engine's default.

    Of both engines. `context_length` in tokens per sequence, None for the trained one up to `default_context`;
    `threads` None for the fast cores; `max_branches`: side branches of all trees in a batch; with 0, several
    sequences have cells of their own, so that attention reads no others'; `widest`: the widest pass of a width class;
    `rows`: the widest pass that asks for logits of all its rows, of a plan only; `reproducible`: True demands a width
    class, None uses one only if it costs nothing, False uses none; `cache_type_k`, `cache_type_v`: of keys and values.

    Of llama.cpp. `speculates`: whether to keep what a model with a running state needs to drop the end of a draft,
    None: only where that costs nothing; `gpu_layers`: -1 for all, on `devices` (names; None: all GPUs; none: the CPU)
    and with their KV cache if `kv_offload`; `endpoints`: RPC servers (HOST:PORT) that hold the layers, with a child
    process in between; `check_tensors`: read all weights and refuse NaN; `is_repacked` False leaves the weights as they
    are in the file, which loads faster and computes slower; `has_mtp`: with the multi-token prediction layers.

    Of ONNX Runtime. `provider`: auto, cpu, cuda, dml, webgpu; `exit_layer`: cut the graph after this layer, for
    `early_exit`; `hidden_states`: allow `give_hidden_states`. Of both again, `state_layers`: whose inputs come with
    hidden states.
    """

    context_length: int | None = None
    default_context: int = DEFAULT_CONTEXT
    threads: int | None = None
    max_sequences: int = 1
    max_batch: int = MAX_BATCH
    max_branches: int = MAX_BRANCHES
    widest: int = WIDEST
    rows: int = 64
    reproducible: bool | None = None
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    speculates: bool | None = True
    gpu_layers: int = 0
    devices: tuple[str, ...] | None = None
    endpoints: tuple[str, ...] = ()
    kv_offload: bool = True
    flash_attention: bool | None = None
    check_tensors: bool = False
    is_repacked: bool = True
    has_mtp: bool = False
    provider: str = "auto"
    exit_layer: int | None = None
    hidden_states: bool = False
    state_layers: tuple[int, ...] = ()


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
