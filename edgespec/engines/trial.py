"""Loads files of unknown origin in a child process first, because a bad file can end the process that loads it.

The child is a fork where that is safe (`may_fork`), which saves the start of Python, and otherwise a program
(`python -m edgespec.engines.trial FILE...`). It uses each file as an engine would and writes one JSON object per file
before it opens the next: {"path": ..., "fault": null or the reason}.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import NoReturn

from edgespec.engines import disk_cache
from edgespec.engines.base import fault_of
from edgespec.engines.disk_cache import CHECKED_FILE, file_key, key_of
from edgespec.engines.machine import has_address_limit
from edgespec.errors import CapabilityError, EdgespecError, ModelFileError, ModelNotFound
from edgespec.formats.gguf.check import check_gguf
from edgespec.formats.gguf.eagle3 import is_eagle3
from edgespec.formats.gguf.split import model_files
from edgespec.formats.onnx.llama_config import WRITABLE
from edgespec.installation import require_engine

PROBE_VERSION = 2  # increase it when the trial finds more faults, so that files are tried again
START_S = 60.0
READ_BYTES_PER_S = 50e6  # a slow disk
# Libraries with threads or devices of their own, which do not survive a fork.
_UNFORKABLE = (b"libiomp", b"libomp", b"onnxruntime_pybind", b"libtorch", b"libcuda")
_OPENMP = b"libgomp"  # of llama.cpp, which starts threads in its first pass; before that, of another library


def check_model_file(path: Path, *, is_trusted: bool = False) -> None:
    """`check_model_files` of one file."""
    check_model_files({path: is_trusted})


def check_model_files(is_trusted: Mapping[Path, bool]) -> None:
    """Check the models of a pair before they are loaded. Raises ModelNotFound and ModelFileError.

    `is_trusted`, by path: the checksums of all files are known, so that only the header is read. Other models are
    loaded once, all in one child process; those that pass are not tried again until one of their files changes.
    """
    for path in is_trusted:
        if _is_graph(path):
            require_engine("onnx", path.name)
        else:
            is_writable = check_gguf(path).architecture in WRITABLE
            convert = f"or convert it: edgespec export {shlex.quote(str(path))} --to onnx" if is_writable else ""
            require_engine("llamacpp", path.name, convert)
    keys = {path: _trial_key(path) for path, trusted in is_trusted.items() if not trusted}
    unknown = [path for path, key in keys.items() if disk_cache.get("probed", key, CHECKED_FILE) is None]
    for path, fault in zip(unknown, faults(unknown, timeout_s=_allowed_s(unknown)), strict=True):
        if fault is not None:
            raise ModelFileError(fault)
        disk_cache.put("probed", keys[path], {"path": str(path)})


def _trial_key(path: Path) -> str:
    return key_of(PROBE_VERSION, _library_version(path), tuple(map(file_key, _files(path))))


def _is_graph(path: Path) -> bool:
    return path.suffix == ".onnx"


def _files(path: Path) -> Sequence[Path]:
    if not _is_graph(path):
        return model_files(path)
    from edgespec.engines.onnx.opening import all_files

    if not path.is_file():
        raise ModelNotFound(f"no file {str(path)!r}: give the model.onnx of an export")
    return all_files(path)


def _allowed_s(paths: Sequence[Path]) -> float:
    """Time to read all files of these models from a slow disk."""
    files = (file for path in paths for file in _files(path))
    return START_S + sum(file.stat().st_size for file in files) / READ_BYTES_PER_S


def probe(path: Path, *, timeout_s: float | None = None) -> None:
    """Load `path` in a child process. Raises ModelFileError when that fails, crashes or takes longer.

    `timeout_s` None allows for reading the whole file from a slow disk.
    """
    fault = next(faults([path], timeout_s=_allowed_s([path]) if timeout_s is None else timeout_s))
    if fault is not None:
        raise ModelFileError(fault)


def faults(paths: Sequence[Path], *, timeout_s: float) -> Iterator[str | None]:
    """What is wrong with each file, or None. One child, with `timeout_s`, tries many files until one ends it."""
    waiting = list(paths)
    while waiting:
        run = _run_fork if may_fork() else _run_program
        output, ending = run(waiting, timeout_s)
        lines = output.decode("utf-8", errors="replace").splitlines()
        reports = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        yield from (report["fault"] for report in reports)
        waiting = waiting[len(reports) :]
        if waiting:
            yield f"{waiting[0]} is not a usable model: loading it {ending}. Download or export it again"
            waiting = waiting[1:]


def may_fork() -> bool:
    """Whether a fork of this process can run an engine: one Python thread, and no library with threads of its own.

    Only on Linux: on macOS the system's own libraries may not be used after a fork. numpy's threads do no harm: its
    library stops and restarts them around a fork.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    from edgespec.engines.llamacpp.library import has_worked, is_loaded

    try:
        maps = Path("/proc/self/maps").read_bytes()
    except OSError:
        return False
    foreign = _UNFORKABLE if is_loaded() else (*_UNFORKABLE, _OPENMP)
    return not has_worked() and not any(name in maps for name in foreign)


