"""Budgets as users write them."""

from __future__ import annotations

import pytest

import edgespec
from edgespec.config.values import as_size, budget_bytes
from edgespec.errors import ConfigError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("6GiB", 6 * GIB),
        ("6G", 6 * GIB),
        ("6gb", 6_000_000_000),
        (" 1.5 GiB ", 3 * GIB // 2),
        ("512MB", 512_000_000),
        ("512m", 512 << 20),
        ("700k", 700 << 10),
        ("1TiB", 1 << 40),
        ("1234567", 1234567),
        ("6000000000000", 6_000_000_000_000),
        (99, 99),
    ],
)
def test_sizes(text: str | int, num_bytes: int) -> None:
    assert budget_bytes(text) == num_bytes


def test_shares_of_what_is_free() -> None:
    assert [budget_bytes(text, 1000) for text in ("auto", "AUTO ", "80%", "12.5 %", "100%")] == [
        *(None, None, 800, 125, 1000)
    ]
    assert budget_bytes("80%") is None


@pytest.mark.parametrize(
    "text", ["", "6 gigs", "-1G", "0", "0%", "101%", "1e9", "GiB", "six", 0, -5, True, 1.5, "9" * 40, "٣G"]
)
def test_what_is_no_size_is_refused_with_what_is(text: object) -> None:
    with pytest.raises(ConfigError, match="allowed: auto, a share of the free memory such as 80%, or a size"):
        edgespec.LoadOptions(memory=text)  # type: ignore[arg-type]


def test_sizes_for_people() -> None:
    assert (as_size(300 << 20), as_size(3 * GIB // 2)) == ("300 MiB", "1.50 GiB")
    assert (as_size(700 << 10), as_size(200 << 10), as_size(5)) == ("1 MiB", "200 KiB", "5 bytes")
