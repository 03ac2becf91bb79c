"""Errors name options as the caller gives them: keywords in Python, flags on the command line and in a server."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

import edgespec
from edgespec import GenerateOptions, LoadOptions
from edgespec.cli.main import cli
from edgespec.config.options import SETTINGS
from edgespec.errors import PYTHON_NAMES, ConfigError, EdgespecError, PromptTooLong, spoken_on_the_command_line
from edgespec.sampling.constraint.library import in_plain_words
from edgespec.server.http_errors import as_http_error

SPOKEN = [
    ("shorten it or give a larger --ctx-size", "shorten it or give a larger context_length=..."),
    ("give -md/--model-draft, or use --drafter ngram", "give draft=..., or use drafter='ngram'"),
    ("--no-reproducible disables it", "reproducible=False disables it"),
    ("max-tokens must be at least 1", "max_tokens must be at least 1"),
    ("give --pooling mean or last", "give pooling='mean' or last"),
    ("convert it: edgespec export X --draft-length 4", "convert it: edgespec export X --draft-length 4"),
    ("give another --output", "give another --output"),
]


@pytest.mark.parametrize(("written", "python"), SPOKEN)
def test_each_caller_reads_the_names_that_he_gives(written: str, python: str) -> None:
    error = ConfigError(written)
    assert str(error) == python
    assert error.on_the_command_line == as_http_error(error).message == written
    with spoken_on_the_command_line():
        assert str(error) == written
    assert str(error) == python


def test_every_option_of_a_model_and_of_an_answer_has_its_name_in_python() -> None:
    for setting in SETTINGS:
        if setting.part in ("load", "sampling", "generate") and setting.name != "model":
            assert PYTHON_NAMES[setting.key] == setting.name


def test_errors_of_either_side() -> None:
    with pytest.raises(ConfigError, match="context_length must be auto"):
        LoadOptions(context_length=3)
    said = CliRunner().invoke(cli, ["generate", "demo", "-p", "x", "-c", "3"]).stderr
    assert "ctx-size must be auto" in said
    with edgespec.load("demo", context_length=32) as model, pytest.raises(PromptTooLong) as refused:
        model.generate("word " * 99)
    assert "larger context_length=" in str(refused.value) and isinstance(refused.value, EdgespecError)
    assert isinstance(refused.value, PromptTooLong)
    assert refused.value.num_tokens > refused.value.context_length == 32
    long = CliRunner().invoke(cli, ["generate", "demo", "-c", "32", "-p", "word " * 99]).stderr
    assert "larger --ctx-size" in long


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "number", "minimum": 1e300, "maximum": 1e301}, "minimum 1e+300 leaves only numbers behind 2**63"),
        ({"$ref": "http://a.example/b"}, "http://a.example/b is not in the schema, and nothing is fetched"),
    ],
)
def test_no_words_of_a_library(schema: dict[str, object], said: str) -> None:
    assert in_plain_words("NoExtensionBias") == "nothing can follow"
    told = in_plain_words("Parser Error: Current row has 6001 items; max is 2000; consider making it left-recursive.")
    assert told.startswith("it leaves 6001 ways to go on at once, 2000 are allowed: use fewer")
    with edgespec.load("demo") as model, pytest.raises(ConfigError) as refused:
        model.check_structure(GenerateOptions(json_schema=schema))
    assert said in str(refused.value) and "Some(" not in str(refused.value)
