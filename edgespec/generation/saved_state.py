"""A sequence on disk: its token ids and the engine's state after them, so that a later run need not read them again.

A file of numpy arrays: FORM, `tokens` [n], `read` (the numbers of `CachedText`), `widths` and the engine's state, which
carries a stamp of the weights, library and cache types and a digest of its own. A restored sequence is used like
any other: the next prompt is compared with its tokens, and only what differs is read.
"""

from __future__ import annotations

import io
import os
import zlib
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from edgespec.config.values import as_path
from edgespec.engines.sequence import CachedSequence, CachedText
from edgespec.errors import ConfigError, StateError, shown
from edgespec.platform.files import write_atomically
from edgespec.types import TokenIds

FORM = "edgespec sequence 4"
_AGAIN = "the prompt is read again instead"
_DAMAGE = (BadZipFile, zlib.error, ValueError, KeyError, EOFError, TypeError, AttributeError, MemoryError)


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
    (tokens, *read), state = sequence.text, sequence.engine.save_state(sequence.sequence)
    parts = {"form": np.array(FORM), "tokens": tokens, "read": np.array(read), "widths": _widths(sequence)}
    file = io.BytesIO()
    np.savez(file, **parts, state=np.frombuffer(state, "u1"))  # type: ignore[arg-type]  # its keywords are arrays and one bool
    write_atomically(path, file.getvalue(), private=True, durable=False)
    return sequence.length


def load_sequence(path: Path, sequence: CachedSequence) -> int:
    """Replace what is in the cache by the saved tokens; returns their number.

    Raises StateError for a missing or damaged file, or one of another model or mode. The cache is then as before, or
    empty where the engine itself refused the state.
    """
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            form, tokens, read, widths, state = (file[name] for name in ("form", "tokens", "read", "widths", "state"))
            text = CachedText(tokens, *map(int, read))
    except OSError as exc:
        raise StateError(f"the saved state {path} cannot be read: {exc.strerror}; {_AGAIN}") from exc
    except _DAMAGE as exc:
        raise StateError(f"{path} is damaged, or not a state saved by this version of edgespec; {_AGAIN}") from exc
    if form != FORM or (tokens.dtype, state.dtype, tokens.ndim) != (np.int32, np.uint8, 1):
        raise StateError(f"{path} is not a state saved by this version of edgespec; {_AGAIN}")
    _check_fits(path, text.token_ids, sequence)
    # Passes of other widths round differently: in reproducible mode only a state of the same class has the right bits.
    if sequence.engine.facts.pinned_class is not None and not np.array_equal(widths, _widths(sequence)):
        raise StateError(f"the saved state {path} was not made in this reproducible mode; {_AGAIN}")
    sequence.adopt(state.data, text)
    return int(text.token_ids.size)


def _check_fits(path: Path, token_ids: TokenIds, sequence: CachedSequence) -> None:
    facts = sequence.engine.facts
    if token_ids.size > facts.context_length:
        raise StateError(
            f"the saved state {path} holds {token_ids.size} tokens, but this context only {facts.context_length}; "
            f"{_AGAIN}"
        )
    if token_ids.size and not 0 <= token_ids.min() <= token_ids.max() < sequence.engine.vocabulary.size:
        raise StateError(f"the saved state {path} contains tokens that this model does not know; {_AGAIN}")


def _widths(sequence: CachedSequence) -> NDArray[np.int64]:
    """Of passes with equal bits; none in the fastest mode."""
    facts = sequence.engine.facts
    pinned = facts.pinned_class
    return np.array([] if pinned is None else [*map(int, pinned), facts.prompt_block], np.int64)
