"""The early exit: first layers and head of the target as its draft, with the weights there once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgespec
from demo import TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.early_exit import EarlyExitDrafter
from edgespec.drafters.hierarchical import HierarchicalDrafter
from edgespec.drafters.model import ChainDrafter
from edgespec.engines.onnx import OnnxEngine
from edgespec.errors import Cancelled, CapabilityError, ConfigError, ContextFull
from edgespec.sampling import Sampler
from edgespec.types import Batch, Logits
from lossless import PROMPTS

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
TARGET = DEMO / "demo-target-q8_0.gguf"
LAYERS = 4


def open_engine(path: Path, **options) -> OnnxEngine:
    wanted = {"context_length": 400, "threads": TEST_THREADS, "reproducible": True, **options}
    return OnnxEngine.load(path, **wanted)


@pytest.fixture(scope="module")
def whole(onnx_path: Path) -> Iterator[OnnxEngine]:
    with open_engine(onnx_path) as engine:
        yield engine


@pytest.fixture(scope="module", params=["f32", "int8"])
def twins(request: pytest.FixtureRequest, onnx_path: Path) -> Iterator[tuple[OnnxEngine, OnnxEngine]]:
    """The model in one piece and in three, with the same cache."""
    kind = request.param
    with (
        open_engine(onnx_path, cache_type_k=kind) as one,
        open_engine(onnx_path, cache_type_k=kind, exit_layer=LAYERS) as other,
    ):
        yield one, other


class Watch:
    """Widths of the passes of an engine's first layers and of the others."""

    def __init__(self, engine: OnnxEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first: list[int] = []
        self.rest: list[int] = []
        assert engine._exit_passes is not None
        for part, seen in zip(engine._exit_passes._parts, (self.first, self.rest), strict=False):

            def watched(cache, rows, taken=None, given=None, *, run=part.run_part, seen=seen) -> Logits:
                seen.append(rows.token_ids.size)
                return run(cache, rows, taken, given)

            monkeypatch.setattr(part, "run_part", watched)


def some_ids(engine: OnnxEngine, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, engine.vocabulary.size, count).astype(np.int32)


def score(engine: OnnxEngine, ids: np.ndarray) -> Logits:
    return engine.forward(Batch.chain(ids)).copy()


def greedy(engine: OnnxEngine, **changed) -> DraftRequest:
    return DraftRequest(np.zeros(0, np.int32), 5, Sampler(Sampling(temperature=0.0), engine.vocabulary.size), **changed)


def test_three_parts_give_the_bits_of_one(twins: tuple[OnnxEngine, OnnxEngine]) -> None:
    """Prefill, lone tokens, wide passes, rollback; nobody drafts."""
    one, other = twins
    assert one.facts.pinned_class == other.facts.pinned_class
    ids = some_ids(one, 120)
    for engine in twins:
        engine.rollback(0)
    for start, stop in ((0, 1), (1, 2), (2, 40), (40, 41), (41, 45), (45, 100), (100, 120)):
        np.testing.assert_array_equal(score(one, ids[start:stop]), score(other, ids[start:stop]))
    for engine in twins:
        engine.rollback(50)
    np.testing.assert_array_equal(score(one, ids[7:20]), score(other, ids[7:20]))


def test_whatever_is_drafted_the_target_computes_the_same(twins: tuple[OnnxEngine, OnnxEngine]) -> None:
    """A random walk: drafts of any length that agree with what follows as far as chance wills, rollbacks, new texts."""
    one, other = twins
    drafter = EarlyExitDrafter(other)
    rng = np.random.default_rng(5)
    for engine in twins:
        engine.rollback(0)
    text = some_ids(one, 3)
    for engine in twins:
        score(engine, text[:-1])
    for step in range(90):
        if step % 30 == 29 or text.size > 360:  # another text, of which the beginning may be the same
            keep = int(rng.integers(0, 3))
            text = np.concatenate((text[:keep], some_ids(one, 9, seed=step)))
            for engine in twins:
                engine.rollback(min(keep, engine.length()))
                score(engine, text[engine.length() : -1])
        for _ in range(int(rng.integers(0, 3))):  # also twice, and not at all
            draft = drafter.draft(greedy(one)._replace(token_ids=text, max_tokens=int(rng.integers(1, 9))))
        proposed = draft.token_ids[: int(rng.integers(0, draft.num_tokens + 1))].copy()
        if proposed.size and rng.random() < 0.3:
            proposed[rng.integers(proposed.size)] = 7
        rows = np.concatenate((text[-1:], proposed))
        np.testing.assert_array_equal(score(one, rows), score(other, rows))
        kept = int(rng.integers(0, proposed.size + 1))
        for engine in twins:
            engine.rollback(text.size + kept)
        text = np.concatenate((text, proposed[:kept], rng.integers(3, 4000, 1).astype(np.int32))).astype(np.int32)


@pytest.mark.parametrize("how", ["load", "fork"])
def test_states_of_another_text_are_forgotten(onnx_path: Path, how: str) -> None:
    """Two texts of one length that end alike: what was drafted behind one must not serve the other."""
    with open_engine(onnx_path, exit_layer=LAYERS, max_sequences=2) as engine:
        ours = some_ids(engine, 20)
        theirs = np.concatenate((some_ids(engine, 10, seed=1), ours[10:])).astype(np.int32)
        rows = np.append(ours[-1:], some_ids(engine, 3, seed=2))
        score(engine, ours[:-1])
        state = engine.save_state()
        engine.fork(0, 1)
        wanted = score(engine, rows)
        engine.rollback(0)
        score(engine, theirs[:-1])
        found = engine.early_exit()
        assert found.follow(theirs) == 19
        found.feed(rows)  # as a draft of just these tokens would be
        if how == "load":
            engine.load_state(state)
        else:
            engine.fork(1, 0)
        np.testing.assert_array_equal(score(engine, rows), wanted)


def test_the_first_layers_are_not_computed_twice(onnx_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(onnx_path, exit_layer=LAYERS) as engine:
        least = engine.facts.pinned_class[0]
        watch = Watch(engine, monkeypatch)
        drafter = EarlyExitDrafter(engine)
        text = some_ids(engine, 30)
        score(engine, text[:-1])
        assert (watch.first.pop(), watch.rest.pop()) == (29, 29)
        draft = drafter.draft(greedy(engine)._replace(token_ids=text, max_tokens=5))
        assert draft.num_tokens == 5
        assert (watch.first, watch.rest) == ([least] * 5, [])
        watch.first.clear()
        score(engine, np.concatenate((text[-1:], draft.token_ids)))
        assert watch.rest == [6]
        assert watch.first == [least]  # the draft's last token, which nobody had read, padded
        watch.first.clear()
        text = np.append(text, np.int32(8))
        engine.rollback(30)
        drafter.draft(greedy(engine)._replace(token_ids=text, max_tokens=4))
        watch.first.clear()
        score(engine, np.concatenate((text[-1:], draft.token_ids)))  # another's draft: only the pending token agrees
        assert watch.first == [5]


def test_a_foreign_text_is_not_drafted_for(onnx_path: Path) -> None:
    with open_engine(onnx_path, exit_layer=LAYERS) as engine:
        drafter, text = EarlyExitDrafter(engine), some_ids(engine, 20)
        score(engine, text[:-1])
        other = text.copy()
        other[4] += 1
        for foreign in (other, text[:-1], text[:3]):
            assert drafter.draft(greedy(engine)._replace(token_ids=foreign)).num_tokens == 0
        assert drafter.draft(greedy(engine)._replace(token_ids=text)).num_tokens == 5
        ahead = np.concatenate((text, some_ids(engine, 90, seed=3)))  # much that the target has not read
        assert drafter.draft(greedy(engine)._replace(token_ids=ahead)).num_tokens == 5


def test_it_drafts_up_to_the_end_of_the_context(onnx_path: Path) -> None:
    with open_engine(onnx_path, exit_layer=LAYERS, context_length=64) as engine:
        drafter, text = EarlyExitDrafter(engine), some_ids(engine, 62)
        score(engine, text[:30])
        score(engine, text[30:-1])
        assert drafter.draft(greedy(engine)._replace(token_ids=text, max_tokens=9)).num_tokens == 2
        found = engine.early_exit()
        assert found.follow(text) == 61
        with pytest.raises(ContextFull, match="draft fewer"):
            found.feed(text[:4])


def test_a_cancelled_draft_is_drafted_again(onnx_path: Path) -> None:
    with open_engine(onnx_path, exit_layer=LAYERS) as engine:
        drafter, text = EarlyExitDrafter(engine), some_ids(engine, 20)
        score(engine, text[:-1])
        request = greedy(engine)._replace(token_ids=text)
        wanted = drafter.draft(request).token_ids.tolist()
        drafter.cancel()
        with pytest.raises(Cancelled):
            drafter.draft(request._replace(token_ids=np.append(text, np.int32(5))))
        drafter.clear_cancel()
        assert drafter.draft(request).token_ids.tolist() == wanted


def test_one_piece_has_no_exit(whole: OnnxEngine, onnx_path: Path, concatenated_path: Path) -> None:
    with pytest.raises(CapabilityError, match="in one piece"):
        whole.early_exit()
    for layers in (0, 9, 12):
        with pytest.raises(ConfigError, match=r"allows 1\.\.8"):
            open_engine(onnx_path, exit_layer=layers)
    with pytest.raises(CapabilityError, match="cannot be cut between layers"):
        open_engine(concatenated_path, exit_layer=1, reproducible=False)


# -- behind the loop


@pytest.fixture(scope="module", params=["early-exit", "auto"])
def model(request: pytest.FixtureRequest) -> Iterator[edgespec.Model]:
    options = {"engine": "onnx", "exit_layer": LAYERS, "drafter": request.param}
    with edgespec.load("demo", reproducible=True, threads=TEST_THREADS, **options) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain() -> Iterator[edgespec.Model]:
    """The same target, loaded for plain decoding."""
    with edgespec.load("demo", engine="onnx", drafter="none", reproducible=True, threads=TEST_THREADS) as opened:
        yield opened


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.2])
def test_text_is_that_of_the_target_alone(model: edgespec.Model, plain: edgespec.Model, temperature: float) -> None:
    for seed, prompt in enumerate(PROMPTS[:2]):
        ids = model.encode_chat([{"role": "user", "content": prompt}])
        sampling = Sampling(temperature=temperature, seed=seed)
        options = GenerateOptions(max_tokens=48, drafter="none", ignore_eos=True)
        wanted = plain.generate(ids, sampling, options)
        for drafter, length in (("none", 0), ("early-exit", 1), ("early-exit", 6), ("auto", "auto")):
            if drafter == "auto" and model.drafter_name != "auto":
                drafter = "early-exit"
            found = model.generate(ids, sampling, replace(options, drafter=drafter, draft_length=length))
            assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs), (drafter, length)
            assert length in (0, "auto") or found.stats.accepted_tokens > 0


