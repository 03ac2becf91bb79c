"""Arrays in pages of their own: they take memory only where written, and return it as soon as they are freed.

numpy's own arrays may lie in memory that the allocator used before, which it then has to fill with zeros.
"""

from __future__ import annotations

import math
import mmap
import sys
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray


def untouched_zeros(shape: int | tuple[int, ...], dtype: Any, *, huge_pages: bool = False) -> NDArray[Any]:
    """Zeros of `shape`; `huge_pages`: in those where the system has them, for what all passes read.

    Raises MemoryError when this process may have no more addresses.
    """
    sizes = (shape,) if isinstance(shape, int) else shape
    count = math.prod(sizes)
    private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    size = max(count * np.dtype(dtype).itemsize, 1)
    try:
        pages = mmap.mmap(-1, size, **private)
    except OSError as exc:
        raise MemoryError(f"no room for {size} bytes: {exc.strerror}") from exc
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype, count).reshape(sizes)
