"""What a GGUF takes in llama.cpp, from its header alone.

Weights are mapped from the file, all of it read ahead. On top of that the CPU's matrix kernels want some types in
another order, and llama.cpp copies these (`_repacked`). A context has its cache, one buffer for the results of a pass,
planned for the widest, and one for logits. The buffers' sizes follow llama.cpp's graphs: at its widest point a layer
holds three rows of the feed-forward part and four of the hidden size per token, the head one row of logits and two
hidden ones per output. They are checked against what the library logs (scripts/lab/measure_memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path

from edgespec.engines.llamacpp.devices import EMBEDDINGS, HEAD, LayerSizes
from edgespec.engines.llamacpp.settings import CACHE_BYTES, CELLS_MULTIPLE, ContextSettings
from edgespec.engines.model_use import (
    BYTES_PER_FEATURE,
    MAX_BATCH,
    MAX_BRANCHES,
    MOST_CHECKPOINTS,
    WINDOW,
    Footprint,
    ModelUse,
)
from edgespec.formats.gguf.check import check_gguf, gives_only_embeddings, model_files
from edgespec.formats.gguf.header import GgufHeader, GgufNumbers, TensorInfo
from edgespec.formats.gguf.heads import HALF_BYTES, HeadSizes, read_head
from edgespec.platform.machine import instruction_sets, lacks_dot_products

# Rows of a matrix that are interleaved, and the instructions that the kernel needs, by type (ggml's repack.cpp).
_X86 = {"Q4_0": "avx2", "Q4_K": "avx2", "IQ4_NL": "avx2", "MXFP4": "avx2", "Q2_K": "avx512f"}
_INTERLEAVED_X86 = 8
_ARM = {"Q4_0": 4, "Q4_K": 8, "Q5_K": 8, "Q6_K": 8, "Q8_0": 4, "IQ4_NL": 4, "MXFP4": 4}  # with dot products
# Reserved per node of the largest graph, mostly for copies to other devices (ggml_backend_sched_new); hardly touched.
_GRAPH_NODE_BYTES = 21_500
# A token's text and score in llama.cpp, its bytes in Python (170 together) and its numbers while a row is sampled; a
# merge, which SentencePiece has none of. Measured with 262144 tokens of Gemma, 151936 of Qwen and 49152 of SmolLM2.
_TOKEN_BYTES, _MERGE_BYTES = 250, 120
_HEAD_VOCABULARY_BYTES = 110  # the same of a head, in llama.cpp alone; measured on 150000


# Some of the architectures whose states llama.cpp can roll back (llm_arch_supports_rs_rollback): those that tests run,
# and the same with experts.
WITH_SNAPSHOTS = frozenset({"lfm2", "lfm2moe", "qwen35", "qwen35moe"})
MOST_SNAPSHOTS = 8
ONLY_ASKED = (
    "on llama.cpp it would cost this model, which keeps a running state, more than lookups alone earn. A draft model "
    "(-md) or --drafter suffix turns it on"
)
_STATE_BYTES = 4  # of a number; llama.cpp stores states as float32
HEAD_CONTEXT = 2048
HEAD_LOGITS_BYTES = 16 << 20
HEAD_WIDEST = 64  # rows per pass, where their logits fit HEAD_LOGITS_BYTES
_MARKOV_COPIES = 6


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides on sizes: hidden sizes in numbers per token; `kv`: numbers of keys and of values in a cell."""

    layers: int
    width: int
    inner: int
    kv: tuple[int, int]
    vocabulary: int

    @classmethod
    def of(cls, header: GgufHeader) -> Shape:
        layers, width = _largest(header, "block_count"), _largest(header, "embedding_length")
        heads = _largest(header, "attention.head_count")
        size = width // heads if heads else 0
        kv_heads = _numbers(header, "attention.head_count_kv") or [heads]
        kept = [not recurrent for recurrent in recurrent_layers(header)]
        per_layer = kv_heads if len(kv_heads) == layers else [min(kv_heads)] * layers
        total = sum(compress(per_layer, kept))
        key, value = (_largest(header, f"attention.{kind}_length") or size for kind in ("key", "value"))
        experts = _largest(header, "expert_used_count") * _largest(header, "expert_feed_forward_length")
        inner = max(_largest(header, "feed_forward_length"), experts, width)
        return cls(layers, width, inner, (total * key, total * value), len(header.tokens))


def state_bytes(header: GgufHeader) -> int:
    """Of the running state of one sequence; 0 where every layer keeps keys and values only.

    Qwen3.5, LFM2, Mamba and others keep one beside keys and values, or instead of them. It cannot be shortened by a
    token as a cache can.
    """
    return sum(recurrent_layers(header)) * _numbers_per_layer(header) * _STATE_BYTES


def num_snapshots(header: GgufHeader, *, speculates: bool) -> int:
    """How many snapshots of such a state to keep.

    For some architectures llama.cpp keeps the state as it was after each of the last rows of a pass (`n_rs_seq`), which
    is enough for speculation: a rejected draft is the end of the pass that verified it. Each pass then copies the
    state, which lookups alone rarely earn: only what was asked for by name, or comes with a model of its own, is
    drafted.
    """
    return MOST_SNAPSHOTS if speculates and header.architecture in WITH_SNAPSHOTS else 0


