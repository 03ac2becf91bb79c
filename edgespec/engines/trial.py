"""Tries files of unknown contents in a child process first, because a bad file can end the process that loads it.

The child opens each file, uses it as an engine would and reads all its weights. Files that passed are not tried again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from edgespec.closing import Closing
from edgespec.contained import Child, ChildEnded
from edgespec.errors import EdgespecError, ModelFileError, ModelNotFound
from edgespec.formats.gguf.check import check_gguf, gives_only_embeddings, model_files
from edgespec.formats.gguf.header import read_header
from edgespec.formats.gguf.heads import head_kind_of
from edgespec.installation import has_memory_limit, require_engine
from edgespec.platform import disk_cache
from edgespec.platform.disk_cache import file_key, key_of

PROBE_VERSION = 4  # increase it when the trial finds more faults, so that files are tried again
ALLOWED_S = 300.0  # for each model


class FileTrial(Closing):
    """The check of models before they are loaded: reads the headers at once, and starts a child that loads the models.

    `is_trusted`, by path: the checksums of all files are known, so that only the header is read. Models that pass are
    not tried again until one of their files changes. Raises ModelNotFound and ModelFileError.
    """

    def __init__(self, is_trusted: Mapping[Path, bool]) -> None:
        for path in is_trusted:
            _check_header(path)
        keys = {path: _trial_key(path) for path, trusted in is_trusted.items() if not trusted}
        self._keys = {path: key for path, key in keys.items() if not disk_cache.get("probed", key, bool)}
        self._child: Child | None = None
        if self._keys:
            self._child = Child(__name__)
            for path in self._keys:
                self._child.ask(fault_of, path)

    def require_sound(self) -> None:
        """Wait until the child has tried all models, and remember that. Raises ModelFileError."""
        if (child := self._child) is None:
            return
        with self:
            for path, key in self._keys.items():
                if (fault := fault_in(child, path)) is not None:
                    raise ModelFileError(fault)
                disk_cache.put("probed", key, True)

    def close(self) -> None:
        """End the child, whatever it is doing. Closing twice is allowed."""
        if self._child is not None:
            self._child.close()
            self._child = None


def fault_in(child: Child, path: Path, allowed_s: float = ALLOWED_S) -> str | None:
    """Wait until `child` has tried `path`, the next that it was asked for: what is wrong with it, or None."""
    try:
        fault: str | None = child.answer(limit_s=allowed_s)
    except TimeoutError:
        return (
            f"{path} could not be tried: loading it took more than {allowed_s:.0f} s in a trial process. Try again "
            "when the machine is less busy; if it still takes that long, download or export the file again"
        )
    except ChildEnded as exc:
        return f"{path} is not a usable model: loading it ended a trial process ({exc}). Download or export it again"
    return fault


def _check_header(path: Path) -> None:
    if path.suffix == ".onnx":
        require_engine("onnx", path.name)
        return
    check_gguf(path)
    require_engine("llamacpp", path.name)


def _trial_key(path: Path) -> str:
    packages = ("onnxruntime", "tokenizers") if path.suffix == ".onnx" else ("llama-cpp-python",)
    versions = ""
    with suppress(PackageNotFoundError):
        versions = " ".join(map(version, packages))
    return key_of(PROBE_VERSION, versions, tuple(map(file_key, files_of(path))))


def files_of(path: Path) -> Sequence[Path]:
    """All files that the model is opened from, `path` first."""
    if path.suffix != ".onnx":
        return model_files(path)
    from edgespec.engines.onnx.source import all_files

    if not path.is_file():
        raise ModelNotFound(f"no file {str(path)!r}: give the model.onnx of an export")
    return all_files(path)


# -- in the child


def fault_of(path: Path) -> str | None:
    """Use a model as the engine will. The reason when it cannot be used, else None."""
    try:
        if path.suffix == ".onnx":
            from edgespec.engines.onnx.source import try_folder

            try_folder(path)
            return None
        return _try_gguf(path)
    except EdgespecError as exc:
        return str(exc)
    except Exception as exc:  # whatever the file made of us
        return f"{path} is not a usable model ({type(exc).__name__}: {exc}). Download or export it again"


def _try_gguf(path: Path) -> str | None:
    import numpy as np  # the process that plans does without

    from edgespec.engines.booked import fault_of
    from edgespec.engines.llamacpp.embeddings import EncoderEngine
    from edgespec.engines.llamacpp.engine import LlamaCppEngine
    from edgespec.engines.llamacpp.heads import try_head
    from edgespec.types import Batch

    if head_kind_of(path) is not None:
        try_head(path)
        return None
    small: dict[str, Any] = {"context_length": 16, "threads": 1, "is_repacked": False}
    small["check_tensors"] = not has_memory_limit()
    fault = ""
    if gives_only_embeddings(read_header(path)):
        with EncoderEngine.load(path, **small) as encoder:
            before, behind = encoder.vocabulary.embedded_ends()
            ids = np.array([*before, *encoder.vocabulary.encode("a b"), *behind][:16] or [0], np.int32)
            if not np.isfinite(encoder.embed(ids, "mean")).all():
                fault = "its embeddings are not numbers"
    else:
        with LlamaCppEngine.load(path, max_batch=8, reproducible=False, **small) as engine:
            tokens = engine.vocabulary.encode("".join(map(chr, range(256))), parse_special=True)
            fault = fault_of(engine.forward(Batch.chain(tokens[:2] or [0])))
            if not fault:
                engine.forward(Batch.chain([0], last_only=True))
    return f"{path} is not a usable model: {fault}. Download or export it again" if fault else None
