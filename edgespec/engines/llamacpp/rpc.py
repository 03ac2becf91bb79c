"""llama.cpp's RPC: asks whether a server is one, adds the devices of servers to this process, and serves devices.

A server is asked before llama.cpp connects to it: ggml ends the process where that fails. What is said is the beginning
of ggml's protocol (ggml-rpc.cpp): a command is a byte, the size of what follows in 8 bytes and as many bytes; an answer
is its size in 8 bytes and as many bytes, all little-endian.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from edgespec.config.values import split_endpoint
from edgespec.engines.llamacpp.devices import devices, function, gpus, handles_of
from edgespec.engines.llamacpp.library import library
from edgespec.errors import CapabilityError, Unreachable
from edgespec.installation import build_command

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
    except OSError as exc:
        why, fix = exc.strerror or str(exc), "check the address, and that edgespec rpc-server runs there"
        if isinstance(exc, TimeoutError):
            why = f"no answer within {timeout_s:g} s"
            fix = "a server takes one program at a time: end the other one, or start the server again if it hangs"
        raise Unreachable(f"the RPC server {endpoint} does not answer: {why}. Fix: {fix}") from exc


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
