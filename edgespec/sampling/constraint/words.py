"""What llguidance says of a grammar in words of its users: its own names and Rust's forms of values are left out."""

from __future__ import annotations

import re

_RANGE = re.compile(r"Failed to generate regex for \w+ range: min=(.*?), max=(.*)")
_PLAIN = (
    (r"\. Enable '\w+' option to \w+ oneOf with anyOf", ": use anyOf"),
    (r"Resource '(.*?)' is not present in a registry.*", r"\1 is not in the schema, and nothing is fetched"),
    (
        r"(?s)(Parser Error: )?Current row has (\d+) items; max is (\d+).*",
        r"it leaves \2 ways to go on at once, \3 are allowed: use fewer alternatives and references",
    ),
    (r"\bNoExtension(Bias)?\b", "nothing can follow"),
    (r"\b(Lexer|Parser)TooComplex\b", "it is too complex"),
)


def in_plain_words(problem: str) -> str:
    """An error of the library without its own names."""
    for pattern, said in _PLAIN:
        problem = re.sub(pattern, said, problem)
    return _RANGE.sub(
        lambda found: f"the range from {_bound(found[1])} to {_bound(found[2])} cannot be checked", problem
    )


def _bound(written: str) -> str:
    """A number that is written as Some(5), or None."""
    return "no limit" if written.startswith("None") else written.replace("Some(", "", 1).replace(")", "", 1)
