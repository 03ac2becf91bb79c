"""Who may import whom, as docs/architecture.md draws it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import edgespec

PACKAGE = Path(edgespec.__file__).parent
ROOT = PACKAGE.parent
# Base classes, and what is no implementation: all that others know of engines and drafters.
BASES = {
    "engines.base",
    "engines.sequence",
    "engines.widths",
    "engines.head",
    "engines.parked",
    "drafters.base",
    "drafters.predicted",  # every controller makes these: they need neither a model nor a text
    "drafters.spec",
}
# what puts engines and drafters together, or reads their files; doctor asks a library for its version, rpc-server runs
# one without a model
ASSEMBLING = {"engines", "drafters.spec", "runtime", "export", "loading", "memory", "control.pool"}
ASSEMBLING |= {"cli.doctor", "cli.rpc_server"}
HEAVY = {"torch", "tokenizers", "gguf", "safetensors", "transformers"}


def modules() -> dict[str, Path]:
    """Dotted name below the package ('' for its root) of every module."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts).removesuffix("__init__").rstrip(".")] = path
    return found


MODULES = modules()


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Full names of all that a file imports, inside functions too."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            for alias in node.names:  # a module of a package, or a name in a module
                full = f"{node.module}.{alias.name}"
                yield full if full.removeprefix("edgespec.") in MODULES else node.module


def own_imports(name: str) -> list[str]:
    return [
        full.removeprefix("edgespec").lstrip(".") for full in imports(MODULES[name]) if full.split(".")[0] == "edgespec"
    ]


def component(name: str) -> str:
    """The package or module below `edgespec` that a module is, or is in."""
    return name.partition(".")[0]


def test_the_drawing_of_imports_is_true():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawing = page.partition("```text\n")[2].partition("```")[0]
    rows = {name: row for row, line in enumerate(drawing.splitlines()) for name in re.findall(r"\w+", line)}
    for name in MODULES:
        own = component(name)
        if not own.startswith("__") and own:
            assert own in rows, f"{own} is missing in the drawing"
            for other in {component(imported) for imported in own_imports(name)} - {own, ""}:
                assert rows[other] > rows[own], f"{name} imports {other}"


def test_only_the_runtime_imports_implementations():
    """Everything else meets engines and drafters through their base classes."""
    for name in MODULES:
        if {name, component(name)} & ASSEMBLING:
            continue
        implementations = {"engines", "drafters"} - {component(name)}
        used = {imported for imported in own_imports(name) if component(imported) in implementations}
        assert used <= BASES, f"{name} imports {used - BASES}"


def test_the_package_does_not_need_the_laboratory():
    """scripts/lab is not in the wheel, though the tests can import it."""
    laboratory = {path.stem for path in (PACKAGE.parent / "scripts" / "lab").iterdir()}
    for name, path in MODULES.items():
        assert not laboratory & {full.split(".")[0] for full in imports(path)}, name


@pytest.mark.parametrize(("library", "engine"), [("llama_cpp", "llamacpp"), ("onnxruntime", "onnx")])
def test_an_engines_library_is_imported_in_one_file(library, engine):
    users = [name for name, path in MODULES.items() if any(full.split(".")[0] == library for full in imports(path))]
    assert users == [f"engines.{engine}.library"]


def test_training_libraries_stay_in_training_and_export():
    for name, path in MODULES.items():
        if component(name) != "export" and name not in ("engines.onnx.tokenizer", "formats.checkpoint"):
            assert not HEAVY & {full.split(".")[0] for full in imports(path)}, name


LIBRARIES = {"numpy", "jinja2", "prompt_toolkit", "rich", "asyncio", "llama_cpp", "onnxruntime", "onnx"}
OF_THE_PACKAGE = LIBRARIES | {"click", "sqlite3", "tomllib", "edgespec.runtime", "edgespec.config"}


@pytest.mark.parametrize("arguments", [None, ["--help"], ["--version"], ["nonsense"]])
def test_help_errors_and_the_package_itself_wait_for_no_library(arguments):
    command = f"from edgespec.cli.main import cli\ntry: cli.main({arguments!r})\nexcept SystemExit: pass\n"
    unwanted = OF_THE_PACKAGE if arguments is None else LIBRARIES
    code = f"import sys, edgespec\n{command if arguments else ''}"
    code += f"sys.exit(','.join(m for m in {unwanted!r} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"loaded: {done.stderr}"


# -- a size that fits a head: the package does not grow unless somebody says so in pyproject.toml


SOURCES = ("*.py", "*.cpp", "*.h")


def test_the_package_does_not_grow_by_itself() -> None:
    lines = sum(
        len(path.read_text(encoding="utf-8").splitlines())
        for pattern in SOURCES
        for path in (ROOT / "edgespec").rglob(pattern)
    )
    most = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["edgespec"]["most_lines"]
    assert lines <= most, f"edgespec/ has {lines} lines, pyproject.toml allows {most}: raise it in a commit of its own"
    assert lines > most - 2000, f"edgespec/ has only {lines} lines now: lower most_lines in pyproject.toml to it"
