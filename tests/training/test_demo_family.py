"""The shipped demo family: its files, its tokenizer in both libraries, its template, and that its draft drafts."""

from __future__ import annotations

import json
import random
import tomllib
import unicodedata
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgespec.chat.template import render_chat
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.errors import ConfigError
from edgespec.formats.manifest import ModelPair, sha256_of
from edgespec.loading.registry import resolve
from edgespec.types import Batch
from edgespec.vocabulary import check_same_vocabulary
from trainlib.documents import read_documents, split_held_out

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
MAX_BYTES = 60_000_000
PROMPT = "<|endoftext|><|im_start|>user\nFind me a restaurant in San Jose.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return resolve(str(DEMO))


@pytest.fixture(scope="module")
def target(pair: ModelPair) -> Iterator[LlamaCppEngine]:
    with LlamaCppEngine.load(pair.target, threads=2, context_length=512, reproducible=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def draft(pair: ModelPair) -> Iterator[LlamaCppEngine]:
    with LlamaCppEngine.load(pair.draft, threads=2, context_length=512, reproducible=False) as engine:
        yield engine


def test_the_manifest_describes_the_files(pair: ModelPair):
    assert (pair.name, pair.licence, pair.context_length) == ("demo", "CC-BY-SA-4.0", 2048)
    assert sorted(pair.files) == ["draft", "medium", "target"]
    for file in pair.files.values():
        assert file.path.stat().st_size == file.bytes
        assert sha256_of(file.path) == file.sha256
    assert "demonstration" in pair.banner and "invents" in pair.banner


def test_everything_together_is_small():
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < MAX_BYTES


def probe_texts(count: int) -> list[str]:
    """Text of every awkward kind: scripts, marks, emoji, code, blanks, digits, contractions, special tokens."""
    rng = random.Random(20)
    letters = [chr(c) for c in range(32, 0x3100) if unicodedata.category(chr(c))[0] in "LMNPSZ"]
    wide = [chr(c) for c in (*range(0x1F300, 0x1F650), *range(0x4E00, 0x4E80), *range(0xAC00, 0xAC40), 0x200D, 0xFE0F)]
    pieces = [
        "it's", "I'LL", "they'Ve", "don't", "O'Reilly", "'s", "x_1", "__init__", "def f(a, *b, **c):\n    return a\n",
        '{"a": [1, 2.5, null]}', "1234567", "3.14", "1,000", "٣٤", "½", " ", "  ", "   ", "\t", "\n", "\r\n", "\n\n\n",
        " \n ", "\u00a0", "\u3000", "\u200b", "café", "cafe\u0301", "ﬁ", "🙂", "👩‍👩‍👧", "🇩🇪", "¿qué?",
        "...", "!!!\n", "->", "//", "\u017f", "\u212a",
        "San Jose", "restaurant", " the", "https://x.y/z?q=1&r=2", "a" * 40, "\x00", "\x7f", "\ufeff", "<|im_start|>",
        "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_response>", "<|im_start", "|>", "<tool_cal",
    ]  # fmt: skip
    texts = [*pieces]
    while len(texts) < count:
        kinds = [rng.choices(pieces, k=rng.randint(1, 6)), rng.choices(letters, k=rng.randint(1, 12))]
        kinds.append(rng.choices(wide, k=rng.randint(1, 5)))
        texts.append(rng.choice(["", " ", "\n"]).join(rng.choice(kinds)) + rng.choice(["", " ", *pieces]))
    return texts[:count]


@pytest.mark.parametrize("parse_special", [True, False])
def test_llama_cpp_and_tokenizers_give_the_same_ids(target: LlamaCppEngine, parse_special: bool):
    import tokenizers

    theirs = tokenizers.Tokenizer.from_file(str(DEMO / "hf" / "target" / "tokenizer.json"))
    theirs.encode_special_tokens = not parse_special
    different = [
        text
        for text in probe_texts(1000)
        if target.vocabulary.encode(text, parse_special=parse_special)
        != theirs.encode(text, add_special_tokens=False).ids
    ]
    assert different == []


def test_the_family_shares_one_vocabulary(pair: ModelPair, target: LlamaCppEngine, draft: LlamaCppEngine):
    check_same_vocabulary(target.vocabulary, draft.vocabulary)
    with LlamaCppEngine.load(pair.medium, threads=2, context_length=64, reproducible=False) as medium:
        check_same_vocabulary(target.vocabulary, medium.vocabulary)
    assert target.vocabulary.bos_id == 0 and not target.vocabulary.adds_bos
    assert target.vocabulary.encode("<|im_end|>", parse_special=True)[0] in target.vocabulary.end_ids


def test_the_generation_prompt_opens_the_turn_that_is_not_open(target: LlamaCppEngine):
    template = target.vocabulary.chat_template
    user = {"role": "user", "content": "Find me a restaurant in San Jose."}
    assert render_chat(template, [user]) == PROMPT
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
    result = {"role": "tool", "content": "{}"}
    wanted = PROMPT + '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_response>{}</tool_response>\n'
    assert render_chat(template, [user, call, result]) == wanted
    closed = render_chat(template, [user, call, result, {"role": "assistant", "content": "Done."}, user])
    assert closed == wanted + "Done.<|im_end|>\n" + PROMPT.removeprefix("<|endoftext|>")
    unanswered = render_chat(template, [user, call, user])
    assert "</tool_call>\n<|im_end|>\n<|im_start|>user" in unanswered


def greedy(engine: LlamaCppEngine, prompt_ids: list[int], count: int) -> list[int]:
    engine.rollback(0)
    emitted: list[int] = []
    row = engine.forward(Batch.chain(prompt_ids, last_only=True))[0]
    for _ in range(count):
        emitted.append(int(row.argmax()))
        row = engine.forward(Batch.chain(emitted[-1:]))[0]
    return emitted


def test_the_answer_is_task_dialogue_and_the_draft_agrees_with_it(target: LlamaCppEngine, draft: LlamaCppEngine):
    prompt = target.vocabulary.encode(PROMPT, parse_special=True)
    answer = greedy(target, prompt, 60)
    text = target.vocabulary.decode(answer).lower()
    assert any(word in text for word in ("restaurant", "food", "cuisine", "city")), text
    draft.rollback(0)
    guesses = draft.forward(Batch.chain(prompt + answer)).argmax(axis=1)[len(prompt) - 1 : -1]
    assert float((guesses == np.array(answer)).mean()) > 0.5


def test_the_wheel_carries_the_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("KERNELS", "PAGE_LIBRARIES"):  # a compilation of a minute, which test_base_install has
        monkeypatch.setenv(f"EDGESPEC_{name}", "none")
    from hatchling.builders import wheel as builders

    wheel = next(builders.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        inside = "edgespec/data/models/demo/"
        manifest = tomllib.loads(archive.read(inside + "manifest.toml").decode())
        for entry in (*manifest["files"].values(), *manifest["heads"].values()):
            assert archive.getinfo(inside + entry["path"]).file_size == entry["bytes"]
        archive.extractall(tmp_path / "site")
    assert {inside + "NOTICE", "edgespec/py.typed"} <= set(names)
    assert not any("safetensors" in name or name.startswith("tests/") for name in names)
    assert resolve(str(tmp_path / "site" / inside)).name == "demo"


# -- what training reads


def test_documents_are_read_from_every_kind_of_file_and_bad_lines_named(tmp_path: Path) -> None:
    lines = [{"text": "one"}, {"messages": [{"role": "user", "content": "two"}]}, {"prompt": "two"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "b.txt").write_text("three")
    paths = [tmp_path / "a.jsonl", tmp_path / "b.txt"]
    found = read_documents(paths)
    assert found == read_documents(paths[::-1]) and len(found) == 3
    train, held_out = split_held_out(found, 64)
    assert len(train) == 2 and len(held_out) == 1
    for content, said in (("{", "line 1 is not JSON"), ('{"x": 1}', "line 1 has no"), ("\xff", "cannot be read")):
        (tmp_path / "bad.jsonl").write_bytes(content.encode("latin-1"))
        with pytest.raises(ConfigError, match=said):
            read_documents([tmp_path / "bad.jsonl"])
    with pytest.raises(ConfigError, match="at least two"):
        split_held_out(["one"], 4)
