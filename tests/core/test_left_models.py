"""Models that are closed, dropped, forked or interrupted, and files that change under them."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

import edgespec
from demo import DEMO, ROOT, TEST_THREADS
from edgespec import GenerateOptions, Model, Sampling
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.onnx.engine import OnnxEngine
from edgespec.engines.onnx.kernel_engine import KernelEngine
from edgespec.errors import EngineError
from edgespec.types import Batch
from needs import NEEDS_KERNELS

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
FORKED = """
import gc, os, sys, threading, warnings
import edgespec
from edgespec import GenerateOptions
from edgespec.errors import StateError
warnings.simplefilter("ignore")
few = GenerateOptions(max_tokens=4, ignore_eos=True)
def load():
    return edgespec.load("demo", engine=sys.argv[1], reproducible=False, threads=2)
model = load()
before = model.generate("Hello", options=few)
stream = model.stream("Hello", options=few)
next(stream)
held, forked = threading.Event(), threading.Event()
def hold():  # a lock, whose thread the fork lacks
    with model._executor._readers_changed:
        held.set()
        forked.wait()
threading.Thread(target=hold).start()
held.wait()
if not (child := os.fork()):
    for call in (stream.result, lambda: model.generate("abc"), lambda: model.encode("abc")):
        try:
            call()
        except StateError as exc:
            assert "load it in the process that uses it" in str(exc)
        else:
            raise AssertionError
    model.cancel()
    stream.close()
    model.close()
    try:
        model = load()
        gc.collect()
        assert len(model.generate("Hello", options=few).token_ids) == len(before.token_ids)
    except StateError as exc:
        print(exc, flush=True)
    sys.exit(7)
forked.set()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), stream.result().finish_reason)
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
def test_a_fork_is_refused_the_model_and_loads_its_own_or_is_told_why_not(name: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, name], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.endswith("7 length\n") and said in done.stdout, done.stderr
    assert done.returncode == 0


# -- files that change while a model runs: an error before the next pass, never a crash of the process


def test_a_truncated_gguf_ends_the_pass_and_not_the_process(tiny_path: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(tiny_path, tmp_path / "model.gguf"))
    with LlamaCppEngine.load(path, threads=1, reproducible=False) as engine:
        engine.forward(Batch.chain([1, 2, 3]))
        os.truncate(path, 4096)
        with pytest.raises(EngineError, match=r"model\.gguf was changed"):
            engine.forward(Batch.chain([4]))
        assert engine.length() == 3


def test_onnx_weights_that_are_written_over_are_noticed(onnx_path: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(onnx_path.parent, tmp_path / "model")
    with OnnxEngine.load(folder / "model.onnx", threads=1, reproducible=False) as engine:
        engine.forward(Batch.chain([1, 2, 3]))
        weights = next(folder.glob("*.data"))
        os.utime(weights, ns=(1, 1))
        with pytest.raises(EngineError, match="was changed"):
            engine.forward(Batch.chain([4]))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not remove a file that is in use")
def test_a_model_whose_file_was_replaced_answers_and_keeps_what_it_learnt_under_its_own_version(
    target_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    path = Path(shutil.copy(target_path, tmp_path / "model.gguf"))
    options = GenerateOptions(max_tokens=24, drafter="ngram", draft_length="auto", ignore_eos=True)
    with edgespec.load(path, threads=1, reproducible=False) as model:
        (tmp_path / "new").write_bytes(b"another version")
        (tmp_path / "new").replace(path)
        assert model.generate("Hello", options=options).stats.new_tokens == 24
        assert model.drafters.costs.curve.at(1) > 0
    with edgespec.load(target_path, threads=1, reproducible=False) as model:
        path.unlink()
        assert model.generate("Hello", options=options).stats.new_tokens == 24


# -- Ctrl-C at any place of a call that changes the caches: what follows is as if it had never come


PACKAGE = str(ROOT / "edgespec")
FIRST = "Find me a cheap Italian restaurant in San Jose for tonight, and then a bus to Fresno. " * 4
OTHER = "Tom has 12 apples and gives away a third of them. How many are left? " * 4
ASKED = (FIRST + " Also", OTHER + " Also", "Hello there")
OPTIONS = GenerateOptions(max_tokens=4, ignore_eos=True)
SAMPLING = Sampling(temperature=0.8, seed=3)
MOST_PLACES = 24  # of a call that are tried, spread over it


@pytest.fixture(scope="module", params=["llamacpp", "onnx"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    options = {"reproducible": True, "parallel": 3, "context_length": 512, "threads": TEST_THREADS}
    with edgespec.load("demo", engine=request.param, **options) as loaded:
        yield loaded


class Interrupt:
    """Raises KeyboardInterrupt at the `number`-th call or return of native code in this package; counts them."""

    def __init__(self, number: int = -1) -> None:
        self.count, self._number = 0, number

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(PACKAGE):
            self.count += 1
            if self.count == self._number:
                raise KeyboardInterrupt

    def during(self, call: Callable[[], object]) -> bool:
        """Whether it came."""
        sys.setprofile(self)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False


# What is open when an interrupt comes is closed by Python, and one in a finaliser or callback is only reported.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", ["forget", "load_state", "save_state", "generate_all"])
def test_an_interrupt_leaves_no_trace(model: Model, tmp_path: Path, what: str) -> None:
    def answer(prompt: str) -> object:
        found = model.generate(prompt, SAMPLING, OPTIONS)
        return found.token_ids, found.logprobs

    expected = []
    for prompt in ASKED:
        model.forget()
        expected.append(answer(prompt))
    answer(FIRST)
    model.save_state(tmp_path / "kept")
    calls: dict[str, Callable[[], object]] = {
        "forget": model.forget,
        "load_state": lambda: model.load_state(tmp_path / "kept"),
        "save_state": lambda: model.save_state(tmp_path / "new"),
        "generate_all": lambda: model.generate_all([OTHER, FIRST, FIRST + " x", "Hello"], SAMPLING, OPTIONS),
    }
    whole = Interrupt()
    assert not whole.during(calls[what])
    places = range(1, whole.count + 1, max(whole.count // MOST_PLACES, 1))
    came = 0
    for number in places:
        answer(FIRST)
        came += Interrupt(number).during(calls[what])
        assert [answer(prompt) for prompt in reversed(ASKED)] == expected[::-1], number
    assert came > 10
