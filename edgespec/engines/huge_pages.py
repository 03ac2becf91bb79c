"""Moves a model's weights into huge pages in idle moments (Linux): passes of small models then take less time.

A pass reads all weights, and the processor looks up the address of each page anew: for 135 MB 33,000 pages of 4 KiB, or
65 of 2 MiB. ONNX Runtime takes weights from malloc, which asks for no huge pages, and where Linux gives them on request
only, as on Debian and Ubuntu, there are none. MADV_COLLAPSE (Linux 6.1, madvise(2)) moves what is there already. Only
blocks that are in memory as a whole are moved, so that no more is taken. llama.cpp's weights are pages of their file,
which this cannot move, and those that it repacks gained nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import numpy as np

LEAST_BYTES = 16_000_000  # weights of fewer stay in the processor's caches
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_COLLAPSE = 25  # MADV_COLLAPSE
_LOOK_S = 0.05  # how long no pass has to begin or end in an idle moment
_PATIENCE_S = 0.5  # how long idle moments are waited for; then a block is moved beside passes, which takes about 1%
_MOST_FAILURES = 8  # one after another; memory may be too short, or the kernel too old


class HugePages:
    """The memory that is taken for a model after this is made and before `start`."""

    def __init__(self) -> None:
        self._before = set(_blocks()) if _block_bytes() else set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, num_changes: Callable[[], int]) -> None:
        """Begin, in a thread of its own. `num_changes`: how many passes have begun and ended, together."""
        if _block_bytes():
            work = self._before, num_changes, self._stop
            self._thread = threading.Thread(target=_move, args=work, name="edgespec-huge-pages", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End before the memory is freed."""
        self._stop.set()
        # The thread itself may hold the last reference to the model, whose end calls this.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _move(before: set[int], num_changes: Callable[[], int], stop: threading.Event) -> None:
    blocks: deque[int] | None = None
    seen, waited_s, failures = -1, 0.0, 0
    while not stop.wait(_LOOK_S) and (blocks is None or blocks):
        now = num_changes()
        is_idle, seen = now == seen and now % 2 == 0, now
        waited_s += _LOOK_S
        if not is_idle and waited_s < _PATIENCE_S:
            continue
        waited_s = 0.0
        if blocks is None:  # now, when all that belongs to the model is loaded
            blocks = deque(sorted(set(_blocks()) - before))
        while blocks:
            failures = 0 if _collapse(blocks.popleft()) else failures + 1
            if failures == _MOST_FAILURES:
                return
            if not is_idle or stop.is_set() or num_changes() != now:
                break


def _blocks() -> Iterator[int]:
    """Addresses of all blocks, each as large as a huge page, of this process's own memory that hold no gap."""
    size = _block_bytes()
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        addresses, access, *_, name = [*line.split(maxsplit=5), ""][:6]
        if access != "rw-p" or name.strip() not in ("", "[heap]"):
            continue
        begin, end = (int(address, 16) for address in addresses.split("-"))
        begin, end = -(-begin // size) * size, end // size * size
        yield from (begin + size * place for place in _whole(begin, max(end - begin, 0) // size))


def _whole(begin: int, count: int) -> Iterable[int]:
    """Which of `count` blocks from an address on are in memory as a whole."""
    if not count:
        return ()
    pages = _block_bytes() // os.sysconf("SC_PAGE_SIZE")
    found = np.zeros(count * pages, np.uint8)
    if _libc().mincore(begin, count * _block_bytes(), found.ctypes.data):  # freed meanwhile
        return ()
    return np.flatnonzero((found & 1).reshape(count, pages).all(axis=1)).tolist()


def _collapse(block: int) -> bool:
    """Make a block one huge page; True if it is one, or is no longer there."""
    return not _whole(block, 1) or _libc().madvise(block, _block_bytes(), _COLLAPSE) == 0


@cache
def _block_bytes() -> int:
    """Bytes of a huge page; 0 where there are none or the administrator wants none."""
    if sys.platform != "linux":
        return 0
    try:
        is_off = "[never]" in (_SETTINGS / "enabled").read_text(encoding="ascii")
        return 0 if is_off else int((_SETTINGS / "hpage_pmd_size").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


@cache
def _libc() -> ctypes.CDLL:
    found = ctypes.CDLL(None)
    found.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    found.mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    return found
