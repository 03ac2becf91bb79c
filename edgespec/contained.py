"""Work on what strangers wrote, in child processes: a crash, a loop without end or gigabytes cost one answer.

A grammar can overflow the stack of the native code that compiles it, and take time that doubles with each line; a chat
template is a program. Children stay warm for the next call; one that had to be ended is replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakSet

from edgespec.errors import CapabilityError
from edgespec.installation import child_environment

Params = ParamSpec("Params")
Returned = TypeVar("Returned")
MEMORY_BYTES = 512 << 20  # that one call may take
_START_S, _LOOK_S = 60.0, 0.05
_IDLE = 2  # children that stay warm

is_wanted: ContextVar[Callable[[], bool]] = ContextVar("is_wanted", default=lambda: True)
"""Whether somebody still waits for what this thread does."""


class Overrun(Exception):
    """The work was ended. The message says why, as in "it takes more than 2 s"."""


class Unwanted(Exception):
    """Nobody waits for the work any more."""


class _Order(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    limit_s: float


class Containment:
    """Children for one kind of work, up to `most` at once; each call may take `limit_s` seconds of one processor.

    `module`: what a child imports before its first call; `niceness`: by which its work stands behind that of others.
    """

    def __init__(self, module: str, most: int, limit_s: float, niceness: int = 0) -> None:
        self.limit_s = limit_s
        self._module, self._most, self._niceness = module, most, niceness
        self._forget()
        _all.add(self)

    def _forget(self) -> None:
        self._room, self._idle = threading.BoundedSemaphore(self._most), queue.SimpleQueue[_Child]()

    def warm(self) -> None:
        """Start a child, so that the first call need not wait for it to begin."""
        if self._idle.empty():
            with contextlib.suppress(CapabilityError):  # the first call will say so
                self._idle.put(_Child(self._module, self._niceness))

    def run(self, function: Callable[Params, Returned], *args: Params.args, **none: Params.kwargs) -> Returned:
        """`function(*args)`, a function of a module; both are pickled. Raises what it raises, Overrun and Unwanted.

        Raises CapabilityError where no process can be started.
        """
        order = pickle.dumps(_Order(function, args, self.limit_s))
        with self._turn():
            child = self._take()
            try:
                found = child.run(order, self.limit_s)
            except BaseException:  # an interrupt, too: it works on what nobody will read
                child.close()
                raise
            if self._idle.qsize() < _IDLE:
                self._idle.put(child)
            else:
                child.close()
        is_done, value = found
        if isinstance(value, MemoryError):
            raise Overrun(_MEMORY)
        if not is_done:
            raise value
        return value  # type: ignore[no-any-return]  # what the function returns

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        while not self._room.acquire(timeout=_LOOK_S):
            _require_wanted()
        try:
            yield
        finally:
            self._room.release()

    def _take(self) -> _Child:
        while True:
            try:
                child = self._idle.get_nowait()
            except queue.Empty:
                return _Child(self._module, self._niceness)
            if child.is_alive:
                return child
            child.close()

    def close(self) -> None:
        """End the children that wait for work."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()


class _Child:
    """One process. What it is sent and says goes through a thread, which no interrupt leaves half a message behind."""

    def __init__(self, module: str, niceness: int) -> None:
        command = [sys.executable, "-m", "edgespec.contained", module, str(niceness)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._orders: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[bool, Any] | None] = queue.SimpleQueue()
        self._is_ready = False
        try:
            self._process = subprocess.Popen(command, **pipes, env=child_environment(), start_new_session=True)
            try:
                threading.Thread(target=self._talk, name="edgespec-contained", daemon=True).start()
            except RuntimeError:
                with self._process:
                    self._process.kill()
                raise
        except (OSError, RuntimeError) as exc:  # the latter: no memory for a thread
            raise CapabilityError(f"a process for templates and grammars cannot be started: {exc}") from exc

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _talk(self) -> None:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            with process, contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
                self._answers.put(pickle.load(process.stdout))
                while (order := self._orders.get()) is not None:
                    process.stdin.write(order)
                    process.stdin.flush()
                    self._answers.put(pickle.load(process.stdout))
        finally:
            self._answers.put(None)

    def run(self, order: bytes, limit_s: float) -> tuple[bool, Any]:
        """(whether the function returned, what it returned or raised). Raises Overrun and Unwanted."""
        if not self._is_ready:
            self._answer(_START_S)
            self._is_ready = True
        self._orders.put(order)
        return self._answer(limit_s * 4 + 1)  # other programs may have the processor meanwhile

    def _answer(self, limit_s: float) -> tuple[bool, Any]:
        deadline_s = monotonic() + limit_s
        while True:
            try:
                answer = self._answers.get(timeout=_LOOK_S)
            except queue.Empty:
                _require_wanted()
                if monotonic() > deadline_s:
                    raise Overrun(f"it takes more than {limit_s:g} s") from None
                if _bytes_of(self._process.pid) > 2 * MEMORY_BYTES:
                    raise Overrun(_MEMORY) from None
                continue
            if answer is None:
                raise Overrun(self._ending())
            return answer

    def _ending(self) -> str:
        code = self._process.wait()
        if code == -getattr(signal, "SIGXCPU", 0):
            return "it takes too long"
        return f"it ends the process that reads it ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"

    def close(self) -> None:
        self._process.kill()
        self._orders.put(None)


_MEMORY = f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"
_all: WeakSet[Containment] = WeakSet()


def _require_wanted() -> None:
    if not is_wanted.get()():
        raise Unwanted


def _bytes_of(pid: int) -> int:
    """Memory of a process; 0 on Linux, where the child's own limit holds."""
    if sys.platform == "linux":
        return 0
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


@atexit.register
def _close_all() -> None:
    for each in list(_all):
        each.close()


def _forget_all() -> None:
    """In a fork: the children are the parent's."""
    for each in list(_all):
        each._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _serve() -> None:
    """Be a child: answer orders until there is nobody who gives them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: it is the parent's to end this
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # where libraries print
    if hasattr(os, "nice"):
        os.nice(int(sys.argv[2]))
    with contextlib.suppress(ImportError):  # the first call says what is missing
        importlib.import_module(sys.argv[1])
    data = pickle.dumps((True, None))
    while True:
        sink.write(data)
        sink.flush()
        try:
            order = pickle.load(source)
        except EOFError:
            return
        _limit(order.limit_s)
        try:
            data = pickle.dumps((True, order.function(*order.args)))
        except Exception as exc:  # the caller's to judge
            data = pickle.dumps((False, exc))
        del order


def _limit(seconds: float) -> None:
    """Have the system end this process after `seconds` of a processor, and refuse it memory; not on Windows."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        def allow(kind: int, most: int) -> None:
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))

        used = resource.getrusage(resource.RUSAGE_SELF)
        allow(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds))
        if resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY:  # else it is one already
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            allow(resource.RLIMIT_DATA, (int(status["VmData"].split()[0]) << 10) + MEMORY_BYTES)


if __name__ == "__main__":
    _serve()