def recurrent_layers(header: GgufHeader) -> list[bool]:
    """Of each layer, whether it keeps a running state and no keys and values."""
    layers = _largest(header, "block_count") - _largest(header, "nextn_predict_layers")
    if interval := _largest(header, "full_attention_interval"):
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    heads = header.value("attention.head_count_kv")
    if isinstance(heads, GgufNumbers) and len(heads.items) >= layers:
        return [count == 0 for count in heads.items[:layers]]
    if header.architecture in ("qwen35", "qwen35moe", "qwen3next"):
        return [(layer + 1) % 4 != 0 for layer in range(layers)]
    return [_numbers_per_layer(header) > 0] * layers


def _numbers_per_layer(header: GgufHeader) -> int:
    """How many numbers the state of a layer has (llama.cpp's n_embd_r and n_embd_s); 0 without one."""
    width = _largest(header, "embedding_length")
    if size := _largest(header, "wkv.head_size"):
        return width * (size + (_largest(header, "token_shift_count") or 2))
    if kernel := _largest(header, "shortconv.l_cache"):
        return width * (kernel - 1)
    inner, state = _largest(header, "ssm.inner_size"), _largest(header, "ssm.state_size")
    convolved = inner + 2 * _largest(header, "ssm.group_count") * state
    return max(_largest(header, "ssm.conv_kernel") - 1, 0) * convolved + state * inner


