"""What one benchmark run leaves behind, as values and as the JSON of a journal line."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.types import RoundRecord, Stats, TokenEvent

Piece = tuple[str, str | None]
STATS_KEYS = tuple(field.name for field in dataclasses.fields(Stats))


@dataclass(frozen=True, slots=True)
class Measurement:
    """One generation on empty caches. Times in seconds, energy in joules or None where the machine does not tell.

    `token_digest` is equal for equal tokens; `pieces`: (text, who drafted it or None) of each token, kept of
    speculation only.
    """

    stats: Stats
    token_digest: str
    rounds: tuple[RoundRecord, ...] = ()
    pieces: tuple[Piece, ...] = ()
    energy_j: float | None = None

    def without_text(self) -> Measurement:
        return dataclasses.replace(self, pieces=())

    @property
    def is_long_enough(self) -> bool:
        """Whether there is a rate: the first token comes from the prefill."""
        return self.stats.new_tokens > 1 and self.stats.decode_s > 0

    def to_json(self) -> dict[str, Any]:
        return {
            "stats": dataclasses.asdict(self.stats),
            "token_digest": self.token_digest,
            "rounds": [dataclasses.astuple(record) for record in self.rounds],
            "pieces": self.pieces,
            "energy_j": self.energy_j,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Measurement:
        """Raises KeyError, TypeError or ValueError for anything that `to_json` did not give."""
        rounds = []
        for position, drafter, drafted, accepted, confidences, *seconds in value["rounds"]:
            rounds.append(RoundRecord(position, drafter, drafted, accepted, tuple(confidences), *seconds))
        pieces = tuple((text, drafter) for text, drafter in value["pieces"])
        stats = Stats(**value["stats"])
        return Measurement(stats, value["token_digest"], tuple(rounds), pieces, value["energy_j"])


@dataclass(frozen=True, slots=True)
class Trial:
    """One prompt decoded both ways, one after the other. `prompt` is its digest, `repeat` counts from 0.

    `plain`: plain decoding by the very model that speculated, whose tokens must be the same. It is None where the
    standard is that model, and in repeats, which must have the tokens of the first. `order`: who ran when.
    """

    prompt: str
    repeat: int
    order: tuple[str, ...]
    standard: Measurement
    speculative: Measurement
    plain: Measurement | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.prompt, self.repeat

    @property
    def speedup(self) -> float | None:
        """Tokens per second with speculation over those without, prefill excluded; None for too short answers."""
        if not (self.standard.is_long_enough and self.speculative.is_long_enough):
            return None
        return self.speculative.stats.tokens_per_second / self.standard.stats.tokens_per_second

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "repeat": self.repeat,
            "order": self.order,
            "standard": self.standard.to_json(),
            "speculative": self.speculative.to_json(),
            "plain": self.plain.to_json() if self.plain else None,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Trial:
        return Trial(
            value["prompt"],
            value["repeat"],
            tuple(value["order"]),
            Measurement.from_json(value["standard"]),
            Measurement.from_json(value["speculative"]),
            Measurement.from_json(value["plain"]) if value["plain"] else None,
        )


def digest_of(events: Iterable[TokenEvent]) -> str:
    return hashlib.sha256(repr([event.token_id for event in events]).encode()).hexdigest()[:32]
