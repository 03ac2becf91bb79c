"""Child processes for what may end a process: what strangers wrote, files of unknown contents, servers that are lost.

A grammar can overflow the stack of the native code that compiles it, and take time that doubles with each line; a chat
template is a program: in a `Containment` a crash, a loop without end or gigabytes cost one answer. llama.cpp ends the
process on some files, and where an RPC server is lost.
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
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO, ParamSpec, TypeVar
from weakref import WeakSet

from edgespec.closing import Closing
from edgespec.errors import CapabilityError
from edgespec.installation import child_environment

Params = ParamSpec("Params")
Returned = TypeVar("Returned")
MEMORY_BYTES = 512 << 20  # that one call may take
_START_S, _LOOK_S = 60.0, 0.05
_IDLE = 2  # children that stay warm
_MOST_WORDS = 4000

is_wanted: ContextVar[Callable[[], bool]] = ContextVar("is_wanted", default=lambda: True)
"""Whether somebody still waits for what this thread does."""


class Overrun(Exception):
    """The work was ended. The message says why, as in "it takes more than 2 s"."""


class Unwanted(Exception):
    """Nobody waits for the work any more."""


class ChildEnded(Exception):
    """The child ended by itself. `how`: SIGSEGV or "exit code 3"; `words`: the last line that its libraries wrote."""

    def __init__(self, how: str, words: str) -> None:
        super().__init__(f"{how}: {words or 'it says nothing'}")
        self.how = how


class Child(Closing):
    """A process that calls functions for this one, in the order in which they are asked for.

    It ends with this process. What it is sent and says goes through a thread, which no interrupt leaves half a message
    behind. `module`: what it imports before its first call; `niceness`: by which its work stands behind that of others.
    """

    def __init__(self, module: str, niceness: int = 0) -> None:
        command = [sys.executable, "-m", "edgespec.contained", module, str(niceness)]
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `_talk`
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._words}
        self._orders: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[bool, Any] | ChildEnded] = queue.SimpleQueue()
        self._is_ready = False
        try:
            self._process = subprocess.Popen(command, **pipes, env=child_environment(), start_new_session=True)
            threading.Thread(target=self._talk, name="edgespec-child", daemon=True).start()
        except (OSError, RuntimeError) as exc:  # the latter: no memory for a thread
            self._words.close()
            raise CapabilityError(
                f"a child process cannot be started ({exc}): it needs more memory or processes than may be had"
            ) from exc

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _talk(self) -> None:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with self._words as words:
            # Around the process: what could not be written to one that is gone fails again when its pipe is closed.
            with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError), process:
                self._answers.put(pickle.load(process.stdout))
                while (order := self._orders.get()) is not None:
                    process.stdin.write(order)
                    process.stdin.flush()
                    self._answers.put(pickle.load(process.stdout))
            code = process.returncode
            words.seek(max(words.seek(0, os.SEEK_END) - _MOST_WORDS, 0))
            lines = words.read().decode("utf-8", errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "")
            self._answers.put(ChildEnded(signal.Signals(-code).name if code < 0 else f"exit code {code}", last))

    def call(self, function: Callable[..., Any], *args: Any, **waiting: Any) -> Any:
        """`function(*args)`, a function of a module; both are pickled. `waiting`: as in `answer`."""
        self.ask(function, *args)
        return self.answer(**waiting)

    def ask(self, function: Callable[..., Any], *args: Any) -> None:
        """Have `function(*args)` called; `answer` waits for it."""
        self._orders.put(pickle.dumps((function, args), protocol=5))

    def answer(self, *, limit_s: float = math.inf, look: Callable[[], object] = lambda: None) -> Any:
        """What the next function that was asked for returns. Raises what it raises.

        Raises ChildEnded, TimeoutError after `limit_s`, and what `look` raises, which is called while it waits: the
        child is then closed.
        """
        try:
            if not self._is_ready:
                self._next(_START_S, look)
                self._is_ready = True
            is_done, value = self._next(limit_s, look)
        except BaseException:  # an interrupt, too: it works on what nobody will read
            self.close()
            raise
        if not is_done:
            raise value
        return value

    def _next(self, limit_s: float, look: Callable[[], object]) -> tuple[bool, Any]:
        deadline_s = monotonic() + limit_s
        while True:
            try:
                found = self._answers.get(timeout=_LOOK_S)
            except queue.Empty:
                look()
                if monotonic() > deadline_s:
                    raise TimeoutError(f"it takes more than {limit_s:g} s") from None
                continue
            if isinstance(found, ChildEnded):
                raise found
            return found

    def close(self) -> None:
        """End it, whatever it is doing. Closing twice is allowed."""
        self._process.kill()
        self._process.wait()
        self._orders.put(None)


class Containment:
    """Children for one kind of work, up to `most` at once; each call may take `limit_s` seconds of one processor.

    `module`, `niceness`: of `Child`. Children stay warm for the next call; one that had to be ended is replaced.
    """

    def __init__(self, module: str, most: int, limit_s: float, niceness: int = 0) -> None:
        self.limit_s = limit_s
        self._module, self._most, self._niceness = module, most, niceness
        self._forget()
        _all.add(self)

    def _forget(self) -> None:
        self._room, self._idle = threading.BoundedSemaphore(self._most), queue.SimpleQueue[Child]()

    def warm(self) -> None:
        """Start a child, so that the first call need not wait for it to begin."""
        if self._idle.empty():
            with contextlib.suppress(CapabilityError):  # the first call will say so
                self._idle.put(Child(self._module, self._niceness))

    def run(self, function: Callable[Params, Returned], *args: Params.args, **none: Params.kwargs) -> Returned:
        """`function(*args)`, a function of a module; both are pickled. Raises what it raises, Overrun and Unwanted.

        Raises CapabilityError where no process can be started.
        """
        with self._turn():
            child = self._take()
            try:
                # other programs may have the processor meanwhile
                most_s, look = 4 * self.limit_s + 1, partial(_look, child)
                found: Returned = child.call(_limited, self.limit_s, function, args, limit_s=most_s, look=look)
                return found
            except MemoryError:
                raise Overrun(_MEMORY) from None
            except TimeoutError as exc:
                raise Overrun(str(exc)) from None
            except ChildEnded as exc:
                is_late = exc.how == "SIGXCPU"
                why = "it takes too long" if is_late else f"it ends the process that reads it ({exc.how})"
                raise Overrun(why) from None
            finally:
                if child.is_alive and self._idle.qsize() < _IDLE:
                    self._idle.put(child)
                else:
                    child.close()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        while not self._room.acquire(timeout=_LOOK_S):
            _require_wanted()
        try:
            yield
        finally:
            self._room.release()

    def _take(self) -> Child:
        while True:
            try:
                child = self._idle.get_nowait()
            except queue.Empty:
                return Child(self._module, self._niceness)
            if child.is_alive:
                return child
            child.close()

    def close(self) -> None:
        """End the children that wait for work."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()


