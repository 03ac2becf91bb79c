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
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgespec.engines.onnx.graph import HIDDEN, LOGITS, Graph, check_weight_files, read_graph
from edgespec.engines.onnx.library import open_session
from edgespec.engines.onnx.settings import CONFIGS, ModelConfig
from edgespec.engines.onnx.tokenizer import TokenizerFile, tokenizer_file
from edgespec.errors import CapabilityError, ConfigError, ModelFileError, ModelNotFound, StateError
from edgespec.formats.gguf.check import check_gguf, head_kind, model_files
from edgespec.formats.gguf.header import TensorInfo, once
from edgespec.formats.gguf.model import GgufModel, GgufTensors, read_model
from edgespec.formats.gguf.tables import KINDS
from edgespec.formats.gguf.tokenizer import FILES, splitter_of, tokenizer_texts
from edgespec.formats.onnx.dflash import CONFIDENCE, FOLLOWERS, MARKOV, SELECTOR, BlockConfig
from edgespec.formats.onnx.eagle import ENCODER, HeadConfig
from edgespec.formats.onnx.forms import EMBEDDING, HEAD
from edgespec.formats.onnx.gemma4 import Gemma4Config
from edgespec.formats.onnx.graph import Fill, MemoryWriter, Nodes
from edgespec.formats.onnx.hybrid import HybridConfig
from edgespec.formats.onnx.llama import llama_graph, rotary_bytes
from edgespec.formats.onnx.llama_config import LlamaConfig
from edgespec.formats.onnx.tiles import Tiles, tiles_name
from edgespec.kernels import interface
from edgespec.platform.disk_cache import file_key, key_of
from edgespec.platform.files import user_folder, write_atomically
from edgespec.platform.machine import usable_processors

TILE_ROWS = 16  # outputs of a tile
_WIDE_BITS, _NARROW_BITS, _NARROW_BLOCK = 5, 4.5, 32  # a weight: from which on matrices of drafts are narrowed; of Q4_0
_NARROWED_FROM = 256 << 20  # bytes of a draft; in a smaller one each bit of a weight tells
CHUNK_BYTES = 4 << 20  # of a file that a thread packs at once
KEPT, MOST_KEPT = "vocabularies", 16  # tokenizers in the cache folder, up to 20 MB each
Place = tuple[Path, int, int]  # the file of a matrix, its part, the byte at which it begins
Key = TypeVar("Key")
TOKENIZER_FORMAT = 1  # increase it when the conversion changes


class GraphSource(ABC):
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

    def weight_bytes(self, graph: Graph) -> int:
        """Bytes of all weights, as they are in the files."""
        return graph.weight_bytes

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """The weights that a session of the latest `graph` has to be given, by name."""
        return {}


def open_source(path: Path, *, is_draft: bool = False) -> GraphSource:
    """`is_draft`: of another model, so that a GGUF's weights are made narrow.

    Raises ModelNotFound and ModelFileError, and for a GGUF CapabilityError where our kernels do not run it.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as exc:
        raise ModelFileError(f"{str(path)!a} is not valid UTF-8: rename the folder of the model") from exc
    return ExportFolder(path) if path.suffix == ".onnx" else GgufFile(path, is_narrow=is_draft)


class ExportFolder(GraphSource):
    """`model.onnx`, with its weights, its tokenizer and its settings beside it."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path.parent
        beside = (each for pattern in ("*.data", "*.onnx_data*") for each in path.parent.glob(pattern))
        self.files = self.mapped = (path, *sorted(beside))

    def config(self) -> ModelConfig:
        tokenizer_file(self.folder)  # so that a missing one is noticed before anything is loaded
        return ModelConfig.read(self.folder)

    def graph(self, cells: int = 0) -> Any:
        path = self.path
        if not path.is_file():
            raise ModelNotFound(f"no file {str(path)!r}: give the model.onnx of an export")
        try:
            model = onnx.load(str(path), load_external_data=False)
        except (DecodeError, OSError, ValueError) as exc:
            raise ModelFileError(f"{path} is not an ONNX file that can be read: {exc}. Export it again") from exc
        if not model.graph.node:
            raise ModelFileError(f"{path} is not an ONNX model: it holds no operators. Export it again")
        check_weight_files(model.graph, path)
        return model


