"""Fixtures that every test file shares: a private home folder, tiny models, and the demo family where it is built."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from demo import DEMO, TEST_THREADS
from edgespec.config.values import EngineName
from edgespec.installation import has_engine
from edgespec.kernels.library import library_path
from hybrid_gguf import HybridShape, write_granite, write_lfm2, write_qwen35
from tiny_gguf import Shape, write_model
from tiny_onnx import write_concatenated_model
from workers import Turns, wanted_processes

os.environ.setdefault("OMP_NUM_THREADS", str(TEST_THREADS))  # of torch, which reads it when it is first imported
SHARED = pytest.StashKey[tempfile.TemporaryDirectory[str]]()
TURNS = pytest.StashKey[Turns]()


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have llama.cpp run every GGUF in this process."""
    monkeypatch.setattr("edgespec.loading.requirements.library_path", lambda: None)
    monkeypatch.setattr("edgespec.loading.requirements.why_missing", lambda: "the kernels are not built")


@pytest.fixture(params=["llamacpp", "onnx"], scope="module")
def engine_name(request: pytest.FixtureRequest) -> EngineName:
    """Of a GGUF: heads in GGUF run on both."""
    if request.param == "onnx" and library_path() is None:
        pytest.skip("the kernels are not built: scripts/run.py test builds them")
    name: EngineName = request.param
    return name


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, like the next one
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return wanted_processes(config.args)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Runs before each worker starts, in the process that starts them."""
    if SHARED not in node.config.stash:
        node.config.stash[SHARED] = folder = tempfile.TemporaryDirectory(prefix="edgespec-tests-")
        node.config.add_cleanup(folder.cleanup)
    node.workerinput["turns"] = node.config.stash[SHARED].name
    node.workerinput["unset"] = [name for name in ("COLUMNS", "LINES") if name not in os.environ]


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.stash[TURNS] = turns = Turns(Path(config.workerinput["turns"]))
        config.add_cleanup(turns.close)
        for name in config.workerinput["unset"]:  # readline sets them behind Python's back, for all that is started
            os.environ.pop(name, None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Quiet tests come last in their file where there are several workers, of which the others wait once for them."""
    if TURNS not in config.stash:
        return
    files = {path: place for place, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (files[item.path], is_quiet(item)))


def is_quiet(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("quiet") is not None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """With all its fixtures, those of a file or a run too, where it is the first or the last to use them."""
    turns = item.config.stash.get(TURNS, None)
    if turns is None:
        return (yield)
    turns.begin(alone=is_quiet(item))
    try:
        return (yield)
    finally:
        turns.end(goes_on=is_quiet(nextitem))


@pytest.fixture(scope="session", autouse=True)
def private_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Caches and settings of a test run stay out of the user's own folders."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("EDGESPEC_HOME", str(home))
        patch.setenv("ORT_DISABLE_TELEMETRY", "1")
        if sys.dont_write_bytecode:  # as containers have it: children would compile all that they import, each anew
            patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
            patch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path_factory.mktemp("bytecode")))
        patch.setenv("EDGESPEC_THREADS", str(TEST_THREADS))
        patch.setattr("edgespec.engines.model_use.default_threads", lambda: TEST_THREADS)
        patch.setattr("edgespec.config.options.fresh_seed", lambda: 0)  # a text must not decide about a test
        yield home


@pytest.fixture
def fresh_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generations without a seed differ, as they do outside the tests."""
    monkeypatch.setattr("edgespec.config.options.fresh_seed", lambda: secrets.randbits(32))


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than free cores make a tiny model a hundred times slower."""
    monkeypatch.setenv("EDGESPEC_THREADS", "1")


@pytest.fixture
def pair(target_path: Path, draft_path: Path) -> list[str]:
    """The options that name the demo target and its draft."""
    return ["-m", str(target_path), "-md", str(draft_path)]


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with a vocabulary of 299 tokens, float32."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="session")
def qwen35_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random hybrid of gated delta nets and gated attention, float32, with fewer heads of keys than of values."""
    shape = HybridShape(hidden=512, head_size=32, rotated=16, state_heads=6, key_heads=2)
    return write_qwen35(tmp_path_factory.mktemp("models") / "qwen35.gguf", shape)


@pytest.fixture(scope="session")
def qwen35moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with routed experts and a shared one, and the layer that predicts a further token."""
    shape = HybridShape(hidden=64, head_size=32, rotated=16, state_heads=6, key_heads=2, experts=(6, 2, 32))
    return write_qwen35(tmp_path_factory.mktemp("models") / "qwen35moe.gguf", shape, has_mtp=True)


@pytest.fixture(scope="session")
def lfm2_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random hybrid of short convolutions and attention, float32."""
    return write_lfm2(tmp_path_factory.mktemp("models") / "lfm2.gguf", HybridShape(hidden=512))


@pytest.fixture(scope="session")
def windowed_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Gemma 3 whose window is 16 tokens long, float32."""
    from edgespec.export.gguf.convert import convert
    from tiny_checkpoints import write_checkpoint

    folder = tmp_path_factory.mktemp("windowed")
    source = write_checkpoint(folder / "source", "gemma3", sliding_window=16, max_position_embeddings=512)
    convert(source, folder / "windowed.gguf", "f32")
    return folder / "windowed.gguf"


@pytest.fixture(scope="session")
def lfm2moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with routed experts behind the first layer."""
    shape = HybridShape(hidden=512, experts=(6, 3, 32))
    return write_lfm2(tmp_path_factory.mktemp("models") / "lfm2moe.gguf", shape)


@pytest.fixture(scope="session")
def granitehybrid_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Granite 4 H: Mamba-2 layers with routed and shared experts."""
    shape = HybridShape(hidden=512, experts=(6, 2, 32))
    return write_granite(tmp_path_factory.mktemp("models") / "granitehybrid.gguf", shape)


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
def q4_k_m_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo target as llama.cpp's mix of Q4_K and Q6_K."""
    if not has_engine("llamacpp"):
        pytest.skip("quantises with llama.cpp, which is not installed")
    from tiny_graphs import export_gguf

    path = tmp_path_factory.mktemp("mix") / "q4_k_m.gguf"
    export_gguf(DEMO / "hf" / "target", path, "q4_k_m", threads=TEST_THREADS)
    return path


@pytest.fixture(scope="session")
def onnx_path() -> Path:
    """The demo target as an int8 ONNX export."""
    return DEMO / "onnx" / "target" / "model.onnx"


@pytest.fixture(scope="session")
def tiny_graph_path(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_path` as a float32 ONNX graph with attention over a shared cache, as a conversion writes it."""
    from edgespec.export.onnx.writer import convert_gguf, open_gguf

    return convert_gguf(open_gguf(tiny_path), tmp_path_factory.mktemp("graph"), "fp32")


@pytest.fixture(scope="session")
def four_bit_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo target with weights of 4 bits."""
    from tiny_graphs import graph

    return graph(DEMO / "hf" / "target", tmp_path_factory.mktemp("int4") / "target", "int4")


@pytest.fixture(scope="session")
def concatenated_path(onnx_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random ONNX model whose cache grows by concatenation, with the demo's vocabulary."""
    return write_concatenated_model(tmp_path_factory.mktemp("concatenated"), onnx_path.parent, 4096)
