"""What every engine promises, run over every engine.

The table; llama.cpp on the demo target with and without reproducible mode, in a child process, on a GPU and on RPC
servers; and on a tiny float32 model, whose lone tokens need padding on most machines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo import TEST_THREADS
from edgespec.engines.base import Engine
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.llamacpp.remote import RemoteEngine
from edgespec.engines.onnx import OnnxEngine
from edgespec.errors import BatchError, Cancelled, CapabilityError, ContextFull, EngineError, StateError
from edgespec.kernels.library import library_path
from edgespec.types import Batch, Draft, Logits, packed
from needs import is_software, needs_gpu
from rpc import idle, needs_rpc, started
from table_engine import TableEngine

CONTEXT, SEQUENCES, MAX_BATCH = 400, 3, 64
# Of the logits' standard deviation; the logits of another token are about 1 away. Where a row alone has another kernel
# than several, CUDA has come to .087, llama.cpp with AVX2 alone to .108 in two of 8192.
TOLERANCE = 0.2
MEAN_TOLERANCE = 0.05  # of the root mean square
OPTIONS = {"context_length": CONTEXT, "max_sequences": SEQUENCES, "max_batch": MAX_BATCH, "threads": TEST_THREADS}
Loader = Callable[[], Engine]


def load_table(_path: Path | None = None) -> Engine:
    return TableEngine.random(11, order=3, context_length=CONTEXT, max_sequences=SEQUENCES, max_batch=MAX_BATCH)


def load_llamacpp(path: Path, **given: Any) -> Engine:
    return LlamaCppEngine.load(path, **OPTIONS, **given)


def load_remote(path: Path, **given: Any) -> Engine:
    return RemoteEngine.load(path, **OPTIONS, **given)


def load_onnx(path: Path, **given: Any) -> Engine:
    return OnnxEngine.load(path, **OPTIONS, **{"provider": "cpu", **given})


def load_kernels(path: Path, **given: Any) -> Engine:
    if library_path() is None:
        pytest.skip("the kernels are not built: scripts/run.py test builds them")
    return load_onnx(path, reproducible=True, **given)


def load_half(path: Path, **given: Any) -> Engine:
    """The graph that CUDA is given, on the processor: attention in float16."""
    from half import as_for_cuda

    with as_for_cuda():
        return load_onnx(path, **given)


def load_on_device(path: Path, *, provider: str, reproducible: bool = False, **given: Any) -> Engine:
    from edgespec.engines.onnx.library import installed_providers, load_cuda

    if provider not in installed_providers() or load_cuda():
        pytest.skip(f"no {provider} device, or no package for it")
    with unless_refused(reproducible):
        return load_onnx(path, provider=provider, reproducible=reproducible, **given)
    raise AssertionError


def load_gpu(path: Path, *, reproducible: bool) -> Engine:
    with unless_refused(reproducible):
        return load_llamacpp(path, gpu_layers=-1, reproducible=reproducible)
    raise AssertionError


@contextmanager
def unless_refused(reproducible: bool) -> Iterator[None]:
    """Devices other than processors need not have a reproducible mode."""
    try:
        yield
    except CapabilityError as exc:
        if not reproducible:
            raise
        pytest.skip(f"the engine says: {exc}")


# kind -> how it is loaded, the fixture of its file, its options
KINDS: dict[str, tuple[Callable[..., Engine], str, dict[str, Any]]] = {
    "table": (load_table, "target_path", {}),
    "llamacpp": (load_llamacpp, "target_path", {"reproducible": False}),
    "llamacpp-reproducible": (load_llamacpp, "target_path", {"reproducible": True}),
    "llamacpp-padded": (load_llamacpp, "tiny_path", {"reproducible": True}),
    "llamacpp-window": (load_llamacpp, "windowed_path", {"reproducible": False}),
    "llamacpp-qwen35": (load_llamacpp, "qwen35_path", {"reproducible": False}),
    "llamacpp-lfm2": (load_llamacpp, "lfm2_path", {"reproducible": False}),
    "llamacpp-process": (load_remote, "target_path", {"reproducible": True}),
    "llamacpp-process-lfm2": (load_remote, "lfm2_path", {"reproducible": False}),
    "llamacpp-gpu": (load_gpu, "target_path", {"reproducible": False}),
    "llamacpp-gpu-reproducible": (load_gpu, "target_path", {"reproducible": True}),
    "llamacpp-rpc": (load_remote, "target_path", {"reproducible": False}),
    "llamacpp-rpc-reproducible": (load_remote, "target_path", {"reproducible": True}),
    "onnx": (load_onnx, "onnx_path", {"reproducible": False}),
    "onnx-reproducible": (load_onnx, "onnx_path", {"reproducible": True}),
    "onnx-concatenated": (load_onnx, "concatenated_path", {"reproducible": False}),
    "onnx-half-reproducible": (load_half, "onnx_path", {"reproducible": True}),
    "onnx-cuda": (load_on_device, "onnx_path", {"provider": "cuda"}),
    "onnx-cuda-reproducible": (load_on_device, "onnx_path", {"provider": "cuda", "reproducible": True}),
    "onnx-cuda-int4": (load_on_device, "four_bit_path", {"provider": "cuda"}),
    "onnx-cuda-int4-reproducible": (load_on_device, "four_bit_path", {"provider": "cuda", "reproducible": True}),
    "kernels": (load_kernels, "target_path", {}),
    "kernels-q8_0-cache": (load_kernels, "target_path", {"cache_type_k": "q8_0"}),
    "kernels-qwen35": (load_kernels, "qwen35_path", {}),
    "kernels-lfm2": (load_kernels, "lfm2_path", {}),
}


@pytest.fixture(scope="module", params=KINDS)
def loader(request: pytest.FixtureRequest) -> Iterator[Loader]:
    load, fixture, options = KINDS[request.param]
    if load is load_gpu and is_software(needs_gpu()):
        fixture = "tiny_path"  # the demo target would take hours on a program that acts as a GPU
    path: Path = request.getfixturevalue(fixture)  # made where it is used: not every machine has what making it needs
    if "rpc" not in request.param:
        yield lambda: load(path, **options)
        return
    needs_rpc()
    # A server takes one client at a time, and some tests here use two engines at once.
    with started() as one, started() as other:
        yield lambda: load(path, endpoints=(idle(one, other).endpoint,), **options)


@pytest.fixture(scope="module")
def loaded(loader: Loader) -> Iterator[Engine]:
    with loader() as engine:
        yield engine


@pytest.fixture
def engine(loaded: Engine) -> Engine:
    """The engine with every sequence empty."""
    loaded.clear_cancel()
    for sequence in range(SEQUENCES):
        loaded.rollback(0, sequence)
    return loaded


def some_ids(engine: Engine, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, engine.vocabulary.size, count).astype(np.int32)


def score(engine: Engine, token_ids, sequence: int = 0) -> Logits:
    """In passes no wider than one that verifies: wider ones, which read prompts, may have other bits."""
    most = engine.widest_pass
    parts = [token_ids[at : at + most] for at in range(0, len(token_ids), most)]
    return np.concatenate([engine.forward(Batch.chain(part, sequence=sequence)).copy() for part in parts])


def one_at_a_time(engine: Engine, token_ids, sequence: int = 0) -> Logits:
    return np.concatenate([score(engine, [token_id], sequence) for token_id in token_ids])


def assert_close(found: Logits, expected: Logits) -> None:
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * expected.std(), rtol=0)
    assert np.square(found - expected).mean() < (MEAN_TOLERANCE * expected.std()) ** 2


def assert_agree(engine: Engine, found: Logits, expected: Logits) -> None:
    """Bitwise where the engine promises it, within a tolerance otherwise."""
    if engine.facts.pinned_class:
        np.testing.assert_array_equal(found, expected)
    else:
        assert_close(found, expected)


def side_draft(engine: Engine) -> Draft:
    """A main chain of three tokens, a side branch of two at its first node, and another first token."""
    ids = some_ids(engine, 6, seed=7)
    ids[3] = (ids[1] + 1) % engine.vocabulary.size
    ids[5] = (ids[0] + 1) % engine.vocabulary.size
    return Draft(ids, np.array([-1, 0, 1, 0, 3, -1], np.int32), np.ones(6, np.float32))


def needs_trees(engine: Engine) -> None:
    if not engine.facts.max_branches:
        with pytest.raises(CapabilityError):
            engine.forward(Batch.tree(1, side_draft(engine)))
        pytest.skip("this engine scores chains only in reproducible mode, and says so")


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    """Every path from a root to a node, as draft nodes."""
    found: list[tuple[int, ...]] = []
    for parent in draft.parents.tolist():
        found.append((*(found[parent] if parent >= 0 else ()), len(found)))
    return found


def test_a_chain_scores_as_its_tokens_one_at_a_time(engine):
    ids = some_ids(engine, 13)
    expected = one_at_a_time(engine, ids)
    engine.rollback(0)
    assert_agree(engine, score(engine, ids), expected)
    assert engine.length() == ids.size


@pytest.mark.parametrize("start", [20, 300])
def test_a_row_scores_the_same_at_every_width(engine, start):
    """Bitwise inside the pinned class."""
    prompt, ids = some_ids(engine, start), some_ids(engine, min(engine.widest_pass, 16), seed=1)
    step = min(50, engine.facts.max_batch)
    for begin in range(0, start, step):
        engine.forward(Batch.chain(prompt[begin : begin + step], last_only=True))
    engine.checkpoint()
    expected = score(engine, ids)
    for width in range(1, ids.size):
        engine.rollback(start)
        parts = [score(engine, ids[i : i + width]) for i in range(0, ids.size, width)]
        assert_agree(engine, np.concatenate(parts), expected)


def test_logits_come_only_for_the_rows_that_ask(engine):
    count = min(9, engine.widest_pass)
    ids = some_ids(engine, count)
    every = score(engine, ids)
    for wanted in ([count - 1], [0], [1, count - 2], [0, count - 1], range(count // 2, count)):
        engine.rollback(0)
        outputs = np.isin(np.arange(count), wanted)
        batch = Batch(ids, np.arange(-1, count - 1, dtype=np.int32), np.zeros(count, np.int32), outputs)
        assert_agree(engine, engine.forward(batch), every[list(wanted)])


def test_every_row_of_a_tree_scores_as_its_path_alone(engine):
    needs_trees(engine)
    prompt, draft = some_ids(engine, 20), side_draft(engine)
    pending = int(some_ids(engine, 1, seed=3)[0])
    score(engine, prompt)
    scored = engine.forward(Batch.tree(pending, draft)).copy()
    assert engine.length() == prompt.size
    engine.keep_path(())
    assert engine.length() == prompt.size
    for node, path in enumerate(paths_of(draft)):
        alone = score(engine, [pending, *draft.token_ids[list(path)]])
        assert_agree(engine, scored[node + 1], alone[-1])
        engine.rollback(prompt.size)


@pytest.mark.parametrize("node", range(-1, 6))
def test_going_on_from_a_kept_path_is_going_on_from_its_tokens(engine, node):
    needs_trees(engine)
    prompt, draft, after = some_ids(engine, 20), side_draft(engine), some_ids(engine, 5, seed=9)
    path = paths_of(draft)[node] if node >= 0 else ()
    score(engine, prompt)
    engine.checkpoint()
    scored = engine.forward(Batch.tree(3, draft))
    before = scored.copy()
    engine.keep_path((0, *(i + 1 for i in path)))
    np.testing.assert_array_equal(scored, before, err_msg="logits must outlive keep_path")
    assert engine.length() == prompt.size + 1 + len(path)
    found = score(engine, after)
    engine.rollback(prompt.size)
    score(engine, [3, *draft.token_ids[list(path)]])
    assert_agree(engine, found, score(engine, after))


def test_keep_path_after_a_chain_keeps_its_head(engine):
    ids = some_ids(engine, 8)
    expected = score(engine, ids)
    engine.rollback(3)
    engine.forward(Batch.chain([*ids[3:6], 1, 2]))
    engine.keep_path((0, 1, 2))
    assert engine.length() == 6
    assert_agree(engine, score(engine, ids[6:]), expected[6:])


def test_rolling_back_is_as_if_the_tokens_never_were(engine):
    ids, wrong = some_ids(engine, 30), some_ids(engine, 12, seed=5)
    score(engine, ids[:20])
    expected = score(engine, ids[20:])
    engine.rollback(0)
    score(engine, ids[:20])
    engine.checkpoint()
    for length in (3, 12, 1):
        score(engine, wrong[:length])
        engine.rollback(20)
    if engine.facts.max_branches:
        engine.forward(Batch.tree(1, side_draft(engine)))
        engine.rollback(20)
    np.testing.assert_array_equal(score(engine, ids[20:]), expected)


def test_sequences_in_one_batch_score_as_alone(engine):
    ids = [some_ids(engine, 7 + 3 * sequence, seed=sequence) for sequence in range(SEQUENCES)]
    alone = []
    for sequence, own in enumerate(ids):
        alone.append(score(engine, own, sequence))
        engine.rollback(0, sequence)
    together = engine.forward(packed([Batch.chain(own, sequence=sequence) for sequence, own in enumerate(ids)]))
    assert_close(together, np.concatenate(alone))
    assert [engine.length(sequence) for sequence in range(SEQUENCES)] == [own.size for own in ids]


def test_trees_of_several_sequences_share_a_batch(engine):
    needs_trees(engine)
    draft = side_draft(engine)
    expected = []
    for sequence in range(2):
        score(engine, some_ids(engine, 10, seed=sequence), sequence)
        expected.append(engine.forward(Batch.tree(2, draft, sequence=sequence)).copy())
        engine.keep_path((), sequence)
    found = engine.forward(packed([Batch.tree(2, draft, sequence=sequence) for sequence in range(2)])).copy()
    assert_close(found, np.concatenate(expected))
    engine.keep_path((0, 1, 4, 5), 0)
    engine.keep_path((7, 13), 1)
    assert (engine.length(0), engine.length(1)) == (14, 12)


def test_a_fork_lives_its_own_life(engine):
    ids, other = some_ids(engine, 25), some_ids(engine, 6, seed=4)
    cached = score(engine, ids[:20])
    engine.checkpoint()
    expected = score(engine, ids[20:])
    engine.rollback(20)
    score(engine, other, 1)
    engine.fork(0, 1)
    assert engine.length(1) == 20
    score(engine, other, 1)
    kept = engine.reachable(5, 1)
    engine.rollback(kept, 1)
    assert engine.length(0) == 20
    assert_close(score(engine, ids[20:]), expected)
    engine.rollback(0, 0)
    assert engine.length(1) == kept == (5 if engine.facts.can_rollback else 0)
    assert_close(score(engine, ids[kept:], 1), np.concatenate((cached[kept:], expected)))


def test_states_saved_and_loaded_right_after_a_fork_are_the_right_ones(engine):
    """Without a pass in between: an engine may put off what a fork copies."""
    ids, others, after = some_ids(engine, 20), some_ids(engine, 9, seed=4), some_ids(engine, 4, seed=5)
    score(engine, others, 1)
    state_of_others = engine.save_state(1)
    expected_of_others = score(engine, after, 1)
    score(engine, ids)
    engine.checkpoint()
    expected = score(engine, after)
    engine.rollback(ids.size)

    engine.fork(0, 1)
    state = engine.save_state(1)
    engine.load_state(state_of_others, 0)
    assert_close(score(engine, after, 1), expected)
    assert_close(score(engine, after), expected_of_others)
    engine.load_state(state, 1)
    assert_close(score(engine, after, 1), expected)

    engine.load_state(state, 0)
    engine.fork(0, 1)
    engine.load_state(state_of_others, 1)
    assert_close(score(engine, after, 1), expected_of_others)
    assert_close(score(engine, after), expected)


def test_a_state_brings_a_sequence_back(engine):
    ids = some_ids(engine, 30)
    score(engine, ids[:20])
    state = engine.save_state()
    expected = score(engine, ids[20:])
    engine.rollback(0)
    score(engine, some_ids(engine, 11, seed=8))
    engine.load_state(state)
    assert engine.length() == 20
    assert_agree(engine, score(engine, ids[20:]), expected)
    engine.load_state(state, 2)
    assert engine.length(2) == 20
    engine.load_state(engine.save_state(1), 2)
    assert engine.length(2) == 0


def test_a_state_that_does_not_belong_is_refused(engine):
    score(engine, some_ids(engine, 10))
    state = engine.save_state()
    damaged = bytearray(state)
    damaged[-1] ^= 1
    stamped = bytearray(state)
    stamped[30] ^= 1
    for foreign in (b"", b"nonsense", state[:-1], state[:40], state + b"x", bytes(damaged), bytes(stamped)):
        with pytest.raises(StateError):
            engine.load_state(foreign)
        assert engine.length() == 10


def test_a_cancelled_pass_leaves_the_cache_as_it_was(engine):
    ids = some_ids(engine, 20)
    score(engine, ids[:10])
    engine.checkpoint()
    expected = score(engine, ids[10:])
    engine.rollback(10)
    engine.cancel()
    with pytest.raises(Cancelled):
        score(engine, ids[10:])
    assert engine.length() == 10
    engine.cancel()
    engine.clear_cancel()
    assert_close(score(engine, ids[10:]), expected)


def test_cancel_from_another_thread_is_exact_to_resume(engine):
    ids, step = some_ids(engine, 300), min(50, engine.widest_pass)
    expected = [score(engine, ids[i : i + step]) for i in range(0, 300, step)]
    for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008):
        engine.rollback(0)
        timer = threading.Timer(delay_s, engine.cancel)
        timer.start()
        found, cancelled = [], 0
        while len(found) < len(expected):
            before = engine.length()
            try:
                found.append(score(engine, ids[step * len(found) :][:step]))
            except Cancelled:
                cancelled += 1
                assert engine.length() == before
        timer.join()
        engine.clear_cancel()
        assert cancelled <= 1
        np.testing.assert_array_equal(np.concatenate(found), np.concatenate(expected))


def bad_batches(engine: Engine) -> dict[str, Batch]:
    def batch(ids=(1, 2), parents=(-1, 0), sequences=(0, 0), outputs=(True, True)) -> Batch:
        def ints(values):
            return np.array(values, np.int32)

        return Batch(ints(ids), ints(parents), ints(sequences), np.array(outputs, np.bool_))

    size = engine.vocabulary.size
    return {
        "no rows": batch((), (), (), ()),
        "too many rows": Batch.chain(np.zeros(MAX_BATCH + 1, np.int32)),
        "id too large": batch(ids=(1, size)),
        "id negative": batch(ids=(-1, 1)),
        "unknown sequence": batch(sequences=(SEQUENCES, SEQUENCES)),
        "negative sequence": batch(sequences=(-1, -1)),
        "no outputs": batch(outputs=(False, False)),
        "parent after child": batch(parents=(1, -1)),
        "own parent": batch(parents=(-1, 1)),
        "parent below -1": batch(parents=(-2, 0)),
        "parent of another sequence": batch(sequences=(0, 1)),
        "rows of a sequence apart": batch((1, 1, 1), (-1, -1, 0), (0, 1, 0), (True, True, True)),
        "sizes differ": batch(parents=(-1,)),
    }


@pytest.mark.parametrize("fault", bad_batches(load_table()))
def test_a_bad_batch_is_refused_and_changes_nothing(engine, fault):
    score(engine, some_ids(engine, 5))
    with pytest.raises(BatchError):
        engine.forward(bad_batches(engine)[fault])
    assert engine.length() == 5
    assert score(engine, [1]).shape == (1, engine.vocabulary.size)


def test_bad_positions_and_sequences_are_refused(engine):
    score(engine, some_ids(engine, 5))
    for to_length in (-1, 6, 1 << 40):
        with pytest.raises(BatchError):
            engine.rollback(to_length)
    for sequence in (-1, SEQUENCES, 1 << 40):
        for call in (engine.length, engine.save_state, lambda s: engine.rollback(0, s), lambda s: engine.fork(0, s)):
            with pytest.raises(BatchError):
                call(sequence)
    assert engine.length() == 5


@pytest.mark.parametrize("rows", [(1,), (0, 2), (0, 0), (7,), (-1,), (0, 1, 5)])
def test_a_path_that_is_none_is_refused(engine, rows):
    needs_trees(engine)
    engine.forward(Batch.tree(1, side_draft(engine)))
    with pytest.raises(BatchError):
        engine.keep_path(rows)
    engine.keep_path((0,))
    assert engine.length() == 1


def test_an_unsettled_tree_blocks_its_sequence_only(engine):
    needs_trees(engine)
    score(engine, some_ids(engine, 4), 1)
    engine.forward(Batch.tree(1, side_draft(engine)))
    for call in (lambda: score(engine, [1]), engine.save_state, lambda: engine.fork(0, 2)):
        with pytest.raises(BatchError):
            call()
    score(engine, [1, 2], 1)
    engine.keep_path((0, 1))
    assert (engine.length(0), engine.length(1)) == (2, 6)


def test_keep_path_needs_a_fresh_batch(engine):
    with pytest.raises(BatchError):
        engine.keep_path((0,))
    score(engine, some_ids(engine, 5))
    engine.rollback(2)
    with pytest.raises(BatchError):
        engine.keep_path((0, 1, 2))


def test_a_full_context_says_so(engine):
    ids, step = some_ids(engine, CONTEXT), min(50, engine.facts.max_batch)
    for sequence in range(SEQUENCES):
        for start in range(0, CONTEXT, step):
            engine.forward(Batch.chain(ids[start : start + step], sequence=sequence, last_only=True))
        assert engine.length(sequence) == CONTEXT
        with pytest.raises(ContextFull):
            score(engine, [1], sequence)
        assert engine.length(sequence) == CONTEXT
    engine.rollback(engine.reachable(CONTEXT - 1))
    assert score(engine, [1]).shape == (1, engine.vocabulary.size)


def test_a_closed_engine_refuses_everything(loader):
    engine = loader()
    score(engine, [1, 2])
    state = engine.save_state()
    engine.close()
    engine.close()
    calls = [
        lambda: score(engine, [1]),
        engine.length,
        lambda: engine.rollback(0),
        lambda: engine.keep_path((0,)),
        lambda: engine.fork(0, 1),
        engine.save_state,
        lambda: engine.load_state(state),
        engine.cancel,
        engine.clear_cancel,
    ]
    for call in calls:
        with pytest.raises(EngineError):
            call()


def test_two_engines_do_not_meet(engine, loader):
    ids = some_ids(engine, 12)
    expected = score(engine, ids)
    engine.rollback(0)
    with loader() as other:
        score(other, some_ids(other, 9, seed=2))
        first = score(engine, ids[:6])
        score(other, ids)
        found = np.concatenate((first, score(engine, ids[6:])))
        other.cancel()
        engine.rollback(0)
        np.testing.assert_array_equal(score(engine, ids), expected)
    assert_close(found, expected)
    assert engine.length() == 12


class Mirror:
    """What an engine must hold after any run of calls on its first `sequences`: plain lists of tokens."""

    def __init__(self, engine: Engine, seed: int, sequences: int) -> None:
        self.engine, self.rng = engine, np.random.default_rng(seed)
        self.tokens: list[list[int]] = [[] for _ in range(sequences)]
        self.states: list[tuple[bytes, list[int]]] = []

    def any_sequence(self) -> int:
        return int(self.rng.integers(len(self.tokens)))

    def ids(self, count: int) -> list[int]:
        return self.rng.integers(0, self.engine.vocabulary.size, count).tolist()

    def chain(self, sequence: int) -> None:
        ids = self.ids(int(self.rng.integers(1, 9)))
        score(self.engine, ids, sequence)
        self.tokens[sequence] += ids

    def tree(self, sequence: int) -> None:
        count = int(self.rng.integers(2, min(12, self.engine.most_draft_tokens + 1)))
        reach = 4 if self.engine.facts.max_branches else 1
        parents = np.array([self.rng.integers(max(-1, i - reach), i) for i in range(count)], np.int32)
        draft = Draft(np.array(self.ids(count), np.int32), parents, np.ones(count, np.float32))
        pending = self.ids(1)[0]
        self.engine.forward(Batch.tree(pending, draft, sequence=sequence))
        path = paths_of(draft)[int(self.rng.integers(count))]
        self.engine.keep_path((0, *(node + 1 for node in path)), sequence)
        self.tokens[sequence] += [pending, *draft.token_ids[list(path)].tolist()]

    def rollback(self, sequence: int) -> None:
        length = int(self.rng.integers(0, len(self.tokens[sequence]) + 1))
        if (reached := self.engine.reachable(length, sequence)) != length:
            with pytest.raises(CapabilityError):
                self.engine.rollback(length, sequence)
            length = reached
        self.engine.rollback(length, sequence)
        del self.tokens[sequence][length:]

    def checkpoint(self, sequence: int) -> None:
        self.engine.checkpoint(sequence)

    def fork(self, sequence: int) -> None:
        destination = self.any_sequence()
        self.engine.fork(sequence, destination)
        self.tokens[destination] = list(self.tokens[sequence])

    def save(self, sequence: int) -> None:
        self.states.append((self.engine.save_state(sequence), list(self.tokens[sequence])))

    def load(self, sequence: int) -> None:
        if self.states:
            state, tokens = self.states[int(self.rng.integers(len(self.states)))]
            self.engine.load_state(state, sequence)
            self.tokens[sequence] = list(tokens)

    def cancelled(self, sequence: int) -> None:
        self.engine.cancel()
        with pytest.raises(Cancelled):
            score(self.engine, self.ids(3), sequence)

    def step(self) -> None:
        sequence = self.any_sequence()
        if len(self.tokens[sequence]) > CONTEXT // 2:
            self.engine.rollback(0, sequence)
            self.tokens[sequence] = []
        often, seldom = [self.chain, self.tree], [self.fork, self.save, self.load, self.cancelled, self.checkpoint]
        actions = often * 2 + [self.rollback, *seldom]
        actions[int(self.rng.integers(len(actions)))](sequence)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sequences", [1, SEQUENCES])
def test_any_run_of_calls_leaves_what_plain_lists_say(engine, loader, seed, sequences):
    mirror = Mirror(engine, seed, sequences)
    with loader() as fresh:
        for _ in range(20):
            for _ in range(4):
                mirror.step()
            assert [engine.length(sequence) for sequence in range(sequences)] == [len(own) for own in mirror.tokens]
            sequence = mirror.any_sequence()
            fresh.rollback(0)
            for start in range(0, len(mirror.tokens[sequence]), 60):
                score(fresh, mirror.tokens[sequence][start : start + 60])
            next_ids = mirror.ids(2)
            found, expected = score(engine, next_ids, sequence), score(fresh, next_ids)
            mirror.tokens[sequence] += next_ids
            if sequences == 1:
                assert_agree(engine, found, expected)
            else:
                assert_close(found, expected)
