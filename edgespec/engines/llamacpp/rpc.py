"""llama.cpp's RPC: asks whether a server is one, adds the devices of servers to this process, and serves devices.

A server is asked before llama.cpp connects to it: ggml ends the process where that fails. What is said is the beginning
of ggml's protocol (ggml-rpc.cpp): a command is a byte, the size of what follows in 8 bytes and as many bytes; an answer
is its size in 8 bytes and as many bytes, all little-endian.

A program that ends closes its connections, which is noticed at once. A machine that loses power or network says
nothing, and ggml would wait for it forever. TCP keepalive notices it within seconds, but ggml does not turn it on: see
`keep_alive`. Windows gives no list of a process's connections: there, only a program that ends is noticed.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil

from edgespec.config.values import split_endpoint
from edgespec.engines.llamacpp.devices import devices, function, gpus, handles_of
from edgespec.engines.llamacpp.library import library
from edgespec.errors import CapabilityError, Unreachable
from edgespec.installation import build_command

SILENCE_S = 4  # a machine that is silent for longer counts as gone
_LOOK_S = 1.0
TIMEOUT_S = 3.0
_HELLO = 14
_CAPABILITIES = bytes(24)  # of the connection: none beyond TCP


def ask_all(endpoints: Sequence[str], timeout_s: float = TIMEOUT_S) -> None:
    """Ask all servers at once. Raises Unreachable for the first that does not answer."""
    with ThreadPoolExecutor(len(endpoints) or 1) as pool:
        list(pool.map(partial(ask, timeout_s=timeout_s), endpoints))


def ask(endpoint: str, timeout_s: float = TIMEOUT_S) -> None:
    """Raises Unreachable, with the reason and the fix, where no RPC server answers at `endpoint`."""
    try:
        with socket.create_connection(split_endpoint(endpoint), timeout_s) as connection:
            connection.settimeout(timeout_s)
            _say_hello(connection)
    except socket.gaierror as exc:
        _fail(endpoint, f"the host name is not known ({exc.strerror})", "check the name, or give its IPv4 address", exc)
    except ConnectionRefusedError as exc:
        port = split_endpoint(endpoint)[1]
        _fail(endpoint, "nothing listens there", f"start edgespec rpc-server --port {port} on that machine", exc)
    except TimeoutError as exc:
        why = f"no answer within {timeout_s:g} s: it serves another program (a server takes one at a time), it hangs, "
        _fail(endpoint, f"{why}or the network drops packets", "end the other program, or start the server again", exc)
    except OSError as exc:
        _fail(endpoint, str(exc) or type(exc).__name__, "check that edgespec rpc-server runs there", exc)


def _say_hello(connection: socket.socket) -> None:
    connection.sendall(struct.pack("<BQ", _HELLO, len(_CAPABILITIES)) + _CAPABILITIES)
    (announced,) = struct.unpack("<Q", _read(connection, 8))
    if announced != 4 + len(_CAPABILITIES):
        raise ConnectionError("what answers there is not an RPC server of a matching version of llama.cpp")
    _read(connection, announced)


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise ConnectionError("the connection was closed: not an RPC server of a matching version of llama.cpp")
        found += part
    return found


def _fail(endpoint: str, why: str, fix: str, cause: BaseException | None = None) -> NoReturn:
    raise Unreachable(f"the RPC server {endpoint} does not answer: {why}. Fix: {fix}") from cause


def require_rpc(what: str) -> None:
    """Raises CapabilityError, with the command that builds it, where llama.cpp has no RPC backend."""
    if not library().llama_supports_rpc():
        raise CapabilityError(
            f"{what} needs llama.cpp with its RPC backend, which this build does not have. Build it (4 to 10 minutes "
            f"on two cores): {build_command('rpc')}"
        )


def add_servers(endpoints: Sequence[str]) -> None:
    """Add the devices of RPC servers to those of this process.

    ggml ends the process where one does not answer, now or later: call it in a child process. Raises CapabilityError.
    """
    require_rpc("--rpc")
    add = _rpc_function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    register = function("ggml_backend_register", None, ctypes.c_void_p)
    for endpoint in endpoints:
        added = add(endpoint.encode())
        if not added:
            raise CapabilityError(f"the RPC server {endpoint} offers no device")
        register(added)


def serve_rpc(endpoint: str, *, threads: int, names: Sequence[str], cache_folder: Path | None) -> None:
    """Serve devices to one client after another, until the process ends. Returns where that fails.

    `names`: of devices; none: the GPUs, or the CPU where there are none. `cache_folder`: where received weights
    are stored. Raises CapabilityError.
    """
    require_rpc("an RPC server")
    chosen = names or [device.name for device in gpus()] or [devices()[0].name]
    handles = handles_of(chosen)
    place = None if cache_folder is None else str(cache_folder).encode()
    start = _rpc_function(
        "ggml_backend_rpc_start_server",
        None,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
    )
    start(endpoint.encode(), place, threads, len(handles), (ctypes.c_void_p * len(handles))(*handles))


def _rpc_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the RPC backend, which gives its address itself: it may be a library of its own."""
    backend = function("ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)(b"RPC")
    address = function("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    found = address(backend, name.encode())
    if not found:
        raise CapabilityError(f"this build of llama.cpp has no {name}; build another: {build_command('rpc')}")
    return ctypes.CFUNCTYPE(result, *arguments)(found)


def keep_alive(ports: Collection[int]) -> None:
    """Turn on TCP keepalive of all connections from or to `ports` that this process has or will have, in a thread."""
    if sys.platform != "win32":
        threading.Thread(target=_keep_alive, args=(frozenset(ports),), daemon=True).start()


def _keep_alive(ports: frozenset[int]) -> None:
    process, known = psutil.Process(), set[Any]()
    while True:
        found = {each for each in process.net_connections("tcp4") if each.raddr}
        for connection in found - known:
            if ports & {connection.laddr.port, connection.raddr.port}:
                with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as held:  # or closed meanwhile
                    _watch(held)
        known = found
        time.sleep(_LOOK_S)


def _watch(connection: socket.socket) -> None:
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
