"""Messages between this process and its child over two pipes; arrays and states are sent without a copy.

A message is anything that pickle takes. Both ends are ours and of one version, so what arrives is trusted.
"""

from __future__ import annotations

import pickle
import struct
import threading
from io import RawIOBase
from typing import Any, NamedTuple

from edgespec.engines.base import EngineFacts

_COUNT, _SIZE = struct.Struct("<I"), struct.Struct("<Q")
LOAD, CANCEL = "load", "cancel"


class Call(NamedTuple):
    """A method of the engine to call; the answer and a cancellation repeat its `number`, which counts up."""

    number: int
    method: str
    arguments: tuple[Any, ...] = ()


class Answer(NamedTuple):
    """The result of a call. `error`: the name of an exception of `edgespec.errors`, whose message is `value`."""

    number: int
    value: Any = None
    error: str = ""


class Report(NamedTuple):
    """Progress of a load, as the arguments of `Progress`, or a line of the log (`level` is not 0)."""

    what: str
    done: int = 0
    total: int = 0
    level: int = 0


class Loaded(NamedTuple):
    """What the parent has to know of the engine: the answer to LOAD."""

    facts: EngineFacts
    class_key: str
    most_branches: int


class Pipe:
    """Sends and receives messages. Any thread may send, one at a time receives."""

    def __init__(self, reading: RawIOBase, writing: RawIOBase) -> None:
        self._reading, self._writing = reading, writing
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Raises OSError when the other end is gone."""
        large: list[pickle.PickleBuffer] = []
        parts = [memoryview(pickle.dumps(message, protocol=5, buffer_callback=large.append))]
        parts += [buffer.raw() for buffer in large]
        sizes = b"".join(_SIZE.pack(part.nbytes) for part in parts)
        with self._sending:
            self._write(memoryview(_COUNT.pack(len(parts)) + sizes))
            for part in parts:
                self._write(part)

    def receive(self) -> Any:
        """The next message; waits for it. Raises EOFError when the other end is gone."""
        (count,) = _COUNT.unpack(self._read(_COUNT.size))
        sizes = [_SIZE.unpack(self._read(_SIZE.size))[0] for _ in range(count)]
        body, *large = [self._read(size) for size in sizes]
        return pickle.loads(body, buffers=large)

    def close(self) -> None:
        self._writing.close()
        self._reading.close()

    def _write(self, data: memoryview) -> None:
        while data:
            data = data[self._writing.write(data) or 0 :]

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        free = memoryview(data)
        while free:
            count = self._reading.readinto(free)
            if not count:
                raise EOFError
            free = free[count:]
        return data
