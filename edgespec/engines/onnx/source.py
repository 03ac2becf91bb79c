"""What an ONNX model is opened from: an export's folder, or a GGUF whose blocks our kernels multiply as they are.

Of a GGUF the header becomes a graph in memory, and its weights are packed into tiles by all cores whenever it is
opened: that takes less time than reading a second copy from a disk would. Its tokenizer is written once into the cache
folder, since the library `tokenizers` reads a file of its own kind.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
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
from edgespec.errors import CapabilityError, ConfigError, ModelFileError, ModelNotFound, StateError
from edgespec.formats.gguf.check import check_gguf, head_kind, model_files
from edgespec.formats.gguf.header import TensorInfo, once
from edgespec.formats.gguf.model import GgufModel, GgufTensors, read_model
from edgespec.formats.gguf.tables import KINDS
from edgespec.formats.gguf.tokenizer import FILES, splitter_of, tokenizer_texts
from edgespec.formats.onnx.forms import EMBEDDING, HEAD
from edgespec.formats.onnx.gemma4 import Gemma4Config
from edgespec.formats.onnx.graph import MemoryWriter
from edgespec.formats.onnx.hybrid import HybridConfig
from edgespec.formats.onnx.llama import llama_graph, rotary_bytes
from edgespec.formats.onnx.tiles import Tiles, tiles_name
from edgespec.installation import IMPORT_FAILURES, has_memory_limit, not_importable
from edgespec.kernels import tiles
from edgespec.platform.disk_cache import cache_folder, file_key, key_of
from edgespec.platform.files import write_atomically
from edgespec.platform.machine import usable_processors

ALIGNMENT, TILE_ROWS = 64, 16  # bytes at which tiles begin, outputs of one
_WIDE_BITS, _NARROW_BITS, _NARROW_BLOCK = 5, 4.5, 32  # a weight: from which on matrices of drafts are narrowed; of Q4_0
CHUNK_BYTES = 4 << 20  # of a file that a thread packs at once
KEPT, MOST_KEPT = "vocabularies", 16  # tokenizers in the cache folder, up to 20 MB each
JSON_BYTES = 2  # of tokenizer.json, at most, for one of a GGUF's header
TOKENIZER_FORMAT = 1  # increase it when the conversion changes


class Source(ABC):
    """`path` as the user gave it; `folder`: of the tokenizer and its settings; `files` hold the graph and its weights.

    `mapped`: those of them that are read while the model is in use. `max_positions`: of a graph that is made for any
    number of them; None: the graph's tables say. `is_drafter`: for another model, whose tokenizer it uses, and whose
    keys and values where it `reads_cache`.
    """

    path: Path
    folder: Path
    files: tuple[Path, ...]
    mapped: tuple[Path, ...] = ()
    max_positions: int | None = None
    is_drafter: bool = False
    reads_cache: bool = False

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

    def reused_bytes(self) -> int:
        """Of the weights of its graph, what is in memory anyway."""
        return 0


def open_source(path: Path, *, is_draft: bool = False) -> Source:
    """`is_draft`: of another model, so that a GGUF's weights are made narrow.

    Raises ModelNotFound and ModelFileError, and for a GGUF CapabilityError where our kernels do not run it.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as exc:
        raise ModelFileError(f"{str(path)!a} is not valid UTF-8: rename the folder of the model") from exc
    return ExportFolder(path) if path.suffix == ".onnx" else GgufFile(path, is_narrow=is_draft)


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
    """A GGUF on our kernels, or the layer in it that predicts a further token (`nextn`). Raises as `open_source`."""

    def __init__(self, path: Path, *, nextn: bool = False, is_narrow: bool = False) -> None:
        self.path, self.files = path, model_files(path)
        self.model = readable_model(path, nextn=nextn)
        config = self.model.config
        self.max_positions = config.max_positions
        self.reads_cache = isinstance(config, Gemma4Config) and bool(config.target_width)
        self.is_drafter = self.reads_cache or (isinstance(config, HybridConfig) and config.is_nextn)
        self._version = tuple(map(file_key, self.files))
        self._packed: dict[str, NDArray[np.uint8]] = {}
        self._given: dict[str, NDArray[np.uint8]] = {}  # tiles of the model that it drafts for
        self._folder: Path | None = None
        self._is_part = False  # of a model that is in memory
        self.is_narrow = is_narrow

    @property
    def folder(self) -> Path:  # type: ignore[override]
        """Where its tokenizer is; written when it is first asked for."""
        if self._folder is None:
            self._folder = _tokenizer_folder(self.model)
        return self._folder

    def drafter(self, path: Path | None = None) -> GgufFile:
        """What drafts for this model: the layer in its file that predicts a further token, or what `path` holds.

        Embeddings and head that both have are this model's own arrays. Raises as `open_source`.
        """
        found = GgufFile(path or self.path, nextn=path is None)
        found._folder = self._folder
        if path is None:
            found._lend(self, {info.place: name for name, info in self._ends()})
        elif isinstance(found.model.config, Gemma4Config):
            found._read_cache_of(self)
        return found

    def first_layers(self, count: int) -> GgufFile:
        """The model that its first `count` layers and its head make, of the very same tiles.

        Raises ConfigError for a number outside 1..all but one, CapabilityError where layers read one another's keys.
        """
        config = self.model.config
        if not 0 < count < config.num_layers:
            raise ConfigError(
                f"an exit after layer {count} was asked for; {self.path.name} allows 1..{config.num_layers - 1}"
            )
        if isinstance(config, Gemma4Config):
            raise CapabilityError(f"{self.path.name} is a Gemma 4, whose layers share keys: use another drafter")
        if isinstance(config, HybridConfig):
            config = replace(config, recurrent_layers=config.recurrent_layers & set(range(count)))
        tensors = {name: each for name, each in self.model.tensors.items() if _layer_of(name) < count}
        found, found._is_part = copy(self), True
        found.model = replace(self.model, config=replace(config, num_layers=count), tensors=tensors)
        found.is_drafter = True
        return found

    def _lend(self, model: GgufFile, names: Mapping[tuple[int, int], str]) -> None:
        """Use tiles of `model`, whose tensors have these `names` by their place."""
        nothing = np.empty(0, np.uint8)  # before anything is packed, as in a plan
        for name, info in self._ends():
            if lent := names.get(info.place):
                self._given[name] = model._packed.get(tiles_name(lent), nothing)

    def _read_cache_of(self, model: GgufFile) -> None:
        """Let the layers of Gemma 4's drafter read the keys and values of the last two layers, and its embeddings."""
        config, whole = self.model.config, model.model.config
        assert isinstance(config, Gemma4Config)
        assert isinstance(whole, Gemma4Config)
        heads = [layer.first_head for layer in whole.layers[-2:]]  # of the windowed one, then of the full one
        layers = (
            replace(layer, first_head=heads[number not in config.windowed_layers])
            for number, layer in enumerate(config.layers)
        )
        self._given[EMBEDDING] = model._packed[tiles_name(EMBEDDING)]
        tensors = {**self.model.tensors, EMBEDDING: model.model.tensors[EMBEDDING]}
        self.model = replace(self.model, config=replace(config, layers=tuple(layers)), tensors=tensors)

    def _ends(self) -> Iterator[tuple[str, TensorInfo]]:
        tensors = self.model.tensors
        return ((name, tensors[name][0]) for name in (EMBEDDING, HEAD) if name in tensors)

    def _reused(self) -> set[str]:
        """The embeddings or the head, where these are tiles of the model's, or the first ones of the embeddings."""
        infos = dict(self._ends())
        is_tied = not self._given and HEAD in infos and infos[HEAD].place == infos[EMBEDDING].place
        return {*self._given, *([HEAD] if is_tied else [])}

    def reused_bytes(self) -> int:
        weights, matrices = (
            self._weights(),
            (name for name, (info, _) in self.model.tensors.items() if len(info.shape) > 1),
        )
        return sum(map(weights.num_bytes, matrices if self._is_part else self._reused()))

    def config(self) -> ModelConfig:
        found = self.model
        return ModelConfig(found.header.architecture, found.config.max_positions, found.config.head_dim)

    def graph(self, cells: int = 0) -> Any:
        return self._write(cells)[0]

    def _write(self, cells: int) -> tuple[Any, MemoryWriter]:
        config = replace(self.model.config, max_positions=max(cells, 1))
        data, weights = MemoryWriter(), self._weights()
        return llama_graph(config, data, lambda nodes: Tiles(weights, nodes)), data

    def weight_bytes(self, graph: Graph) -> int:
        reused = self._reused()
        weights, tensors = self._weights(), self.model.tensors
        return sum(weights.file_bytes(tensor) for name, (tensor, _) in tensors.items() if name not in reused)

    def _weights(self) -> GgufTiles:
        return GgufTiles(self.model, is_narrow=self.is_narrow)

    def arrays(self, cells: int) -> Mapping[str, NDArray[Any]]:
        _, data = self._write(cells)
        if not self._packed:
            self._packed = self._pack(data)
            if tuple(map(file_key, self.files)) != self._version:
                raise ModelFileError(f"{self.path} was changed while it was read: load it again")
        return {**data.arrays, **self._packed}

    def _pack(self, data: MemoryWriter) -> dict[str, NDArray[np.uint8]]:
        sizes = {name: data.later.pop(tiles_name(name))[0] for name in self._reused()}
        made = packed_tiles(data)
        for name, size in sizes.items():
            whole = self._given[name] if name in self._given else made[tiles_name(EMBEDDING)]
            made[tiles_name(name)] = whole[:size]
        return made

    def rotary_bytes(self, cells: int) -> int:
        return rotary_bytes(replace(self.model.config, max_positions=cells))

    def reading_bytes(self) -> int:
        largest = max(tensor.num_bytes for tensor in self.model.header.tensors)
        return usable_processors() * 2 * min(CHUNK_BYTES, largest)

    def tokenizer_bytes(self) -> int:
        return self.model.header.data_start * JSON_BYTES


