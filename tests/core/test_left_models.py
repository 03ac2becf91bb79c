"""Models that are closed, dropped without it, or inherited by a fork."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref

import pytest

import edgespec
from demo import DEMO, TEST_THREADS
from edgespec import GenerateOptions
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.onnx.engine import OnnxEngine
from edgespec.engines.onnx.kernel_engine import KernelEngine
from needs import NEEDS_KERNELS

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
FORKED = """
import gc, os, sys, warnings
import edgespec
from edgespec import GenerateOptions
warnings.simplefilter("ignore")
few = GenerateOptions(max_tokens=4, ignore_eos=True)
def load():
    return edgespec.load("demo", engine=sys.argv[1], reproducible=False, threads=2)
model = load()
before = model.generate("Hello", options=few)
if not (child := os.fork()):
    try:
        model = load()
        gc.collect()
        assert len(model.generate("Hello", options=few).token_ids) == len(before.token_ids)
    except edgespec.errors.StateError as exc:
        print(exc, flush=True)
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
model.generate("Hello again", options=few)
"""


@pytest.mark.parametrize(("name", "engine"), [("llamacpp", LlamaCppEngine), ("onnx", OnnxEngine)])
@pytest.mark.parametrize("is_running", [False, True])
def test_a_model_that_is_dropped_is_freed(
    name: str, engine: type, is_running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[object] = []
    usual = engine._free  # type: ignore[attr-defined]
    monkeypatch.setattr(engine, "_free", lambda self: (freed.append(id(self)), usual(self)))
    model = edgespec.load("demo", engine=name, reproducible=False, threads=TEST_THREADS)
    target = id(model.target)
    stream = model.stream("Hello", options=GenerateOptions(max_tokens=40))
    next(stream)
    if not is_running:
        stream.close()
    del model, stream
    gc.collect()
    assert target in freed


@NEEDS_KERNELS
def test_the_weights_of_a_closed_model_are_freed_at_once() -> None:
    """Not when the garbage collector comes by: the next model is loaded before that."""
    model = edgespec.load(DEMO / "demo-target-q8_0.gguf", threads=TEST_THREADS)
    assert isinstance(model.target, KernelEngine)
    weights = [weakref.ref(array) for array in model.target.source.arrays().values() if array.nbytes > 10_000]
    gc.disable()
    try:
        model.close()
        assert weights and not any(weight() is not None for weight in weights)
    finally:
        gc.enable()


@needs_fork
@pytest.mark.parametrize(("name", "said"), [("onnx", ""), ("llamacpp", "forked from one that had used llama.cpp")])
def test_a_fork_loads_its_own_model_or_is_told_why_not_and_ends(name: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, name], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.endswith("7\n") and said in done.stdout, done.stderr
    assert done.returncode == 0
