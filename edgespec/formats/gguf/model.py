"""What model a GGUF holds: its sizes and constants for a graph, and its config.json. The unknown is refused by name.

Known are the architectures in `KINDS` with the tensors that `formats.architectures` gives them, so that a file is
read by the same tables by which one is written. A metadata key or a tensor that these do not name may change what the
model computes, so a file with one is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError
from edgespec.formats.architectures import PERMUTE_K, PERMUTE_Q, Sizes, Tensor
from edgespec.formats.gguf.header import GgufHeader, MetadataReader, TensorInfo
from edgespec.formats.gguf.tables import KINDS, SCORE_CAP, SHARED_INNER, TEMPERATURE, WINDOW, WINDOW_BASE
from edgespec.formats.onnx.forms import EMBEDDING, HEAD
from edgespec.formats.onnx.llama_config import WRITABLE, Experts, LlamaConfig

# Divisors of rotary frequencies: Llama 3's, or Phi's within the length that it was trained for and beyond.
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
HEAD_MULTIPLE = 16  # of ONNX Runtime's rotary attention
SIZES = ("block_count", "context_length", "embedding_length", "attention.head_count")
INNER, EXPERT_INNER = "feed_forward_length", "expert_feed_forward_length"
YARN_KEYS = ("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_attn_factor")
KNOWN_KEYS = (
    *(*SIZES, INNER),
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", "vocab_size"),
    *("attention.layer_norm_rms_epsilon", "tensor_data_layout"),
    *("rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.attn_factor"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
    *YARN_KEYS,
    *("attention.sliding_window", "attention.sliding_window_pattern", "final_logit_softcapping"),
)
OTHER_PARTS = ("mm.", "vision.")  # of a model for pictures, which lie in a file of their own
# Else 0 is what changes nothing.
NEUTRAL = {
    "attention.causal": True,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}
MOST_EXPERTS, MOST_USED = 1024, 64  # as experts.cpp

Tensors = dict[str, tuple[TensorInfo, Tensor]]


@dataclass(frozen=True)
class GgufModel:
    """A GGUF whose model can be written as a graph; `tensors` and their rows in the table by Hugging Face name."""

    path: Path
    header: GgufHeader
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
        config, (hub, model_type) = self.config, WRITABLE[self.header.architecture]
        return {
            "architectures": [hub],
            "model_type": model_type,
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


def read_model(path: Path, header: GgufHeader, *, nextn: bool = False) -> GgufModel:
    """The model in the file of this `header`; `nextn`: its layer that predicts a further token, as a model.

    Raises ModelFileError for one that cannot be written as a graph.
    """
    if header.architecture not in KINDS:
        raise ModelFileError(
            f"{path} is of the architecture {header.architecture!r}; allowed for ONNX: {', '.join(WRITABLE)}. Run the "
            "GGUF as it is, with llama.cpp, or export the folder of the original model, of which more are known"
        )
    try:
        return _reader(header.architecture, nextn=nextn)(path, header).read()
    except (OverflowError, ZeroDivisionError) as exc:
        raise ModelFileError(f"{path} is damaged: its sizes are not those of a model ({exc})") from exc


def _reader(architecture: str, *, nextn: bool) -> type[Reader]:
    """What reads a file. Gemma 4 has sizes that differ by layer, hybrids layers of two kinds."""
    from edgespec.formats.gguf.gemma4 import Gemma4DrafterReader, Gemma4Reader
    from edgespec.formats.gguf.head_model import BlockReader, EagleReader
    from edgespec.formats.gguf.hybrid import GraniteHybridReader, Lfm2Reader, NextnReader, Qwen35Reader

    qwen35 = NextnReader if nextn else Qwen35Reader
    readers: dict[str, type[Reader]] = {
        "gemma4": Gemma4Reader,
        "gemma4-assistant": Gemma4DrafterReader,
        "eagle3": EagleReader,
        "dflash": BlockReader,
        **dict.fromkeys(("qwen35", "qwen35moe"), qwen35),
        **dict.fromkeys(("lfm2", "lfm2moe"), Lfm2Reader),
        "granitehybrid": GraniteHybridReader,
    }
    return readers.get(architecture, Reader)


class Reader(MetadataReader):
    """The model in one file; every complaint names the file."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        super().__init__(path, header)
        self._kind = KINDS[header.architecture]

    def read(self) -> GgufModel:
        self._refuse_unknown_keys()
        sizes = self._sizes()
        tensors = self._tensors(sizes)
        return GgufModel(self._path, self._header, self._config(sizes, tensors), tensors)

    def _sizes(self) -> Sizes:
        layers, context, width, heads = (self._size(key) for key in SIZES)
        experts = int(self._number("expert_count", 0))
        inner = self._size(SHARED_INNER if experts and SHARED_INNER in self._kind.keys else INNER)
        kv_heads, head_dim = self._kv_heads(layers, heads), self._head_dim(width // heads)
        return Sizes(
            *(layers, width, inner, heads, kv_heads, head_dim, len(self._header.tokens), context),
            experts=experts,
            expert_inner=self._size(EXPERT_INNER, self._value(INNER)) if experts else 0,
        )

    def _kv_heads(self, layers: int, heads: int) -> int:
        return self._size("attention.head_count_kv", heads)

    def _config(self, sizes: Sizes, tensors: Tensors) -> LlamaConfig:
        return LlamaConfig(**self._settings(sizes, tensors))

    def _settings(self, sizes: Sizes, tensors: Tensors) -> dict[str, Any]:
        """What a `LlamaConfig` is made of."""
        kind, rotated = self._kind, self._num_rotated(sizes)
        window = self._size(WINDOW) if WINDOW in kind.keys else int(self._number(WINDOW, 0))
        has_windows = window > 0 and bool(kind.window_every)
        # llama.cpp's other architectures have no window; up to its length the results are the same
        context = min(sizes.context, window) if window and not has_windows else sizes.context
        windowed = self._windowed(sizes.layers) if has_windows else frozenset()
        return {
            "hidden_size": sizes.width,
            "intermediate_size": sizes.inner,
            "num_layers": sizes.layers,
            "num_heads": sizes.heads,
            "num_kv_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "vocab_size": sizes.vocabulary,
            "max_positions": context,
            "norm_epsilon": self._number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._number("rope.freq_base", 10000.0),
            "rotary_dim": rotated if rotated < sizes.head_dim else None,
            **self._rotary(sizes, rotated),
            "unrotated_layers": self._unrotated(sizes.layers, windowed),
            "window": window if has_windows else -1,
            "windowed_layers": windowed,
            "window_rope_theta": self._window_base(),
            "biases": self._biases(tensors),
            "logit_cap": (kind.is_gemma and self._number("final_logit_softcapping", 0.0)) or None,  # as in llama.cpp
            "attention_cap": self._own(SCORE_CAP, 0.0),
            "attention_scale": self._number("attention.scale", 0.0) or None,
            "attention_growth": self._number(TEMPERATURE, 0.0),
            "trained_positions": self._trained(sizes),
            "embedding_scale": self._own("embedding_scale", 1.0),
            "residual_scale": self._own("residual_scale", 1.0),
            "logit_scale": 1 / self._own("logit_scale", 1.0),
            **kind.settings,
            **(self._gemma(sizes) if kind.is_gemma else {}),
            **({"experts": self._experts(sizes)} if sizes.experts else {}),
        }

    def _own(self, key: str, neutral: float) -> float:
        """A number that files of some architectures have to have, and others cannot have."""
        return self._number(key, None if key in self._kind.keys else neutral)

    def _trained(self, sizes: Sizes) -> int:
        return self._size("rope.scaling.original_context_length", sizes.context)

    def _unrotated(self, layers: int, windowed: frozenset[int]) -> frozenset[int]:
        """SmolLM3's each n-th, EXAONE 4's full ones beside windowed ones, none or all of Granite's."""
        if "rope.scaling.finetuned" in self._kind.keys:
            return frozenset(range(layers if self._value("rope.scaling.finetuned") is False else 0))
        if self._kind.window_every:
            is_mixed = self._kind.unrotated_every and windowed
            return frozenset(range(layers)) - windowed if is_mixed else frozenset()
        return self._each(self._kind.unrotated_every, layers)

    def _window_base(self) -> float | None:
        base = self._kind.window_base
        return None if base is None else self._number(WINDOW_BASE, base or self._number("rope.freq_base", 10000.0))

    def _gemma(self, sizes: Sizes) -> dict[str, Any]:
        """llama.cpp scales the attention of Gemma's largest model by another width."""
        is_largest = sizes.layers == self._kind.largest
        divided = sizes.width // sizes.heads if is_largest else sizes.head_dim
        return {"attention_scale": float(divided**-0.5), "embedding_scale": float(sizes.width**0.5)}

    def _experts(self, sizes: Sizes) -> Experts:
        found = Experts(sizes.experts, self._size("expert_used_count"), sizes.expert_inner, **self._kind.experts)
        if found.inner % 16 or sizes.width % 16 or found.count > MOST_EXPERTS or found.used > MOST_USED:
            raise self._wrong(
                f"it uses {found.used} of {found.count} experts of {found.inner} x {sizes.width}; the kernels have at "
                f"most {MOST_USED} of {MOST_EXPERTS}, of sizes that 16 divides"
            )
        return found

    def _yarn(self, head_dim: int, factor: float, trained: int) -> tuple[float, ...]:
        """YaRN's divisors (Peng et al., 2023): none for what turns often enough, `factor` for what turns too rarely.

        Between the two a ramp, whose ends are rounded to whole frequencies. gpt-oss was trained without that, though
        llama.cpp rounds there, too.
        """
        base = self._number("rope.freq_base", 10000.0)
        turns = self._number(YARN_KEYS[0], 32.0), self._number(YARN_KEYS[1], 1.0)
        if not (base > 1 and min(turns) > 0 and factor >= 1):
            raise self._wrong("its rotary positions are scaled by settings that YaRN cannot have")
        low, high = (head_dim * math.log(trained / (each * 2 * math.pi)) / (2 * math.log(base)) for each in turns)
        if self._header.architecture != "gpt-oss":
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0.0), min(high, head_dim - 1.0)
        steps = np.arange(head_dim // 2) - low
        ramp = np.clip(steps / max(high - low, 1e-3), 0.0, 1.0)
        return tuple(float(each) for each in 1.0 / (ramp / factor + 1.0 - ramp))

    def _windowed(self, layers: int) -> frozenset[int]:
        """Layers with a window: a list of layers, each how many has none, or as the architecture has it."""
        if flags := self._items("attention.sliding_window_pattern"):
            if len(flags) != layers:
                raise self._wrong(f"its pattern of windows is for {len(flags)} layers, it has {layers}")
            return frozenset(layer for layer, flag in enumerate(flags) if flag)
        every = int(self._number("attention.sliding_window_pattern", self._kind.window_every))
        return frozenset(range(layers)) - self._each(every, layers)

    def _each(self, every: int, layers: int) -> frozenset[int]:
        return frozenset(range(every - 1, layers, every)) if every else frozenset()

    def _rotary(self, sizes: Sizes, num_rotated: int) -> dict[str, Any]:
        """Divisors of the rotary frequencies: stored ones times that of linear scaling, or YaRN's, and its scale."""
        kind = self._value("rope.scaling.type")
        if kind not in (None, "none", "linear", "yarn", "longrope"):
            raise self._wrong(f"its rotary positions are scaled by {str(kind)[:40]!r}, which is not known")
        # As llama.cpp reads them: linear where nothing is said, and the older name where the newer one is missing.
        factor = self._number("rope.scaling.factor", 0.0) or self._number("rope.scale_linear", 1.0)
        factor = 1.0 if kind == "none" else factor
        if not math.isfinite(factor) or factor <= 0:
            raise self._wrong(f"its rotary positions are scaled by {factor}")
        scale = self._number("rope.scaling.attn_factor", 1.0)
        if kind == "yarn":
            log = 0.1 * math.log(factor)
            yarn = (log + 1) / (log * self._number("rope.scaling.yarn_log_multiplier", 0.0) + 1)
            if (given := self._number(YARN_KEYS[2], yarn)) != 1 and abs(given - yarn) > 1e-3:
                raise self._wrong(f"its {YARN_KEYS[2]} is {given}; {yarn:g} is that of its factor {factor:g}")
            return {"rope_divisors": self._yarn(num_rotated, factor, self._trained(sizes)), "rope_scale": scale * yarn}
        stored, short, long = (
            tuple(factor * each for each in self._stored_factors(name, num_rotated)) for name in ROPE_FACTORS
        )
        linear = () if factor == 1 else (factor,) * (num_rotated // 2)
        return {"rope_divisors": stored or short or linear, "long_divisors": long, "rope_scale": scale}

    def _stored_factors(self, name: str, num_rotated: int) -> tuple[float, ...]:
        tensor = self._infos.get(name)
        if tensor is None:
            return ()
        if tensor.kind != "F32" or tensor.shape != (num_rotated // 2,):
            raise self._wrong(f"{name} is {tensor.kind} {tensor.shape}, F32 ({num_rotated // 2},) is needed")
        file, place = self._header.place_of(tensor, self._path)
        found = np.fromfile(file, np.float32, num_rotated // 2, offset=place)
        if not (np.isfinite(found).all() and (found > 0).all()):
            raise self._wrong(f"{name} contains values that cannot divide a frequency")
        return tuple(float(each) for each in found)

    def _sizes_of(self, layer: int, sizes: Sizes) -> Sizes:
        """Those of one layer; 0: outside of any, too."""
        return sizes

    def _tensors(self, sizes: Sizes) -> Tensors:
        """All tensors by Hugging Face name, of the shapes that sizes imply."""
        left, found = dict(self._infos), {}
        for name in ROPE_FACTORS:
            left.pop(name, None)
        for layer, name, tensor, own in self._places(sizes.layers):
            info = left.pop(own, None)
            if info is None and tensor.is_optional:
                continue
            wanted = self._sizes_of(layer, sizes).shape(tensor.shape)[::-1]
            if info is None or info.shape != wanted:
                what = "lacks it" if info is None else f"has {info.shape}"
                raise self._wrong(f"a {self._header.architecture} needs the tensor {own!r} of {wanted}, it {what}")
            found[name] = info, tensor
        if left:
            raise self._wrong(f"it holds {len(left)} tensors that are not known, such as {min(left)!r}")
        return found

    def _places(self, layers: int) -> Iterator[tuple[int, str, Tensor, str]]:
        """(layer, Hugging Face name, row of the table, GGUF name) of every tensor there may be."""
        for name, tensor in self._kind.outer.items():
            yield 0, name, tensor, tensor.name
        for layer in range(layers):
            for rest, tensor in self._layer_table(layer).items():
                yield layer, f"model.layers.{layer}.{rest}", tensor, f"blk.{layer}.{tensor.name}"

    def _layer_table(self, layer: int) -> Mapping[str, Tensor]:
        return self._kind.layer

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

    def _head_dim(self, default: int, kind: str = "") -> int:
        """Numbers of an attention head, of a key and of a value; `kind` "_swa": in layers with a window."""
        found = self._size(f"attention.key_length{kind}", default)
        if found % HEAD_MULTIPLE:
            raise self._wrong(
                f"it has attention heads of {found} values; ONNX Runtime's rotary attention needs a multiple of "
                f"{HEAD_MULTIPLE}"
            )
        return self._check_size(f"attention.value_length{kind}", found)

    def _num_rotated(self, sizes: Sizes) -> int:
        """How many of a head's values are rotated, on our kernels not always all."""
        rotated = self._size("rope.dimension_count", sizes.head_dim)
        if rotated % 2 or rotated > sizes.head_dim:
            raise self._wrong(f"its rope.dimension_count {rotated} is odd, or above its head size {sizes.head_dim}")
        is_writable = self._header.architecture in WRITABLE
        return self._check_size("rope.dimension_count", sizes.head_dim) if is_writable else rotated

    def _check_size(self, key: str, head_dim: int) -> int:
        if self._size(key, head_dim) != head_dim:
            raise self._wrong(f"its {key} {self._value(key)} is not its head size {head_dim}")
        return head_dim

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

    def _wrong(self, reason: str) -> ModelFileError:
        return ModelFileError(f"{self._path} cannot be converted to ONNX: {reason}")


class GgufTensors:
    """The tensors of an opened model. The output projection is `lm_head.weight`, also where it is the embedding."""

    def __init__(self, model: GgufModel) -> None:
        self._tensors, self._config = model.tensors, model.config
        self._path, self._header, self.is_tied = model.path, model.header, model.is_tied

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
        file, place = self._header.place_of(tensor, self._path)
        found = np.fromfile(file, np.uint8, (stop - start) * size, offset=place + start * size)
        if found.size < (stop - start) * size:
            raise ModelFileError(f"{file} became shorter while {tensor.name} was read. Download it again")
        return found.reshape(stop - start, size)

    def _order(self, count: int, row: Tensor) -> NDArray[np.intp] | None:
        """Where the rows of queries and keys lie: llama.cpp keeps rotary pairs side by side, Hugging Face in halves."""
        if row.change not in (PERMUTE_Q, PERMUTE_K):
            return None
        heads = self._config.num_heads if row.change == PERMUTE_Q else self._config.num_kv_heads
        rows, rotated = np.arange(count).reshape(heads, -1), self._config.num_rotated
        halves = rows[:, :rotated].reshape(heads, -1, 2).swapaxes(1, 2).reshape(heads, -1)
        found: NDArray[np.intp] = np.concatenate((halves, rows[:, rotated:]), axis=1).reshape(-1)
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
