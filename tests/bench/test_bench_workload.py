"""The benchmark's prompts: sources, selection by seed, refused input."""

from __future__ import annotations

import pytest

from edgespec.bench import prompts as sources
from edgespec.bench.prompts import BenchPrompt, choose, with_random_text
from edgespec.errors import PromptError, UsageError
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


@pytest.mark.parametrize(
    ("name", "contents", "said"),
    [
        ("bad.txt", b" \n\t\n", "one prompt per line"),
        ("bad.jsonl", b'{"text": "a"}', "none of them JSON"),
        ("bad.txt", b"\xff\xfe", "not UTF-8"),
    ],
)
def test_bad_prompt_files_are_refused(tmp_path, name, contents, said):
    path = tmp_path / name
    path.write_bytes(contents)
    with pytest.raises(UsageError, match=said):
        sources.read_prompts(path)


def test_domains_take_turns_and_what_does_not_fit_is_left_out():
    domains = {"a": [*prompts_of("a", 3), BenchPrompt("a", "a number 1")], "b": prompts_of("b", 2)}
    chosen, too_long = choose(domains, [], lambda prompt: prompt.text != "a number 0")
    assert [prompt.text for prompt in chosen] == ["a number 1", "b number 0", "a number 2", "b number 1"]
    assert too_long == 1
    assert choose(domains, ["b", "a"], lambda prompt: True, one_each=True)[0] == [domains["b"][0], domains["a"][0]]
    with pytest.raises(PromptError, match="context_length="):
        choose(domains, [], lambda prompt: False)


def test_random_text_is_made_of_tokens_that_print_and_of_the_seed():
    found = sources.built_in()
    domains = with_random_text(found, VOCABULARY, seed=3)
    assert set(domains) == {*(prompt.domain for prompt in PROMPTS), "random_text"}
    assert domains == with_random_text(found, VOCABULARY, seed=3) == found | {"random_text": domains["random_text"]}
    assert domains["random_text"] != with_random_text(found, VOCABULARY, seed=4)["random_text"]
    for prompt in domains["random_text"]:
        assert len(VOCABULARY.encode(prompt.text)) == 48 and set(prompt.text) <= set("abcdefghijk")
