"""The benchmark's prompts: sources, selection by seed, refused input."""

from __future__ import annotations

import json
import random

import pytest

from edgespec.bench import prompts as sources
from edgespec.bench.prompts import (
    NUM_GENERATED,
    BenchPrompt,
    choose,
    copy_edit,
    random_text,
    with_generated,
)
from edgespec.errors import PromptError
from edgespec.loading.drafts import PROMPTS
from table_engine import LetterVocabulary

VOCABULARY = LetterVocabulary(12, end_id=11)


def prompts_of(domain: str, count: int) -> list[BenchPrompt]:
    return [BenchPrompt(domain, f"{domain} number {index}") for index in range(count)]


def test_plain_lines_are_prompts(tmp_path):
    (tmp_path / "mine.txt").write_text("one prompt\n\n  \nanother: {x}\n")
    found = sources.read_prompts(tmp_path / "mine.txt")
    assert {domain: [p.text for p in prompts] for domain, prompts in found.items()} == {
        "prompts": ["one prompt", "another: {x}"]
    }


def test_json_lines_name_their_domain(tmp_path):
    lines = [{"domain": "mail", "text": "a\nb"}, {"text": "c"}, {"domain": "mail", "text": "d"}]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n" + "\n".join(json.dumps(line) for line in lines))
    found = sources.read_prompts(path)
    assert {name: [p.text for p in prompts] for name, prompts in found.items()} == {
        "mail": ["a\nb", "d"],
        "prompts": ["c"],
    }


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "line 1 is not JSON"),
        (b"", "has no prompt"),
        (b" \n\t\n", "has no prompt"),
        (b'{"text": "a"}\n\n{"text": "b"', "line 3 is not JSON"),
        (b'{"text": "a"}\n{"text": ""}', 'line 2 needs a non-empty "text"'),
        (b'{"prompt": "a"}', 'line 1 needs a non-empty "text"'),
        (b'{"text": "a"}\n[1]', 'line 2 needs a non-empty "text"'),
        (b'{"text": "a", "domain": 3}', 'line 1: "domain" must be a name'),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_bad_prompt_files_name_the_line(tmp_path, contents, said):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(contents)
    with pytest.raises(PromptError, match=said):
        sources.read_prompts(path)


def test_domains_take_turns_and_what_does_not_fit_is_left_out():
    domains = {"a": [*prompts_of("a", 3), BenchPrompt("a", "a number 1")], "b": prompts_of("b", 2)}
    chosen = choose(domains, [], lambda prompt: prompt.text != "a number 0")
    assert [prompt.text for prompt in chosen] == ["a number 1", "b number 0", "a number 2", "b number 1"]
    assert choose(domains, ["b", "a"], lambda prompt: True, one_each=True) == [domains["b"][0], domains["a"][0]]
    with pytest.raises(PromptError, match="context_length="):
        choose(domains, [], lambda prompt: False)


def test_generated_domains_derive_from_the_others_and_the_seed():
    found = sources.built_in()
    domains = with_generated(found, VOCABULARY, seed=3)
    assert set(domains) == {*(prompt.domain for prompt in PROMPTS), "copying", "random_text"}
    assert domains == with_generated(found, VOCABULARY, seed=3)
    assert domains["random_text"] != with_generated(found, VOCABULARY, seed=4)["random_text"]
    assert domains["copying"][: len(found["copying"])] == found["copying"]
    assert len(domains["copying"]) == len(found["copying"]) + NUM_GENERATED


def test_an_edit_keeps_the_text_and_names_a_word_of_it():
    text = "def total(prices):\n    return sum(prices)"
    edit = copy_edit(text, random.Random(1))
    assert edit is not None
    assert edit.text.endswith(text)
    old = edit.text.split("'")[1]
    assert old in ("total", "prices", "return")
    assert copy_edit("1 + 1 = 2", random.Random(1)) is None
    assert copy_edit(text * 40, random.Random(1)) is None


def test_random_text_is_made_of_tokens_that_print():
    text = random_text(VOCABULARY, random.Random(2)).text
    assert len(VOCABULARY.encode(text)) == 48
    assert set(text) <= set("abcdefghijk")
