"""The edge of attention with wide heads: the cell that no pass goes across in reproducible mode.

ONNX Runtime multiplies queries and keys 128 values of a head at a time, but all of them at once where a text has no
more than 64 cells, which rounds otherwise. If heads are wider, as Gemma's, the first 64 rows would therefore have other
bits in a pass that ends behind them. Flash attention counts these cells anew in each of its blocks, whose size depends
on the processor's caches: sessions are made without it then.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EDGE, VALUES_AT_ONCE = 64, 128
FLASH_OFF = "ORT_GQA_DISABLE_FLASH_ATTENTION"
_lock, _num_without = threading.Lock(), 0


def edge_of(head_size: int) -> int:
    """The edge for heads of so many values; 0 for none."""
    return EDGE if head_size > VALUES_AT_ONCE else 0


def end_of_pass(base: int, end: int, edge: int) -> int:
    """Where a pass over the cells from `base` to `end` has to end: at the edge if that lies between them."""
    return edge if base < edge < end else end


def rows_before(base: int, missing: int, edge: int) -> int:
    """How many of `missing` rows can be the ones before cell `base`: all or none."""
    return missing if missing <= base and not base - missing < edge <= base else 0


@contextmanager
def without_flash() -> Iterator[None]:
    """No flash attention in the sessions for the CPU that are made here, nor in others that are made meanwhile.

    ONNX Runtime has no option for that but a variable of the environment. It is set for good, and only its value
    changes later: another thread may read the environment, which must not move then.
    """
    global _num_without
    with _lock:
        _num_without += 1
        os.environ[FLASH_OFF] = "1"
    try:
        yield
    finally:
        with _lock:
            _num_without -= 1
            if not _num_without:
                os.environ[FLASH_OFF] = "0"
