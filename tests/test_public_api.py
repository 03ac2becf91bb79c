"""What `import edgespec` promises: an explicit list of names, each documented, each importable on its own."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
import types

import pytest

import edgespec
from edgespec import errors

EXPECTED = {
    "EdgespecError",
    "GenerateOptions",
    "LoadOptions",
    "Model",
    "Result",
    "Sampling",
    "Stats",
    "TokenEvent",
    "__version__",
    "load",
}


def test_the_list_of_names_is_deliberate():
    assert set(edgespec.__all__) == EXPECTED
    assert list(edgespec.__all__) == sorted(edgespec.__all__)


@pytest.mark.parametrize("name", sorted(EXPECTED - {"__version__"}))
def test_every_name_is_documented(name):
    value = getattr(edgespec, name)
    documentation = value.__doc__
    assert documentation
    if dataclasses.is_dataclass(value):
        assert not documentation.startswith(f"{name}("), "dataclass wrote this one itself"


@pytest.mark.parametrize("name", ["Model", "Result", "Stats"])
def test_every_public_method_is_documented(name):
    members = vars(getattr(edgespec, name))
    public = {
        key: member for key, member in members.items()
        if not key.startswith("_") and isinstance(member, (types.FunctionType, property, staticmethod))
    }  # fmt: skip
    undocumented = [key for key, member in public.items() if not inspect.getdoc(member)]
    obvious = {"reproducible", "decode_s"}  # defined by a documented neighbour
    assert set(undocumented) <= obvious


def test_version_is_the_project_files():
    assert edgespec.__version__.count(".") == 2


def test_star_import_gives_exactly_the_list():
    code = "from edgespec import *; print(sorted(n for n in dir() if n in __import__('edgespec').__all__))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(sorted(EXPECTED))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = edgespec.nonsense


def test_every_error_is_in_the_drawn_tree():
    """The tree at the top of errors.py shows each class below its real parent."""
    assert errors.__doc__ is not None
    lines = [line for line in errors.__doc__.splitlines() if "──" in line or line.startswith("EdgespecError")]
    depth_of = {line.lstrip("│├└─ ").split()[0]: (len(line) - len(line.lstrip("│├└─ "))) // 4 for line in lines}
    classes = {k: v for k, v in vars(errors).items() if inspect.isclass(v) and issubclass(v, Exception)}
    assert set(depth_of) == set(classes)
    for name, cls in classes.items():
        assert depth_of[name] == len([base for base in cls.__mro__ if base.__module__ == errors.__name__]) - 1
