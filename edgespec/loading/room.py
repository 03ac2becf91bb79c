"""Whether a model fits into this machine's memory, by the size of its files."""

from __future__ import annotations

from edgespec.platform.memory import free_memory

_BESIDE_WEIGHTS = 1.1  # weights with caches and buffers, over the weights alone


def fits(num_bytes: int) -> bool | None:
    """Whether models of `num_bytes` fit into the memory that is available now; None if that is unknown."""
    available = free_memory()
    return None if available is None else num_bytes * _BESIDE_WEIGHTS <= available
