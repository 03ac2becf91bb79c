"""Bits do not depend on the number of threads, which a busy machine may change at any time.

Nowhere in reproducible mode. The one exception is in the fast mode, which makes no such promise: from 512 cells on
llama.cpp reads the cache of a lone row in as many parts as it has threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import numpy as np
import pytest
from numpy.typing import NDArray

import edgespec
from demo import DEMO
from edgespec import GenerateOptions, Sampling
from edgespec.engines.base import Engine
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.errors import ConfigError
from edgespec.types import Batch
from lossless import PROMPTS

CONTEXT = 1024
CACHED = (40, 500, 700)
SPLIT_CELLS = 512 - 256  # cells are counted up to a multiple of 256
WIDTHS = (1, 2, 3, 4, 5, 8, 16)
TEXT = " ".join(PROMPTS) + " def clamp(value, low, high):\n    return max(low, min(value, high))\n" * 3
Snapshot = list[tuple[int, int, bytes]]


def real_model() -> Path:
    given = os.environ.get("EDGESPEC_TEST_MODEL")
    if not given:
        pytest.skip("EDGESPEC_TEST_MODEL names no real model")
    return Path(given)


@pytest.fixture(params=["demo", "real"])
def gguf_path(request: pytest.FixtureRequest, target_path: Path) -> Path:
    return target_path if request.param == "demo" else real_model()


def text_ids(engine: Engine, length: int) -> NDArray[np.int32]:
    ids = engine.vocabulary.encode(TEXT)
    return np.resize(np.array(ids, np.int32), length)


def snapshot(engine: Engine, use: Callable[[int], None]) -> Snapshot:
    """Logits by cached tokens and width, and the cache at the end, `use(turn)` being called before each pass."""
    engine.rollback(0)
    ids, found, turn = text_ids(engine, max(CACHED) + max(WIDTHS)), [], 0
    for cached in CACHED:
        while engine.length() < cached:
            use(turn)
            turn += 1
            step = min(64, cached - engine.length(), engine.widest_pass)
            engine.forward(Batch.chain(ids[engine.length() : engine.length() + step], last_only=True))
        for width in WIDTHS:
            use(turn)
            turn += 1
            found.append((cached, width, engine.forward(Batch.chain(ids[cached : cached + width])).tobytes()))
            engine.rollback(cached)
    return [*found, (0, 0, engine.save_state())]


@pytest.fixture(params=[True, False], ids=["reproducible", "fast"])
def llama(request: pytest.FixtureRequest, gguf_path: Path) -> Iterator[LlamaCppEngine]:
    wanted = None if request.param else False
    with LlamaCppEngine.load(gguf_path, context_length=CONTEXT, threads=2, reproducible=wanted) as engine:
        yield engine


def test_llama_cpp_gives_the_same_bits_with_one_thread_and_two(llama: LlamaCppEngine) -> None:
    def use(threads: int) -> Callable[[int], None]:
        return lambda turn: assert_set(llama, threads or 1 + turn % 2)

    two, one, mixed = (snapshot(llama, use(threads)) for threads in (2, 1, 0))
    for (cached, width, with_two), (*_, with_one), (*_, with_both) in zip(two, one, mixed, strict=True):
        if llama.facts.pinned_class is None and width == 1 and cached > SPLIT_CELLS:
            continue
        assert with_two == with_one, (cached, width)
        assert with_two == with_both, (cached, width)


def assert_set(engine: Engine, threads: int) -> None:
    assert engine.set_threads(threads)


def test_a_number_of_threads_that_the_model_was_not_loaded_for_is_refused(target_path: Path) -> None:
    with LlamaCppEngine.load(target_path, context_length=64, threads=2, reproducible=False) as engine:
        for wrong in (0, 3, -1):
            with pytest.raises(ConfigError, match=r"loaded for 1\.\.2"):
                engine.set_threads(wrong)


@pytest.fixture(scope="module", params=["int8", "w8a8"])
def onnx_target(request: pytest.FixtureRequest, onnx_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "int8":
        return onnx_path
    pytest.importorskip("onnx")
    from edgespec.export.onnx.writer import convert_gguf, open_gguf

    folder = tmp_path_factory.mktemp("whole")
    return convert_gguf(open_gguf(DEMO / "demo-target-q8_0.gguf"), folder, "w8a8")


@pytest.mark.parametrize("reproducible", [None, False])
def test_onnx_runtime_gives_the_same_bits_with_one_thread_and_two(onnx_target: Path, reproducible: bool | None) -> None:
    from edgespec.engines.onnx import OnnxEngine

    found = []
    for threads in (1, 2):
        with OnnxEngine.load(onnx_target, context_length=800, threads=threads, reproducible=reproducible) as engine:
            found.append(snapshot(engine, lambda turn: None))
    for (cached, width, with_one), (*_, with_two) in zip(*found, strict=True):
        assert with_one[-(1 << 20) :] == with_two[-(1 << 20) :], (cached, width)


@pytest.mark.skipif(not DEMO.is_dir(), reason="the demo family is not built")
@pytest.mark.parametrize("drafter", ["none", "auto"])
def test_texts_are_the_same_whatever_the_threads_do(drafter: str) -> None:
    """A controller that changes its mind every few passes, in the middle of answers, for target and draft alike."""
    sampling, options = Sampling(temperature=0.8, seed=11), GenerateOptions(max_tokens=64, ignore_eos=True)
    with edgespec.load("demo", engine="llamacpp", reproducible=True, threads=2, drafter=drafter) as model:
        ids = model.encode_chat([{"role": "user", "content": PROMPTS[1]}])
        expected = model.generate(ids, sampling, options)
        pool = model._pool
        for step, events in enumerate(model.stream(ids, sampling, options)):
            pool.use_threads(1 + step // 3 % 2)
            assert events.token_id == expected.token_ids[step]
            assert events.logprob == expected.logprobs[step]


def settle(engine: Engine, threads: int, spins: bool) -> None:
    """Wait until passes run as asked, which a session that is made in a thread delays."""
    assert engine.set_threads(threads)
    deadline_s = monotonic() + 60
    while True:
        engine.forward(Batch.chain([1]))
        engine.rollback(0)
        if engine.is_settled and engine._sessions[0].spins == spins:  # type: ignore[attr-defined]
            return
        assert monotonic() < deadline_s


@pytest.mark.parametrize("reproducible", [None, False])
def test_sessions_that_wait_otherwise_give_the_same_bits_and_go_on_from_the_same_cache(
    onnx_target: Path, reproducible: bool | None
) -> None:
    from edgespec.engines.onnx import OnnxEngine

    with OnnxEngine.load(onnx_target, context_length=800, threads=2, reproducible=reproducible) as engine:
        spinning = snapshot(engine, lambda turn: None)
        settle(engine, 1, spins=False)
        sleeping = snapshot(engine, lambda turn: None)
        mixed = snapshot(engine, lambda turn: assert_set(engine, 1 + turn % 2))
        assert spinning == sleeping == mixed
        with pytest.raises(ConfigError, match=r"loaded for 1\.\.2"):
            engine.set_threads(3)


def test_a_model_closes_while_its_other_session_is_made(onnx_path: Path) -> None:
    from edgespec.engines.onnx import OnnxEngine

    with OnnxEngine.load(onnx_path, context_length=64, threads=2, reproducible=False) as engine:
        assert_set(engine, 1)
    assert not [each for each in threading.enumerate() if each.name == "edgespec-session"]
