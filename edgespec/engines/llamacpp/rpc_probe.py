"""Asks an RPC server what it is, before llama.cpp connects to it: ggml ends the process where that fails.

What is said here is the beginning of ggml's protocol (ggml-rpc.cpp): a command is a byte, the size of what follows in
8 bytes and as many bytes; an answer is its size in 8 bytes and as many bytes, all little-endian.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from edgespec.config.values import split_endpoint
from edgespec.errors import Unreachable

TIMEOUT_S = 3.0
_DEVICE_MEMORY, _HELLO, _DEVICE_COUNT = 11, 14, 15
_CAPABILITIES = bytes(24)  # of the connection: none beyond TCP
_MOST_DEVICES = 64


@dataclass(frozen=True, slots=True)
class RpcServer:
    """What a server says: the `version` of its protocol, and the memory of each of its devices in bytes."""

    endpoint: str
    version: tuple[int, int, int]
    device_bytes: tuple[int, ...]

    @property
    def identity(self) -> str:
        """What its results may depend on bitwise, as far as it can be asked."""
        return f"{self.endpoint} {self.version} {self.device_bytes}"


def ask_all(endpoints: Sequence[str], timeout_s: float = TIMEOUT_S) -> tuple[RpcServer, ...]:
    """What all servers are, asked at once. Raises Unreachable for the first that does not answer."""
    with ThreadPoolExecutor(len(endpoints) or 1) as pool:
        return tuple(pool.map(partial(ask, timeout_s=timeout_s), endpoints))


def ask(endpoint: str, timeout_s: float = TIMEOUT_S) -> RpcServer:
    """What the server at `endpoint` is. Raises Unreachable with the reason and the fix."""
    try:
        with socket.create_connection(split_endpoint(endpoint), timeout_s) as connection:
            connection.settimeout(timeout_s)
            version = _call(connection, _HELLO, _CAPABILITIES, 4 + len(_CAPABILITIES))
            (count,) = struct.unpack("<I", _call(connection, _DEVICE_COUNT, b"", 4))
            if not 1 <= count <= _MOST_DEVICES:
                _fail(endpoint, f"it claims to have {count} devices", "start edgespec rpc-server there")
            sizes = tuple(_memory(connection, index) for index in range(count))
        return RpcServer(endpoint, (version[0], version[1], version[2]), sizes)
    except socket.gaierror as exc:
        _fail(endpoint, f"the host name is not known ({exc.strerror})", "check the name, or give its IPv4 address", exc)
    except ConnectionRefusedError as exc:
        port = split_endpoint(endpoint)[1]
        _fail(endpoint, "nothing listens there", f"start edgespec rpc-server --port {port} on that machine", exc)
    except TimeoutError as exc:
        why = f"no answer within {timeout_s:g} s: it serves another program (a server takes one at a time), it hangs, "
        _fail(endpoint, f"{why}or the network drops packets", "end the other program, or start the server again", exc)
    except (OSError, struct.error) as exc:
        _fail(endpoint, str(exc) or type(exc).__name__, "check that edgespec rpc-server runs there", exc)


def _memory(connection: socket.socket, device: int) -> int:
    free_and_total = _call(connection, _DEVICE_MEMORY, struct.pack("<I", device), 16)
    return int(struct.unpack("<QQ", free_and_total)[1])


def _call(connection: socket.socket, command: int, payload: bytes, size: int) -> bytes:
    connection.sendall(struct.pack("<BQ", command, len(payload)) + payload)
    (announced,) = struct.unpack("<Q", _read(connection, 8))
    if announced != size:
        raise ConnectionError("what answers there is not an RPC server of a matching version of llama.cpp")
    return _read(connection, size)


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
