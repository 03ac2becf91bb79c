"""A SentencePiece vocabulary of a GGUF as tokenizer.json: it splits text as llama.cpp does, or is refused."""

from __future__ import annotations

import itertools
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from edgespec.engines.llamacpp.tokenizer import VocabularyFile
from edgespec.engines.onnx.tokenizer import TokenizerFile
from edgespec.errors import ModelFileError
from edgespec.formats.gguf.check import check_gguf
from edgespec.formats.gguf.tokenizer import write_tokenizer_files
from tiny_gguf import Shape, matrices, sentencepiece, write_model

NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6
FIRST = 259  # behind <unk>, <s>, </s> and the bytes
Words = dict[str, tuple[float, int]]


def written(folder: Path, words: Words, **changed: Any) -> Path:
    """A GGUF with these words: score and kind of each."""
    parts = sentencepiece()
    scores, kinds = zip(*words.values(), strict=True)
    metadata = parts | {
        "tokenizer.ggml.tokens": [*parts["tokenizer.ggml.tokens"][:FIRST], *words],
        "tokenizer.ggml.scores": [0.0] * FIRST + list(scores),
        "tokenizer.ggml.token_type": [2, CONTROL, CONTROL] + [BYTE] * 256 + list(kinds),
        **{f"tokenizer.ggml.{name}": value for name, value in changed.items()},
    }
    shape = Shape(layers=1, width=32, heads=2, kv_heads=1, hidden=32)
    tensors = matrices(shape, FIRST + len(words))
    return write_model(folder / "model.gguf", shape, metadata=metadata, tensors=tensors)


def converted(path: Path) -> TokenizerFile:
    folder = path.parent / "onnx"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    header = check_gguf(path)
    write_tokenizer_files(header, folder)
    return TokenizerFile(folder, len(header.tokens))


def words(letters: str, **pieces: tuple[float, int]) -> Words:
    return dict.fromkeys(letters, (-9.0, NORMAL)) | {"\u2581": (-9.0, NORMAL)} | pieces


def drawn(rng: random.Random) -> Words:
    """A vocabulary in which scores may be equal, parts may score worse than the whole, and kinds may be any."""
    letters = "abc\u2581" if rng.random() < 0.7 else "ab\u2581"
    texts = set(letters) if rng.random() < 0.8 else set(letters[1:])
    texts |= {"".join(rng.choices(letters, k=rng.randrange(2, 6))) for _ in range(rng.randrange(3, 20))}
    ordered = sorted(texts)
    rng.shuffle(ordered)
    worst = rng.choice((4, 1000))
    found = {text: (-float(rng.randrange(1, worst)), NORMAL) for text in ordered}
    if rng.random() < 0.4:  # runs of spaces that score alike, as in Llama 2 and Phi
        worst = -float(rng.randrange(1, 2000))
        found |= dict.fromkeys(["\u2581" * count for count in range(1, rng.randrange(3, 7))], (worst, NORMAL))
    if rng.random() < 0.3:
        one = rng.choice(ordered)
        found[one] = found[one][0], rng.choice((CONTROL, USER_DEFINED, UNUSED))
    return found


def test_random_vocabularies_split_text_as_llama_cpp_does(tmp_path: Path) -> None:
    rng, counts = random.Random(5), Counter[str]()
    for _ in range(120):
        vocabulary = drawn(rng)
        path = written(tmp_path, vocabulary, add_space_prefix=rng.random() < 0.5)
        try:
            ours = converted(path)
        except ModelFileError:
            counts["refused"] += 1
            continue
        with VocabularyFile(path) as theirs:
            for _ in range(100):
                text = "".join(rng.choices("abcd ", (9, 9, 9, 1, 9), k=rng.randrange(1, 14)))
                for special in (False, True):
                    found = theirs.encode(text, parse_special=special)
                    assert ours.encode(text, parse_special=special) == found, (vocabulary, text, special)
        counts["equal"] += 1
    assert counts["equal"] > 60 and counts["refused"] > 20, counts


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ({"ab": (-1.0, NORMAL), "ba": (-1.0, NORMAL)}, "2 of its tokens have equal scores, such as 'ab' and 'ba'"),
        # Joining the first "ab" leads to "abc" before "ca" is looked at.
        (
            {"ab": (-2.0, NORMAL), "ca": (-2.0, NORMAL), "abc": (-1.0, NORMAL)},
            "2 of its tokens have equal scores, such as 'ab' and 'ca'",
        ),
        ({"aa": (-1.0, NORMAL), "aaaa": (-1.0, NORMAL)}, "2 of its tokens have equal scores, such as 'aa' and 'aaaa'"),
        ({"ab": (-1.0, UNUSED)}, "its token 'ab' is marked as unused"),
        ({"d": (-1.0, UNUSED)}, "its token 'd' is marked as unused"),
        ({"ad": (-1.0, NORMAL)}, "its token 'ad' has a letter that is no token"),
        ({"ab": (-1.0, BYTE)}, "its tokens for bytes are not those marked as such"),
    ],
)
def test_what_a_tokenizer_json_cannot_say_is_refused(tmp_path: Path, pieces: Words, why: str) -> None:
    with pytest.raises(ModelFileError, match=f"splits text as llama.cpp does: {why}"):
        converted(written(tmp_path, words("abc", **pieces)))


IDS = ("bos_id", "eos_id", "adds_bos", "end_ids")


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("lacking", [("bos_token_id",), ("eos_token_id",), ("bos_token_id", "eos_token_id")])
def test_ids_that_a_file_lacks_are_those_llama_cpp_takes(tmp_path: Path, model: str, lacking: tuple[str, ...]) -> None:
    missing = dict.fromkeys(lacking)
    if model == "llama":
        path = written(tmp_path, words("abc"), **missing)
    else:
        metadata = {f"tokenizer.ggml.{name}": None for name in (*missing, "add_bos_token")}
        path = write_model(tmp_path / "model.gguf", metadata=metadata)
    ours = converted(path)
    with VocabularyFile(path) as theirs:
        assert [getattr(ours, name) for name in IDS] == [getattr(theirs, name) for name in IDS]


NAMES = ["<|im_end|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<eos>", "[EOS]", "<|end|>", "<EOT>", "[e~[",
         "<|fim_prefix|>", "<SUF>", "<fim_middle>", "[PAD]", "<|repo_name|>", "<|flush|>", "<|x|>"]  # fmt: skip


@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED])
@pytest.mark.parametrize(
    "names", [*([name] for name in NAMES), [], ["<|end|>", "<|return|>", "<|call|>"], ["<|tool_response>", "<turn|>"]]
)
def test_tokens_have_the_kind_that_llama_cpp_gives_them_by_name(tmp_path: Path, names: list[str], kind: int) -> None:
    """`</s>` too, token 212 of Gemma, which is HTML beside Gemma 4's marks alone."""
    found = words("abc", **dict.fromkeys(names, (-1.0, kind)))
    kinds = [2, CONTROL, kind] + [BYTE] * 256 + [each for _, each in found.values()]
    path = written(tmp_path, found, token_type=kinds, eos_token_id=1)
    ours = converted(path)
    with VocabularyFile(path) as theirs:
        assert ours.pieces == theirs.pieces and ours.end_ids == theirs.end_ids
        for name, special in itertools.product([*names, "</s>"], (False, True)):
            text = f"a{name}b"
            assert ours.encode(text, parse_special=special) == theirs.encode(text, parse_special=special), name


def test_tokens_without_a_name_print_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, words("abc") | {"": (-1.0, CONTROL)})
    assert converted(path).token_bytes(FIRST + 4) == b""
