"""Writes heads files: what `edgespec.formats.head_file` reads."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.formats.head_file import (
    FORMAT,
    FREQUENT,
    MANIFEST,
    PROBE_IDS,
    PROBE_STATES,
    SCALE,
    TOKEN_IDS,
    VOCABULARY,
    HeadFile,
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
            scales = np.maximum(np.abs(array).max(axis=1), 1e-12) / np.float32(127.0)
            stored[name] = np.rint(array / scales[:, None]).astype(np.int8)
            stored[name + SCALE] = scales.astype(np.float32)
        else:
            stored[name] = array.astype(np.float16 if array.ndim == 2 else np.float32)
    text = json.dumps({"format": FORMAT, **asdict(heads.manifest)}, sort_keys=True)
    stored[MANIFEST] = np.frombuffer(text.encode(), np.uint8)
    with atomic_file(path) as temporary, temporary.open("wb") as handle:
        np.savez(handle, allow_pickle=False, **stored)
