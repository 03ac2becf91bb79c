"""How Ollama's `keep_alive` is written; what it does is in test_idle_unload."""

from __future__ import annotations

import math
from typing import Any

import pytest

from edgespec.server.http_errors import HttpError
from edgespec.server.ollama import read_keep_alive


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        (0, 0),
        (90, 90),
        (0.5, 0.5),
        ("0", 0),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("250ms", 0.25),
        ("0s", 0),
        (-1, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
        (-(10**400), math.inf),
    ],
)
def test_a_keep_alive_is_read_as_ollama_does(given: Any, seconds: float | None):
    assert read_keep_alive(given) == seconds


@pytest.mark.parametrize("given", ["", "soon", "5 m", "5x", "m", True, [], {}, "1h" * 100])
def test_another_keep_alive_is_a_400(given: Any):
    with pytest.raises(HttpError, match="keep_alive must be seconds or a duration") as caught:
        read_keep_alive(given)
    assert caught.value.status == 400