def _look(child: Child) -> None:
    _require_wanted()
    if sys.platform == "linux":  # where the limit of its own holds
        return
    import psutil

    with contextlib.suppress(psutil.Error):
        if psutil.Process(child._process.pid).memory_info().rss > 2 * MEMORY_BYTES:
            raise Overrun(_MEMORY)


_MEMORY = f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"
_all: WeakSet[Containment] = WeakSet()


def _require_wanted() -> None:
    if not is_wanted.get()():
        raise Unwanted


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
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ImportError):  # the first call says what is missing
        importlib.import_module(sys.argv[1])
    orders: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(source, orders), daemon=True).start()
    data = pickle.dumps((True, None))
    while True:
        sink.write(data)
        sink.flush()
        function, args = orders.get()
        try:
            data = pickle.dumps((True, function(*args)), protocol=5)
        except Exception as exc:  # the caller's to judge
            data = pickle.dumps((False, exc))
        del function, args


def _receive(source: BinaryIO, orders: queue.SimpleQueue[Any]) -> None:
    """Wait for orders; the end of the parent ends this process, whatever it is doing."""
    try:
        while True:
            orders.put(pickle.load(source))
    finally:
        os._exit(1)


def _limited(limit_s: float, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """In a child: `function(*args)` within the limits of a `Containment`."""
    _limit(limit_s)
    return function(*args)


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
