"""Requests to change a function of Python's standard library and return all of it: answers that mostly copy."""

from __future__ import annotations

import random
import sys
from itertools import cycle
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))

from trainlib.public_data import library_functions

CHARACTERS = range(400, 1600)
REQUESTS = (
    "Add type hints to this function. Return the whole function.",
    "Add a docstring and comments to this function. Return the complete code.",
    "Rename the local variables of this function to be more descriptive. Return the whole function.",
    "Fix any bugs in this function and return all of it.",
)


def edits(count: int) -> list[tuple[str, str]]:
    """(kind, request) pairs, in an order drawn with a seed; the requests by turns."""
    code = [code for _, functions in library_functions() for *_, code in functions if len(code) in CHARACTERS]
    random.Random(0).shuffle(code)
    asked = zip(cycle(REQUESTS), code[:count], strict=False)
    return [("edit", f"{request}\n\n```python\n{each}\n```") for request, each in asked]
