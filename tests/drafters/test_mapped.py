"""Drafts with another vocabulary: the same text as without, and drafts as good as what both vocabularies share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest

import edgespec
from edgespec import Sampling
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.mapped import LACKS, MappedSequence, VocabularyMap, map_vocabulary
from edgespec.drafters.model import ModelDrafter
from edgespec.errors import Cancelled, VocabularyMismatch
from edgespec.loading.drafts import LEAST_OVERLAP
from edgespec.sampling.sampler import Sampler
from lossless import assert_same_text
from table_engine import TableEngine, Words
from tiny_gguf import finish, write_sentencepiece_model

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
TARGET, DRAFT = (DEMO / f"demo-{role}-q8_0.gguf" for role in ("target", "draft"))
PROMPTS = ("Find me a cheap Italian restaurant in San Jose.", "Write a Python function `clamp(value, low, high)`.")
ORDER = np.random.default_rng(7).permutation(4096).tolist()


# -- the map


def read(mapping: VocabularyMap, *token_ids: int) -> list[int]:
    ids = np.array(token_ids, np.int32)
    found = mapping.read(ids)
    assert mapping.sizes(ids).sum() == found.size
    return found.tolist()


def test_tokens_are_the_same_when_they_print_the_same() -> None:
    target = Words([b"a", b"b", b"ab", b"", b""], stop=3, other=4)
    draft = Words([b"", b"ab", b"b", b"\n"], stop=0)
    mapping = VocabularyMap(target, draft)
    assert mapping.draft_ids.tolist() == [-1, 2, 1, 0, -1]
    assert mapping.share(range(5)) == pytest.approx(3 / 5)
    assert mapping.share([0, 2, 2, 2]) == 0.75 and mapping.share([]) == 0
    logits = mapping.gathered(np.array([10, 11, 12, 13], np.float32))
    assert logits.tolist() == [LACKS, 12, 11, 10, LACKS]


def test_what_the_draft_lacks_is_spelled_and_never_nothing() -> None:
    target = Words([b"hello", "é".encode(), "é".encode()[:1], b"?", b"", b"hel"], talk=4)
    draft = Words([b"hel", b"lo", b"\xc3", b"\xa9", b"\n", b"l", b"o"])
    mapping = VocabularyMap(target, draft)
    assert read(mapping, 0) == [0, 1]
    assert read(mapping, 1) == [2, 3]
    assert read(mapping, 2) == [2]  # no UTF-8 by itself
    assert read(mapping, 3) == [4] and read(mapping, 4) == [4]  # neither letters nor a name: a line break in its place
    assert read(mapping, 5, 0, 5) == [0, 0, 1, 0]
    assert read(VocabularyMap(target, draft, most_per_token=1), 0) == [1]


def test_byte_tokens_stand_for_bytes_that_nothing_else_prints() -> None:
    target = Words([b"A", b"\n", b"B"])
    draft = Words([b"A", b"\n", b"A", b"B", b"B"])
    draft._names = {0: "<0x41>", 1: "<0x0A>", 3: "'B'", 4: "<0x42>"}
    assert VocabularyMap(target, draft).draft_ids.tolist() == [2, 1, 3]
    back = VocabularyMap(draft, target)
    assert back.draft_ids.tolist() == [-1, 1, 0, 2, -1]  # one proposal for one text


def test_begin_and_end_mean_the_same_whatever_they_are_called() -> None:
    target = Words([b"a", b"", b""], bos=1, ends=(2,), begin=1, end=2)
    draft = Words([b"", b"", b"a"], bos=0, ends=(1,), s=0, eot=1)
    mapping = VocabularyMap(target, draft)
    assert mapping.draft_ids.tolist() == [2, 0, 1]
    assert mapping.end_ids == {2} and mapping.begins_with == []
    without = VocabularyMap(Words([b"a"]), draft)
    assert without.begins_with == [0] and without.end_ids == frozenset()


def test_a_space_that_a_tokenizer_puts_in_front_is_not_read() -> None:
    class Spaced(Words):
        def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = False) -> list[int]:
            return super().encode(" " + text)

    draft = Spaced([b" ", b"he", b"llo", b" he"])
    assert read(VocabularyMap(Words([b"hello", b" hello"]), draft), 0, 1) == [1, 2, 3, 2]


# -- the cache


def table_pair(context_length: int = 64) -> tuple[TableEngine, MappedSequence]:
    """A draft of the letters a..h, reversed, and a target that has i and j besides."""
    draft = TableEngine.random(8, seed=5, context_length=context_length)
    target = Words([bytes([letter]) for letter in b"jihgfedcba"])
    return draft, MappedSequence(draft, map_vocabulary(target, draft))


def test_a_mapped_cache_is_what_its_tokens_make_it() -> None:
    draft, cache = table_pair()
    rng = np.random.default_rng(0)
    text = rng.integers(0, 10, 40).astype(np.int32)
    for cut in (10, 3, 25, 25, 39, 1, 40):
        wanted = text[:cut].copy()
        if cut % 2:
            wanted[-2:] = 9
        shared = cache.shared_length(wanted)
        assert cache.reuse(wanted) == shared == cache.length
        found = cache.feed(wanted[shared:]).copy()
        fresh = [9 - token if token >= 2 else None for token in wanted.tolist()]
        known = cache._map.read(wanted).tolist()
        assert [k for k, f in zip(known, fresh, strict=True) if f is not None] == [f for f in fresh if f is not None]
        row = draft.row(known)
        assert found.tolist() == [LACKS, LACKS, *row[::-1].tolist()]
        assert cache.token_ids.tolist() == wanted.tolist()


def test_spelled_tokens_are_taken_back_whole_and_the_window_slides() -> None:
    draft = TableEngine.random(4, seed=2, context_length=32)
    target = Words([b"a", b"b", b"abc", b"abcd", b"dd"])
    drafter = ModelDrafter(draft, MappedSequence(draft, map_vocabulary(target, draft)))
    sampler = Sampler(Sampling(temperature=1.0, seed=3), target.size)
    rng = np.random.default_rng(1)
    text = rng.integers(0, 5, 300).astype(np.int32)
    for end in [*range(1, 60), 200, 90, 30, 300]:
        found = drafter.draft(DraftRequest(text[:end], 6, sampler))
        assert found.num_tokens == 6 and set(found.token_ids.tolist()) <= {0, 1}
        assert draft.length() <= 32
        cache = drafter.cache
        assert isinstance(cache, MappedSequence)
        assert draft.length() == cache._map.sizes(cache.token_ids).sum()
        assert drafter.num_uncached(text[:end]) in (0, 1)


def test_a_cancelled_read_leaves_the_known_tokens() -> None:
    draft = TableEngine.random(4, seed=2, context_length=64, max_batch=4)
    target = Words([b"a", b"b", b"abc", b"abcd"])
    cache = MappedSequence(draft, map_vocabulary(target, draft))
    cache.feed(np.array([2, 0], np.int32))
    passes = iter(range(2))
    forward = draft.forward

    def failing(batch):
        if next(passes, None) == 1:
            raise Cancelled("enough")
        return forward(batch)

    draft.forward = failing  # type: ignore[method-assign]
    with pytest.raises(Cancelled):
        cache.feed(np.array([3, 3, 3], np.int32))
    assert draft.length() == 8
    cache.restore()
    assert draft.length() == 4 and cache.length == 2


# -- what comes of it


def write_reordered_gguf(source: Path, path: Path, order: Sequence[int]) -> Path:
    """Write the model at `source` with token `order[i]` of it as token i; what `order` lacks is left out."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    place = {old: new for new, old in enumerate(order)}
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    kept = {tokens[old] for old in order}
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = field.contents()
        if key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
            value = [value[old] for old in order]
        elif key == "tokenizer.ggml.merges":
            value = [rule for rule in value if {rule.replace(" ", ""), *rule.split(" ")} <= kept]
        elif key.endswith("_token_id"):
            value = place[value]
        elif key.endswith(".vocab_size"):
            value = len(order)
        writer.add_key_value(key, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        rows = tensor.data[list(order)] if tensor.name in ("token_embd.weight", "output.weight") else tensor.data
        writer.add_tensor(tensor.name, np.ascontiguousarray(rows), raw_dtype=tensor.tensor_type)
    return finish(writer, path, {})


@pytest.fixture(scope="module")
def reordered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reordered_gguf(DRAFT, tmp_path_factory.mktemp("reordered") / "reordered.gguf", ORDER)


@pytest.fixture(scope="module", params=["llamacpp", "onnx"])
def pairs(request: pytest.FixtureRequest, reordered: Path) -> Iterator[tuple[edgespec.Model, edgespec.Model]]:
    """The demo pair, and the same with the draft's tokens in another order, on one engine."""
    options = {"engine": request.param, "drafter": "model", "reproducible": True}
    with (
        edgespec.load(TARGET, draft=DRAFT, **options) as own,
        edgespec.load(TARGET, draft=reordered, **options) as other,
    ):
        yield own, other


def test_the_same_draft_in_another_order_drafts_the_same(pairs: tuple[edgespec.Model, edgespec.Model]) -> None:
    own, mapped = pairs
    (note,) = (note for note in mapped.notes if "vocabular" in note)
    assert "token 0 is" in note and "100.0%" in note and not any("vocabular" in note for note in own.notes)
    asked = [("model", 3), ("model", 8)]
    one = assert_same_text(own, asked, num_tokens=32)
    other = assert_same_text(mapped, [*asked, ("tree", 8), ("auto", "auto")], num_tokens=32)
    for each in asked:
        assert one[each].accepted_tokens == other[each].accepted_tokens > 60
        assert one[each].drafted_tokens == other[each].drafted_tokens


@pytest.mark.parametrize("order", [list(range(3396)), list(range(3396))[::-1]], ids=["shorter", "reversed"])
def test_a_part_of_the_vocabulary_is_enough(tmp_path: Path, order: list[int]) -> None:
    """Without the 700 tokens that were merged last, which it reads in smaller pieces."""
    some = write_reordered_gguf(DRAFT, tmp_path / "some.gguf", order)
    with edgespec.load("demo", draft=some, drafter="model", reproducible=True) as model:
        assert any("82.9% of the target's tokens" in note for note in model.notes)
        assert assert_same_text(model, [("model", 4)])["model", 4].accepted_tokens > 60


def test_too_small_an_overlap_is_refused_with_the_first_difference(tiny_path: Path, tmp_path: Path) -> None:
    spaced = write_sentencepiece_model(tmp_path / "spm.gguf")
    few = write_reordered_gguf(DRAFT, tmp_path / "few.gguf", list(range(330))[::-1])
    for draft, first in ((tiny_path, "token 0 is"), (spaced, "token 0 is"), (few, "token")):
        with pytest.raises(VocabularyMismatch, match=f"{first}.*in ordinary text; at least {LEAST_OVERLAP:.0%}"):
            edgespec.load("demo", draft=draft, drafter="model")