class GgufFile(GraphSource):
    """A GGUF on our kernels, or the layer in it that predicts a further token (`nextn`). Raises as `open_source`."""

    def __init__(self, path: Path, *, nextn: bool = False, is_narrow: bool = False) -> None:
        self.path, self.files = path, model_files(path)
        self.model = readable_model(path, nextn=nextn)
        config = self.model.config
        self.max_positions = config.max_positions
        self.reads_cache = isinstance(config, Gemma4Config) and bool(config.target_width)
        self.is_drafter = nextn or head_kind(self.model.header) is not None
        self._version = tuple(map(file_key, self.files))
        self._tiles: dict[Place, NDArray[np.uint8]] = {}  # shared with what drafts for this model
        # Tiles that are in memory for another model.
        self._lent = frozenset((path, *info.place) for info, _ in self.model.tensors.values() if info.offset < 0)
        self._files: dict[str, Path] = {}  # of matrices that are another model's
        self._data = MemoryWriter()  # of the latest graph
        self._folder: Path | None = None
        is_large = sum(file.stat().st_size for file in self.files) >= _NARROWED_FROM
        self.is_narrow = is_narrow and is_large and not self.is_drafter

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
        found = GgufFile(path or self.path, nextn=path is None, is_narrow=self.is_narrow)
        found._folder, found._tiles, found._lent = self._folder, self._tiles, frozenset(self._places().values())
        if isinstance(found.model.config, Gemma4Config):
            found._read_cache_of(self)
        elif missing := [name for name, (info, _) in found.model.tensors.items() if info.offset < 0]:
            found._read_tables_of(self, missing)
        return found

    def first_layers(self, count: int) -> GgufFile:
        """The model that its first `count` layers and its head make, of the very same tiles.

        Raises ConfigError for a number outside 1..all but one, CapabilityError where layers read one another's keys.
        """
        config = self.model.config
        recurrent = config.recurrent_layers if isinstance(config, HybridConfig) else frozenset()
        least = 1 + next(layer for layer in range(config.num_layers) if layer not in recurrent)  # a cache is needed
        if not least <= count < config.num_layers:
            raise ConfigError(
                f"an exit after layer {count} was asked for; {self.path.name} allows {least}..{config.num_layers - 1}"
            )
        if isinstance(config, Gemma4Config):
            raise CapabilityError(f"{self.path.name} is a Gemma 4, whose layers share keys: use another drafter")
        if isinstance(config, HybridConfig):
            config = replace(config, recurrent_layers=config.recurrent_layers & set(range(count)))
        tensors = {name: each for name, each in self.model.tensors.items() if _layer_of(name) < count}
        found = copy(self)
        found.model = replace(self.model, config=replace(config, num_layers=count), tensors=tensors)
        found.is_drafter = True
        found._lent = frozenset(found._places().values())
        return found

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
        self.model = replace(self.model, config=replace(config, layers=tuple(layers)))
        self._read_tables_of(model, [EMBEDDING])

    def _read_tables_of(self, model: GgufFile, names: list[str]) -> None:
        """Let embeddings or head be those of another model, whose head may be its embeddings."""
        tensors = model.model.tensors
        own = {name: tensors.get(name, tensors[EMBEDDING]) for name in names}
        self._files = dict.fromkeys(names, model.path)
        self.model = replace(self.model, tensors={**self.model.tensors, **own})

    def _places(self) -> dict[str, Place]:
        """Of all tensors, by name: two can be one."""
        tensors = self.model.tensors.items()
        return {name: (self._files.get(name, self.path), *info.place) for name, (info, _) in tensors}

    def _own(self, lent: frozenset[Place]) -> set[str]:
        """The tensors that are not `lent`, each once."""
        places = reversed(self._places().items())
        return set({place: name for name, place in places if place not in lent}.values())

    def packed_bytes(self, graph: Graph, cells: int) -> int:
        """What it adds to memory, with rotary tables for so many `cells`."""
        weights, tensors = self._weights(), self.model.tensors
        reused = (name for name in tensors.keys() - self._own(self._lent) if len(tensors[name][0].shape) > 1)
        tables = rotary_bytes(replace(self.model.config, max_positions=cells))
        apart = (name for name in (ENCODER, MARKOV, FOLLOWERS, CONFIDENCE, SELECTOR) if name in tensors)
        tables *= 2 if isinstance(self.model.config, BlockConfig) else 1  # its encoder has them, too
        return graph.weight_bytes + sum(map(weights.num_bytes, apart)) - sum(map(weights.num_bytes, reused)) + tables

    def config(self) -> ModelConfig:
        found = self.model
        return ModelConfig(found.header.architecture, found.config.max_positions, found.config.head_dim)

    def graph(self, cells: int = 0) -> Any:
        return self._written(replace(self.model.config, max_positions=max(cells, 1)))

    def _written(self, config: LlamaConfig) -> Any:
        self._data, weights = MemoryWriter(), self._weights()
        return llama_graph(config, self._data, lambda nodes: Tiles(weights, nodes))

    def part(self, name: Literal["encoder", "chain"], cells: int) -> bytes:
        """The graph of a part of a head for so many `cells`; `arrays` are then its weights."""
        config = self.model.config
        assert isinstance(config, HeadConfig)
        found: bytes = self._written(replace(config, part=name, max_positions=cells)).SerializeToString()
        return found

    @property
    def feature_size(self) -> int:
        """The width of the target's states that a head reads for one token; 0: that of its own states."""
        config = self.model.config
        return config.feature_size if isinstance(config, HeadConfig) else 0

    @property
    def num_unscored(self) -> int:
        """How many tokens a layer that predicts a further one leaves out."""
        config = self.model.config
        return len(self.model.header.tokens) - config.vocab_size if isinstance(config, HybridConfig) else 0

    def rest_of_head(self) -> tuple[bytes, Mapping[str, NDArray[Any]]] | None:
        """A graph of logits of the tokens that are left out, from states, and its weights; None if these are nowhere.

        They are those of the model that this drafts for, which has all of the head in memory.
        """
        weights, place = self._weights(), self._places().get(HEAD)
        whole, size = self._tiles.get(place) if place else None, weights.num_bytes(HEAD)
        if whole is None or not self.num_unscored:
            return None
        info, row = self.model.tensors[HEAD]
        (width, count), left = info.shape, self.num_unscored
        rest = replace(info, shape=(width, left), num_bytes=info.num_bytes // count * left)
        model = replace(self.model, tensors={**self.model.tensors, HEAD: (rest, row)})
        weights, nodes = GgufTiles(model, is_narrow=self.is_narrow), Nodes(MemoryWriter())
        if size + weights.num_bytes(HEAD) != whole.nbytes:
            return None
        Tiles(weights, nodes).product("/rest/MatMul", HIDDEN, [HEAD], LOGITS)
        values = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", size])
            for name, size in ((HIDDEN, width), (LOGITS, left))
        ]
        return nodes.model(values[:1], values[1:]).SerializeToString(), {tiles_name(HEAD): whole[size:]}

    def weight_bytes(self, graph: Graph) -> int:
        own = self._own(self._lent) or self._own(frozenset())  # of a part of a model all
        return sum(self._weights().file_bytes(self.model.tensors[name][0]) for name in own)

    def _weights(self) -> GgufTiles:
        return GgufTiles(self.model, is_narrow=self.is_narrow)

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        later, self._data.later = self._data.later, {}  # what fills tiles refers to the graph, and that to it
        places = {tiles_name(name): place for name, place in self._places().items()}
        missing: dict[Place, tuple[int, Fill]] = {}
        for name, wanted in later.items():  # in the order in which they are read
            if places[name] not in self._tiles:
                missing.setdefault(places[name], wanted)
        self._tiles.update(packed_tiles(missing))
        if missing and tuple(map(file_key, self.files)) != self._version:
            raise ModelFileError(f"{self.path} was changed while it was read: load it again")
        for name, (size, _) in later.items():
            self._data.arrays[name] = self._tiles[places[name]][:size]
        return self._data.arrays