@pytest.mark.quiet
def test_it_costs_no_second_model(model: edgespec.Model) -> None:
    drafter = model._pool.drafters["early-exit"]
    assert isinstance(drafter, EarlyExitDrafter)
    assert 0 < drafter.bytes_used < model.target.facts.weight_bytes
    assert model.drafter_name == "auto" or model.drafter_bytes == drafter.bytes_used
    assert 0 < model.draft_costs["early-exit"].token_s < 2 * model.cost_curve.at(1)
    assert model.draft_name == ("model" if model.drafter_name == "auto" else "early-exit")
    assert ("model" in model._pool.drafters) == (model.drafter_name == "auto")


def test_forgetting_and_cancelling(model: edgespec.Model) -> None:
    options = GenerateOptions(max_tokens=12, drafter="early-exit", draft_length=3, ignore_eos=True)
    ids = model.encode("A bus to Fresno")
    first = model.generate(ids, Sampling(seed=3), options)
    model.forget()
    assert model.generate(ids, Sampling(seed=3), options).token_ids == first.token_ids
    events = model.stream(ids, Sampling(seed=3), options)
    next(events)
    model.cancel()
    assert [event for event in events if event.finish_reason == "stop"] == []
    assert model.generate(ids, Sampling(seed=3), options).token_ids == first.token_ids


