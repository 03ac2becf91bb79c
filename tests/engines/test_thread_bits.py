"""Bits do not depend on the number of threads, which a busy machine may change at any time.

Nowhere in reproducible mode. The one exception is in the fast mode, which makes no such promise: from 512 cells on
llama.cpp reads the cache of a lone row in as many parts as it has threads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from numpy.typing import NDArray

import edgespec
from demo import DEMO
from edgespec import GenerateOptions, Sampling
from edgespec.engines.base import Engine
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.onnx.engine import OnnxEngine
from edgespec.errors import ConfigError
from edgespec.types import Batch
from lossless import PROMPTS
from needs import NEEDS_KERNELS

CONTEXT = 1024
CACHED = (40, 500, 700)
SPLIT_CELLS = 512 - 256  # cells are counted up to a multiple of 256
WIDTHS = (1, 2, 3, 4, 5, 8, 16)
TEXT = " ".join(PROMPTS) + " def clamp(value, low, high):\n    return max(low, min(value, high))\n" * 3
Snapshot = list[tuple[int, int, bytes]]


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
def llama(request: pytest.FixtureRequest, target_path: Path) -> Iterator[LlamaCppEngine]:
    wanted = None if request.param else False
    with LlamaCppEngine.load(target_path, context_length=CONTEXT, threads=2, reproducible=wanted) as engine:
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


def test_onnx_runtime_gives_the_same_bits_with_one_thread_and_two(onnx_path: Path) -> None:
    found = []
    for threads in (1, 2):
        with OnnxEngine.load(onnx_path, context_length=800, threads=threads) as engine:
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
        pool = model.drafters
        for step, events in enumerate(model.stream(ids, sampling, options)):
            pool.use_threads(1 + step // 3 % 2)
            assert events.token_id == expected.token_ids[step]
            assert events.logprob == expected.logprobs[step]


@NEEDS_KERNELS
def test_on_the_kernels_one_thread_and_two_give_the_same_bits_and_go_on_from_the_same_cache(target_path: Path) -> None:
    with OnnxEngine.load(target_path, context_length=800, threads=2) as engine:
        two, one = snapshot(engine, lambda turn: None), snapshot(engine, lambda turn: assert_set(engine, 1))
        assert two == one == snapshot(engine, lambda turn: assert_set(engine, 1 + turn % 2))
        with pytest.raises(ConfigError, match=r"loaded for 1\.\.2"):
            engine.set_threads(3)


@NEEDS_KERNELS
def test_more_callers_at_once_than_the_kernels_have_teams_of_threads_get_the_same_bits() -> None:
    batch = Batch.chain(np.arange(40) % 290)
    with ExitStack() as opened:
        path = DEMO / "demo-target-q8_0.gguf"
        threads = (1, 2, 3, 4, 2, 3, 4)
        engines = [opened.enter_context(OnnxEngine.load(path, context_length=64, threads=each)) for each in threads]
        expected = engines[0].forward(batch).tobytes()
        engines[0].rollback(0)

        def score(engine: Engine) -> bool:
            found = []
            for _ in range(12):
                found.append(engine.forward(batch).tobytes())
                engine.rollback(0)
            return set(found) == {expected}

        with ThreadPoolExecutor(len(engines)) as pool:
            assert all(pool.map(score, engines))


@NEEDS_KERNELS
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_has_threads_of_its_own() -> None:
    """The parent's do not exist there, and nobody waits for them."""
    code = """
        import os, signal, sys
        from pathlib import Path
        import numpy as np
        from edgespec.engines.onnx import OnnxEngine
        from edgespec.types import Batch
        engine = OnnxEngine.load(Path(sys.argv[1]), context_length=64, threads=2)
        expected = engine.forward(Batch.chain(np.arange(40))).tobytes()
        engine.rollback(0)
        child = os.fork()
        if not child:
            signal.alarm(100)
        assert engine.forward(Batch.chain(np.arange(40))).tobytes() == expected
        if not child:
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    command = [sys.executable, "-W", "ignore", "-c", dedent(code), str(DEMO / "demo-target-q8_0.gguf")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.stdout.strip() == "7", found.stderr