def all_files(path: Path) -> list[Path]:
    named = (path.parent / name for name in (*CONFIGS, "tokenizer.json", "tokenizer_config.json"))
    return [*ExportFolder(path).files, *(file for file in named if file.is_file())]


def try_folder(path: Path) -> None:
    """In a trial process: read everything that may end one. Raises EdgespecError for a model that cannot be used.

    It runs no pass: without packed weights one takes 17 s on a model of 1.2 billion weights, and packing them takes as
    long as the load itself. `OnnxEngine.load` checks the logits of its first pass instead.
    """
    source = open_source(path)
    graph = read_graph(source)
    source.config()
    open_session(graph.serialised, path.parent, is_trial=True)
    vocabulary = TokenizerFile(path.parent, graph.vocabulary_size)
    vocabulary.encode("".join(map(chr, range(256))), parse_special=True)
    _ = vocabulary.pieces


def _layer_of(tensor: str) -> int:
    """The layer of a tensor by its Hugging Face name; -1: of none."""
    name = tensor.removeprefix("model.layers.")
    return -1 if name == tensor else int(name.partition(".")[0])


class GgufTiles(GgufTensors):
    """`TiledWeights` of a GGUF; `is_narrow`: matrices of more bits are made Q4_0, as a draft is as good with them.

    Of Qwen 0.5B's drafts for Qwen 1.5B as many tokens are right with Q4_0 as with its Q5_0, Q6_K and Q8_0 (4.50 of 6
    instead of 4.57 in code, 2.45 instead of 2.43 in humanities), and a token takes .75 of the time. Embeddings and the
    head stay: with SmolLM2's head in Q4_0 a tenth fewer tokens were right. So do drafts of its size: from Q5_0 and Q8_0
    to Q4_0 acceptance fell from .51 to .36.
    """

    def __init__(self, model: GgufModel, *, is_narrow: bool = False) -> None:
        super().__init__(model)
        self._is_narrow = is_narrow

    def _is_made_narrow(self, tensor: TensorInfo) -> bool:
        weights, inputs = math.prod(tensor.shape), tensor.shape[0]
        is_wide = len(tensor.shape) == 2 and tensor.num_bytes > weights * _WIDE_BITS / 8
        is_vocabulary = tensor.place in (self._matrix(EMBEDDING)[0].place, self._matrix(HEAD)[0].place)
        return self._is_narrow and is_wide and not is_vocabulary and not inputs % _NARROW_BLOCK

    def stored_kind(self, name: str) -> str:
        return "Q4_0" if self._is_made_narrow(self._matrix(name)[0]) else self.kind(name)

    def file_bytes(self, tensor: TensorInfo) -> int:
        """Bytes of a tensor in the file, or of what is made of it."""
        return int(math.prod(tensor.shape) * _NARROW_BITS / 8) if self._is_made_narrow(tensor) else tensor.num_bytes

    def type_number(self, name: str) -> int:
        return interface.TYPES[self.stored_kind(name)]

    def num_bytes(self, name: str) -> int:
        found = interface.packed_bytes(self.stored_kind(name), *self.shape(name))
        assert found is not None, f"{name} was checked by readable_model"
        return found

    def pack(self, name: str, out: NDArray[np.uint8]) -> list[Callable[[], None]]:
        outputs, inputs = self.shape(name)
        tile_bytes = self.num_bytes(name) // -(-outputs // TILE_ROWS)

        def fill(start: int, stop: int) -> None:
            kind, stored, rows = self.kind(name), self.stored_kind(name), self.some_rows(name, start, stop)
            made = rows if stored == kind else interface.narrow(kind, rows, inputs)
            place = slice(start // TILE_ROWS * tile_bytes, -(-stop // TILE_ROWS) * tile_bytes)
            if made is None or not interface.pack(stored, made, inputs, out[place]):
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
        if len(tensor.shape) > 1 and interface.packed_bytes(tensor.kind, *weights.shape(name)) is None:
            raise CapabilityError(f"it holds {tensor.name} as {tensor.kind} {tensor.shape}, which the kernels lack")
    return model


def packed_tiles(wanted: Mapping[Key, tuple[int, Fill]]) -> dict[Key, NDArray[np.uint8]]:
    """Tiles of which bytes and filling are given, in one block of memory: numpy asks for huge pages."""
    places, size = {}, 0
    for key, (num_bytes, _) in wanted.items():
        places[key] = size, num_bytes
        size += -(-num_bytes // interface.LINE) * interface.LINE
    whole = interface.zeros(size)
    found = {key: whole[start : start + num_bytes] for key, (start, num_bytes) in places.items()}
    calls = [call for key, (_, fill) in wanted.items() for call in fill(found[key])]
    with ThreadPoolExecutor(usable_processors(), "edgespec-packing") as pool:
        for each in [pool.submit(call) for call in calls]:
            each.result()
    return found


def _tokenizer_folder(model: GgufModel) -> Path:
    """The folder with the tokenizer of a GGUF, made now or by an earlier load; of this process alone where it must."""
    key = key_of("tokenizer", TOKENIZER_FORMAT, file_key(model.path))
    folder = user_folder("cache") / KEPT / key
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
