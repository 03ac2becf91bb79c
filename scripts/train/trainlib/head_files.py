"""Writes heads files: what `edgespec.formats.head_file` reads."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.formats.head_file import (
    EMBEDDING,
    FORMAT,
    FREQUENT,
    MANIFEST,
    PROBE_IDS,
    PROBE_STATES,
    SCALE,
    TOKEN_IDS,
    VOCABULARY,
    HeadFile,
    Table,
)
from edgespec.platform.files import atomic_file


def write_head_file(path: Path, heads: HeadFile, storage: str = "int8") -> None:
    """Write `heads` to `path`; matrices as `storage`, int8 with a scale per row or f16. Raises StateError."""
    stored: dict[str, NDArray[Any]] = {TOKEN_IDS: heads.token_ids, PROBE_IDS: heads.probe_ids}
    stored[PROBE_STATES] = heads.probe_states.astype(np.float16)
    if heads.frequent is not None:
        stored[FREQUENT] = heads.frequent
    for name, array in {**heads.arrays, VOCABULARY: heads.vocabulary}.items():
        if array.ndim == 2 and storage == "int8":
            _add(stored, name, in_bytes(array))
        else:
            stored[name] = array.astype(np.float16 if array.ndim == 2 else np.float32)
    if heads.embedding is not None:
        _add(stored, EMBEDDING, heads.embedding)
    text = json.dumps({"format": FORMAT, **asdict(heads.manifest)}, sort_keys=True)
    stored[MANIFEST] = np.frombuffer(text.encode(), np.uint8)
    with atomic_file(path) as temporary, temporary.open("wb") as handle:
        np.savez(handle, allow_pickle=False, **stored)


def _add(stored: dict[str, NDArray[Any]], name: str, table: Table) -> None:
    stored[name] = table.codes
    if table.scales is not None:
        stored[name + SCALE] = table.scales


def in_bytes(rows: NDArray[np.float32]) -> Table:
    """Rows in 8 bits."""
    scales = np.maximum(np.abs(rows).max(axis=1), 1e-12) / np.float32(127.0)
    return Table(np.rint(rows / scales[:, None]).astype(np.int8), scales.astype(np.float32))
