"""What an ONNX model is opened from: an export's folder, or a GGUF whose blocks our kernels multiply as they are.

Of a GGUF the header becomes a graph in memory, and its weights are packed into tiles by all cores whenever it is
opened: that takes less time than reading a second copy from a disk would. Its tokenizer is written once into the cache
folder, since the library `tokenizers` reads a file of its own kind.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.onnx.graph import Graph, check_weight_files
from edgespec.engines.onnx.pages import untouched_zeros
from edgespec.engines.onnx.settings import ModelConfig
from edgespec.engines.onnx.tokenizer import tokenizer_file
from edgespec.errors import CapabilityError, ModelFileError, ModelNotFound, StateError
from edgespec.formats.gguf.check import check_gguf, model_files
from edgespec.formats.gguf.header import once
from edgespec.formats.gguf.model import KINDS, GgufModel, GgufTensors, read_model
from edgespec.formats.gguf.tokenizer import FILES, splitter_of, tokenizer_texts
from edgespec.formats.onnx.graph import MemoryWriter
from edgespec.formats.onnx.llama import llama_graph, rotary_bytes
from edgespec.formats.onnx.tiles import Tiles
from edgespec.installation import IMPORT_FAILURES, has_memory_limit, not_importable
from edgespec.kernels import tiles
from edgespec.platform.disk_cache import cache_folder, file_key, key_of
from edgespec.platform.files import write_atomically
from edgespec.platform.machine import usable_processors

ALIGNMENT, TILE_ROWS = 64, 16  # bytes at which tiles begin, outputs of one
CHUNK_BYTES = 4 << 20  # of a file that a thread packs at once
KEPT, MOST_KEPT = "vocabularies", 16  # tokenizers in the cache folder, up to 20 MB each
JSON_BYTES = 2  # of tokenizer.json, at most, for one of a GGUF's header
TOKENIZER_FORMAT = 1  # increase it when the conversion changes


class Source(ABC):
    """`path` as the user gave it; `folder`: of the tokenizer and its settings; `files` hold the graph and its weights.

    `mapped`: those of them that are read while the model is in use. `max_positions`: of a graph that is made for any
    number of them; None: the graph's tables say.
    """

    path: Path
    folder: Path
    files: tuple[Path, ...]
    mapped: tuple[Path, ...] = ()
    max_positions: int | None = None

    @abstractmethod
    def graph(self, cells: int = 0) -> Any:
        """The graph, a new ModelProto. `cells`: positions that it needs, where `max_positions` is known."""

    @abstractmethod
    def config(self) -> ModelConfig:
        """What is said of the model beside its graph."""

    @abstractmethod
    def tokenizer_bytes(self) -> int:
        """Size of its tokenizer.json, or what it is at most."""

    def weight_bytes(self, graph: Graph) -> int:
        """Bytes of all weights, as they are in the files."""
        return graph.weight_bytes

    def arrays(self, cells: int) -> Mapping[str, NDArray[Any]]:
        """The weights that a session of `graph(cells)` has to be given, by name."""
        return {}

    def reading_bytes(self) -> int:
        """What is in memory only while `arrays` are made."""
        return 0

    def rotary_bytes(self, cells: int) -> int:
        """Size of rotary tables that are made for so many `cells`."""
        return 0


def open_source(path: Path) -> Source:
    """Raises ModelNotFound and ModelFileError, and for a GGUF CapabilityError where our kernels do not run it."""
    try:
        str(path).encode()
    except UnicodeEncodeError as exc:
        raise ModelFileError(f"{str(path)!a} is not valid UTF-8: rename the folder of the model") from exc
    return ExportFolder(path) if path.suffix == ".onnx" else GgufFile(path)


class ExportFolder(Source):
    """`model.onnx`, with its weights, its tokenizer and its settings beside it."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path.parent
        beside = (each for pattern in ("*.data", "*.onnx_data*") for each in path.parent.glob(pattern))
        self.files = self.mapped = (path, *sorted(beside))

    def config(self) -> ModelConfig:
        return ModelConfig.read(self.folder)

    def tokenizer_bytes(self) -> int:
        return tokenizer_file(self.folder).stat().st_size

    def graph(self, cells: int = 0) -> Any:
        try:
            import onnx
            from google.protobuf.message import DecodeError
        except IMPORT_FAILURES as exc:
            raise not_importable("reading ONNX files", exc, "onnx") from exc
        path = self.path
        if not path.is_file():
            raise ModelNotFound(f"no file {str(path)!r}: give the model.onnx of an export")
        try:
            model = onnx.load(str(path), load_external_data=False)
        except (DecodeError, OSError, ValueError) as exc:
            if has_memory_limit() and "alloc" in str(exc):  # protobuf tells it in words only
                raise CapabilityError(
                    f"{path} needs more memory than this process may have ({exc}). Raise its limits (ulimit -v, "
                    "ulimit -d)"
                ) from exc
            raise ModelFileError(f"{path} is not an ONNX file that can be read: {exc}. Export it again") from exc
        if not model.graph.node:
            raise ModelFileError(f"{path} is not an ONNX model: it holds no operators. Export it again")
        check_weight_files(model.graph, path)
        return model