def footprint(path: Path, use: ModelUse) -> Footprint:
    """The memory of the model at `path`. Raises ModelNotFound, ModelFileError, and ConfigError for a bad setting."""
    header = check_gguf(path)
    shape = Shape.of(header)
    context = use.length_for(path.name, header.context_length)
    settings = _settings(path, header, use, context)
    kinds = [settings.cache_type_k, settings.cache_type_v]
    cells = -(-settings.cells // CELLS_MULTIPLE) * CELLS_MULTIPLE
    cache = int(sum(count * CACHE_BYTES[kind] for count, kind in zip(shape.kv, kinds, strict=True)) * cells)
    if gives_only_embeddings(header):
        cache = 0
    cache += state_bytes(header) * settings.sequence_ids * (1 + settings.snapshots + MOST_CHECKPOINTS)
    if use.has_mtp:
        cache += use.max_sequences * _mtp_bytes(shape, context)
    sizes = LayerSizes.of(header, shape.layers, cache, use.overrides)
    cache_there = sizes.cache_on(use.gpu_layers)
    weights_there = sizes.weights_on(use.gpu_layers)
    repacked = sum(tensor.num_bytes for tensor in header.tensors if _is_repacked(tensor, header))
    compute, reserved = _compute_bytes(shape, settings, cells, use.rows)
    outputs = min(settings.max_outputs(shape.vocabulary), max(use.rows, settings.sequence_ids))
    files = sum(file.stat().st_size for file in model_files(path))
    share_here = 1 - min(weights_there / max(sum(tensor.num_bytes for tensor in header.tensors), 1), 1)
    packed = int(repacked * share_here)
    return Footprint(
        mapped=files,
        read_once=packed + weights_there,
        packed=packed,
        cache=cache - cache_there,
        compute=compute,
        logits=4 * outputs * shape.vocabulary,
        vocabulary=_TOKEN_BYTES * shape.vocabulary + _MERGE_BYTES * header.num_merges,
        device=weights_there + cache_there + (reserved + sizes.visiting if weights_there else 0),
        reserved=reserved - compute + _GRAPH_NODE_BYTES * _graph_nodes(header),
        context_length=context,
        sequences=use.max_sequences,
        cache_type="/".join(dict.fromkeys(kinds)),
    )


def _settings(path: Path, header: GgufHeader, use: ModelUse, context: int) -> ContextSettings:
    """Those that the model is loaded with, whether or not this machine has the devices. Raises ConfigError."""
    snapshots = num_snapshots(header, speculates=use.speculates)
    settings = ContextSettings.checked(
        replace(use, gpu_layers=0, devices=None, overrides=()), context, snapshots=snapshots
    )
    # Architectures that ignore a window that their file names share cells, which takes a little less.
    has_window = _largest(header, "attention.sliding_window") > 0
    settings = replace(settings, gpu_layers=use.gpu_layers, devices=use.devices)
    return settings.for_model(keeps_state=state_bytes(header) > 0, has_window=has_window)


def _mtp_bytes(shape: Shape, context: int) -> int:
    """The context of a multi-token prediction layer: its cache, logits twice, and the hidden states that it reads."""
    sizes = layers_sizes(shape.width, shape.vocabulary, min(context, HEAD_CONTEXT))
    return (
        cache_bytes(sizes, sizes.context_length) + pass_bytes(sizes) + _feature_bytes(shape.width, min(context, WINDOW))
    )


def _feature_bytes(width: int, window: int) -> int:
    """What keeping features of the `window` latest tokens takes, and llama.cpp's own copy of those of a pass."""
    return width * (BYTES_PER_FEATURE * window + 4 * MAX_BATCH)


def head_footprint(path: Path, use: ModelUse) -> Footprint:
    """The memory of a head with a file of its own, beside its target. Raises as `footprint`."""
    header, sizes = check_gguf(path), read_head(path)
    context = min(sizes.context_length, use.context_length or HEAD_CONTEXT)
    features = _feature_bytes(sizes.feature_width, min(context, WINDOW))
    packed = sum(tensor.num_bytes for tensor in header.tensors if _is_repacked(tensor, header))
    return Footprint(
        mapped=path.stat().st_size,
        read_once=packed,
        packed=packed,
        cache=use.max_sequences * cache_bytes(sizes, context),
        compute=use.max_sequences * (pass_bytes(sizes) + features),
        vocabulary=_HEAD_VOCABULARY_BYTES * sizes.vocabulary_size,
        cache_type="f16",
        context_length=context,
    )


def layers_sizes(width: int, vocabulary_size: int, context_length: int) -> HeadSizes:
    """Of a multi-token prediction layer in the target's own file: keys and values are at most as wide as the model."""
    kv_bytes = 2 * width * HALF_BYTES
    return HeadSizes("mtp", width, width, vocabulary_size, context_length, 0, kv_bytes)


def widest_pass(sizes: HeadSizes) -> int:
    """Rows: the library keeps logits of the whole vocabulary for all of them; a block cannot be divided."""
    return max(min(max(HEAD_LOGITS_BYTES // (4 * sizes.vocabulary_size), 1), HEAD_WIDEST), sizes.block_size)


def cache_bytes(sizes: HeadSizes, context_length: int) -> int:
    """Of a cache for `context_length` tokens of text, and a block."""
    cells = context_length
    if sizes.block_size:
        cells = -(-(context_length + sizes.block_size) // CELLS_MULTIPLE) * CELLS_MULTIPLE
    return cells * sizes.kv_bytes_per_token


def pass_bytes(sizes: HeadSizes) -> int:
    """What the widest pass works with: logits in the graph and copies of them, and activations of a layer."""
    rows, row_bytes = widest_pass(sizes), 4 * sizes.vocabulary_size
    if sizes.form == "mtp":
        return 2 * rows * row_bytes
    if sizes.form == "gemma4":  # a row for each sequence id of the target, as llama.cpp reserves them, and a copy
        return (MAX_BRANCHES + 2) * row_bytes
    if sizes.form == "eagle3":
        return rows * (2 * row_bytes + 4 * (sizes.num_drafted + sizes.feature_width + 8 * sizes.width))
    # A Markov head works on copies of the block's logits: the number is what was measured.
    in_graph = max(rows, _MARKOV_COPIES * sizes.block_size if sizes.has_markov else 0) * row_bytes
    activations = 4 * rows * (sizes.feature_width + 4 * sizes.width + 3 * sizes.inner_width)
    return in_graph + sizes.block_size * row_bytes + activations


def _compute_bytes(shape: Shape, settings: ContextSettings, cells: int, rows: int) -> tuple[int, int]:
    """(used, reserved) for the results of a pass; logits are reserved for more rows than any pass asks for."""
    tokens = settings.max_rows
    reached = cells // settings.max_sequences if settings.streams else cells  # by attention, for each row
    mask, converted = 2 * tokens * reached, int(1.1 * tokens * shape.inner)
    layer = 4 * tokens * (3 * shape.inner + 4 * shape.width) + mask

    def head(outputs: int) -> int:
        return 4 * (outputs * (shape.vocabulary + 2 * shape.width) + 2 * tokens * shape.width)

    most = settings.max_outputs(shape.vocabulary)
    return max(layer, head(min(rows, most))) + converted, max(layer, head(most)) + converted


def _graph_nodes(header: GgufHeader) -> int:
    """Nodes that llama.cpp reserves room for (llama_context::graph_max_nodes)."""
    tensors = len(header.tensors)
    if not state_bytes(header):
        return max(1024, 8 * tensors)
    return max(40 * MAX_BATCH, 32 * tensors)


def _is_repacked(tensor: TensorInfo, header: GgufHeader) -> bool:
    """Whether llama.cpp copies a matrix into the order of this CPU's kernels."""
    if len(tensor.shape) not in (2, 3) or not tensor.name.endswith(".weight"):
        return False
    if tensor.name == EMBEDDINGS and any(each.name == HEAD for each in header.tensors):
        return False  # rows are looked up in it, never multiplied
    found = instruction_sets()
    if not found:  # not x86
        return tensor.kind in _ARM and tensor.shape[1] % _ARM[tensor.kind] == 0 and not lacks_dot_products()
    return _X86.get(tensor.kind) in found and tensor.shape[1] % _INTERLEAVED_X86 == 0


def _numbers(header: GgufHeader, name: str) -> list[int]:
    return [item for item in header.listed(name) if isinstance(item, int)]


def _largest(header: GgufHeader, name: str) -> int:
    return max(_numbers(header, name), default=0)
