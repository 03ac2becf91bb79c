"""A GGUF at the cost of a bigger model still says what it said, and its draft says it less surely with more noise."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

pytest.importorskip("gguf", reason="expansion needs the package gguf: scripts/run.py install export")

import edgespec
from demo import DEMO, TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.drafters.eagle import EagleDrafter
from edgespec.export.check import Comparison
from edgespec.formats.head_file import read_head_file
from expansion import real
from expansion.model import Shape, cancelling_shares_of, shares_of
from expansion.real import AS_IS, RealBench, compared
from head_tables import request

SOURCE = DEMO / "demo-target-q8_0.gguf"
SMALL = Shape(512, 1024, 10, 8, 2, vocab_size=4096)
PROMPT = "Hi, can you find me a restaurant?"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> RealBench:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(real, "DEEP_SHAPES", {"small": SMALL})
        bench = RealBench(SOURCE, tmp_path_factory.mktemp("real") / "bench")
        for kind in ("w8a8", "q4_k_m"):
            bench.target("small", kind)
        bench.target("small", "w8a8", vocab_size=4352)
        for sigma in (0.0, 0.2):
            bench.draft(AS_IS, "int8", sigma)
        bench.draft("small", "int8", 0.2)
        bench.heads(DEMO / "heads" / "eagle.npz", "small")
    return bench


@pytest.fixture(scope="module")
def found(bench: RealBench) -> dict[str, Comparison]:
    made = [path for path in bench.output.iterdir() if path.name != "source" and path.suffix != ".npz"]
    return compared(SOURCE, made, bench.output)


def test_every_format_says_what_the_source_says(found: dict[str, Comparison]) -> None:
    limits = {"target-small-w8a8": 0.005, "target-small-vocab-4352-w8a8": 0.005}
    for name, limit in {**limits, "target-small-q4_k_m.gguf": 0.1, "draft-135m-sigma-0-int8": 0.005}.items():
        assert found[name].mean_kl < limit, (name, found[name])
        assert found[name].top1_agreement > 0.95, (name, found[name])


def test_noise_makes_a_draft_that_is_often_but_not_always_right(found: dict[str, Comparison]) -> None:
    """The same noise in a draft of any size: what it accepts does not depend on what it costs."""
    as_is, expanded = found["draft-135m-sigma-0.2-int8"], found["draft-small-sigma-0.2-int8"]
    assert 10 * found["draft-135m-sigma-0-int8"].mean_kl < as_is.mean_kl < 3
    assert expanded.mean_kl == pytest.approx(as_is.mean_kl, rel=0.25)


def test_a_made_target_runs_with_its_draft(bench: RealBench) -> None:
    options = GenerateOptions(max_tokens=24, draft_length=4)
    answers = []
    for drafter in ("none", "model"):
        with edgespec.load(
            str(bench.output / "target-small-w8a8"),
            draft=str(bench.output / "draft-135m-sigma-0.2-int8"),
            threads=TEST_THREADS,
            reproducible=True,
            drafter=drafter,
        ) as model:
            ids = model.encode_chat([{"role": "user", "content": PROMPT}])
            result = model.generate(ids, Sampling(temperature=0.0), options)
            answers.append((list(result.token_ids), result.stats.accepted_tokens))
    assert answers[0][0] == answers[1][0]
    assert answers[1][1] > 0


def test_expanded_heads_draft_what_the_small_ones_draft(bench: RealBench) -> None:
    path = bench.output / "heads-small.npz"
    small, big = read_head_file(DEMO / "heads" / "eagle.npz"), read_head_file(path)
    assert big.manifest.hidden_size == SMALL.hidden_size > small.manifest.hidden_size
    scores = []
    for heads in (small, big):
        assert heads.manifest.is_projected == small.manifest.is_projected
        with closing(EagleDrafter(heads, 4096, frozenset(), heads.manifest.layers)) as drafter:
            text = np.append(heads.probe_ids, heads.probe_ids[-1])
            asked = request(text, heads.probe_states, most=6)
            scores.append(drafter.draft(asked).token_ids.tolist())
    assert scores[0] == scores[1] and len(scores[0]) == 6


def test_expanded_heads_draft_for_an_expanded_target(bench: RealBench) -> None:
    target, path = bench.output / "target-small-w8a8", bench.output / "heads-small.npz"
    options = GenerateOptions(max_tokens=48, draft_length=4, ignore_eos=True)
    with edgespec.load(str(target), heads=path, drafter="eagle", threads=TEST_THREADS, context_length=256) as model:
        stats = model.generate(PROMPT, Sampling(temperature=0), options).stats
    assert stats.accepted_tokens > 0.3 * stats.drafted_tokens > 10


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 11])
def test_shares_are_powers_of_two_and_sum_up(count: int) -> None:
    owners = np.concatenate((np.tile([0, 1], count), [-1]))
    shares, cancelling = shares_of(owners), cancelling_shares_of(owners)
    for owner in (0, 1):
        mine = shares[owners == owner]
        assert mine.sum() == 1 and (np.log2(mine) % 1 == 0).all()
        assert cancelling[owners == owner].sum() == 0
    assert shares[-1] == cancelling[-1] == 0
