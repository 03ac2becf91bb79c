"""Prompts and texts of public data that is not part of this project: xz-compressed JSON lines, and documented functions
of Python's standard library.

From data that the demo models were trained on, only the held-out part gives prompts.
"""

from __future__ import annotations

import ast
import hashlib
import json
import lzma
import random
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from edgespec.bench.prompts import BenchPrompt, Domains, copy_edit
from edgespec.errors import ConfigError

GSM8K_FILE, SGD_DEV_FILE = "gsm8k_train.jsonl.xz", "sgd_dev.jsonl.xz"
SPEC_BENCH_FILE = "spec_bench_dev.jsonl.xz"
DATA_FILES = (SGD_DEV_FILE, GSM8K_FILE, SPEC_BENCH_FILE)
HELD_OUT_FRACTION = 0.03
_SPEC_BENCH_DOMAINS = ("translation", "summarization", "qa", "math_reasoning", "rag")
_MULTI_TURN = "multi_turn"  # Spec-Bench's name for the categories of MT-bench


def read_data(folder: Path) -> Domains:
    """Held-out prompts of the data files in `folder`, by domain.

    `dialogue`: Schema-Guided Dialogue development set; `arithmetic`: GSM8K; the domains of Spec-Bench; `code` and
    `copying`: documented functions of Python's standard library, which need no file. Raises ConfigError if the folder
    has none of the files or a file is broken.
    """
    if not any((folder / name).is_file() for name in DATA_FILES):
        raise ConfigError(f"{folder} holds none of {', '.join(DATA_FILES)}: give the folder that holds them")
    domains: Domains = {}
    for name, prompts_of in _READERS.items():
        if (folder / name).is_file():
            for prompt in _prompts_of_file(folder / name, prompts_of):
                domains.setdefault(prompt.domain, []).append(prompt)
    for prompt in library_prompts():
        domains.setdefault(prompt.domain, []).append(prompt)
    return domains


def _prompts_of_file(
    path: Path, prompts_of: Callable[[dict[str, Any]], Iterator[BenchPrompt]]
) -> Iterator[BenchPrompt]:
    try:
        for record in read_lines(path):
            yield from prompts_of(record)
    except (OSError, lzma.LZMAError, EOFError, ValueError, KeyError, TypeError, IndexError, AttributeError) as exc:
        raise ConfigError(f"{path} is not in this data set's format: {exc!r}") from exc


def _dialogue(record: dict[str, Any]) -> Iterator[BenchPrompt]:
    """A conversation up to its middle user turn, counting only turns before the first tool call."""
    turns: list[str] = []
    for message in record["messages"]:
        if message.get("call") or message["role"] != ("assistant" if len(turns) % 2 else "user"):
            break
        turns.append(message["content"])
    questions = range(1, len(turns) + 1, 2)
    if questions:
        yield BenchPrompt("dialogue", tuple(turns[: questions[len(questions) // 2]]))


def _arithmetic(record: dict[str, Any]) -> Iterator[BenchPrompt]:
    if is_held_out(record["question"]):
        yield BenchPrompt("arithmetic", (record["question"],))


def _spec_bench(record: dict[str, Any]) -> Iterator[BenchPrompt]:
    domain = record["category"] if record["category"] in _SPEC_BENCH_DOMAINS else _MULTI_TURN
    yield BenchPrompt(domain, (record["turns"][0],))


_READERS: dict[str, Callable[[dict[str, Any]], Iterator[BenchPrompt]]] = {
    SGD_DEV_FILE: _dialogue,
    GSM8K_FILE: _arithmetic,
    SPEC_BENCH_FILE: _spec_bench,
}


def library_prompts() -> Iterator[BenchPrompt]:
    """Requests to write documented functions of held-out library files, and to edit the short ones."""
    for _, functions in library_functions(is_held_out):
        for signature, documentation, code in functions:
            yield BenchPrompt("code", (function_request(signature, documentation),))
            edit = copy_edit(code, random.Random(signature))
            if edit is not None:
                yield edit


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of an xz-compressed JSON-lines file."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def is_held_out(key: str) -> bool:
    """Whether a document is held out; depends only on its key, so it does not change when data is added."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") < HELD_OUT_FRACTION * 2**32


def documented_functions(source: str) -> Iterator[tuple[str, str, str]]:
    """(signature, docstring, dedented code) of every documented function of a module."""
    tree = ast.parse(source)
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        documentation = ast.get_docstring(node)
        if not documentation or node.end_lineno is None or node.end_lineno - node.lineno > 80:
            continue
        code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        yield f"{node.name}({ast.unparse(node.args)})", documentation, code


def function_request(signature: str, documentation: str) -> str:
    """A user's request to write the function."""
    summary = documentation.split("\n\n")[0].replace("\n", " ")
    return f"Write a Python function `{signature}`: {summary}"


def library_functions(
    is_wanted: Callable[[str], bool] = lambda path: True,
) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """(path, its `documented_functions`) of each file of the standard library that `is_wanted` selects."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if relative.parts[0] in ("site-packages", "lib2to3") or not is_wanted(str(relative)):
            continue
        try:
            yield str(relative), list(documented_functions(path.read_text(encoding="utf-8")))
        except (SyntaxError, UnicodeDecodeError):  # test data of the library contains broken files
            continue
