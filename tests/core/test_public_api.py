"""The public API of `edgespec`: an explicit list of names, each documented and importable."""

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

import edgespec
from edgespec import errors
from edgespec.config.options import LoadKeywords, LoadOptions

EXPECTED = {
    "Busy",
    "EdgespecError",
    "GenerateOptions",
    "Generation",
    "LoadOptions",
    "Model",
    "Result",
    "Sampling",
    "Stats",
    "TokenEvent",
    "__version__",
    "load",
}


def test_the_public_names_are_these():
    assert set(edgespec.__all__) == EXPECTED
    assert list(edgespec.__all__) == sorted(edgespec.__all__)


@pytest.mark.parametrize("name", sorted(EXPECTED - {"__version__"}))
def test_every_name_is_documented(name):
    value = getattr(edgespec, name)
    documentation = value.__doc__
    assert documentation
    if dataclasses.is_dataclass(value):
        assert not documentation.startswith(f"{name}("), "dataclass wrote this one itself"


@pytest.mark.parametrize("name", ["Generation", "Model", "Result", "Stats"])
def test_every_public_method_is_documented(name):
    members = vars(getattr(edgespec, name))
    public = {
        key: member for key, member in members.items()
        if not key.startswith("_") and isinstance(member, (types.FunctionType, property, staticmethod))
    }  # fmt: skip
    undocumented = [key for key, member in public.items() if not inspect.getdoc(member)]
    obvious = {"reproducible", "decode_s"}  # defined by a documented neighbour
    assert set(undocumented) <= obvious


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


def test_every_error_is_in_the_drawn_tree():
    """The tree at the top of errors.py shows each class below its real parent."""
    assert errors.__doc__ is not None
    lines = [line for line in errors.__doc__.splitlines() if "──" in line or line.startswith("EdgespecError")]
    depth_of = {line.lstrip("│├└─ ").split()[0]: (len(line) - len(line.lstrip("│├└─ "))) // 4 for line in lines}
    classes = {k: v for k, v in vars(errors).items() if inspect.isclass(v) and issubclass(v, Exception)}
    assert set(depth_of) == set(classes)
    for name, cls in classes.items():
        assert depth_of[name] == len([base for base in cls.__mro__ if base.__module__ == errors.__name__]) - 1