def _layer_of(tensor: str) -> int:
    """The layer of a tensor by its Hugging Face name; -1: of none."""
    name = tensor.removeprefix("model.layers.")
    return -1 if name == tensor else int(name.partition(".")[0])


class GgufTiles(GgufTensors):
    """`TiledWeights` of a GGUF; `is_narrow`: matrices of more bits are made Q4_0, as a draft is as good with them.

    Of Qwen 0.5B's drafts for Qwen 1.5B as many tokens are right with Q4_0 as with its Q5_0, Q6_K and Q8_0 (4.50 of 6
    instead of 4.57 in code, 2.45 instead of 2.43 in humanities), and a token takes .75 of the time.
    """

    def __init__(self, model: GgufModel, *, is_narrow: bool = False) -> None:
        super().__init__(model)
        self._is_narrow = is_narrow

    def _is_made_narrow(self, tensor: TensorInfo) -> bool:
        weights, inputs = math.prod(tensor.shape), tensor.shape[0]
        is_wide = len(tensor.shape) == 2 and tensor.num_bytes > weights * _WIDE_BITS / 8
        return self._is_narrow and is_wide and not inputs % _NARROW_BLOCK

    def stored_kind(self, name: str) -> str:
        """The type of a matrix's tiles."""
        return "Q4_0" if self._is_made_narrow(self._matrix(name)[0]) else self.kind(name)

    def file_bytes(self, tensor: TensorInfo) -> int:
        """Bytes of a tensor in the file, or of what is made of it."""
        return int(math.prod(tensor.shape) * _NARROW_BITS / 8) if self._is_made_narrow(tensor) else tensor.num_bytes

    def type_number(self, name: str) -> int:
        return tiles.TYPES[self.stored_kind(name)]

    def num_bytes(self, name: str) -> int:
        found = tiles.packed_bytes(self.stored_kind(name), *self.shape(name))
        assert found is not None, f"{name} was checked by readable_model"
        return found

    def pack(self, name: str, out: NDArray[np.uint8]) -> list[Callable[[], None]]:
        outputs, inputs = self.shape(name)
        tile_bytes = self.num_bytes(name) // -(-outputs // TILE_ROWS)

        def fill(start: int, stop: int) -> None:
            kind, stored, rows = self.kind(name), self.stored_kind(name), self.some_rows(name, start, stop)
            made = rows if stored == kind else tiles.narrow(kind, rows, inputs)
            place = slice(start // TILE_ROWS * tile_bytes, -(-stop // TILE_ROWS) * tile_bytes)
            if made is None or not tiles.pack(stored, made, inputs, out[place]):
                raise self.wrong_numbers(name)

        return [partial(fill, start, stop) for start, stop in self.spans(name, CHUNK_BYTES, TILE_ROWS)]


def readable_model(path: Path, *, nextn: bool = False) -> GgufModel:
    """The model of a GGUF that our kernels run, from its header; `nextn`: the layer that predicts a further token.

    Raises ModelNotFound and ModelFileError for a damaged file, CapabilityError for one that llama.cpp has to run.
    """
    return once(f"on kernels {nextn}", path, lambda: _readable_model(path, nextn))


def _readable_model(path: Path, nextn: bool) -> GgufModel:
    header = check_gguf(path)
    if header.architecture not in KINDS:
        known = ", ".join(KINDS)
        raise CapabilityError(f"the kernels have no architecture {header.architecture!r}, only {known}")
    try:
        model = read_model(path, header, nextn=nextn or head_kind(header) == "mtp")
        splitter_of(header)
    except ModelFileError as exc:
        raise CapabilityError(str(exc).removeprefix(f"{path} cannot be converted to ONNX: ")) from exc
    weights = GgufTensors(model)
    for name, (tensor, _) in model.tensors.items():
        if len(tensor.shape) > 1 and tiles.packed_bytes(tensor.kind, *weights.shape(name)) is None:
            raise CapabilityError(f"it holds {tensor.name} as {tensor.kind} {tensor.shape}, which the kernels lack")
    return model


def packed_tiles(data: MemoryWriter) -> dict[str, NDArray[np.uint8]]:
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
