"""The public API of `edgespec`: its names, documented and typed, and errors that name options as callers do."""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest
from click.testing import CliRunner

import edgespec
from edgespec import GenerateOptions
from edgespec.cli.main import cli
from edgespec.config.options import SETTINGS, LoadKeywords, LoadOptions
from edgespec.errors import PYTHON_NAMES, ConfigError, EdgespecError, PromptTooLong, spoken_on_the_command_line
from edgespec.sampling.constraint.library import in_plain_words
from edgespec.server.http_errors import as_http_error

EXPECTED = {
    *("Busy", "EdgespecError", "GenerateOptions", "Generation", "LoadOptions", "Model", "Result", "Sampling"),
    *("Stats", "TokenEvent", "__version__", "load"),
}


def test_the_public_names_are_these():
    assert set(edgespec.__all__) == EXPECTED
    assert list(edgespec.__all__) == sorted(edgespec.__all__)


@pytest.mark.parametrize("name", sorted(EXPECTED - {"__version__"}))
def test_every_name_is_documented(name):
    value = getattr(edgespec, name)
    assert value.__doc__ and not value.__doc__.startswith(f"{name}("), "a dataclass wrote this one itself"
    if name in ("Generation", "Model", "Result", "Stats"):
        methods = (types.FunctionType, property, staticmethod)
        public = {key: each for key, each in vars(value).items() if key[0] != "_" and isinstance(each, methods)}
        obvious = {"reproducible", "decode_s"}  # defined by a documented neighbour
        assert {key for key, each in public.items() if not inspect.getdoc(each)} <= obvious


def test_the_keywords_of_load_are_the_fields_of_its_options():
    keywords, types = typing.get_type_hints(LoadKeywords), typing.get_type_hints(LoadOptions)
    assert ["model", *keywords] == [field.name for field in dataclasses.fields(LoadOptions)]
    for name, kind in keywords.items():
        wanted = str | os.PathLike[str] | None if types[name] == Path | None else types[name]
        assert kind == wanted, name


CALLER = """
import edgespec
from edgespec import GenerateOptions, LoadOptions, Sampling

with edgespec.load("demo", drafter="ngram", draft="x.gguf", context_length=512) as model:
    generation = model.stream("x", Sampling(seed=None), GenerateOptions(stop="zebra", top_logprobs=2))
    for event in generation:
        text: str = event.text
    seed: int = generation.result().seed
    model.chat([{"role": "user", "content": "hi"}]).cancel()
edgespec.load(LoadOptions("demo", draft_length=4)).close()
"""
MISTAKES = {
    'edgespec.load("demo", drafer="ngram")': '"drafer"',
    'edgespec.load("demo", drafter="ngrma")': "Literal['ngrma']",
    'edgespec.load("demo", threads="2")': '"threads"',
    "GenerateOptions(max_token=5)": '"max_token"',
    'edgespec.load("demo").generate("x", Sampling(temprature=0.5))': '"temprature"',
    'edgespec.load("demo").stream("x", max_tokens=5)': '"max_tokens"',
    'edgespec.load("demo").generate("x").txt': '"txt"',
}


def test_a_type_checker_finds_a_callers_typo(tmp_path):
    lines = CALLER.count("\n")
    (tmp_path / "caller.py").write_text(CALLER + "\n".join(MISTAKES) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary", "caller.py"]
    environment = {**os.environ, "MYPYPATH": str(Path(edgespec.__file__).parent.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    found = {int(line.split(":")[1]): line for line in done.stdout.splitlines() if ": error:" in line}
    assert sorted(found) == [lines + number for number in range(1, len(MISTAKES) + 1)], done.stdout + done.stderr
    for line, named in zip((found[number] for number in sorted(found)), MISTAKES.values(), strict=True):
        assert named in line


# -- errors name options as the caller gives them: keywords in Python, flags on the command line and in a server


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
