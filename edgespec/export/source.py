"""What an export is made of, from headers and small files alone; and whether disk and memory suffice for it, estimated
before it begins: upper limits.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.config.values import as_size
from edgespec.errors import CapabilityError, EdgespecError, ModelFileError
from edgespec.export.check import CHECK_CONTEXT, has_transformers, token_names
from edgespec.export.hub import CheckpointSource, card_licence, recommended_sampling
from edgespec.export.request import TILED, ExportRequest, Format
from edgespec.formats.architectures import ARCHITECTURES, LLAMA
from edgespec.formats.checkpoint import Checkpoint, named_architecture, read_json
from edgespec.formats.gguf.header import GgufHeader
from edgespec.formats.gguf.model import GgufModel
from edgespec.formats.manifest import read_pair
from edgespec.formats.onnx.llama_config import WRITABLE
from edgespec.platform.memory import free_memory

# Bits per weight, block scales included; for mixtures, of their heavier tensors.
BITS = {
    "f32": 32, "fp32": 32, "f16": 16, "bf16": 16,
    "q8_0": 8.5, "q6_k": 6.6, "q5_k_m": 5.8, "q5_k_s": 5.6, "q5_1": 6, "q5_0": 5.6,
    "q4_k_m": 5, "q4_k_s": 4.7, "q4_1": 5.1, "q4_0": 4.7, "iq4_nl": 4.7, "iq4_xs": 4.5,
    "q3_k_l": 4.4, "q3_k_m": 4.1, "q3_k_s": 3.7, "q2_k": 3.4,
    "iq3_m": 4, "iq3_s": 3.8, "int8": 9, "int4": 6.5,
}  # fmt: skip
PROGRAM_BYTES = 400 * 2**20  # the interpreter and its libraries
TORCH_BYTES = 500 * 2**20
SPARE = 1.05


class Weights(NamedTuple):
    """A GGUF that files are made of, and the type of most of it."""

    path: Path
    quant: str


@dataclass(frozen=True)
class SourceModel:
    """What a role is made of, as far as headers and small files tell: a GGUF, or the folder of a `checkpoint`.

    `num_parameters`, without a tied head, and `table_parameters`, of the input embedding, are numbers of weights;
    `stored_bytes`: size on disk; `said`: what the manifest says of it as a target; `weights`: the GGUF.
    """

    name: str
    architecture: str
    num_parameters: int
    table_parameters: int
    stored_bytes: int
    num_layers: int
    vocabulary_size: int
    token_names: list[str]
    said: Mapping[str, Any]
    weights: Weights | None = None
    checkpoint: CheckpointSource | None = None

    @property
    def missing(self) -> Mapping[str, int]:
        """The weights that have to be fetched: bytes by file."""
        return {} if self.checkpoint is None else self.checkpoint.missing

    @property
    def folder(self) -> Path | None:
        return None if self.checkpoint is None else self.checkpoint.folder

    def output_bytes(self, wanted: Format, quant: str) -> int:
        weights = self.num_parameters * BITS[quant] / 8
        if wanted == "onnx":  # with an embedding table of its own, which only some types quantise
            weights += self.table_parameters * (1.1 if quant in TILED else 4)
        return round(weights * SPARE)


def of_gguf(model: GgufModel) -> SourceModel:
    config, header = model.config, model.header
    said: dict[str, Any] = {
        "licence": str(header.metadata.get("general.license", "")),
        "context_length": config.max_positions,
    }
    with suppress(EdgespecError):  # the manifest beside the file
        pair = read_pair(model.path.parent)
        if any(file.path == model.path for file in pair.files.values()):
            said["sampling"] = dict(pair.recommended)
    return SourceModel(
        name=model.path.stem,
        architecture=WRITABLE[header.architecture][0],
        num_parameters=model.num_parameters,
        table_parameters=config.vocab_size * config.hidden_size,
        stored_bytes=header.data_bytes,
        num_layers=config.num_layers,
        vocabulary_size=config.vocab_size,
        token_names=[text.decode(errors="replace") for text in header.tokens],
        said=said,
        weights=Weights(model.path, _kind_of(header)),
    )


def _kind_of(header: GgufHeader) -> str:
    """The type of most of a file's bytes, such as q4_k."""
    sizes = Counter[str]()
    for tensor in header.tensors:
        sizes[tensor.kind.lower()] += tensor.num_bytes
    return sizes.most_common(1)[0][0]


