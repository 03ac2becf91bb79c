"""Results of one benchmark run, with conversion from and to the JSON of a journal line."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.reports import RoundRecord, Stats, TokenEvent

Piece = tuple[str, str | None]
STATS_KEYS = tuple(field.name for field in dataclasses.fields(Stats))


@dataclass(frozen=True, slots=True)
class Measurement:
    """One generation that began with empty caches. Times in seconds; energy in joules, None if unknown.

    `token_digest`: hash of the token ids; `pieces`: (text, drafter or None) of each token, for speculative runs only.
    """

    stats: Stats
    token_digest: str
    rounds: tuple[RoundRecord, ...] = ()
    pieces: tuple[Piece, ...] = ()
    energy_j: float | None = None

    @property
    def is_long_enough(self) -> bool:
        """Whether a decoding speed is defined: the first token comes from prefill."""
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
        """Raises KeyError, TypeError or ValueError for anything that `to_json` does not produce."""
        rounds = []
        for position, drafter, drafted, accepted, confidences, *seconds in value["rounds"]:
            rounds.append(RoundRecord(position, drafter, drafted, accepted, tuple(confidences), *seconds))
        pieces = tuple((text, drafter) for text, drafter in value["pieces"])
        stats = Stats(**value["stats"])
        return Measurement(stats, value["token_digest"], tuple(rounds), pieces, value["energy_j"])


@dataclass(frozen=True, slots=True)
class Trial:
    """One prompt decoded with and without speculation. `prompt`: its digest; `repeat` counts from 0.

    `standard`: the baseline for speed. `plain`: plain decoding by the model that speculates, which must give the same
    tokens; None if that model is the standard, and in repeats, which must equal the first. `again`: the standard once
    more, which shows the noise; None in repeats. `order`: of the runs.
    """

    prompt: str
    repeat: int
    order: tuple[str, ...]
    standard: Measurement
    speculative: Measurement
    plain: Measurement | None = None
    again: Measurement | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.prompt, self.repeat

    @property
    def speedup(self) -> float | None:
        """Decoding speed with speculation / without; None if an answer is too short."""
        return self._over_standard(self.speculative)

    @property
    def noise(self) -> float | None:
        """The same ratio where it should be 1: plain decoding once more / plain decoding."""
        return None if self.again is None else self._over_standard(self.again)

    def _over_standard(self, other: Measurement) -> float | None:
        if not (self.standard.is_long_enough and other.is_long_enough):
            return None
        return other.stats.tokens_per_second / self.standard.stats.tokens_per_second

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "repeat": self.repeat,
            "order": self.order,
            "standard": self.standard.to_json(),
            "speculative": self.speculative.to_json(),
            "plain": self.plain.to_json() if self.plain else None,
            "again": self.again.to_json() if self.again else None,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Trial:
        return Trial(
            value["prompt"],
            value["repeat"],
            tuple(value["order"]),
            Measurement.from_json(value["standard"]),
            Measurement.from_json(value["speculative"]),
            *(Measurement.from_json(value[name]) if value.get(name) else None for name in ("plain", "again")),
        )


def digest_of(events: Iterable[TokenEvent]) -> str:
    return hashlib.sha256(repr([event.token_id for event in events]).encode()).hexdigest()[:32]