class GgufFile(Source):
    """A GGUF on our kernels. Raises as `open_source`."""

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, (path,)
        self._model = readable_model(path)
        self.max_positions = self._model.config.max_positions
        self._version = file_key(path)
        self._packed: dict[str, NDArray[np.uint8]] = {}
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:  # type: ignore[override]
        """Where its tokenizer is; written when it is first asked for."""
        if self._folder is None:
            self._folder = _tokenizer_folder(self._model)
        return self._folder

    def config(self) -> ModelConfig:
        found = self._model
        return ModelConfig(found.kind.model_type, found.config.max_positions, found.config.head_dim)

    def graph(self, cells: int = 0) -> Any:
        return self._write(cells)[0]

    def _write(self, cells: int) -> tuple[Any, MemoryWriter]:
        config = replace(self._model.config, max_positions=max(cells, 1))
        data, weights = MemoryWriter(), GgufTiles(self._model)
        return llama_graph(config, data, lambda nodes: Tiles(weights, nodes)), data

    def weight_bytes(self, graph: Graph) -> int:
        return sum(tensor.num_bytes for tensor in self._model.header.tensors)

    def arrays(self, cells: int) -> Mapping[str, NDArray[Any]]:
        _, data = self._write(cells)
        if not self._packed:
            self._packed = _packed(data)
            if file_key(self.path) != self._version:
                raise ModelFileError(f"{self.path} was changed while it was read: load it again")
        return {**data.arrays, **self._packed}

    def rotary_bytes(self, cells: int) -> int:
        return rotary_bytes(replace(self._model.config, max_positions=cells))

    def reading_bytes(self) -> int:
        largest = max(tensor.num_bytes for tensor in self._model.header.tensors)
        return usable_processors() * 2 * min(CHUNK_BYTES, largest)

    def tokenizer_bytes(self) -> int:
        return self._model.header.data_start * JSON_BYTES


class GgufTiles(GgufTensors):
    """`TiledWeights` of a GGUF."""

    def type_number(self, name: str) -> int:
        return tiles.TYPES[self.kind(name)]

    def num_bytes(self, name: str) -> int:
        found = tiles.packed_bytes(self.kind(name), *self.shape(name))
        assert found is not None, f"{name} was checked by readable_model"
        return found

    def pack(self, name: str, out: NDArray[np.uint8]) -> list[Callable[[], None]]:
        outputs, inputs = self.shape(name)
        tile_bytes = self.num_bytes(name) // -(-outputs // TILE_ROWS)

        def fill(start: int, stop: int) -> None:
            rows = self.some_rows(name, start, stop)
            place = slice(start // TILE_ROWS * tile_bytes, -(-stop // TILE_ROWS) * tile_bytes)
            if not tiles.pack(self.kind(name), rows, inputs, out[place]):
                raise self.wrong_numbers(name)

        return [partial(fill, start, stop) for start, stop in self.spans(name, CHUNK_BYTES, TILE_ROWS)]


def readable_model(path: Path) -> GgufModel:
    """The model of a GGUF that our kernels run, from its header.

    Raises ModelNotFound and ModelFileError for a damaged file, CapabilityError for one that llama.cpp has to run.
    """
    return once("on kernels", path, lambda: _readable_model(path))


def _readable_model(path: Path) -> GgufModel:
    header = check_gguf(path)
    if len(model_files(path)) > 1:
        raise CapabilityError("it is one of several files of a model")
    if header.architecture not in KINDS:
        known = ", ".join(KINDS)
        raise CapabilityError(f"the kernels have no architecture {header.architecture!r}, only {known}")
    try:
        model = read_model(path, header)
        splitter_of(header)
    except ModelFileError as exc:
        raise CapabilityError(str(exc).removeprefix(f"{path} cannot be converted to ONNX: ")) from exc
    weights = GgufTensors(model)
    for name, (tensor, _) in model.tensors.items():
        if len(tensor.shape) > 1 and tiles.packed_bytes(tensor.kind, *weights.shape(name)) is None:
            raise CapabilityError(f"it holds {tensor.name} as {tensor.kind} {tensor.shape}, which the kernels lack")
    return model


def _packed(data: MemoryWriter) -> dict[str, NDArray[np.uint8]]:
    """All tiles, in one block of memory, which is asked for in huge pages."""
    places, size = {}, 0
    for name, (num_bytes, _) in data.later.items():
        places[name] = size, num_bytes
        size += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    whole = untouched_zeros(size, np.uint8, huge_pages=True)
    found = {name: whole[start : start + num_bytes] for name, (start, num_bytes) in places.items()}
    calls = [call for name, (_, fill) in data.later.items() for call in fill(found[name])]
    with ThreadPoolExecutor(usable_processors(), "edgespec-packing") as pool:
        for each in [pool.submit(call) for call in calls]:
            each.result()
    return found


def _tokenizer_folder(model: GgufModel) -> Path:
    """The folder with the tokenizer of a GGUF, made now or by an earlier load; of this process alone where it must."""
    key = key_of("tokenizer", TOKENIZER_FORMAT, file_key(model.path))
    folder = cache_folder() / KEPT / key
    if all((folder / name).is_file() for name in FILES):
        with suppress(OSError):
            os.utime(folder)  # the last used are kept
        return folder
    texts = tokenizer_texts(model.header)
    try:
        for name, text in texts.items():
            write_atomically(folder / name, text, parents=True, durable=False)
    except StateError:
        folder = Path(tempfile.mkdtemp(prefix="edgespec-"))
        weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        return folder
    with suppress(OSError):
        kept = sorted(folder.parent.iterdir(), key=lambda each: each.stat().st_mtime)
        for old in kept[:-MOST_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    return folder
