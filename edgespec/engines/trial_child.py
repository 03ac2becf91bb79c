"""The child process that tries models, and its handle in the parent.

It is a fork where that is safe (`may_fork`), which saves starting Python, and otherwise a program
(`python -m edgespec.engines.trial_child FILE...`). It writes JSON objects, {"path": ..., "fault": null or the reason}:
one when a file was opened, one when it was used, and after all files were, one per file whose weights were read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import IO, NoReturn

from edgespec.closing import Closing
from edgespec.engines.checks import fault_of
from edgespec.errors import CapabilityError, EdgespecError
from edgespec.formats.gguf.head_reader import head_kind_of
from edgespec.formats.gguf.header import read_header
from edgespec.formats.gguf.kind import gives_only_embeddings
from edgespec.installation import child_environment
from edgespec.platform.machine import has_address_limit

# Libraries with threads or devices of their own, which do not survive a fork.
_UNFORKABLE = (b"libiomp", b"libomp", b"onnxruntime_pybind", b"libtorch", b"libcuda")
OPENED, USED = 1, 2  # steps of a file's trial, and how many reports there are of it then
STEP_S = 1.0
_OPENMP = b"libgomp"  # of llama.cpp, which starts threads in its first pass; before that, of another library


def is_graph(path: Path) -> bool:
    """Whether it is an ONNX model; others are GGUF files."""
    return path.suffix == ".onnx"


class Child(Closing):
    """A child that tries models: `results` returns what it found, `close` ends it.

    `order`: the file that each report is about; `reports`: the pipe it writes to; `ended` waits for its end and returns
    its status; `kill` ends it.
    """

    def __init__(
        self,
        order: Sequence[Path],
        timeout_s: float,
        reports: IO[bytes],
        ended: Callable[[], int],
        kill: Callable[[], None],
    ) -> None:
        self._order, self._timeout_s = order, timeout_s
        self._ended, self._kill = ended, kill
        self._left_s = timeout_s
        self._found: list[str | None] = []
        self._lines: queue.Queue[bytes] = queue.Queue()
        # Windows cannot wait for a pipe with a time limit, a queue can.
        threading.Thread(target=_copy_lines, args=(reports, self._lines), daemon=True).start()

    def results(self, count: int) -> list[str | None]:
        """Wait for its first `count` reports: of each the fault, or None. Fewer if it ended: the last one says how."""
        while len(self._found) < count:
            if fault := self._read(self._order[len(self._found)]):
                return [*self._found, fault]
        return self._found[:count]

    def _read(self, path: Path) -> str:
        """Wait for the next line, which is about `path`; the fault to report if none comes."""
        line = self._next_line()
        if line is None:
            return (
                f"{path} could not be tried: loading it took more than {self._timeout_s:.0f} s in a trial process. Try "
                "again when the machine is less busy; if it still takes that long, download or export the file again"
            )
        if not line:
            ending = f"ended a trial process (status {self._ended()})"
            return f"{path} is not a usable model: loading it {ending}. Download or export it again"
        text = line.decode("utf-8", errors="replace").strip()
        if text.startswith("{") and text.endswith("}"):  # libraries may write lines of their own
            self._found.append(json.loads(text)["fault"])
        return ""

    def _next_line(self) -> bytes | None:
        """The next line, empty at the end; None when the time is over. While this process is stopped none passes."""
        while self._left_s > 0:
            step_s, before_s = min(STEP_S, self._left_s), monotonic()
            try:
                return self._lines.get(timeout=step_s)
            except queue.Empty:
                self._left_s -= min(step_s, monotonic() - before_s)
        return None

    def close(self) -> None:
        """End it, whatever it is doing. Closing twice is allowed."""
        with contextlib.suppress(ProcessLookupError):
            self._kill()
        with contextlib.suppress(ChildProcessError):
            self._ended()


def _copy_lines(reports: IO[bytes], lines: queue.Queue[bytes]) -> None:
    """Put every line into the queue, then an empty one."""
    with reports:
        for line in reports:
            lines.put(line)
    lines.put(b"")


def start_child(paths: Sequence[Path], *, timeout_s: float) -> Child:
    """Let a child try `paths`. It makes three reports per file, those of the weights after all others."""
    return (_fork if may_fork() else _start_program)(paths, timeout_s)


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


def _fork(paths: Sequence[Path], timeout_s: float) -> Child:
    if not all(map(is_graph, paths)):
        _load_library()  # needed later anyway: here the fork shares it
    receiving, sending = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads; see `may_fork`
        try:
            process = os.fork()
        except OSError:
            os.close(receiving)
            os.close(sending)
            raise
    if not process:
        _be_the_child(paths, sending, timeout_s)
    os.close(sending)
    forked = _Forked(process)
    return Child(order_of_reports(paths), timeout_s, os.fdopen(receiving, "rb"), forked.ended, forked.kill)


@dataclass(slots=True)
class _Forked:
    """A forked process; its id must not be used any more once it was waited for."""

    process: int
    status: int | None = None

    def ended(self) -> int:
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        return self.status

    def kill(self) -> None:
        if self.status is None:
            os.kill(self.process, signal.SIGKILL)


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
        _try_all(paths, lambda report: os.write(sending, report.encode() + b"\n"))
        os._exit(0)
    except BaseException:
        os._exit(1)


def _load_library() -> None:
    import edgespec.engines.llamacpp.engine  # noqa: F401  # here, so that the child need not import it again
    from edgespec.engines.llamacpp.library import library

    with contextlib.suppress(CapabilityError):  # reported when a model is opened
        library()


def _start_program(paths: Sequence[Path], timeout_s: float) -> Child:
    process = subprocess.Popen(
        [sys.executable, "-m", "edgespec.engines.trial_child", *map(str, paths)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=child_environment(),
    )
    assert process.stdout is not None
    return Child(order_of_reports(paths), timeout_s, process.stdout, process.wait, process.kill)


def _try_all(paths: Sequence[Path], send: Callable[[str], object]) -> None:
    """In the child: `send` what is found, in the order of `order_of_reports`."""
    found = [(path, _try_one(path, send)) for path in paths]
    for path, fault in found:
        send(_report(path, fault or try_weights(path)))


def _try_one(path: Path, send: Callable[[str], object]) -> str | None:
    """Open and use a model, with a report after each step; returns the fault."""
    left = USED

    def opened() -> None:
        nonlocal left
        if left == USED:
            left -= 1
            send(_report(path, None))

    fault = try_model(path, opened)
    for _ in range(left):
        send(_report(path, fault))
    return fault


def order_of_reports(paths: Sequence[Path]) -> list[Path]:
    """The file that each report is about."""
    return [path for path in paths for _ in range(USED)] + [*paths]


def _report(path: Path, fault: str | None) -> str:
    return json.dumps({"path": str(path), "fault": fault})


def try_model(path: Path, opened: Callable[[], None]) -> str | None:
    """In the child: use a model as the engine will. The reason when it cannot be used, else None.

    `opened` is called when its file was opened, before anything else is used.
    """
    try:
        if is_graph(path):
            from edgespec.engines.onnx.opening import try_folder

            try_folder(path, opened)
            return None
        return _try_gguf(path, opened)
    except EdgespecError as exc:
        return str(exc)


def _try_gguf(path: Path, opened: Callable[[], None]) -> str | None:
    from edgespec.engines.llamacpp import LlamaCppEngine
    from edgespec.engines.llamacpp.heads import head_class
    from edgespec.types import Batch

    if (head := head_class(path)) is not None:
        head.try_alone(path)
        return None
    if gives_only_embeddings(read_header(path)):
        from edgespec.engines.llamacpp.encoder import try_encoder

        return try_encoder(path, opened)
    load = partial(LlamaCppEngine.load, path, context_length=16, max_batch=8, threads=1, reproducible=False)
    with load(opened=opened, is_repacked=False) as engine:
        ids = engine.vocabulary.encode("".join(map(chr, range(256))), parse_special=True)
        logits = engine.forward(Batch.chain(ids[:2] or [0]))
        if fault := fault_of(logits):
            if named := try_weights(path):  # says which of them are damaged
                return named
            return f"{path} is not a usable model: {fault}. Download or export it again"
        engine.forward(Batch.chain([0], last_only=True))
    return None


def try_weights(path: Path) -> str | None:
    """In the child: read all weights of a GGUF. The reason when some are no numbers, else None."""
    if is_graph(path) or head_kind_of(path) or has_address_limit():
        return None
    from edgespec.engines.llamacpp import weights

    return weights.try_weights(path)


def main(paths: Sequence[str]) -> None:
    _try_all([Path(path) for path in paths], partial(print, flush=True))


if __name__ == "__main__":
    main(sys.argv[1:])
