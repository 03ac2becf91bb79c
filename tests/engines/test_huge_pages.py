"""Weights are moved into huge pages while no pass runs, and memory that was never touched stays so."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from edgespec.engines import huge_pages
from edgespec.engines.huge_pages import HugePages
from edgespec.engines.onnx.engine import OnnxEngine
from edgespec.types import Batch
from waiting import until

SIZE = 8 << 21


def huge_bytes(address: int) -> int:
    """Of the mapping around `address`, in huge pages."""
    found = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    for mapping in found:
        begin, end = (int(part, 16) for part in mapping.split(maxsplit=1)[0].split("-"))
        if begin <= address < end:
            match = re.search(r"AnonHugePages:\s+(\d+) kB", mapping)
            assert match is not None
            return int(match[1]) * 1024
    raise AssertionError("no such mapping")


class Area:
    """Pages of their own, of which the first `filled` bytes are touched; not taken as huge ones by the kernel."""

    def __init__(self, filled: int = SIZE) -> None:
        self.memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = np.frombuffer(self.memory, np.uint8)
        self.bytes[:filled] = np.arange(filled, dtype=np.uint8)
        self.address = self.bytes.ctypes.data


def moves() -> bool:
    """Whether this kernel makes huge pages of what is there."""
    if sys.platform != "linux" or not huge_pages._block_bytes():
        return False
    area = Area()
    block = -(-area.address // huge_pages._block_bytes()) * huge_pages._block_bytes()
    return huge_pages._libc().madvise(block, huge_pages._block_bytes(), huge_pages._COLLAPSE) == 0


pytestmark = pytest.mark.skipif(not moves(), reason="this system makes no huge pages on request")


def resident(area: Area) -> int:
    pages = SIZE // mmap.PAGESIZE
    found = np.zeros(pages, np.uint8)
    assert huge_pages._libc().mincore(ctypes.c_void_p(area.address), SIZE, found.ctypes.data) == 0
    return int(np.count_nonzero(found & 1))


def test_what_is_taken_after_it_is_moved_and_keeps_its_bytes(monkeypatch):
    moved, collapse = [], huge_pages._collapse
    monkeypatch.setattr(huge_pages, "_collapse", lambda block: moved.append(block) or collapse(block))
    earlier = Area()
    pages = HugePages()
    later = Area()
    sparse = Area(filled=mmap.PAGESIZE)
    pages.start(lambda: 0)
    until(lambda: huge_bytes(later.address) >= SIZE // 2)
    pages.stop()
    assert (later.bytes == np.arange(SIZE, dtype=np.uint8)).all()
    whole = range(earlier.address, earlier.address + SIZE - huge_pages._block_bytes() + 1)
    assert moved
    assert not [block for block in moved if block in whole]
    assert resident(sparse) == 1


def test_beside_passes_it_hardly_works(monkeypatch):
    moved, changes = [], iter(range(10**6))
    monkeypatch.setattr(huge_pages, "_LOOK_S", 0.001)
    monkeypatch.setattr(huge_pages, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(huge_pages, "_collapse", lambda block: moved.append(block) or True)
    monkeypatch.setattr(huge_pages, "_blocks", lambda: range(0, 10 * len(moved) + 1000, 10))
    pages = HugePages()
    monkeypatch.setattr(pages, "_before", set())
    pages.start(lambda: next(changes))
    until(lambda: len(moved) >= 3)
    pages.stop()
    assert next(changes) >= 10 * len(moved), "a block each time that patience ends"
    assert moved == sorted(moved)


def test_it_ends_where_nothing_can_be_moved(monkeypatch):
    tried = []
    monkeypatch.setattr(huge_pages, "_collapse", lambda block: tried.append(block))
    monkeypatch.setattr(huge_pages, "_blocks", lambda: range(100))
    pages = HugePages()
    monkeypatch.setattr(pages, "_before", set())
    pages.start(lambda: 0)
    thread = pages._thread
    assert thread is not None
    until(lambda: not thread.is_alive())
    assert len(tried) == huge_pages._MOST_FAILURES


def test_an_administrator_who_wants_none_gets_none(monkeypatch, tmp_path):
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    assert huge_pages._block_bytes.__wrapped__() == 0
    pages = HugePages()
    monkeypatch.setattr(huge_pages, "_block_bytes", huge_pages._block_bytes.__wrapped__)
    pages.start(lambda: 0)
    assert pages._thread is None
    pages.stop()


@pytest.fixture
def moving(onnx_path, monkeypatch):
    """An engine whose weights are being moved, in a list that a test may empty, and the thread."""
    monkeypatch.setattr("edgespec.engines.onnx.engine.LEAST_BYTES", 0)
    engine = OnnxEngine.load(onnx_path, context_length=64)
    assert engine._pages is not None
    assert engine._pages._thread is not None
    return [engine], engine._pages._thread


def test_a_model_that_is_closed_ends_it(moving):
    (engine,), thread = moving
    before = engine.forward(Batch.chain([1, 2, 3])).copy()
    engine.rollback(0)
    assert engine._num_changes % 2 == 0
    assert (engine.forward(Batch.chain([1, 2, 3])) == before).all()
    engine.close()
    assert not thread.is_alive()


def test_a_model_that_is_forgotten_ends_it(moving):
    engines, thread = moving
    engines.clear()
    until(lambda: not thread.is_alive())
