"""Checks files of unknown origin in a child process first, because a bad file can end the process that loads it.

The child opens each file, uses it as an engine would, and finally reads all its weights. The load in this process stays
one step behind: what the child has opened is opened here while the child goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from edgespec.closing import Closing
from edgespec.engines.trial_child import OPENED, USED, Child, is_graph, start_child
from edgespec.errors import ModelFileError, ModelNotFound
from edgespec.formats.gguf.check import check_gguf
from edgespec.formats.gguf.split import model_files
from edgespec.formats.onnx.llama_config import WRITABLE
from edgespec.installation import quoted, require_engine
from edgespec.platform import disk_cache
from edgespec.platform.disk_cache import file_key, key_of
from edgespec.platform.machine import usable_processors

PROBE_VERSION = 2  # increase it when the trial finds more faults, so that files are tried again
START_S = 60.0
READ_BYTES_PER_S = 50e6  # a slow disk


def check_model_file(path: Path) -> None:
    """`check_model_files` of one file without known checksums."""
    check_model_files({path: False})


def check_model_files(is_trusted: Mapping[Path, bool]) -> None:
    """Check the models of a pair before they are loaded. Raises ModelNotFound and ModelFileError.

    `is_trusted`, by path: the checksums of all files are known, so that only the header is read. Other models are
    loaded once, all in one child process; those that pass are not tried again until one of their files changes.
    """
    with Trial(is_trusted) as trial:
        trial.require_sound()


class Trial(Closing):
    """`check_model_files` in steps, so that a load waits for each only when it gets there itself.

    The constructor reads the headers and starts the child. Raises ModelNotFound and ModelFileError.
    """

    def __init__(self, is_trusted: Mapping[Path, bool]) -> None:
        for path in is_trusted:
            _check_header(path)
        keys = {path: _trial_key(path) for path, trusted in is_trusted.items() if not trusted}
        self._keys = {path: key for path, key in keys.items() if not disk_cache.is_marked("probed", key)}
        unknown = list(self._keys)
        self._child: Child | None = None
        if unknown:
            self._child = start_child(unknown, timeout_s=_allowed_s(unknown))

    def require_opened(self, path: Path) -> None:
        """Wait until the child has opened this model; only then may it be opened here. Raises ModelFileError."""
        self._require(path, OPENED)

    def require_used(self, path: Path) -> None:
        """Wait until the child has used it; only then make contexts and passes here. Raises ModelFileError."""
        self._require(path, USED)

    def _require(self, path: Path, step: int) -> None:
        if self._child is not None and path in self._keys:
            before = list(self._keys).index(path)
            _require_none(self._child.results(before * USED + step))

    def require_sound(self) -> None:
        """Wait until it has read the weights of all models too, and remember that. Raises ModelFileError."""
        if self._child is not None:
            _require_none(self._child.results((USED + 1) * len(self._keys)))
        self.close()
        for path, key in self._keys.items():
            disk_cache.mark("probed", key, path)
        self._keys = {}

    def close(self) -> None:
        """End the child, whatever it is doing."""
        if self._child is not None:
            self._child.close()
            self._child = None


def _check_header(path: Path) -> None:
    if is_graph(path):
        require_engine("onnx", path.name)
        return
    is_writable = check_gguf(path).architecture in WRITABLE
    convert = f"or convert it: edgespec export {quoted(str(path))} --to onnx" if is_writable else ""
    require_engine("llamacpp", path.name, convert)


def _require_none(faults: Iterable[str | None]) -> None:
    for fault in faults:
        if fault is not None:
            raise ModelFileError(fault)


def _trial_key(path: Path) -> str:
    return key_of(PROBE_VERSION, _library_version(path), tuple(map(file_key, _files(path))))


def _library_version(path: Path) -> str:
    if is_graph(path):
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed

        try:
            return f"{installed('onnxruntime')} {installed('tokenizers')}"
        except PackageNotFoundError:
            return ""
    from edgespec.engines.llamacpp.library import version

    return version()


def _files(path: Path) -> Sequence[Path]:
    if not is_graph(path):
        return model_files(path)
    from edgespec.engines.onnx.opening import all_files

    if not path.is_file():
        raise ModelNotFound(f"no file {str(path)!r}: give the model.onnx of an export")
    return all_files(path)


def _allowed_s(paths: Sequence[Path]) -> float:
    """Time to read all files of these models from a slow disk, on a machine as busy as this one."""
    files = (file for path in paths for file in _files(path))
    return _programs_per_core() * (START_S + sum(file.stat().st_size for file in files) / READ_BYTES_PER_S)


def _programs_per_core() -> float:
    """How many programs share a core, at least 1; also 1 where the system does not say (Windows)."""
    try:
        return max(1.0, os.getloadavg()[0] / usable_processors())
    except (AttributeError, OSError):
        return 1.0
