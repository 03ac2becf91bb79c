"""The files of a loaded model: whether they are as they were, and their stamp on saved sequences.

Weights are mapped, not copied: where a file is truncated, touching what is gone ends the process with SIGBUS, and where
it is written over, the model writes nonsense. Before each pass the files are compared with what they were, which costs
microseconds. What changes during a pass is not noticed before the next one. The header of a saved sequence is checked
because libraries would read the state of another model unchecked.
"""

from __future__ import annotations

import hashlib
import os
import struct
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from edgespec.errors import EngineError, StateError

HEADER = struct.Struct("<32s32s32sQ")  # magic, stamp, digest of the payload, length in tokens
SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StateStamp:
    """What a state and its loader must have in common: weights, library, KV types; `magic` names the engine."""

    magic: bytes
    digest: bytes

    @classmethod
    def of(cls, engine: str, files: Iterable[Path], *kinds: object) -> Self:
        found = hashlib.sha256(b"".join(fingerprint(path) for path in files))
        found.update("\0".join(map(str, kinds)).encode())
        return cls(f"EDGESPEC STATE {engine}".encode().ljust(32, b"\n"), found.digest())

    def wrap(self, payload: bytes | memoryview, length: int) -> bytes:
        header = HEADER.pack(self.magic, self.digest, hashlib.sha256(payload).digest(), length)
        return b"".join((header, payload))  # one copy: a state may be as large as the room for it

    def unwrap(self, state: bytes | memoryview, context_length: int) -> tuple[memoryview, int]:
        """(payload, length in tokens), not copied.

        Raises StateError for anything but a whole state of this model, of at most `context_length` tokens.
        """
        state = memoryview(state)
        if len(state) < HEADER.size or state[: len(self.magic)] != self.magic:
            raise StateError("this is not a saved sequence of this engine; start from the prompt instead")
        _, stamp, digest, length = HEADER.unpack_from(state)
        if stamp != self.digest:
            raise StateError(
                "this state was saved with another model, library version or cache type; start from the prompt instead"
            )
        payload = state[HEADER.size :]
        if hashlib.sha256(payload).digest() != digest:
            raise StateError("this saved sequence is damaged; start from the prompt instead")
        if length > context_length:
            raise StateError(f"the state holds {length} tokens, this context {context_length}")
        return payload, length


def fingerprint(path: Path) -> bytes:
    """A digest of a model file: its size, its beginning (metadata) and its end (weights)."""
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        found.update(file.read(SAMPLE_BYTES))
        file.seek(max(size - SAMPLE_BYTES, 0))
        found.update(file.read(SAMPLE_BYTES))
    return found.digest()


Seen = tuple[int, int]  # size in bytes, time of change in ns


class HeldFiles:
    """Open files and what they were when the model was loaded. A file that cannot be opened is not watched."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: list[tuple[Path, int, Seen]] = []
        for path in paths:
            with suppress(OSError):
                handle = os.open(path, os.O_RDONLY)
                self._files.append((path, handle, _seen(handle)))
        self._release = weakref.finalize(self, _close, [handle for _, handle, _ in self._files])

    def check(self) -> None:
        """Raises EngineError where a file is not what it was; to be called before each pass."""
        for path, handle, before in self._files:
            if _seen(handle) != before:
                raise EngineError(
                    f"{path} was changed while the model was in use and reading weights from it: load the model again "
                    "(write new files under another name and rename them)"
                )

    def close(self) -> None:
        """Close the files; closing twice is allowed."""
        self._files = []
        self._release()


def _close(handles: Iterable[int]) -> None:
    for handle in handles:
        os.close(handle)


def _seen(handle: int) -> Seen:
    found = os.fstat(handle)
    return found.st_size, found.st_mtime_ns
