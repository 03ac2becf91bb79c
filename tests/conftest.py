"""Fixtures that every test file shares: a private home folder, tiny models, and the demo family where it is built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_gguf import Shape, write_model
from tiny_onnx import write_concatenated_model

DEMO = Path(__file__).parent.parent / "models" / "demo"
TEST_THREADS = 1  # several would wait for each other on a busy machine


@pytest.fixture(scope="session", autouse=True)
def private_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Caches and settings of a test run stay out of the user's own folders."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("EDGESPEC_HOME", str(home))
        yield home


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with a vocabulary of 299 tokens, float32."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="session")
def other_tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape as `tiny_path` with other weights."""
    return write_model(tmp_path_factory.mktemp("models") / "other.gguf", Shape(seed=1))


@pytest.fixture(scope="session")
def target_path(tiny_path: Path) -> Path:
    """The demo target, or a tiny random model in a checkout without weights."""
    return next(iter(sorted(DEMO.glob("*target*.gguf"))), tiny_path)


@pytest.fixture(scope="session")
def draft_path(tiny_path: Path) -> Path:
    """The demo draft, or the tiny random model."""
    return next(iter(sorted(DEMO.glob("*draft*.gguf"))), tiny_path)


@pytest.fixture(scope="session")
def onnx_path() -> Path:
    """The demo target as an int8 ONNX export."""
    return DEMO / "onnx" / "target" / "model.onnx"


@pytest.fixture(scope="session")
def concatenated_path(onnx_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random ONNX model whose cache grows by concatenation, with the demo's vocabulary."""
    return write_concatenated_model(tmp_path_factory.mktemp("concatenated"), onnx_path.parent, 4096)
