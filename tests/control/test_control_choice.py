"""Hedge over policies, and drafts that only the text judges."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.config.options import Sampling
from edgespec.control.choice import BEST, NEVER, Hedge, add_ucb_bonus, choice_of
from edgespec.control.kinds import Kinds, kind_of
from edgespec.control.round import UnusedDraft, UnusedDrafts
from edgespec.control.text_mean import DecisionScore, TextMean
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.ngram import NgramDrafter
from edgespec.sampling import Sampler
from edgespec.types import Draft

GAINS = {"ngram": 0.5, "model": 0.3}


def test_what_each_policy_does() -> None:
    assert choice_of(BEST, GAINS) == "ngram"
    assert choice_of("model", GAINS) == "model"
    assert choice_of(NEVER, GAINS) is None
    assert choice_of("ngram", {"ngram": -0.1, "model": 1.0}) is None
    assert choice_of(BEST, {"ngram": -0.1, "model": 0.0}) is None
    assert choice_of(BEST, {}) is None


def test_the_best_expected_is_believed_at_first() -> None:
    assert Hedge(["ngram", "model"]).pick(GAINS) == "ngram"


@pytest.mark.parametrize(
    ("gains", "bonuses", "wanted"),
    [
        ({"ngram": 2.0, "model": 1.0, "eagle": 1.4}, {"model": 1.2, "eagle": 0.3}, {"model": 1.4, "eagle": 1.0}),
        ({"ngram": 2.0, "model": 1.0, "eagle": 1.4}, {"model": 0.5, "eagle": 0.3}, {"model": 1.0, "eagle": 1.4}),
        ({"ngram": 2.0, "model": -0.1, "eagle": 1.4}, {"model": 9.0, "eagle": 0.3}, {"model": -0.1, "eagle": 1.4}),
        ({"ngram": 2.0, "model": -0.1, "eagle": 0.0}, {"model": 9.0, "eagle": 0.3}, {"model": -0.1, "eagle": 0.0}),
        ({"ngram": 2.0, "model": 0.5}, {"model": 9.0}, {"model": 0.5}),
    ],
    ids=["changed", "too little", "nothing to gain", "none", "alone"],
)
def test_hope_changes_which_is_asked_and_not_whether(
    gains: dict[str, float], bonuses: dict[str, float], wanted: dict[str, float]
) -> None:
    add_ucb_bonus(gains, bonuses)
    assert gains == {"ngram": 2.0, **wanted}


def play(hedge: Hedge, net: dict[str, float], rounds: int) -> None:
    for _ in range(rounds):
        hedge.update(GAINS, net)
        hedge.share()


def test_a_long_prompt_is_a_kind_of_its_own_that_begins_with_what_is_known() -> None:
    request = DraftRequest(np.arange(300, dtype=np.int32), 4, Sampler(Sampling(temperature=0.0), 5000))
    assert [kind_of(request, tokens) for tokens in (0, 255, 256)] == ["greedy", "greedy", "greedy long"]
    for first, second in (("greedy", "greedy long"), ("warm long", "warm")):
        kinds = Kinds({"ngram": NgramDrafter()})
        states, hedge = kinds.of(first).states, kinds.of(first).hedge
        states["ngram"].upcoming.observe(None, 0.1)
        play(hedge, {"ngram": -0.5}, 30)
        others, other_hedge = kinds.of(second).states, kinds.of(second).hedge
        assert others["ngram"].to_json() == states["ngram"].to_json() and other_hedge.weights == hedge.weights
        play(other_hedge, {"ngram": 1.0}, 30)
        others["ngram"].upcoming.observe(None, 0.9)
        assert others["ngram"].to_json() != states["ngram"].to_json() and other_hedge.weights != hedge.weights
    assert Kinds({"ngram": NgramDrafter()}).of("warm").hedge.weights == Hedge(["ngram"]).weights


def test_the_leader_follows_what_was_really_gained() -> None:
    """The lookup expects more and gains less; afterwards it is the other way round."""
    hedge = Hedge(["ngram", "model"])
    play(hedge, {"ngram": -0.5, "model": 1.0}, 30)
    assert hedge.pick(GAINS) == "model"
    play(hedge, {"ngram": 1.0, "model": -0.5}, 60)
    assert hedge.pick(GAINS) == "ngram"


def test_drafters_that_copy_long_runs_are_told_apart() -> None:
    """Five tokens a round against nine: the one that gains less expects more."""
    hedge = Hedge(["cache", "suffix"])
    for _ in range(30):
        hedge.update({"cache": 8.0, "suffix": 7.0}, {"cache": 4.5, "suffix": 9.0})
        hedge.share()
    assert hedge.pick({"cache": 8.0, "suffix": 7.0}) == "suffix"


def test_the_best_of_the_others_takes_over_unless_nobody_should_draft() -> None:
    hedge = Hedge(["ngram", "model"])
    assert hedge.second({"ngram": 0.5}) == "ngram"
    assert hedge.second({"ngram": -0.5}) is None
    assert hedge.second({}) is None
    play(hedge, {"ngram": -1.0, "model": -1.0}, 30)
    assert hedge.second({"ngram": 0.5}) is None


def test_nobody_drafts_when_every_draft_loses_and_one_is_asked_again_when_it_gains() -> None:
    hedge = Hedge(["ngram", "model"])
    play(hedge, {"ngram": -0.5, "model": -0.5}, 1000)
    assert hedge.pick(GAINS) is None
    assert hedge.weights[BEST] > 1e-4  # a share of all weight keeps every policy within recall
    play(hedge, {"ngram": 1.0, "model": 1.0}, 40)
    assert hedge.pick(GAINS) is not None


def test_weights_sum_to_one_and_one_round_moves_them_little() -> None:
    hedge = Hedge(["ngram"])
    hedge.update(GAINS, {"ngram": 1e9})
    hedge.share()
    assert sum(hedge.weights.values()) == pytest.approx(1.0)
    assert min(hedge.weights.values()) > 0.05


def shadow(token_ids: list[int], start: int, kept: int = 2) -> UnusedDraft:
    return UnusedDraft("ngram", start, Draft.chain(token_ids, evidence=[(2.0,)] * len(token_ids)), kept, GAINS, 0.4)


def resolved(shadows: UnusedDrafts, text: list[int]) -> list[tuple[int, int]]:
    return [(found.start, agreed) for found, agreed in shadows.resolved(np.array(text, np.int32))]


def test_a_draft_is_judged_at_its_first_difference() -> None:
    shadows = UnusedDrafts()
    shadows.add(shadow([5, 6, 7, 8], start=3))
    assert resolved(shadows, [1, 2, 3]) == []
    assert resolved(shadows, [1, 2, 3, 5]) == []
    assert resolved(shadows, [1, 2, 3, 5, 6, 9]) == [(3, 2)]
    assert resolved(shadows, [1, 2, 3, 5, 6, 9, 8]) == []


def test_a_draft_that_agrees_waits_for_its_last_token() -> None:
    shadows = UnusedDrafts()
    shadows.add(shadow([5, 6], start=1))
    assert resolved(shadows, [1, 5]) == []
    assert resolved(shadows, [1, 5, 6, 7]) == [(1, 2)]


def test_several_drafts_wait_at_once_and_each_is_told_once() -> None:
    shadows = UnusedDrafts()
    shadows.add(shadow([5, 6, 7], start=1))
    shadows.add(shadow([6, 9], start=2))
    shadows.add(shadow([4], start=1))
    assert sorted(resolved(shadows, [1, 5])) == [(1, 0)]
    assert sorted(resolved(shadows, [1, 5, 6, 7, 8])) == [(1, 3), (2, 1)]


def test_an_empty_draft_is_no_draft_and_clearing_forgets() -> None:
    shadows = UnusedDrafts()
    shadows.add(shadow([], start=1))
    shadows.add(shadow([5], start=1))
    shadows.clear()
    assert resolved(shadows, [1, 5]) == []


def test_only_so_many_are_kept_waiting() -> None:
    shadows = UnusedDrafts()
    for start in range(200):
        shadows.add(shadow([1] * 400, start=start))
    assert len(resolved(shadows, [2] * 500)) == 64


def test_a_decision_pays_when_its_mean_gain_is_clear() -> None:
    score = DecisionScore()
    assert not score.pays, "nothing is known"
    for _ in range(200):
        score.observe(0.01)
    assert not score.pays, "that may be chance"
    for gain in (4.0, 0.0, 0.0, -0.02):
        score.observe(gain)
    assert score.pays, "copies come in bursts"
    for _ in range(200):
        score.observe(-0.02)
    assert not score.pays


def test_a_text_begins_with_what_is_usual_and_soon_says_more_itself() -> None:
    mean = TextMean(rate=0.05, prior=4.0)
    assert not mean.is_known
    for value in (1.0, 0.0, 1.0, 0.0):
        mean.begin()
        for _ in range(60):
            mean.observe(value)
        assert mean.value == pytest.approx(value, abs=0.1), "the text itself"
    mean.begin()
    assert mean.is_known and mean.value == pytest.approx(0.5, abs=0.1), "texts in general, not the last one"
    for _ in range(4):
        mean.observe(1.0)
    assert 0.6 < mean.value < 0.9
    mean.begin()
    usual = mean.value
    mean.begin()
    assert mean.value == usual, "a text without any says nothing"