def of_folder(source: CheckpointSource) -> SourceModel:
    """Exact if its weights are fetched, else estimated from the sizes of files.

    Raises ModelFileError for a config.json or tokenizer that cannot be read, or a damaged safetensors file.
    """
    config = read_json(source.folder / "config.json")
    nested = config.get("text_config")
    text = {**config, **(nested if isinstance(nested, dict) else {})}
    stored = sum(source.weights.values())
    width = 4 if text.get("dtype", text.get("torch_dtype")) == "float32" else 2
    said = {
        "licence": card_licence(source.folder),
        "context_length": _number(text, "max_position_embeddings", "n_positions", "n_ctx"),
        "sampling": recommended_sampling(source.folder),
    }
    return SourceModel(
        name=source.name,
        architecture=named_architecture(config),
        num_parameters=stored // width if source.missing else _num_parameters(Checkpoint.open(source.folder)),
        table_parameters=_number(text, "vocab_size") * _number(text, "hidden_size", "n_embd"),
        stored_bytes=stored,
        num_layers=_number(text, "num_hidden_layers", "n_layer"),
        vocabulary_size=_number(text, "vocab_size"),
        token_names=token_names(source.folder),
        said=said,
        checkpoint=source,
    )


def _num_parameters(checkpoint: Checkpoint) -> int:
    """Without a head that is tied to the embeddings."""
    sizes = {name: math.prod(checkpoint.tensors[name].shape) for name in checkpoint.tensors}
    if not sizes:
        raise ModelFileError(f"{checkpoint.folder} has no tensors")
    if ARCHITECTURES.get(checkpoint.architecture, LLAMA).is_tied(checkpoint.config) and len(sizes) > 1:
        sizes.pop("lm_head.weight", None)
    return sum(sizes.values())


def _number(config: Mapping[str, Any], *keys: str) -> int:
    found = next((config[key] for key in keys if isinstance(config.get(key), int)), 0)
    return int(found)


def disk_bytes(request: ExportRequest, models: Mapping[str, SourceModel]) -> int:
    """Of all files that are made of `models`, by role, and the largest of those that lie between meanwhile."""
    outputs = [
        model.output_bytes(to, request.quant_of(role, to)) for role, model in models.items() for to in request.formats
    ]
    between = max(_between_bytes(request, role, model) for role, model in models.items())
    return sum(outputs) + between + (0 if request.heads is None else request.heads.stat().st_size)


def _between_bytes(request: ExportRequest, role: str, model: SourceModel) -> int:
    """A folder's weights as a GGUF, their blocks for a graph, or Optimum's graph."""
    found = model.stored_bytes if request.has_gguf_between(role) else 0
    if request.exporter == "optimum":
        found += 4 * model.num_parameters
    elif "onnx" in request.formats and (quant := request.quant_of(role, "onnx")) in TILED:
        found += model.output_bytes("gguf", quant)
    return found


def memory_bytes(request: ExportRequest, models: Mapping[str, SourceModel]) -> int:
    """What the embeddings, the largest tensor, need, or the model that is compared."""
    most = 12 * max(model.table_parameters for model in models.values())
    largest = max(models.values(), key=lambda model: model.num_parameters)
    if request.exporter == "optimum":
        most = TORCH_BYTES + 8 * largest.num_parameters
    elif request.check:
        with_torch = not request.is_gguf and has_transformers()
        opened = TORCH_BYTES + 4 * largest.num_parameters if with_torch else largest.stored_bytes
        most = max(most, opened + 8 * CHECK_CONTEXT * largest.vocabulary_size)
    return PROGRAM_BYTES + most


def check_room(output: Path, disk: int, memory: int) -> None:
    """Raise CapabilityError with needed and available bytes if disk or memory do not suffice."""
    place = next(each for each in output.absolute().parents if each.exists())
    if disk > (free := free_bytes(place)):
        raise CapabilityError(
            f"not enough disk: the export needs {as_size(disk)} in {place}, {as_size(free)} are free. Free space, "
            "choose another disk with -o, or a smaller --quant"
        )
    available = free_memory()
    if available is not None and memory > available:
        raise CapabilityError(
            f"not enough memory: the export needs {as_size(memory)}, {as_size(available)} are available. Close other "
            "programs, or skip the comparison by --no-check"
        )


def free_bytes(place: Path) -> int:
    return shutil.disk_usage(place).free
