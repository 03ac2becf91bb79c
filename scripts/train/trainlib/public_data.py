"""Texts of public data that is not part of this project: xz-compressed JSON lines, and documented functions of Python's
standard library.
"""

from __future__ import annotations

import ast
import hashlib
import json
import lzma
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GSM8K_FILE, SGD_DEV_FILE = "gsm8k_train.jsonl.xz", "sgd_dev.jsonl.xz"
HELD_OUT_FRACTION = 0.03


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


def library_functions() -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """(path, its `documented_functions`) of each file of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if relative.parts[0] in ("site-packages", "lib2to3"):
            continue
        try:
            yield str(relative), list(documented_functions(path.read_text(encoding="utf-8")))
        except (SyntaxError, UnicodeDecodeError):  # test data of the library contains broken files
            continue
