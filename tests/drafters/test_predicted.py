"""Drafting from what the caller expects the answer to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench_table import table_model
from edgespec import GenerateOptions, Sampling
from edgespec.config.values import DrafterName, DraftLength
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.predicted import PREDICTION, PredictedDrafter
from edgespec.errors import ConfigError
from edgespec.sampling.sampler import Sampler

SAMPLER = Sampler(Sampling(temperature=0), 100)
PROMPT = [50, 51, 1, 2]  # whose end is not the beginning of the answer
PREDICTED = np.array([1, 2, 3, 4, 5, 6, 3, 4, 9], np.int32)


def drafted(drafter: PredictedDrafter, answer: list[int], most: int = 3) -> list[int]:
    request = DraftRequest(np.array(PROMPT + answer, np.int32), most, SAMPLER, predicted_ids=PREDICTED)
    return drafter.draft(request).token_ids.tolist()


def begun() -> PredictedDrafter:
    drafter = PredictedDrafter()
    drafter.begin(np.array(PROMPT, np.int32))
    return drafter


@pytest.mark.parametrize(
    ("answer", "draft"),
    [
        ([1], [2, 3, 4]),
        ([1, 2, 3, 4], [5, 6, 3]),
        ([1, 2, 70], [4, 5, 6]),  # another token in place of 3
        ([1, 2, 70, 71, 3], [4, 5, 6]),  # two put in
        ([1, 2, 70, 71, 72, 5], [6, 3, 4]),  # three in place of two
        ([1, 2, 5], [6, 3, 4]),  # 3 and 4 left out
        ([1, 2, 3, 4, 5, 70, 6, 3], [4, 9]),  # the nearest 3 ahead
        ([70, 71, 5, 6, 3, 4], [9]),
        ([1, 2, 3, 4, 5, 6, 3, 4, 9], []),
        ([1, 2, 3, 4, 5, 6, 3, 4, 9, 2, 3], [4, 5, 6]),  # again from the beginning
    ],
)
def test_the_answer_is_followed_through_the_prediction(answer: list[int], draft: list[int]) -> None:
    step_by_step = begun()
    for end in range(1, len(answer) + 1):
        found = drafted(step_by_step, answer[:end])
    assert found == drafted(begun(), answer) == draft


def test_there_is_nothing_to_draft_without_a_prediction() -> None:
    request = DraftRequest(np.array([1, 2], np.int32), 4, SAMPLER)
    assert not begun().serves(request) and not begun().draft(request).num_tokens


def test_another_answer_has_another_prediction() -> None:
    drafter = begun()
    assert drafted(drafter, [1, 2]) == [3, 4, 5] and drafter.bytes_used
    drafter.begin(np.array([1], np.int32))
    request = DraftRequest(np.array([1, 7], np.int32), 2, SAMPLER, predicted_ids=np.array([7, 8], np.int32))
    assert drafter.draft(request).token_ids.tolist() == [8]


@pytest.mark.parametrize("drafter, length", [("auto", "auto"), ("ngram", 4), ("model", 3), ("model", "auto")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prediction_changes_no_text(
    tmp_path: Path, drafter: DrafterName, length: DraftLength, temperature: float
) -> None:
    with table_model(tmp_path, pass_s=0.0005) as model:
        sampling, fixed = Sampling(temperature=temperature, seed=5), {"max_tokens": 60, "logprobs": True}
        plain = model.generate("abc", sampling, GenerateOptions(drafter="none", **fixed))  # type: ignore[arg-type]
        swapped = plain.text[:20] + "aa" + plain.text[23:]
        for text in (plain.text, swapped, plain.text[::-1], "", "l" * 5000):
            options: Any = {"drafter": drafter, "draft_length": length, "prediction": text} | fixed
            found = [*model.stream("abc", sampling, GenerateOptions(**options))]
            assert [event.token_id for event in found] == list(plain.token_ids)
            assert [event.logprob for event in found] == list(plain.logprobs)
            num_predicted = sum(event.drafter == PREDICTION for event in found)
            # With "auto" what passes took on this machine decides how much is drafted.
            assert num_predicted > 40 or text != plain.text or length == "auto"


def test_a_prediction_is_a_text() -> None:
    with pytest.raises(ConfigError, match="prediction must be text"):
        GenerateOptions(prediction=5)  # type: ignore[arg-type]
