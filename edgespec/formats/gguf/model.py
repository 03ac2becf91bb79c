"""What model a GGUF holds: its sizes and constants for a graph, and its config.json. The unknown is refused by name.

Known are the architectures in `KINDS` with the tensors that `formats.architectures` gives them, so that a file is
read by the same tables by which one is written. A metadata key or a tensor that these do not name may change what the
model computes, so a file with one is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError
from edgespec.formats.architectures import ARCHITECTURES, PERMUTE_K, PERMUTE_Q, Architecture, Sizes, Tensor
from edgespec.formats.gguf.header import GgufHeader, GgufNumbers, Scalar, TensorInfo
from edgespec.formats.gguf.tables import (
    GEMMA4,
    GEMMA4_DRAFTER,
    GEMMA4_KEYS,
    GPT_OSS,
    LFM2,
    QWEN3_MOE,
    QWEN35,
    QWEN35_MOE,
)
from edgespec.formats.onnx.forms import EMBEDDING, HEAD
from edgespec.formats.onnx.llama_config import WRITABLE, Experts, LlamaConfig

ROPE_FACTORS = "rope_freqs.weight"
HEAD_MULTIPLE = 16  # of ONNX Runtime's rotary attention
SIZES = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
KNOWN_KEYS = (
    *SIZES,
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", "vocab_size"),
    *("attention.layer_norm_rms_epsilon", "tensor_data_layout"),
    *("rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "rope.scale_linear"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
    *("attention.sliding_window", "attention.sliding_window_pattern", "final_logit_softcapping"),
)
OTHER_PARTS = ("mm.", "vision.")  # of a model for pictures, which lie in a file of their own
# Else 0 is what changes nothing.
NEUTRAL = {
    "attention.causal": True,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.0,
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"), 1.0),
}
EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
MOST_EXPERTS, MOST_USED = 1024, 64  # as experts.cpp
STATE_KEYS = tuple(f"ssm.{key}" for key in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count"))
QWEN35_KEYS = (
    *(*STATE_KEYS, "full_attention_interval", "attention.recurrent_layers", "rope.dimension_sections"),
    "nextn_predict_layers",
)
YARN_KEYS = ("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")


Tensors = dict[str, tuple[TensorInfo, Tensor]]


@dataclass(frozen=True, slots=True)
class Kind:
    """How llama.cpp computes one architecture. `hub`: its name at Hugging Face, by which tensors are looked up.

    `unrotated_every`: each n-th layer has no rotary positions; `window_every`: all but each n-th layer have a window;
    `table`: its tensors, where it runs on our kernels only; `is_hybrid`: `hybrid` knows those of its layers; `keys`: of
    its metadata that others do not have.
    """

    hub: str
    model_type: str
    has_head_norms: bool = False
    is_gemma: bool = False
    unrotated_every: int = 0
    window_every: int = 0
    table: Architecture | None = None
    keys: tuple[str, ...] = ()
    is_hybrid: bool = False


KINDS = {
    "llama": Kind("LlamaForCausalLM", "llama"),
    "qwen2": Kind("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Kind("Qwen3ForCausalLM", "qwen3", has_head_norms=True),
    "smollm3": Kind("SmolLM3ForCausalLM", "smollm3", unrotated_every=4),
    "gemma3": Kind("Gemma3ForCausalLM", "gemma3_text", has_head_norms=True, is_gemma=True, window_every=6),
    "qwen3moe": Kind("Qwen3MoeForCausalLM", "qwen3_moe", has_head_norms=True, table=QWEN3_MOE, keys=EXPERT_KEYS),
    "gpt-oss": Kind("GptOssForCausalLM", "gpt_oss", window_every=2, table=GPT_OSS, keys=(*EXPERT_KEYS, *YARN_KEYS)),
    "gemma4": Kind(
        "Gemma4ForCausalLM", "gemma4_text", has_head_norms=True, table=GEMMA4, keys=(*EXPERT_KEYS, *GEMMA4_KEYS)
    ),
    "gemma4-assistant": Kind(
        *("Gemma4AssistantForCausalLM", "gemma4_assistant"),
        has_head_norms=True,
        table=GEMMA4_DRAFTER,
        keys=(*GEMMA4_KEYS, "embedding_length_out", "nextn_predict_layers"),
    ),
    "qwen35": Kind(
        "Qwen3_5ForCausalLM", "qwen3_5_text", has_head_norms=True, table=QWEN35, keys=QWEN35_KEYS, is_hybrid=True
    ),
    "qwen35moe": Kind(
        *("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
        has_head_norms=True,
        table=QWEN35_MOE,
        keys=(*QWEN35_KEYS, *EXPERT_KEYS, "expert_shared_feed_forward_length"),
        is_hybrid=True,
    ),
    "lfm2": Kind(
        *("Lfm2ForCausalLM", "lfm2"),
        has_head_norms=True,
        table=LFM2,
        keys=("shortconv.l_cache",),
        is_hybrid=True,
    ),
}


@dataclass(frozen=True)
class GgufModel:
    """A GGUF whose model can be written as a graph; `tensors` and their rows in the table by Hugging Face name."""

    path: Path
    header: GgufHeader
    kind: Kind
    config: LlamaConfig
    tensors: Tensors

    @property
    def is_tied(self) -> bool:
        return "lm_head.weight" not in self.tensors

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor, _ in self.tensors.values())

    def hub_config(self) -> dict[str, Any]:
        """config.json, as far as a graph's users read it."""
        config = self.config
        found: dict[str, Any] = {
            "architectures": [self.kind.hub],
            "model_type": self.kind.model_type,
            "hidden_act": "gelu_pytorch_tanh" if config.activation == "gelu" else "silu",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_positions,
            "rms_norm_eps": config.norm_epsilon,
            "rope_theta": config.rope_theta,
            "tie_word_embeddings": self.is_tied,
        }
        if config.rope_divisors:  # the file holds divisors of frequencies, not the settings that they came from
            found["rope_scaling"] = {"rope_type": "divisors", "divisors": list(config.rope_divisors)}
        if config.windowed_layers:
            found["sliding_window"] = config.window
            layers = range(config.num_layers)
            names = ("full_attention", "sliding_attention")
            found["layer_types"] = [names[layer in config.windowed_layers] for layer in layers]
        for name, products in (("attention_bias", {"q_proj", "o_proj"}), ("mlp_bias", {"gate_proj", "down_proj"})):
            if config.biases & products:
                found[name] = True
        return found


