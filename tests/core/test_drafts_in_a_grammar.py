"""A grammar and drafters that know less than the target: the text stays plain decoding's, and the drafter in use."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgespec.config.options import Sampling
from edgespec.control.base import FixedLength
from edgespec.drafters.base import Drafter
from edgespec.drafters.heads import DFlashDrafter, Eagle3Drafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.tree import TreeDrafter
from edgespec.engines.head import Confidences, States
from edgespec.engines.sequence import CachedSequence
from edgespec.generation.decode import autoregressive, speculative
from edgespec.generation.run_state import Run
from edgespec.sampling.acceptance import RULES
from edgespec.sampling.constraint.grammar import Grammar
from edgespec.sampling.constraint.state import Constraints
from edgespec.sampling.sampler import Sampler
from edgespec.sampling.stopping import StopRules
from edgespec.types import Logits, TokenIds
from table_engine import TableEngine
from tiny_heads import LAYERS, OpenBlock, OpenHead

PROMPT = np.arange(4, dtype=np.int32)


def written(
    target: TableEngine, regex: str, drafter: Drafter | None, sampling: Sampling, length: int = 8
) -> tuple[list[int], Run]:
    """The answer's tokens, and the run that made it."""
    target.rollback(0)
    constraint = Constraints().of(Grammar("regex", regex), target.vocabulary, PROMPT.size)
    sequence = CachedSequence(target, 0)
    target.state_layers = LAYERS
    sequence.keep_features(True)
    sampler = Sampler(sampling, target.vocabulary.size, constraint)
    run = Run(sequence, PROMPT, sampler, StopRules(target.vocabulary.end_ids, (), 60))
    rule = RULES["coupled"]
    events = autoregressive(run) if drafter is None else speculative(run, FixedLength(drafter, length), rule)
    return [event.token_id for event in events], run


@pytest.mark.parametrize("as_tree", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_draft_model_without_the_targets_end_token_drafts_on_behind_it(seed: int, *, as_tree: bool) -> None:
    """As a base model beside an instruct one: what it drafts behind the end is no text that a grammar can follow."""
    size = 30
    target = TableEngine.random(size, order=2, seed=3, end_id=size - 1)
    small = target.related(0.3)
    small.vocabulary.end_ids = frozenset()
    sampling = Sampling(temperature=0.8, seed=seed)
    drafter: Drafter = ModelDrafter(small, owns_engine=False)
    drafter = TreeDrafter(drafter) if as_tree else drafter
    plain, _ = written(target, "[a-d]{1,3}", None, sampling)
    drafted, run = written(target, "[a-d]{1,3}", drafter, sampling)
    assert drafted == plain and not run.stats.notes


FEWER = 8  # tokens that the heads know, of ten


class FewHead(OpenHead):
    def decode(self, token_ids: TokenIds, states: States) -> tuple[Logits, States]:
        logits, state = super().decode(token_ids, states)
        return np.where(np.arange(logits.size) < FEWER, logits, -np.inf).astype(np.float32), state


class FewBlock(OpenBlock):
    def block(self, token_id: int, most: int | None = None) -> tuple[Logits, Confidences | None]:
        rows, confidences = super().block(token_id)
        return np.where(np.arange(rows.shape[1]) < FEWER, rows, -np.inf).astype(np.float32), confidences


HEADS: dict[str, Callable[[], Drafter]] = {
    "eagle3": lambda: Eagle3Drafter(FewHead(64), 512),
    "dflash": lambda: DFlashDrafter(FewBlock(64), 512),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", HEADS)
def test_heads_that_know_no_allowed_token_draft_nothing_there_and_go_on_later(name: str, temperature: float) -> None:
    target = TableEngine.random(10, order=1, end_id=None)
    target.vocabulary.end_ids = frozenset({9})
    regex, sampling = "([a-d]{2}i[a-d]{2}){4}", Sampling(temperature=temperature, seed=1)  # the heads know no i
    plain, _ = written(target, regex, None, sampling)
    drafted, run = written(target, regex, HEADS[name](), sampling, 3)
    assert drafted == plain and not run.stats.notes
    assert run.stats.drafted_tokens > 12
