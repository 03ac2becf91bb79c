"""Which engine runs a GGUF: our kernels in ONNX Runtime where they can, else llama.cpp; and the heads shipped for it.

On the processor the kernels give rows of a pass that cost little and have the same bits beside any others. What they
lack stays with llama.cpp: GPUs, other architectures, heads in GGUF, caches of other types.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from edgespec.config.options import LoadOptions
from edgespec.engines.llamacpp.library import has_gpu
from edgespec.errors import CapabilityError, EdgespecError, ModelFileError
from edgespec.formats.gguf.check import gives_only_embeddings, has_mtp
from edgespec.formats.gguf.header import read_header
from edgespec.formats.gguf.heads import head_kind_of
from edgespec.formats.manifest import ModelFile, ModelPair
from edgespec.installation import IMPORT_FAILURES, has_engine, not_importable
from edgespec.kernels.library import library_path, why_missing
from edgespec.loading.download import known_sha256
from edgespec.platform.files import is_file, shipped_models

KERNEL_CACHE_TYPES = (None, "f16", "q8_0")


def with_engines(options: LoadOptions, pair: ModelPair) -> ModelPair:
    """`pair` with an engine for each of its GGUF files.

    Raises CapabilityError where `options` ask for ONNX Runtime and the kernels cannot run the target.
    """
    if options.engine == "llamacpp":
        return pair
    files = {role: _with_engine(options, role, file, pair) for role, file in pair.files.items()}
    found = replace(
        pair, files=MappingProxyType(files), engines=tuple(dict.fromkeys((*pair.engines, files["target"].engine)))
    )
    return replace(found, heads=_heads(options, found))


def _heads(options: LoadOptions, pair: ModelPair) -> Mapping[str, ModelFile]:
    """The pair's heads, or the shipped ones for its very target where nothing else drafts for it."""
    target = pair.files["target"]
    if pair.heads or pair.draft or options.heads or options.drafter not in ("auto", "eagle"):
        return pair.heads
    if target.engine != "onnx" or not target.is_gguf or (path := shipped_heads(target.path, target.sha256)) is None:
        return pair.heads
    return MappingProxyType({"eagle": ModelFile(path)})


def _with_engine(options: LoadOptions, role: str, file: ModelFile, pair: ModelPair) -> ModelFile:
    if not file.is_gguf:
        return file
    why = _why_not(options, role, file, pair)
    if not why:
        return replace(file, runs_on="onnx")
    if role == "target" and options.engine == "onnx":
        raise CapabilityError(f"--engine onnx cannot run {file.path.name}: {why}. Use --engine auto")
    return file if _is_no_news(file.path) else replace(file, note=f"llama.cpp runs {file.path.name}: {why}")


def _why_not(options: LoadOptions, role: str, file: ModelFile, pair: ModelPair) -> str:
    """Why the kernels do not run a GGUF; empty where they do."""
    if _is_head(file.path):
        if role == "target":
            return "it only drafts for another model"
        return _why_not(options, "target", pair.files["target"], pair)  # whose states it reads
    found = _asked_of_llamacpp(options, role)
    if not found and role == "target":
        found = _heads_in_gguf(options, pair)
    return found or why_unreadable(file.path)


def _is_no_news(path: Path) -> bool:
    """Whether nobody expects the kernels to run a file: heads, models that only give embeddings, what is no GGUF."""
    try:
        return _is_head(path) or gives_only_embeddings(read_header(path))
    except (EdgespecError, OSError):
        return True


def _is_head(path: Path) -> bool:
    try:
        return head_kind_of(path) is not None
    except (EdgespecError, OSError):  # opening the file says what is wrong with it
        return False


