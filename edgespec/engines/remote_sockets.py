"""Makes the connections that a library opened notice within seconds that the other machine is gone.

A program that ends closes its connections, which is noticed at once. A machine that loses power or network says
nothing: ggml would wait for it forever, and so would a server, which then serves nobody else. TCP keepalive notices it
within seconds, but ggml does not turn it on, so this process finds the connections and does. Windows gives no list of
them: there, only a program that ends is noticed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

SILENCE_S = 4  # a machine that is silent for longer counts as gone
_LOOK_S = 1.0


def start_watching(ports: Collection[int]) -> None:
    """Watch all connections from or to `ports` that this process has or will have, in a thread that never ends."""
    threading.Thread(target=_keep_watched, args=(frozenset(ports),), daemon=True).start()


def _keep_watched(ports: frozenset[int]) -> None:
    known: set[int] = set()
    while sys.platform != "win32":
        found = set(_sockets())
        for number in found - known:
            with contextlib.suppress(OSError):
                _watch(number, ports)
        known = found
        time.sleep(_LOOK_S)


def _sockets() -> Iterator[int]:
    """Numbers of this process's sockets."""
    folder = next(place for place in (Path("/proc/self/fd"), Path("/dev/fd")) if place.is_dir())
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                yield int(entry.name)


def _watch(number: int, ports: frozenset[int]) -> None:
    with socket.socket(fileno=os.dup(number)) as connection:
        if connection.family != socket.AF_INET:
            return
        if not ports & {connection.getpeername()[1], connection.getsockname()[1]}:  # raises where it only listens
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", 1),
            ("TCP_KEEPALIVE", 1),  # what macOS calls TCP_KEEPIDLE
            ("TCP_KEEPINTVL", 1),
            ("TCP_KEEPCNT", SILENCE_S - 1),
            ("TCP_USER_TIMEOUT", 1000 * SILENCE_S),
        ):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
