"""Tries files of unknown contents in a child process first, because a bad file can end the process that loads it.

The child (`python -m edgespec.engines.trial FILE...`) opens each file, uses it as an engine would and reads all its
weights. It prints one JSON object per file: {"fault": null or the reason}. Files that passed are not tried again.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.closing import Closing
from edgespec.errors import EdgespecError, ModelFileError, ModelNotFound
from edgespec.formats.gguf.check import check_gguf, gives_only_embeddings, model_files
from edgespec.formats.gguf.header import read_header
from edgespec.formats.gguf.heads import head_kind_of
from edgespec.formats.onnx.llama_config import WRITABLE
from edgespec.installation import child_environment, quoted, require_engine
from edgespec.platform import disk_cache
from edgespec.platform.disk_cache import file_key, key_of
from edgespec.platform.machine import has_address_limit

PROBE_VERSION = 3  # increase it when the trial finds more faults, so that files are tried again
START_S = 60.0
READ_BYTES_PER_S = 50e6  # a slow disk


def check_model_files(is_trusted: Mapping[Path, bool]) -> None:
    """Check the models of a pair before they are loaded. Raises ModelNotFound and ModelFileError.

    `is_trusted`, by path: the checksums of all files are known, so that only the header is read. Other models are
    loaded once, all in one child process; those that pass are not tried again until one of their files changes.
    """
    with Trial(is_trusted) as trial:
        trial.require_sound()


class Trial(Closing):
    """`check_model_files` in two steps: the constructor reads the headers and starts the child.

    Raises ModelNotFound and ModelFileError.
    """

    def __init__(self, is_trusted: Mapping[Path, bool]) -> None:
        for path in is_trusted:
            _check_header(path)
        keys = {path: _trial_key(path) for path, trusted in is_trusted.items() if not trusted}
        self._keys = {path: key for path, key in keys.items() if not disk_cache.is_marked("probed", key)}
        self._child = start_child(list(self._keys)) if self._keys else None

    def require_sound(self) -> None:
        """Wait until the child has tried all models, and remember that. Raises ModelFileError."""
        if self._child is None:
            return
        paths = list(self._keys)
        for fault in results(self._child, paths, _allowed_s(paths)):
            if fault is not None:
                raise ModelFileError(fault)
        self.close()
        for path, key in self._keys.items():
            disk_cache.mark("probed", key, path)

    def close(self) -> None:
        """End the child, whatever it is doing. Closing twice is allowed."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


def is_graph(path: Path) -> bool:
    """Whether it is an ONNX model; others are GGUF files."""
    return path.suffix == ".onnx"


def _check_header(path: Path) -> None:
    if is_graph(path):
        require_engine("onnx", path.name)
        return
    is_writable = check_gguf(path).architecture in WRITABLE
    convert = f"or convert it: edgespec export {quoted(str(path))} --to onnx" if is_writable else ""
    require_engine("llamacpp", path.name, convert)


def _trial_key(path: Path) -> str:
    return key_of(PROBE_VERSION, _library_versions(path), tuple(map(file_key, _files(path))))


def _library_versions(path: Path) -> str:
    try:
        return " ".join(map(version, ("onnxruntime", "tokenizers") if is_graph(path) else ("llama-cpp-python",)))
    except PackageNotFoundError:
        return ""


def _files(path: Path) -> Sequence[Path]:
    if not is_graph(path):
        return model_files(path)
    from edgespec.engines.onnx.opening import all_files

    if not path.is_file():
        raise ModelNotFound(f"no file {str(path)!r}: give the model.onnx of an export")
    return all_files(path)


def _allowed_s(paths: Sequence[Path]) -> float:
    """Time to read all files of these models from a slow disk."""
    return START_S + sum(file.stat().st_size for path in paths for file in _files(path)) / READ_BYTES_PER_S


# -- the child and its handle in the parent


def start_child(paths: Sequence[Path]) -> subprocess.Popen[bytes]:
    """A child that tries `paths`; `results` waits for it."""
    return subprocess.Popen(
        [sys.executable, "-m", "edgespec.engines.trial", *map(str, paths)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=child_environment(),
    )


def results(child: subprocess.Popen[bytes], paths: Sequence[Path], allowed_s: float) -> list[str | None]:
    """Wait for the child: the fault of each path, or None. Fewer if it ended early: the last one says how."""
    is_late = False
    try:
        written = child.communicate(timeout=allowed_s)[0]
    except subprocess.TimeoutExpired:
        child.kill()
        is_late, written = True, child.communicate()[0]
    lines = (line.strip() for line in written.decode("utf-8", errors="replace").splitlines())
    found = [json.loads(line)["fault"] for line in lines if line.startswith('{"fault"')]  # libraries print, too
    if len(found) == len(paths):
        return found
    path = paths[len(found)]
    if is_late:
        fault = (
            f"{path} could not be tried: loading it took more than {allowed_s:.0f} s in a trial process. Try again "
            "when the machine is less busy; if it still takes that long, download or export the file again"
        )
    else:
        fault = (
            f"{path} is not a usable model: loading it ended a trial process (status {child.returncode}). Download or "
            "export it again"
        )
    return [*found, fault]


def _main(paths: Sequence[Path]) -> None:
    """In the child."""
    if sys.platform != "win32":
        import resource

        limit_s = int(_allowed_s(paths))
        with contextlib.suppress(ValueError, OSError):  # a lower limit is there
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))  # should the parent be killed
    for path in paths:
        print(json.dumps({"fault": _fault_of(path)}), flush=True)


def _fault_of(path: Path) -> str | None:
    """Use a model as the engine will. The reason when it cannot be used, else None."""
    try:
        if is_graph(path):
            from edgespec.engines.onnx.opening import try_folder

            try_folder(path)
            return None
        return _try_gguf(path)
    except EdgespecError as exc:
        return str(exc)


def _try_gguf(path: Path) -> str | None:
    from edgespec.engines.llamacpp import LlamaCppEngine
    from edgespec.engines.llamacpp.embeddings import EncoderEngine
    from edgespec.engines.llamacpp.heads import try_head
    from edgespec.engines.rows import fault_of
    from edgespec.types import Batch

    if head_kind_of(path) is not None:
        try_head(path)
        return None
    small: dict[str, Any] = {"context_length": 16, "threads": 1, "is_repacked": False}
    small["check_tensors"] = not has_address_limit()
    fault = ""
    if gives_only_embeddings(read_header(path)):
        with EncoderEngine.load(path, **small) as encoder:
            before, behind = encoder.vocabulary.embedded_ends()
            ids = np.array([*before, *encoder.vocabulary.encode("a b"), *behind][:16] or [0], np.int32)
            if not np.isfinite(encoder.embed([ids], "mean")).all():
                fault = "its embeddings are not numbers"
    else:
        with LlamaCppEngine.load(path, max_batch=8, reproducible=False, **small) as engine:
            tokens = engine.vocabulary.encode("".join(map(chr, range(256))), parse_special=True)
            fault = fault_of(engine.forward(Batch.chain(tokens[:2] or [0])))
            if not fault:
                engine.forward(Batch.chain([0], last_only=True))
    return f"{path} is not a usable model: {fault}. Download or export it again" if fault else None


if __name__ == "__main__":
    _main([Path(path) for path in sys.argv[1:]])
