"""Ctrl-C at any place of a call that changes the caches: what follows is as if it had never come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

import edgespec
from demo import ROOT, TEST_THREADS
from edgespec import GenerateOptions, Model, Sampling

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
