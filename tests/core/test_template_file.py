"""A chat template from a file: used instead of the model's, and checked before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import edgespec
from demo import TEST_THREADS
from edgespec.cli.main import cli
from edgespec.errors import ConfigError
from tiny_gguf import TEMPLATE, Shape, write_model

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model without a chat template."""
    return write_model(tmp_path / "base.gguf", Shape(has_template=False))


def written(folder: Path, text: str) -> Path:
    path = folder / "template.jinja"
    path.write_text(text, encoding="utf-8")
    return path


def test_python_and_command_line_use_it(base: Path, tmp_path: Path) -> None:
    path = written(tmp_path, TEMPLATE + "!")
    with edgespec.load(base, chat_template_file=path, threads=TEST_THREADS, reproducible=False) as model:
        expected = model.encode("<|user|>hello<|end|><|assistant|>!", parse_special=True)
        assert model.encode_chat(HELLO) == expected
    words = ["generate", str(base), "-p", "hello", "-n", "1", "--json", "--no-reproducible"]
    found = CliRunner().invoke(cli, [*words, "--chat-template-file", str(path)])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["prompt_token_ids"] == expected
    without = CliRunner().invoke(cli, words)
    assert without.exit_code == 2 and "--chat-template-file" in without.stderr, "the error names the fix"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{% for m in messages %}", "broken: line 1"),
        ("\n{% if messages %}{% endfor %}", "line 2"),
        ("You are a bot.", "does not mention 'messages'"),
        ("", "does not mention 'messages'"),
        ("{{ messages }}" + " " * (1 << 20), "more than 1048576 characters"),
    ],
)
def test_a_file_that_is_none_is_refused_before_the_model_is_looked_for(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=said) as caught:
        edgespec.load(tmp_path / "missing.gguf", chat_template_file=path)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused_by_every_command(base: Path, tmp_path: Path) -> None:
    binary = tmp_path / "binary.jinja"
    binary.write_bytes(b"{{ messages }}\xff")
    cases = ((tmp_path / "missing.jinja", "No such file"), (binary, "not UTF-8"), (tmp_path, "cannot be read"))
    for path, said in cases:
        for command in (["generate", "-p", "x"], ["chat"], ["serve", "--port", "0"]):
            found = CliRunner().invoke(cli, [*command, str(base), "--chat-template-file", str(path)])
            assert found.exit_code == 2 and said in found.stderr, found.output