def read_model(path: Path, header: GgufHeader, *, nextn: bool = False) -> GgufModel:
    """The model in the file of this `header`; `nextn`: its layer that predicts a further token, as a model.

    Raises ModelFileError for one that cannot be written as a graph.
    """
    kind = KINDS.get(header.architecture)
    if kind is None:
        raise ModelFileError(
            f"{path} is of the architecture {header.architecture!r}; allowed for ONNX: {', '.join(WRITABLE)}. Run the "
            "GGUF as it is, with llama.cpp, or export the folder of the original model, of which more are known"
        )
    try:
        return _reader(path, header, nextn=nextn).read()
    except (OverflowError, ZeroDivisionError) as exc:
        raise ModelFileError(f"{path} is damaged: its sizes are not those of a model ({exc})") from exc


def _reader(path: Path, header: GgufHeader, *, nextn: bool) -> Reader:
    """What reads a file. Gemma 4 has sizes that differ by layer, hybrids layers of two kinds."""
    from edgespec.formats.gguf.gemma4 import Gemma4DrafterReader, Gemma4Reader
    from edgespec.formats.gguf.hybrid import hybrid_reader

    kind = KINDS[header.architecture]
    if kind.is_hybrid:
        return hybrid_reader(path, header, kind, nextn=nextn)
    readers: dict[str, type[Reader]] = {"gemma4": Gemma4Reader, "gemma4-assistant": Gemma4DrafterReader}
    return readers.get(header.architecture, Reader)(path, header, kind)


