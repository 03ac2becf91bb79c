"""The working folder OUTPUT.partial of an unfinished distillation; the result is renamed to OUTPUT at the end.

It contains request.json (the options), state.pt (the state after the last finished round) and rounds.csv. After an
interruption at any time, the next run of the same request resumes from the last finished round.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from edgespec.errors import CapabilityError, ConfigError
from edgespec.export.training.request import flag
from edgespec.platform.files import write_atomically, write_errors

SUFFIX, REQUEST, ROUNDS = ".partial", "request.json", "rounds.csv"
RESUME_FIX = "the last finished round is kept: fix this, then run the same command again"


@dataclass(frozen=True)
class RoundResult:
    """Results of one round; round 0 is the untrained student.

    `greedy`: share of positions in the target's greedy text where the student's first choice is the target's token;
    `sampled`: 1 minus the total variation distance on text at temperature 1; both on held-out prompts. `variation`:
    distance on the training batches, at their temperatures. `own_tokens`: number of tokens that the target generated in
    this round; `tokens`: training tokens so far.
    """

    index: int
    tokens: int
    own_tokens: int
    greedy: float
    sampled: float
    variation: float
    rate: float
    seconds: float

    @property
    def acceptance(self) -> float:
        """The figure for early stopping and for choosing the best student."""
        return (self.greedy + self.sampled) / 2


def stale_rounds(rounds: Sequence[RoundResult], min_rise: float) -> int:
    """Number of rounds since acceptance last rose by more than `min_rise`."""
    stale, level = 0, rounds[0].acceptance if rounds else 0.0
    for result in rounds[1:]:
        if result.acceptance > level + min_rise:
            stale, level = 0, result.acceptance
        else:
            stale += 1
    return stale


def best_round(rounds: Sequence[RoundResult]) -> RoundResult:
    """The round with the highest acceptance; the earliest of equal ones."""
    return max(rounds, key=lambda result: (result.acceptance, -result.index))


def partial_of(output: Path) -> Path:
    """The working folder of an output."""
    return output.with_name(output.name + SUFFIX)


def check_output(output: Path) -> None:
    """Raise ConfigError for a name that cannot be created, before anything large is fetched or computed."""
    if not output.name:
        raise ConfigError(f"--output {output} is no name for something new: give a folder or file to create")
    if output.exists() and not partial_of(output).exists():
        raise _already_exists(output)


def _already_exists(output: Path) -> ConfigError:
    return ConfigError(f"{output} already exists: give another --output, or delete it")


class Journal:
    """The files of one unfinished run. `is_resumed`: the same request was interrupted and left a state."""

    def __init__(self, output: Path, identity: Mapping[str, Any], *, restart: bool = False) -> None:
        """Raises ConfigError if `output` exists, or OUTPUT.partial belongs to another request."""
        self.output, self.folder = output, partial_of(output)
        if output.exists():
            if _same_bytes(output / ROUNDS, self.folder / ROUNDS):  # killed before the working folder was deleted
                shutil.rmtree(self.folder)
            raise _already_exists(output)
        if restart and (self.folder / REQUEST).is_file():
            shutil.rmtree(self.folder)
        self._begin(dict(identity))

    @property
    def state(self) -> Path:
        return self.folder / "state.pt"

    @property
    def result(self) -> Path:
        """The folder in which the result is written."""
        return self.folder / "result"

    @property
    def is_resumed(self) -> bool:
        return self.state.is_file()

    def _begin(self, identity: dict[str, Any]) -> None:
        path = self.folder / REQUEST
        text = json.dumps(identity, indent=1, sort_keys=True)
        if path.is_file():
            before = _read(path)
            changed = sorted(key for key in {*before, *identity} if before.get(key) != identity.get(key))
            if changed:
                raise ConfigError(f"{self.folder} has other options ({_differences(before, identity, changed)}): "
                                  "use the same, give another --output, or start over with --restart")  # fmt: skip
            return
        if self.folder.exists() and any(self.folder.iterdir()):
            raise ConfigError(f"{self.folder} holds other files: give another --output, or delete it")
        write_atomically(path, text, parents=True, fix=RESUME_FIX)

    def write_rounds(self, rounds: Sequence[RoundResult]) -> None:
        """Write rounds.csv; after the state, so that it never lists an unfinished round."""
        write_atomically(self.folder / ROUNDS, rounds_csv(rounds), fix=RESUME_FIX)

    def need_space(self, num_bytes: int) -> None:
        """Raise CapabilityError if the disk has less than `num_bytes` free."""
        free = shutil.disk_usage(self.folder).free
        if free < num_bytes:
            raise CapabilityError(
                f"{self.folder} needs {num_bytes / 2**20:.0f} MiB but its disk has {free / 2**20:.0f} MiB free: free "
                "space, or give an --output on another disk"
            )

    def publish(self) -> None:
        """Rename the result to OUTPUT and delete the working folder."""
        with write_errors(self.output, fix=RESUME_FIX):
            self.result.replace(self.output)
        shutil.rmtree(self.folder)


def _same_bytes(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes()


def rounds_csv(rounds: Sequence[RoundResult]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([field.name for field in fields(RoundResult)])
    writer.writerows(asdict(result).values() for result in rounds)
    return buffer.getvalue()


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}; start over with --restart") from exc
    return value if isinstance(value, dict) else {}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Text such as `--hidden was 128, is 192`; files are only named."""
    return ", ".join(
        f"{key if key == 'target' else flag(key)} has changed"
        if key in ("target", "data")
        else f"{flag(key)} was {before.get(key)}, is {now.get(key)}"
        for key in keys
    )
