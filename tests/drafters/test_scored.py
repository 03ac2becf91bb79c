"""Heads that always score frequent tokens only: the others are drafted once they occurred, in every kind of draft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.engines.onnx.file_heads import HeadText
from edgespec.errors import ModelFileError
from edgespec.formats.head_file import HeadFile, HeadManifest, read_head_file
from head_tables import KINDS, VOCABULARY, request, table, with_features
from lossless import GREEDY, run_once
from tiny_heads import drafter_of, table_heads
from trainlib.head_files import write_head_file

SIZE = 1000


def cut_heads(num_frequent: int = 8) -> HeadFile:
    """Heads with a vocabulary of every second token, of which the first `num_frequent` are frequent."""
    manifest = HeadManifest("eagle", 3, 16, SIZE, "random", "-", heads=2, kv_heads=1, head_dim=4, ffn=8, scale=0.5)
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in manifest.shapes().items()}
    ids = np.arange(0, SIZE, 2, dtype=np.int32)
    vocabulary = rng.standard_normal((ids.size, 16)).astype(np.float16).astype(np.float32)
    frequent = np.arange(num_frequent, dtype=np.int32)
    return HeadFile(manifest, arrays, vocabulary, ids, ids[:4], np.zeros((4, 16), np.float32), frequent)


def logits_of(scored: HeadText, heads: HeadFile, states: np.ndarray) -> np.ndarray:
    frequent = (states @ heads.frequent_rows.T) * np.float32(heads.manifest.scale)
    return scored.logits(states, frequent)[0].copy()


def test_a_token_is_scored_from_its_first_occurrence_on() -> None:
    heads = cut_heads()
    scored = HeadText(heads, SIZE)
    states = np.random.default_rng(1).standard_normal((1, 16)).astype(np.float32)
    exact = np.full(SIZE, -1e30, np.float32)
    exact[heads.token_ids] = states[0] @ heads.vocabulary.T * 0.5
    expected = set(range(0, 16, 2))
    text = np.array([3, 500, 7], np.int32)
    for new in ([], [500, 2, 501], [998, 500], list(range(0, SIZE, 2))):  # 501 and 3 are not in the vocabulary
        text = np.concatenate((text, np.array(new, np.int32)))
        scored.follow(text)
        expected |= {int(token) for token in text if token % 2 == 0}
        found = logits_of(scored, heads, states)
        assert set(np.flatnonzero(found > -1e29)) == expected
        np.testing.assert_allclose(found[sorted(expected)], exact[sorted(expected)], rtol=1e-5, atol=1e-5)
    scored.begin()  # another text: all of it is forgotten
    assert set(np.flatnonzero(logits_of(scored, heads, states) > -1e29)) == set(range(0, 16, 2))
    scored.follow(text[:2])
    scored.follow(text[:1])  # shorter: another text, too
    assert 500 not in np.flatnonzero(logits_of(scored, heads, states) > -1e29)


@pytest.mark.parametrize("branches", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_whole_vocabulary_where_all_tokens_occurred(kind: str, branches: int) -> None:
    target = table()
    whole = table_heads(kind, target)
    cut = replace(whole, frequent=np.array([1, 4], np.int32))
    rng = np.random.default_rng(0)
    states = rng.standard_normal((30, VOCABULARY)).astype(np.float32)
    text = np.concatenate((np.arange(VOCABULARY), rng.integers(0, VOCABULARY, 21))).astype(np.int32)
    asked = request(text, states)._replace(max_branches=branches)
    drafts = [drafter_of(heads, VOCABULARY).draft(asked) for heads in (whole, cut)]
    assert list(drafts[0].token_ids) == list(drafts[1].token_ids)
    assert list(drafts[0].parents) == list(drafts[1].parents)
    # before they occurred only the frequent ones can be drafted
    drafter = drafter_of(cut, VOCABULARY)
    early = drafter.draft(request(np.full(31, 4, np.int32), states)._replace(max_branches=branches))
    assert set(early.token_ids.tolist()) <= {1, 4}


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_plain_decoding(kind: str) -> None:
    target = table()
    heads = replace(table_heads(kind, target), frequent=np.array([1, 4], np.int32))
    plain = run_once(with_features(target), None, "coupled", 0, GREEDY, 200)
    found = run_once(with_features(target), drafter_of(heads, VOCABULARY), "coupled", 3, GREEDY, 200)
    assert [event.token_id for event in found] == [event.token_id for event in plain]
    assert sum(event.from_draft for event in found) > 40


def test_the_file_keeps_them_and_refuses_damage(tmp_path: Path) -> None:
    heads = cut_heads()
    write_head_file(tmp_path / "heads.npz", heads)
    found = read_head_file(tmp_path / "heads.npz")
    assert found.frequent is not None and heads.frequent is not None
    assert np.array_equal(found.frequent, heads.frequent) and len(found.frequent_rows) == 8
    for wrong in ([3, 1], [0, 500], [-1, 2], []):
        write_head_file(tmp_path / "wrong.npz", replace(heads, frequent=np.array(wrong, np.int32)))
        with pytest.raises(ModelFileError):
            read_head_file(tmp_path / "wrong.npz")
