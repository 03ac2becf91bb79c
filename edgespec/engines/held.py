"""Keeps the files of a loaded model open and notices when one is changed in place.

Weights are mapped, not copied: where a file is truncated, touching what is gone ends the process with SIGBUS, and where
it is written over, the model writes nonsense. Before each pass the files are compared with what they were, which costs
microseconds. During a pass Linux delays other programs that write or truncate them: the pass takes a read lease
of each file (fcntl F_SETLEASE), and opening it for writing waits until the lease is returned, or for the time in
/proc/sys/fs/lease-break-time (45 s).

Not protected during a pass: files of another user, file systems without leases (network drives), a file that was open
for writing before, and macOS. Windows refuses to truncate a mapped file.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from edgespec.errors import EngineError

if sys.platform == "linux":
    import fcntl

_SIGURG = int(getattr(signal, "SIGURG", 0))
Seen = tuple[int, int]  # size in bytes, time of change in ns


class HeldFiles:
    """Open files and what they were when the model was loaded. A file that cannot be opened is not watched.

    As a context manager it encloses a pass: entering raises EngineError where a file is not what it was.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: list[tuple[Path, int, Seen]] = []
        for path in paths:
            with suppress(OSError):
                handle = os.open(path, os.O_RDONLY)
                self._files.append((path, handle, _seen(handle)))
        self._release = weakref.finalize(self, _close, [handle for _, handle, _ in self._files])
        # A graph is copied when it is loaded, not mapped.
        mapped = [handle for path, handle, _ in self._files if path.suffix != ".onnx"]
        self._leasable = mapped if sys.platform == "linux" else []
        self._leased: list[int] = []

    def __enter__(self) -> None:
        try:
            for handle in tuple(self._leasable):
                if self._lease(handle):
                    self._leased.append(handle)
            self.check()
        except BaseException:
            self._return_leases()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._return_leases()

    def _lease(self, handle: int) -> bool:
        """Take a lease: until it is returned, nobody can open this file for writing. Returns whether that worked."""
        try:
            # The kernel sends a signal when another program waits. The default, SIGIO, would end the process; SIGURG is
            # ignored unless it has a handler. Returning a lease sets the default again.
            fcntl.fcntl(handle, fcntl.F_SETSIG, _SIGURG)
            fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError as exc:
            if exc.errno != errno.EAGAIN:  # EAGAIN: the file is open for writing now
                self._leasable.remove(handle)
            return False
        return True

    def _return_leases(self) -> None:
        if self._leased:
            for handle in self._leased:
                with suppress(OSError):
                    fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            self._leased = []

    def check(self) -> None:
        """Raises EngineError where a file is not what it was."""
        for path, handle, before in self._files:
            if _seen(handle) != before:
                raise EngineError(
                    f"{path} was changed while the model was in use and reading weights from it: load the model again "
                    "(write new files under another name and rename them)"
                )

    def close(self) -> None:
        """Close the files; closing twice is allowed."""
        self._files, self._leasable = [], []
        self._release()


def _close(handles: Iterable[int]) -> None:
    for handle in handles:
        os.close(handle)


def _seen(handle: int) -> Seen:
    found = os.fstat(handle)
    return found.st_size, found.st_mtime_ns