def small_of(model: edgespec.Model) -> object:
    """What drafts for the medium."""
    drafter = model._pool.drafters["hierarchical"]
    assert isinstance(drafter, HierarchicalDrafter)
    return drafter._small


def test_an_onnx_exit_is_the_small_model_of_a_hierarchy(onnx_path: Path) -> None:
    """The target's own first layers look ahead of the medium: what they read of its text is not read again."""
    medium = onnx_path.parent.parent / "medium" / "model.onnx"
    options = {"engine": "onnx", "threads": TEST_THREADS, "reproducible": True, "exit_layer": LAYERS}
    with edgespec.load(str(onnx_path), medium=medium, **options) as opened:
        assert small_of(opened) is opened._pool.drafters["early-exit"]
        generate = GenerateOptions(max_tokens=48, drafter="none", ignore_eos=True)
        for temperature in (0.0, 0.8, 1.2):
            sampling = Sampling(temperature=temperature, seed=3)
            plain = opened.generate(PROMPTS[1], sampling, generate)
            for name, length in (("hierarchical", 5), ("early-exit", 3), ("auto", "auto")):
                found = opened.generate(PROMPTS[1], sampling, replace(generate, drafter=name, draft_length=length))
                assert found.token_ids == plain.token_ids


def test_a_draft_temperature_reaches_an_exit() -> None:
    options = {"engine": "onnx", "exit_layer": LAYERS, "drafter": "early-exit", "threads": 1}
    with edgespec.load("demo", draft_temperature=0.7, **options) as opened:
        drafter = opened._pool.drafters["early-exit"]
        assert isinstance(drafter, ChainDrafter) and drafter.temperature.factor == 0.7