class Reader:
    """Typed access to the metadata of one file; every complaint names the file."""

    def __init__(self, path: Path, header: GgufHeader, kind: Kind) -> None:
        self._path, self._header, self._kind = path, header, kind
        self._table: Architecture = kind.table or ARCHITECTURES[kind.hub]
        self._infos = {tensor.name: tensor for tensor in header.tensors}

    def read(self) -> GgufModel:
        self._refuse_unknown_keys()
        sizes = self._sizes()
        self._check_heads(sizes)
        tensors = self._tensors(lambda layer: sizes)
        return GgufModel(self._path, self._header, self._kind, self._config(sizes, tensors), tensors)

    def _sizes(self) -> Sizes:
        layers, context, width, inner, heads = (self._size(key) for key in SIZES)
        head_dim = self._size("attention.key_length", width // heads)
        kv_heads = self._size("attention.head_count_kv", heads)
        found = Sizes(layers, width, inner, heads, kv_heads, head_dim, len(self._header.tokens), context)
        if EXPERT_KEYS[0] in self._kind.keys:
            inner = self._size("expert_feed_forward_length")
            return replace(found, inner=inner, experts=self._size("expert_count"), expert_inner=inner)
        return found

    def _config(self, sizes: Sizes, tensors: Tensors) -> LlamaConfig:
        return LlamaConfig(**self._settings(sizes, tensors))

    def _settings(self, sizes: Sizes, tensors: Tensors) -> dict[str, Any]:
        """What a `LlamaConfig` is made of."""
        window, context = int(self._number("attention.sliding_window", 0)), sizes.context
        return {
            "hidden_size": sizes.width,
            "intermediate_size": sizes.inner,
            "num_layers": sizes.layers,
            "num_heads": sizes.heads,
            "num_kv_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "vocab_size": sizes.vocabulary,
            # llama.cpp's other architectures have no window; up to its length the results are the same
            "max_positions": min(context, window) if window and not self._kind.window_every else context,
            "norm_epsilon": self._number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._number("rope.freq_base", 10000.0),
            "rope_divisors": self._divisors(self._num_rotated(sizes)),
            "unrotated_layers": self._each(self._kind.unrotated_every, sizes.layers),
            "biases": self._biases(tensors),
            "has_head_norms": self._kind.has_head_norms,
            **(self._gemma(sizes, window) if self._kind.is_gemma else {}),
            **(self._mixture(sizes, window) if sizes.experts else {}),
        }

    def _gemma(self, sizes: Sizes, window: int) -> dict[str, Any]:
        """What sets Gemma 3 off; llama.cpp scales the attention of its largest model by another width."""
        is_largest = sizes.layers == self._table.fixed_attention_scale_layers
        divided = sizes.width // sizes.heads if is_largest else sizes.head_dim
        return {
            "window": window or -1,
            "windowed_layers": self._windowed(sizes.layers) if window else frozenset(),
            "window_rope_theta": self._number("rope.freq_base_swa", 10000.0),
            "has_post_norms": True,
            "activation": "gelu",
            "attention_scale": float(divided**-0.5),
            "embedding_scale": float(sizes.width**0.5),
            "logit_cap": self._number("final_logit_softcapping", 0.0) or None,
        }

    def _mixture(self, sizes: Sizes, window: int) -> dict[str, Any]:
        """What Qwen3 MoE and gpt-oss have beside a Llama."""
        experts = self._experts(sizes)
        if self._table is not GPT_OSS:
            return {"experts": experts}
        return {
            "experts": replace(experts, gate="clamped", has_biases=True),
            "has_sinks": True,
            "window": window or -1,
            "windowed_layers": self._windowed(sizes.layers) if window else frozenset(),
            "rope_scale": 0.1 * math.log(self._yarn_factor()) + 1.0,
        }

    def _experts(self, sizes: Sizes) -> Experts:
        found = Experts(sizes.experts, self._size("expert_used_count"), sizes.expert_inner)
        if found.inner % 16 or sizes.width % 16 or found.count > MOST_EXPERTS or found.used > MOST_USED:
            raise self._wrong(
                f"it uses {found.used} of {found.count} experts of {found.inner} x {sizes.width}; the kernels have at "
                f"most {MOST_USED} of {MOST_EXPERTS}, of sizes that 16 divides"
            )
        return found

    def _yarn_factor(self) -> float:
        return self._number("rope.scaling.factor", 1.0) if self._value("rope.scaling.type") == "yarn" else 1.0

    def _yarn(self, head_dim: int, factor: float) -> tuple[float, ...]:
        """YaRN's divisors (Peng et al., 2023): none for what turns often enough, `factor` for what turns too rarely.

        Between the two a ramp, whose ends are not rounded to whole frequencies: so gpt-oss was trained; llama.cpp
        rounds them, as other models need.
        """
        base, trained = self._number("rope.freq_base"), self._number("rope.scaling.original_context_length")
        turns = self._number("rope.scaling.yarn_beta_fast", 32.0), self._number("rope.scaling.yarn_beta_slow", 1.0)
        if not (base > 1 and trained > 0 and min(turns) > 0 and factor >= 1):
            raise self._wrong("its rotary positions are scaled by settings that YaRN cannot have")
        low, high = (head_dim * math.log(trained / (each * 2 * math.pi)) / (2 * math.log(base)) for each in turns)
        low, high = max(low, 0.0), min(high, head_dim - 1.0)
        steps = np.arange(head_dim // 2) - low
        ramp = np.clip(steps / max(high - low, 1e-3), 0.0, 1.0)
        return tuple(float(each) for each in 1.0 / (ramp / factor + 1.0 - ramp))

    def _windowed(self, layers: int) -> frozenset[int]:
        """Layers with a window: a list of layers, each how many has none, or as the architecture has it."""
        found = self._value("attention.sliding_window_pattern")
        if isinstance(found, GgufNumbers):
            if len(found.items) != layers:
                raise self._wrong(f"its pattern of windows is for {len(found.items)} layers, it has {layers}")
            return frozenset(layer for layer, flag in enumerate(found.items) if flag)
        every = int(self._number("attention.sliding_window_pattern", self._kind.window_every))
        return frozenset(range(layers)) - self._each(every, layers)

    def _each(self, every: int, layers: int) -> frozenset[int]:
        return frozenset(range(every - 1, layers, every)) if every else frozenset()

    def _divisors(self, head_dim: int) -> tuple[float, ...]:
        """Divisors of the rotary frequencies: Llama 3's, stored as a tensor, times that of linear scaling."""
        kind = self._value("rope.scaling.type")
        if kind == "yarn" and YARN_KEYS[0] in self._kind.keys:
            return self._yarn(head_dim, self._yarn_factor())
        if kind not in (None, "none", "linear"):
            raise self._wrong(f"its rotary positions are scaled by {kind!r}; allowed: none, linear, and Llama 3's")
        # As llama.cpp reads them: linear where nothing is said, and the older name where the newer one is missing.
        factor = self._number("rope.scaling.factor", 0.0) or self._number("rope.scale_linear", 1.0)
        factor = 1.0 if kind == "none" else factor
        if not math.isfinite(factor) or factor <= 0:
            raise self._wrong(f"its rotary positions are scaled by {factor}")
        stored = self._stored_factors(head_dim)
        if factor == 1 and not stored:
            return ()
        return tuple(factor * each for each in stored or (1.0,) * (head_dim // 2))

    def _stored_factors(self, head_dim: int) -> tuple[float, ...]:
        import numpy as np

        tensor = self._infos.get(ROPE_FACTORS)
        if tensor is None:
            return ()
        if tensor.kind != "F32" or tensor.shape != (head_dim // 2,):
            raise self._wrong(f"{ROPE_FACTORS} is {tensor.kind} {tensor.shape}, F32 ({head_dim // 2},) is needed")
        place = self._header.data_start + tensor.offset
        found = np.fromfile(self._path, np.float32, head_dim // 2, offset=place)
        if not (np.isfinite(found).all() and (found > 0).all()):
            raise self._wrong(f"{ROPE_FACTORS} contains values that cannot divide a frequency")
        return tuple(float(each) for each in found)

    def _tensors(self, sizes: Callable[[int], Sizes]) -> Tensors:
        """All tensors by Hugging Face name, of the shapes that the `sizes` of a layer (0 outside of any) imply."""
        left, found = dict(self._infos), {}
        left.pop(ROPE_FACTORS, None)
        for layer, name, tensor, own in self._places(sizes(0).layers):
            info = left.pop(own, None)
            if info is None and tensor.is_optional:
                continue
            wanted = sizes(layer).shape(tensor.shape)[::-1]
            if info is None or info.shape != wanted:
                what = "lacks it" if info is None else f"has {info.shape}"
                raise self._wrong(f"a {self._header.architecture} needs the tensor {own!r} of {wanted}, it {what}")
            found[name] = info, tensor
        if left:
            raise self._wrong(f"it holds {len(left)} tensors that are not known, such as {min(left)!r}")
        return found

    def _places(self, layers: int) -> Iterator[tuple[int, str, Tensor, str]]:
        """(layer, Hugging Face name, row of the table, GGUF name) of every tensor there may be."""
        for name, tensor in self._table.outer.items():
            yield 0, name, tensor, tensor.name
        for layer in range(layers):
            for rest, tensor in self._layer_table(layer).items():
                yield layer, f"{self._table.layer_prefix}{layer}.{rest}", tensor, f"blk.{layer}.{tensor.name}"

    def _layer_table(self, layer: int) -> Mapping[str, Tensor]:
        return self._table.layer

    def _biases(self, tensors: Tensors) -> frozenset[str]:
        """The products with a bias, which are the same in all layers."""
        layers: dict[str, set[str]] = {}
        for name in tensors:
            if name.endswith("_proj.bias"):
                _, _, layer, _, product, _ = name.split(".")
                layers.setdefault(layer, set()).add(product)
        found = frozenset(next(iter(layers.values()), ()))
        same = not layers or len(layers) == int(self._number("block_count"))
        joined = len({"q_proj", "k_proj", "v_proj"} & found) in (0, 3)
        if not (same and joined and all(each == found for each in layers.values())):
            raise self._wrong("some of its layers or projections have biases and others have none")
        return found

    def _check_heads(self, sizes: Sizes) -> None:
        if sizes.head_dim % HEAD_MULTIPLE:
            raise self._wrong(
                f"it has attention heads of {sizes.head_dim} values; ONNX Runtime's rotary attention needs a multiple "
                f"of {HEAD_MULTIPLE}"
            )
        self._num_rotated(sizes)
        self._check_size("attention.value_length", sizes)

    def _num_rotated(self, sizes: Sizes) -> int:
        """How many of a head's values are rotated. Raises ModelFileError for a number that a graph cannot have."""
        return self._check_size("rope.dimension_count", sizes)

    def _check_size(self, key: str, sizes: Sizes) -> int:
        if self._size(key, sizes.head_dim) != sizes.head_dim:
            raise self._wrong(f"its {key} {self._value(key)} is not its head size {sizes.head_dim}")
        return sizes.head_dim

    def _refuse_unknown_keys(self) -> None:
        prefix = f"{self._header.architecture}."
        for key, value in self._header.metadata.items():
            name = key.removeprefix(prefix)
            if not key.startswith(prefix) or name in (*KNOWN_KEYS, *self._kind.keys) or name.startswith(OTHER_PARTS):
                continue
            if value != NEUTRAL.get(name, 0):
                raise self._wrong(
                    f"its setting {key} = {str(value)[:40]} is not known, and may change what it computes"
                )

    def _value(self, key: str) -> Any:
        return self._header.metadata.get(f"{self._header.architecture}.{key}")

    def _number(self, key: str, default: float | None = None) -> float:
        found: Scalar | Any = self._value(key)
        found = default if found is None else found
        if not isinstance(found, (int, float)):
            what = "is missing" if found is None else f"is {str(found)[:40]}, one number was expected"
            raise self._wrong(f"{self._header.architecture}.{key} {what}")
        return float(found)

    def _size(self, key: str, default: int | None = None) -> int:
        found = self._number(key, default)
        if not 1 <= found < 1 << 31 or found != int(found):
            raise self._wrong(f"{self._header.architecture}.{key} is {found}, a size was expected")
        return int(found)

    def _wrong(self, reason: str) -> ModelFileError:
        return ModelFileError(f"{self._path} cannot be converted to ONNX: {reason}")


class GgufTensors:
    """The tensors of an opened model. The output projection is `lm_head.weight`, also where it is the embedding."""

    def __init__(self, model: GgufModel) -> None:
        self._tensors, self._config = model.tensors, model.config
        self._path, self._start, self.is_tied = model.path, model.header.data_start, model.is_tied
        self.file_type = model.header.metadata.get("general.file_type")  # llama.cpp's number, if the file has one

    def kind(self, name: str) -> str:
        """The type of a matrix, such as Q4_K."""
        return self._matrix(name)[0].kind

    def shape(self, name: str) -> tuple[int, int]:
        """(outputs, inputs) of a matrix; of one for each expert, those of all one below the other."""
        inputs, *outputs = self._matrix(name)[0].shape
        return math.prod(outputs), inputs

    def vector(self, name: str) -> NDArray[np.float32]:
        """A norm's weights or a bias [width]. Raises ModelFileError for infinity, NaN and quantised vectors."""
        tensor, row = self._tensors[name]
        found = self._floats(self._raw(tensor, 0, rows_of(tensor)).reshape(1, -1), tensor)[0]
        order = self._order(tensor.shape[-1], row)
        return self._checked(found if order is None else found[order], tensor)

    def spans(self, name: str, bytes_at_once: int, multiple: int) -> Iterator[tuple[int, int]]:
        """Rows (from, to) of a matrix that are read at once; their number is a `multiple`, but at the end.

        One span where the file has the rows in another order than Hugging Face.
        """
        tensor, row = self._matrix(name)
        outputs = rows_of(tensor)
        step = max(bytes_at_once * outputs // tensor.num_bytes // multiple, 1) * multiple
        step = outputs if self._order(outputs, row) is not None else step
        return ((start, min(start + step, outputs)) for start in range(0, outputs, step))

    def some_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes [rows, bytes] of the rows of one of `spans`, in Hugging Face's order.

        They are read, not mapped, so that a file that is cut meanwhile ends in ModelFileError and not in a signal.
        """
        tensor, row = self._matrix(name)
        found, order = self._raw(tensor, start, stop), self._order(stop - start, row)
        return found if order is None else found[order]

    def wrong_numbers(self, name: str) -> ModelFileError:
        """The error of a matrix that holds infinity or NaN."""
        return self._wrong_numbers(self._matrix(name)[0])

    def _wrong_numbers(self, tensor: TensorInfo) -> ModelFileError:
        return ModelFileError(f"{self._path}: the tensor {tensor.name} holds infinity or NaN. Download it again")

    def _matrix(self, name: str) -> tuple[TensorInfo, Tensor]:
        return self._tensors[EMBEDDING if name == HEAD and self.is_tied else name]

    def _raw(self, tensor: TensorInfo, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes [rows, bytes] of some rows."""
        size = tensor.num_bytes // rows_of(tensor)
        place = self._start + tensor.offset + start * size
        found = np.fromfile(self._path, np.uint8, (stop - start) * size, offset=place)
        if found.size < (stop - start) * size:
            raise ModelFileError(f"{self._path} became shorter while {tensor.name} was read. Download it again")
        return found.reshape(stop - start, size)

    def _order(self, count: int, row: Tensor) -> NDArray[np.intp] | None:
        """Where the rows of queries and keys lie: llama.cpp keeps rotary pairs side by side, Hugging Face in halves."""
        if row.change not in (PERMUTE_Q, PERMUTE_K):
            return None
        heads = self._config.num_heads if row.change == PERMUTE_Q else self._config.num_kv_heads
        found: NDArray[np.intp] = np.arange(count).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return found

    def _floats(self, raw: NDArray[np.uint8], tensor: TensorInfo) -> NDArray[np.float32]:
        """Floats [rows, columns] of the bytes [rows, bytes] of a tensor that is not quantised."""
        if tensor.kind == "BF16":
            widened: NDArray[np.float32] = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            return widened
        kinds = {"F32": np.float32, "F16": np.float16}
        if tensor.kind not in kinds:
            raise ModelFileError(
                f"{self._path} holds {tensor.name} as {tensor.kind}; a norm or bias has to be F32, F16 or BF16. "
                "Download a file that was quantised by llama.cpp"
            )
        return raw.view(kinds[tensor.kind]).astype(np.float32, copy=False)

    def _checked(self, values: NDArray[np.float32], tensor: TensorInfo) -> NDArray[np.float32]:
        if not np.isfinite(values).all():
            raise self._wrong_numbers(tensor)
        return values


def rows_of(tensor: TensorInfo) -> int:
    """Number of rows; a vector is one."""
    return math.prod(tensor.shape[1:])
