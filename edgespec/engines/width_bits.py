"""What a survey of the widths of passes found: results of each width, and the classes of widths that agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from edgespec.platform.disk_cache import MOST_SECONDS, Schema, a_list, a_record, a_row, number, text, whole

WidthClass = tuple[int, int]
MOST_POSITIONS = 1 << 20


@dataclass(slots=True)
class Bits:
    """Results of passes of one width: a digest of each row of logits by position, and one of the whole KV cache."""

    rows: dict[int, bytes] = field(default_factory=dict)
    cache: bytes = b""
    seconds: float = 0.0  # median of a pass

    def agrees(self, other: Bits) -> bool:
        """Whether the caches are equal, and the logits at all positions that both have."""
        return self.cache == other.cache and all(
            self.rows[position] == other.rows[position] for position in self.rows.keys() & other.rows.keys()
        )

    def as_json(self) -> dict[str, object]:
        rows = [[position, digest.hex()] for position, digest in self.rows.items()]
        return {"rows": rows, "cache": self.cache.hex(), "seconds": self.seconds}

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Self:
        rows = {int(position): bytes.fromhex(digest) for position, digest in kept["rows"]}
        return cls(rows, bytes.fromhex(kept["cache"]), float(kept["seconds"]))


@dataclass(slots=True)
class Survey:
    """Results of a survey so far, by width, and a digest of its text. It can be saved and resumed."""

    text: str = ""
    found: dict[int, Bits] = field(default_factory=dict)

    @property
    def classes(self) -> tuple[WidthClass, ...]:
        return classes(self.found)

    def begins_class(self, width: int) -> bool:
        """Whether a class begins with `width`, as far as narrower widths were measured."""
        return any(low == width for low, _ in classes({each: self.found[each] for each in self.found if each <= width}))

    @property
    def seconds(self) -> dict[int, float]:
        """Seconds of a pass, by width."""
        return {width: bits.seconds for width, bits in self.found.items()}

    def as_json(self) -> dict[str, object]:
        return {"text": self.text, "found": [[width, bits.as_json()] for width, bits in self.found.items()]}

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Self:
        return cls(kept["text"], {int(width): Bits.from_json(bits) for width, bits in kept["found"]})

    @staticmethod
    def schema(widest: int) -> Schema:
        """The shape of what `as_json` returns."""
        rows = a_list(a_row(whole(0, MOST_POSITIONS), _is_digest))
        bits = a_record({"rows": rows, "cache": _is_digest, "seconds": number(0.0, MOST_SECONDS)})
        return a_record({"text": text, "found": a_list(a_row(whole(1, widest), bits))})


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) % 2 == 0 and not value.strip("0123456789abcdef")


def classes(found: Mapping[int, Bits]) -> tuple[WidthClass, ...]:
    """Runs of measured widths that agree with one another, as intervals; `found` by width."""
    runs: list[list[int]] = []
    for width in sorted(found):
        if runs and all(found[other].agrees(found[width]) for other in runs[-1]):
            runs[-1].append(width)
        else:
            runs.append([width])
    return tuple((run[0], run[-1]) for run in runs)


def without(found: Sequence[WidthClass], width: int) -> tuple[WidthClass, ...]:
    """The classes, with `width`, the lowest of its class, split off into one of its own."""
    return tuple(
        part
        for low, high in found
        for part in (((low, low), (low + 1, high)) if low == width < high else ((low, high),))
    )