def test_an_exit_that_is_not_there_is_refused() -> None:
    with pytest.raises(CapabilityError, match="needs an early exit of the target"):
        edgespec.load("demo", engine="llamacpp", drafter="early-exit")
    with pytest.raises(CapabilityError, match="give exit_layer= N"):
        edgespec.load("demo", engine="onnx", drafter="early-exit")
    with pytest.raises(CapabilityError, match="for ONNX targets"):
        edgespec.load("demo", engine="llamacpp", exit_layer=3)
    with pytest.raises(ConfigError, match="at least 1"):
        edgespec.load("demo", engine="onnx", exit_layer=0)


MEMORY = """
import sys
from pathlib import Path
from edgespec.engines.onnx import OnnxEngine
import numpy as np
from edgespec.types import Batch

def pss():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))

def load(path, layer=None):
    options = dict(context_length=64, threads=1, max_batch=64, reproducible=False, exit_layer=layer)
    engine = OnnxEngine.load(Path(path), **options)
    engine.forward(Batch.chain(np.arange(40, dtype=np.int32)))
    return engine

warm = load(sys.argv[1])
warm.close()
del warm
before = pss()
engines = [load(sys.argv[1], int(layer)) for layer in sys.argv[2:]] or [load(sys.argv[1])]
print(pss() - before)
"""


@pytest.mark.quiet
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's account of memory")
def test_the_weights_are_in_memory_once(onnx_path: Path) -> None:
    """Proportional set size: three parts take what one piece takes."""
    found = []
    for layers in ([], ["8"]):  # of 9: a second copy of so much would show
        command = [sys.executable, "-c", MEMORY, str(onnx_path), *layers]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(int(done.stdout) * 1024)
    assert found[1] < found[0] + 0.25 * (onnx_path.parent / "model.onnx.data").stat().st_size, found
