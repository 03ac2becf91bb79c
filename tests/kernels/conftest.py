"""The kernels' tests need their library."""

from collections.abc import Iterator

import pytest

import tiled
from edgespec.kernels import interface
from edgespec.kernels.library import library_path

PATHS = ("portable", "avx2", "avx-vnni", "avx512-vnni", "neon-dot", "neon-i8mm")


@pytest.fixture(autouse=True)
def path_in_use() -> Iterator[str]:
    """The instruction set that the processor was given, which a test may have changed."""
    if library_path() is None:
        pytest.skip("the kernels have not been built")
    path = interface.path()
    yield path
    assert tiled.choose_path(path)


@pytest.fixture
def paths() -> list[str]:
    """Instruction sets that this processor has."""
    return [path for path in PATHS if tiled.choose_path(path)]
