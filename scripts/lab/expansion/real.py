"""A real model at the cost of a bigger one, and drafts for it: the GGUF of a small Llama, expanded, without torch.

    OUTPUT/source/                  tokenizer and configuration of the GGUF, which all that is made reads
    OUTPUT/target-FORMAT            the expanded target: a folder (ONNX) or a file (.gguf)
    OUTPUT/draft-SIZE-FORMAT-...    the small model again as a draft, at its own cost or at that of a bigger one
    OUTPUT/heads-SIZE.npz           EAGLE heads of the GGUF, expanded like a target
    OUTPUT/FORMAT/                  a pair of both, as bench_peers.py takes it; with
    OUTPUT/checkpoints/ROLE/        the same as Hugging Face folders

The draft is the same
model with noise in its head, since no small model of the same family can be had here: what a real draft accepts depends
on two trainings, what this one accepts on the noise. Finished models are kept; another source or seed needs another
OUTPUT.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import ConfigError, ModelFileError
from edgespec.export.gguf.convert import FILE_TYPES, convert, quantise
from edgespec.export.onnx.weights import GgufWeights
from edgespec.export.onnx.writer import open_gguf
from edgespec.export.request import DEFAULT_GROUP_SIZES
from edgespec.export.workspace import write_manifest
from edgespec.formats.checkpoint import Checkpoint
from edgespec.formats.gguf.model import GgufModel
from edgespec.formats.gguf.tokenizer import write_tokenizer_files
from edgespec.formats.head_file import read_head_file, write_head_file
from edgespec.formats.manifest import sha256_of
from edgespec.formats.onnx.forms import Blocks, Form, LlamaWeights, QuantisedRows, RowWeights, WholeNumbers
from edgespec.formats.onnx.four_bits import OffsetBlocks
from edgespec.formats.onnx.graph import Nodes
from edgespec.formats.onnx.llama import write_llama
from edgespec.formats.onnx.llama_config import LlamaConfig
from edgespec.platform.files import atomic_file, atomic_folder
from edgespec.platform.machine import products_saturate
from expansion.heads import expanded_heads
from expansion.model import Expansion, Floats, Shape
from expansion.weights import ExpandedCheckpoint, ExpandedRows, ExpandedWeights, NoisyHead, RowCheckpoint

Progress = Callable[[int, int, str], None]
ONNX_FORMATS = ("w8a8", "int8", "int4")
GGUF_FORMATS = ("q8_0", *(name for name in FILE_TYPES if name != "q8_0"))
AS_IS = "135m"

# SmolLM2 has 30 layers with 9 + 3 heads of 64, and expansion keeps depth and the ratio of heads; the larger ones have
# about the weights of Llama 3.2 1B and 3B and Llama 3.1 8B without their vocabulary, in narrower and more layers.
DEEP_SHAPES = {
    "230m": Shape(768, 2048, 30, 12, 4, vocab_size=49_152),
    "360m": Shape(1024, 2560, 30, 15, 5, vocab_size=49_152),
    "1b": Shape(1792, 4608, 30, 24, 8, vocab_size=49_152),
    "3b": Shape(3072, 8192, 30, 36, 12, vocab_size=49_152),
    "8b": Shape(5120, 13824, 30, 60, 20, vocab_size=49_152),
}


@dataclass(frozen=True)
class RealBench:
    """What is made of the GGUF `source` in `output`. Raises ModelFileError for a GGUF that cannot be expanded."""

    source: Path
    output: Path
    seed: int = 0
    progress: Progress | None = None

    def target(self, size: str, kind: str, vocab_size: int | None = None) -> Path:
        """The expanded model as `kind`; its path. Raises ConfigError for an unknown size or format."""
        shape = _shape(size)
        if vocab_size is not None:
            shape = replace(shape, vocab_size=vocab_size)
        path = self._path(f"target-{size}" + (f"-vocab-{vocab_size}" if vocab_size else ""), kind)
        if not path.exists():
            self._write(path, kind, Expansion(self._checkpoint(self._weights), shape, self.seed))
        return path

    def draft(self, size: str, kind: str, sigma: float) -> Path:
        """The model with noise of `sigma` deviations in its head, expanded unless `size` is its own; its path."""
        path = self._path(f"draft-{size}-sigma-{sigma:g}", kind)
        if not path.exists():
            rows: RowWeights = NoisyHead(self._weights, sigma, self.seed) if sigma else self._weights
            checkpoint = self._checkpoint(rows)
            self._write(path, kind, checkpoint if size == AS_IS else Expansion(checkpoint, _shape(size), self.seed))
        return path

    def heads(self, path: Path, size: str) -> Path:
        """EAGLE heads of the model, expanded like the target; their path. Raises as `expanded_heads`."""
        made = self.output / f"heads-{size}.npz"
        if not made.exists():
            self.output.mkdir(parents=True, exist_ok=True)
            expansion = Expansion(self._checkpoint(self._weights), _shape(size), self.seed)
            # Rows with shares of two sizes would lose much in 8 bits with one scale.
            write_head_file(made, expanded_heads(read_head_file(path), expansion), "f16")
        return made

    def pair(self, target: Path, draft: Path) -> Path:
        """A folder named like the target's format, with both (as links to their files) and a manifest."""
        kind = target.name.removesuffix(".gguf").rpartition("-")[2]
        folder = self.output / kind
        with atomic_folder(folder) as made:
            suffix = ".gguf" if kind in GGUF_FORMATS else ""
            models = {role: made / f"{role}{suffix}" for role in ("target", "draft")}
            for path, linked in zip((target, draft), models.values(), strict=True):
                for file in [path] if path.is_file() else sorted(path.iterdir()):
                    place = linked if path.is_file() else linked / file.name
                    place.parent.mkdir(exist_ok=True)
                    place.hardlink_to(file)
            table = "files" if kind in GGUF_FORMATS else "onnx"
            for path in models.values() if table == "onnx" else ():
                config = json.loads((path / "config.json").read_text(encoding="utf-8"))
                (path / "genai_config.json").write_text(json.dumps(genai_config(config), indent=2), encoding="utf-8")
            entries = {role: entry_of(made, path) for role, path in models.items()}
            write_manifest(made, {"name": f"{self.output.name}-{kind}", "context_length": 2048, table: entries})
        return folder

    def checkpoints(self, size: str, sigma: float) -> None:
        """Hugging Face folders of the target and of the draft at its own size, for libraries that convert them."""
        expansion = Expansion(self._checkpoint(self._weights), _shape(size), self.seed)
        self._write_checkpoint("target", ExpandedCheckpoint.of(expansion))
        rows: RowWeights = NoisyHead(self._weights, sigma, self.seed) if sigma else self._weights
        self._write_checkpoint("draft", self._checkpoint(rows))

    def checkpoint(self) -> None:
        """The Hugging Face folder of the source itself, as a target."""
        self._write_checkpoint("target", self._checkpoint(self._weights))

    def _write_checkpoint(self, role: str, made: Checkpoint) -> None:
        folder = self.output / "checkpoints" / role
        if folder.exists():
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(folder) as partial_folder:
            shutil.copytree(self._companions, partial_folder, dirs_exist_ok=True)
            (partial_folder / "config.json").write_text(json.dumps(made.config, indent=2) + "\n", encoding="utf-8")
            shapes = {name: tensor.shape for name, tensor in made.tensors.items()}
            write_tensors(partial_folder / "model.safetensors", shapes, lambda name: [made.weights(name)])

    @cached_property
    def _model(self) -> GgufModel:
        return open_gguf(self.source)

    @cached_property
    def _weights(self) -> GgufWeights:
        return GgufWeights(self._model)

    @cached_property
    def _companions(self) -> Path:
        folder = self.output / "source"
        if not folder.exists():
            with atomic_folder(folder) as made:
                write_tokenizer_files(self._model.header, made)
                (made / "config.json").write_text(json.dumps(self._model.hub_config(), indent=2), encoding="utf-8")
        return folder

    def _checkpoint(self, rows: RowWeights) -> RowCheckpoint:
        return RowCheckpoint.of(rows, self._model.hub_config(), self._companions, tuple(self._model.tensors))

    def _path(self, name: str, kind: str) -> Path:
        if kind not in (*ONNX_FORMATS, *GGUF_FORMATS):
            raise ConfigError(f"no format {kind!r}; allowed: {', '.join((*ONNX_FORMATS, *GGUF_FORMATS))}")
        return self.output / (f"{name}-{kind}" + ("" if kind in ONNX_FORMATS else ".gguf"))

    def _write(self, path: Path, kind: str, made: Expansion | RowCheckpoint) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        told = self._told(path.name)
        if kind in ONNX_FORMATS:
            self._write_graph(path, kind, made, told)
        elif kind == "q8_0":
            convert(
                made if isinstance(made, RowCheckpoint) else ExpandedCheckpoint.of(made), path, "q8_0", progress=told
            )
        else:
            # 8 bits first: as floats a large model would take more disk than both results
            between = path.with_name(f"{path.stem.removesuffix(kind)}q8_0.gguf")
            is_new = not between.exists()
            if is_new:
                self._write(between, "q8_0", made)
            quantise(between, path, kind, may_requantise=True, progress=told)
            if is_new:
                between.unlink()

    def _write_graph(self, folder: Path, kind: str, made: Expansion | RowCheckpoint, told: Progress) -> None:
        config = made.config() if isinstance(made, Expansion) else made.config
        with atomic_folder(folder) as partial_folder:
            shutil.copytree(self._companions, partial_folder, dirs_exist_ok=True)
            (partial_folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            write_llama(
                partial_folder,
                LlamaConfig.from_hub(config),
                _form(kind, made),
                lambda done, total: told(done, total, "part"),
            )

    def _told(self, name: str) -> Progress:
        tell = self.progress
        return (lambda done, total, what: None) if tell is None else lambda done, total, _: tell(done, total, name)


def _form(kind: str, made: Expansion | RowCheckpoint) -> Callable[[Nodes], Form]:
    rows = ExpandedRows(made) if isinstance(made, Expansion) else made.rows
    size = DEFAULT_GROUP_SIZES[kind]
    if kind == "int4":
        return partial(OffsetBlocks, size, rows, None)
    if kind == "int8":
        return partial(Blocks, 8, size, rows)
    weights: LlamaWeights = ExpandedWeights(made) if isinstance(made, Expansion) else QuantisedRows(made.rows)
    return partial(WholeNumbers, weights, is_unsigned=products_saturate())


def _shape(size: str) -> Shape:
    if size not in DEEP_SHAPES:
        raise ConfigError(f"no size {size!r}; allowed: {', '.join(DEEP_SHAPES)}")
    return DEEP_SHAPES[size]


def compared(source: Path, paths: Sequence[Path], temporary: Path) -> dict[str, Any]:
    """Each model of `paths` against the float32 weights of `source`, over the exporter's probe texts, by name."""
    from edgespec.export.check import CHECK_CONTEXT, compare, engine_reference, open_engine

    exact = temporary / "float32.tmp.gguf"
    try:
        quantise(source, exact, "f32", may_requantise=True)
        with open_engine("gguf", exact, CHECK_CONTEXT, None) as engine:
            reference = engine_reference(engine, "llama.cpp on the source's weights as float32")
    finally:
        exact.unlink(missing_ok=True)
    found = {}
    for path in paths:
        is_gguf = path.suffix == ".gguf"
        file = path if is_gguf else path / "model.onnx"
        with open_engine("gguf" if is_gguf else "onnx", file, CHECK_CONTEXT, None) as engine:
            found[path.name] = compare(reference, engine)
    return found


def _dtype(shape: Sequence[int]) -> np.dtype[Any]:
    return np.dtype("<f2") if len(shape) == 2 else np.dtype("<f4")


def write_tensors(path: Path, shapes: Mapping[str, Sequence[int]], blocks: Callable[[str], Iterable[Floats]]) -> None:
    """One safetensors file, row block by row block: eight bytes of header length, the header, the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + int(np.prod(shape)) * _dtype(shape).itemsize
        kind = "F16" if _dtype(shape).itemsize == 2 else "F32"
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            for block in blocks(name):
                stored = block.astype(_dtype(shape))
                if not np.isfinite(stored).all():
                    raise ModelFileError(f"a weight of {name} is too large for float16")
                file.write(stored.tobytes())


def genai_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What onnxruntime-genai wants to know of a graph of edgespec's own, given its config.json."""
    names = {
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask"},
        "outputs": {"logits": "logits"},
    }
    for part in ("key", "value"):
        names["inputs"][f"past_{part}_names"] = f"past_key_values.%d.{part}"
        names["outputs"][f"present_{part}_names"] = f"present.%d.{part}"
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": "model.onnx",
        "head_size": config["head_dim"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_key_value_heads": config["num_key_value_heads"],
        **names,
    }
    length = config["max_position_embeddings"]
    return {
        "model": {
            "type": "llama",
            "vocab_size": config["vocab_size"],
            "context_length": length,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "decoder": decoder,
        },
        "search": {"max_length": length, "past_present_share_buffer": True},
    }


def entry_of(folder: Path, model: Path) -> dict[str, Any]:
    """A model's table in the manifest."""
    if model.is_file():
        return _facts(folder, model)
    graph = model / "model.onnx"
    return {**_facts(folder, graph), "parts": [_facts(folder, path) for path in _files(model) if path != graph]}


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _facts(folder: Path, path: Path) -> dict[str, Any]:
    return {"path": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": sha256_of(path)}