def _asked_of_llamacpp(options: LoadOptions, role: str) -> str:
    """The option that ONNX Runtime does not have, if one was given."""
    is_target = role == "target"
    layers = options.gpu_layers if is_target or options.draft_gpu_layers is None else options.draft_gpu_layers
    device = options.target_devices if is_target else options.draft_devices
    kinds = (options.cache_type_k, options.cache_type_v) if is_target else (None, None)
    is_automatic = layers == "auto" or (layers is None and not options.reproducible and device is None)
    if has_gpu() if is_automatic else layers or device:
        return "its layers go to the GPU"
    if is_target and options.override_tensor:
        return "--override-tensor places its tensors"
    if is_target and options.rpc:
        return "it is on RPC servers"
    if options.provider not in ("auto", "cpu"):
        return f"the kernels are for the processor, not for {options.provider}"
    if is_target and options.pooling:
        return "ONNX Runtime gives no embeddings"
    if other := next((kind for kind in kinds if kind not in KERNEL_CACHE_TYPES), None):
        return f"the kernels have no cache of the type {other}"
    return "the kernels keep keys and values in one type" if kinds[0] != kinds[1] else ""


def _heads_in_gguf(options: LoadOptions, pair: ModelPair) -> str:
    """The head in GGUF that drafts for the target, if one does that the kernels lack: it reads llama.cpp's states."""
    if options.drafter == "none":
        return ""
    if pair.draft is not None and head_kind_of(pair.draft):
        return f"{pair.draft.name} reads its states there" if why_unreadable(pair.draft) else ""
    if options.drafter == "mtp" and has_mtp(read_header(pair.target)):
        return why_unreadable(pair.target, nextn=True)
    return ""


def has_fast_kernels() -> bool:
    """Whether the kernels are built, and made for this processor's instructions."""
    from edgespec.kernels import tiles

    return library_path() is not None and tiles.path() != "portable"


def runs_on_kernels(path: Path) -> bool:
    """Whether the kernels run a model where nothing else is asked for."""
    return path.suffix != ".onnx" and not why_unreadable(path)


def why_unreadable(path: Path, *, nextn: bool = False) -> str:
    """Why the kernels do not run a GGUF, or the layer in it that predicts a further token; empty where they do."""
    if library_path() is None:
        return why_missing()
    if not has_engine("onnx"):
        return "ONNX Runtime, which the kernels are part of, is not installed"
    try:
        from edgespec.engines.onnx.source import readable_model
    except IMPORT_FAILURES as exc:
        failure = not_importable("the kernels", exc, "onnx")
        if not has_engine("llamacpp"):
            raise failure from exc
        return str(failure)
    if not has_fast_kernels() and has_engine("llamacpp"):
        return "this processor has none of the instructions that the kernels are made for"
    try:
        readable_model(path, nextn=nextn)
    except CapabilityError as exc:
        return str(exc)
    except EdgespecError:
        return ""  # a damaged file: opening it says what is wrong
    return ""


logger = logging.getLogger("edgespec")
SHIPPED = "eagle.npz"
# Types of ONNX models for which the shipped heads' drafts were measured to gain.
GAINING = frozenset({"int8", "int4"})


def shipped_heads(source: Path, sha256: str | None = None) -> Path | None:
    """The heads in `models/NAME` for the GGUF `source`, whose checksum is computed once where it is not given.

    None for other files. Heads that cannot be read are logged and left out.
    """
    from edgespec.formats.head_file import read_head_manifest  # imports numpy

    if source.suffix == ".onnx" or not is_file(source):
        return None
    for path in sorted(shipped_models().glob(f"*/{SHIPPED}")):
        try:
            manifest = read_head_manifest(path)
        except ModelFileError as exc:
            logger.warning("the heads are left out: %s", exc)
            continue
        try:
            header = read_header(source)
            sizes = header.metadata.get(f"{header.architecture}.embedding_length"), len(header.tokens)
            if sizes != (manifest.hidden_size, manifest.vocabulary_size):
                continue
            if (sha256 or known_sha256(source)) == manifest.target_sha256:
                return path
        except (EdgespecError, OSError):  # opening the file says what is wrong with it
            return None
    return None