def _run_fork(paths: Sequence[Path], timeout_s: float) -> tuple[bytes, str]:
    """What a fork reported of the files it finished, and how it ended."""
    if not all(map(_is_graph, paths)):
        _load_library()  # needed later anyway: here the fork shares it
    receiving, sending = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads; see `may_fork`
        child = os.fork()
    if not child:
        _be_the_child(paths, sending, timeout_s)
    os.close(sending)
    try:
        output, is_over = _received(receiving, monotonic() + timeout_s)
        if is_over:
            return output, f"ended a trial process (status {_status(child)})"
        return output, f"took more than {timeout_s:g} s in a trial process"
    finally:
        os.close(receiving)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def _be_the_child(paths: Sequence[Path], sending: int, timeout_s: float) -> NoReturn:
    """Try the files, report to the parent only, and end the process whatever happens."""
    try:
        import resource

        signal.signal(signal.SIGINT, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        soft, hard = int(timeout_s) + 1, resource.getrlimit(resource.RLIMIT_CPU)[1]
        if hard == resource.RLIM_INFINITY or soft < hard:
            resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))  # in case the parent is killed
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        logging.disable()
        for path in paths:
            os.write(sending, _report_of(path).encode() + b"\n")
        os._exit(0)
    except BaseException:
        os._exit(1)


def _received(pipe: int, deadline_s: float) -> tuple[bytes, bool]:
    """What arrives through a pipe until it is closed or the time is over; whether it was closed."""
    output = b""
    while (left_s := deadline_s - monotonic()) > 0:
        if select.select([pipe], [], [], left_s)[0]:
            part = os.read(pipe, 1 << 16)
            if not part:
                return output, True
            output += part
    return output, False


def _status(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _load_library() -> None:
    import edgespec.engines.llamacpp.engine  # noqa: F401  # here, so that the child need not import it again
    from edgespec.engines.llamacpp.library import library

    with contextlib.suppress(CapabilityError):  # reported when a model is opened
        library()


def _run_program(paths: Sequence[Path], timeout_s: float) -> tuple[bytes, str]:
    """As `_run_fork`, in a process of its own."""
    package_root = str(Path(__file__).resolve().parents[2])
    search_path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "edgespec.engines.trial", *map(str, paths)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
            env={**os.environ, "PYTHONPATH": search_path},
        )
    except subprocess.TimeoutExpired as exc:
        return exc.stdout or b"", f"took more than {timeout_s:g} s in a trial process"
    return done.stdout, f"ended a trial process (status {done.returncode})"


def try_model(path: Path) -> str | None:
    """In the child: use a model as the engine will. The reason when it cannot be used, else None."""
    try:
        if _is_graph(path):
            from edgespec.engines.onnx.opening import try_folder

            try_folder(path)
            return None
        return _try_gguf(path)
    except EdgespecError as exc:
        return str(exc)


def _try_gguf(path: Path) -> str | None:
    from edgespec.engines.llamacpp import Eagle3Head, LlamaCppEngine
    from edgespec.types import Batch

    if is_eagle3(path):
        Eagle3Head.try_alone(path)
        return None
    with LlamaCppEngine.load(
        path, context_length=16, max_batch=8, threads=1, reproducible=False, check_tensors=not has_address_limit()
    ) as engine:
        ids = engine.vocabulary.encode("".join(map(chr, range(256))), parse_special=True)
        logits = engine.forward(Batch.chain(ids[:2] or [0]))
        if fault := fault_of(logits):
            return f"{path} is not a usable model: {fault}. Download or export it again"
        engine.forward(Batch.chain([0], last_only=True))
    return None


def _report_of(path: Path) -> str:
    return json.dumps({"path": str(path), "fault": try_model(path)})


def _library_version(path: Path) -> str:
    if _is_graph(path):
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed

        try:
            return f"{installed('onnxruntime')} {installed('tokenizers')}"
        except PackageNotFoundError:
            return ""
    from edgespec.engines.llamacpp.library import version

    return version()


def main(paths: Sequence[str]) -> None:
    for path in paths:
        print(_report_of(Path(path)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
