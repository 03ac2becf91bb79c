"""A sequence on disk: its token ids and the engine's state after them, so that a later run need not read them again.

The file holds MAGIC, the length of a JSON header, the header, the token ids, where the pass of each ended (both int32,
little-endian) and the engine's state, which carries a stamp of the weights, library and cache types and a digest of its
own. A restored sequence is used like any other: the next prompt is compared with its tokens, and only what differs is
read.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.config.values import as_path
from edgespec.engines.cached_text import CachedText
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import ConfigError, StateError, shown
from edgespec.platform.files import write_atomically
from edgespec.types import TokenIds

MAGIC = b"EDGESPEC SEQUENCE 2\n"
_LENGTH = struct.Struct("<I")
_MAX_HEADER_BYTES = 1 << 12
_AGAIN = "the prompt is read again instead"


def state_path(given: str | os.PathLike[str]) -> Path:
    """`given` as the path of a saved state. Raises ConfigError for what is none."""
    path = as_path("path", given)
    if not path.name:
        raise ConfigError(f"path {shown(str(given))} is a folder: name the file of the saved state")
    return path


def save_sequence(path: Path, sequence: CachedSequence) -> int:
    """Write the tokens in the cache and the state after them; returns their number.

    Raises StateError when the file cannot be written, EngineError.
    """
    sequence.reconcile()
    tokens = b"".join(part.astype("<i4").tobytes() for part in sequence.text)
    count = sequence.length
    header = {"tokens": count, "sha256": hashlib.sha256(tokens).hexdigest(), "widths": _widths(sequence)}
    text = json.dumps(header).encode()
    state = sequence.engine.save_state(sequence.sequence)
    parts = (MAGIC, _LENGTH.pack(len(text)), text, tokens, state)
    write_atomically(path, b"".join(parts), private=True, durable=False)
    return count


def load_sequence(path: Path, sequence: CachedSequence) -> int:
    """Replace what is in the cache by the saved tokens; returns their number.

    Raises StateError for a missing or damaged file, or one of another model or mode. The cache is then as before, or
    empty where the engine itself refused the state.
    """
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise StateError(f"the saved state {path} cannot be read: {exc.strerror}; {_AGAIN}") from exc
    header, rest = _header(path, content)
    count = header["tokens"]
    tokens = rest[: 8 * count]
    if len(tokens) != 8 * count or hashlib.sha256(tokens).hexdigest() != header.get("sha256"):
        raise StateError(f"the saved state {path} is damaged; {_AGAIN}")
    text = CachedText(*np.frombuffer(tokens, "<i4").astype(np.int32).reshape(2, count))
    _check_fits(path, header, text.token_ids, sequence)
    sequence.adopt(rest[8 * count :], text)
    return int(text.token_ids.size)


def _header(path: Path, content: bytes) -> tuple[dict[str, Any], memoryview]:
    """The checked header, and what follows it."""
    begin = len(MAGIC) + _LENGTH.size
    if not content.startswith(MAGIC) or len(content) < begin:
        raise StateError(f"{path} is not a state saved by this version of edgespec; {_AGAIN}")
    (length,) = _LENGTH.unpack_from(content, len(MAGIC))
    try:
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"its header claims {length} bytes")
        header = json.loads(content[begin : begin + length])
        count = header["tokens"]
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < 1 << 31:
            raise ValueError(f"it claims {count!r} tokens")
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise StateError(f"the saved state {path} is damaged ({exc}); {_AGAIN}") from exc
    return header, memoryview(content)[begin + length :]


def _check_fits(path: Path, header: dict[str, Any], token_ids: TokenIds, sequence: CachedSequence) -> None:
    facts = sequence.engine.facts
    if token_ids.size > facts.context_length:
        raise StateError(
            f"the saved state {path} holds {token_ids.size} tokens, but this context only {facts.context_length}; "
            f"{_AGAIN}"
        )
    if token_ids.size and not 0 <= token_ids.min() <= token_ids.max() < sequence.engine.vocabulary.size:
        raise StateError(f"the saved state {path} contains tokens that this model does not know; {_AGAIN}")
    # Passes of other widths round differently: in reproducible mode only a state of the same class has the right bits.
    if facts.pinned_class is not None and header.get("widths") != _widths(sequence):
        raise StateError(f"the saved state {path} was not made in this reproducible mode; {_AGAIN}")


def _widths(sequence: CachedSequence) -> list[int] | None:
    facts = sequence.engine.facts
    return None if facts.pinned_class is None else [*map(int, facts.pinned_class), facts.prompt_block]
