"""The benchmark's prompts: sources, selection by seed, refused input."""

from __future__ import annotations

import json
import random

import pytest

from edgespec.bench import prompts as sources
from edgespec.bench.prompts import (
    HOT_TEMPERATURE,
    SYNTHETIC,
    BenchPrompt,
    choose,
    copy_edit,
    random_text,
    with_synthetic,
)
from edgespec.config.options import Sampling
from edgespec.errors import PromptError
from edgespec.loading.drafts import PROMPTS
from table_engine import LetterVocabulary

VOCABULARY = LetterVocabulary(12, end_id=11)


def prompts_of(domain: str, count: int) -> list[BenchPrompt]:
    return [BenchPrompt(domain, (f"{domain} number {index}",)) for index in range(count)]


def test_plain_lines_are_prompts(tmp_path):
    (tmp_path / "mine.txt").write_text("one prompt\n\n  \nanother: {x}\n")
    found = sources.read_prompts(tmp_path / "mine.txt")
    assert {domain: [p.text for p in prompts] for domain, prompts in found.items()} == {
        "prompts": ["one prompt", "another: {x}"]
    }


def test_json_lines_name_their_domain(tmp_path):
    lines = [{"domain": "mail", "text": "a\nb"}, {"text": "c"}, {"domain": "mail", "text": "d"}]
    path = tmp_path / "mine.txt"
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
    path = tmp_path / "bad.txt"
    path.write_bytes(contents)
    with pytest.raises(PromptError, match=said):
        sources.read_prompts(path)


def test_a_smaller_number_is_a_prefix_and_another_seed_differs():
    domains = {"a": prompts_of("a", 30), "b": prompts_of("b", 2)}
    few, more, other = (
        choose(domains, [], count, seed, lambda prompt: True) for count, seed in ((3, 5), (6, 5), (3, 6))
    )
    assert [p.domain for p in few] == ["a", "b", "a", "b", "a"]
    assert [p for p in more if p.domain == "a"][:3] == [p for p in few if p.domain == "a"]
    assert few == choose(domains, [], 3, 5, lambda prompt: True)
    assert few != other


def test_prompts_that_do_not_fit_are_replaced_and_none_is_an_error():
    domains = {"a": prompts_of("a", 30)}
    even = choose(domains, ["a"], 5, 0, lambda prompt: prompt.text.endswith(("0", "2", "4", "6", "8")))
    assert len(even) == 5
    with pytest.raises(PromptError, match="context_length="):
        choose(domains, [], 5, 0, lambda prompt: False)


def test_without_a_number_all_prompts_are_used_in_order():
    domains = {"a": [*prompts_of("a", 7), BenchPrompt("a", ("a number 3",))]}
    assert choose(domains, [], None, 1, lambda prompt: True) == prompts_of("a", 7)


def test_synthetic_domains_derive_from_the_others_and_the_seed():
    found = sources.built_in()
    domains = with_synthetic(found, VOCABULARY, seed=3)
    assert set(domains) == {prompt.domain for prompt in PROMPTS} | set(SYNTHETIC)
    assert domains == with_synthetic(found, VOCABULARY, seed=3)
    assert domains["random_text"] != with_synthetic(found, VOCABULARY, seed=4)["random_text"]
    assert domains["copying"][: len(found["copying"])] == found["copying"]
    hot = domains["high_entropy"][0].sampling(Sampling(temperature=0.0, top_k=5, seed=9))
    assert (hot.temperature, hot.top_k, hot.top_p, hot.min_p, hot.seed) == (HOT_TEMPERATURE, 0, 1.0, 0.0, 9)
    assert domains["dialogue"][0].sampling(Sampling(temperature=0.0)).temperature == 0.0


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


def test_different_prompts_have_different_digests():
    prompts = [
        BenchPrompt("a", ("x",)),
        BenchPrompt("b", ("x",)),
        BenchPrompt("a", ("x",), is_hot=True),
        BenchPrompt("a", ("x",), is_raw=True),
        BenchPrompt("a", ("y", "z", "x")),
    ]
    assert len({prompt.digest for prompt in prompts}) == len(prompts)
    assert BenchPrompt("a", ("x",)).digest == prompts[0].digest
