"""The table engine: what it computes is known in closed form."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.errors import CapabilityError, PromptError, UsageError
from edgespec.types import Batch
from edgespec.vocabulary import check_same_vocabulary
from table_engine import TableEngine


def test_logits_depend_on_the_last_tokens_and_nothing_else():
    engine = TableEngine.random(5, order=2, seed=3)
    scored = engine.forward(Batch.chain([0, 1, 2, 1, 2, 4])).copy()
    np.testing.assert_array_equal(scored[2], scored[4])
    assert not np.array_equal(scored[2], scored[3])
    for end in range(1, 7):
        np.testing.assert_array_equal(scored[end - 1], engine.row([0, 1, 2, 1, 2, 4][:end]))


def test_every_short_context_has_a_row_of_its_own():
    engine = TableEngine.random(10, order=2)
    contexts = [[]] + [[a] for a in range(10)] + [[a, b] for a in range(10) for b in range(10)]
    assert len({engine.row(context).tobytes() for context in contexts}) == len(contexts)


def test_a_seed_fixes_the_table_and_related_ones_differ_by_sigma():
    target = TableEngine.random(50, seed=1)
    again, draft, far = TableEngine.random(50, seed=1), target.related(0.1), target.related(1.0)
    np.testing.assert_array_equal(target.row([3, 4]), again.row([3, 4]))
    contexts = [[a, b] for a in range(50) for b in range(50)]
    for engine, sigma in ((draft, 0.1), (far, 1.0)):
        difference = np.concatenate([engine.row(context) - target.row(context) for context in contexts])
        assert difference.std() == pytest.approx(sigma, rel=0.05)
    agree = [np.argmax(draft.row(context)) == np.argmax(target.row(context)) for context in contexts]
    assert 0.8 < np.mean(agree) < 1.0
    check_same_vocabulary(target.vocabulary, draft.vocabulary)


def test_a_large_vocabulary_shares_its_rows():
    engine = TableEngine.random(152_000, max_batch=16)
    assert engine.facts.weight_bytes <= 16 << 20
    logits = engine.forward(Batch.chain([1, 151_999, 7]))
    assert logits.shape == (3, 152_000)
    assert logits.dtype == np.float32
    assert not np.array_equal(logits[0], logits[1])


def test_logits_are_overwritten_by_the_next_pass():
    engine = TableEngine.random()
    first = engine.forward(Batch.chain([1, 2]))
    kept = first.copy()
    engine.forward(Batch.chain([3, 4]))
    assert not np.array_equal(first, kept)


def test_an_engine_without_rollback_says_so():
    engine = TableEngine.random(can_rollback=False)
    engine.forward(Batch.chain([1, 2, 3]))
    engine.rollback(3)
    with pytest.raises(CapabilityError, match="without rollback"):
        engine.rollback(1)
    assert engine.length() == 3
    engine.rollback(0)
    assert engine.length() == 0


def test_letters_are_tokens():
    vocabulary = TableEngine.random(30, end_id=29).vocabulary
    assert vocabulary.encode("bad[27]z") == [1, 0, 3, 27, 25]
    assert vocabulary.decode([1, 0, 3, 27, 29]) == "bad[27]"
    assert vocabulary.token_name(29) == "[29]"
    for text in ("A", "a b", "[30]", "\u00e9"):
        with pytest.raises(PromptError):
            vocabulary.encode(text)
    with pytest.raises(UsageError):
        vocabulary.token_name(30)
