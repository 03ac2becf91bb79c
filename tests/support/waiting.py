"""Waiting in tests: for what must come about, up to a deadline, never for a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

WITHIN_S = 60.0  # far above what anything here takes on a busy machine
EVERY_S = 0.005


def until(is_so: Callable[[], object], within_s: float = WITHIN_S, process: Any = None) -> None:
    """Return once `is_so()` holds. `process`: a Popen that must run until then."""
    deadline_s = time.monotonic() + within_s
    while not is_so():
        assert process is None or process.poll() is None, "the process ended by itself"
        assert time.monotonic() < deadline_s, f"it has not come about within {within_s:g} s"
        time.sleep(EVERY_S)


async def reached(is_so: Callable[[], object], within_s: float = WITHIN_S) -> None:
    """`until` for a task: the loop goes on meanwhile."""
    async with asyncio.timeout(within_s):
        while not is_so():
            await asyncio.sleep(EVERY_S)
