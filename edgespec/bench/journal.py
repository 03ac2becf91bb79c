"""The journal of a benchmark: one line per finished trial, so that an interrupted run can be resumed.

The first line holds the settings. A line that a crash left incomplete is removed by the next run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from edgespec.bench.record import Trial
from edgespec.closing import Closing
from edgespec.errors import ConfigError, StateError
from edgespec.platform.disk_cache import cache_folder, key_of

FORMAT = 1
_START = b'{"edgespec_bench": '  # of the first line


def default_path(settings: Mapping[str, Any]) -> Path:
    return cache_folder() / "bench" / f"{key_of(sorted(settings.items()))}.jsonl"


class Journal(Closing):
    """Trials by (prompt digest, repeat) in the file `path`, for one set of settings. `restart`: discard the file.

    Raises ConfigError if the file is not a journal or has other settings, StateError if it cannot be written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, restart: bool = False) -> None:
        self.path = path
        self.trials: dict[tuple[str, int], Trial] = {}
        # through JSON, so that they compare equal to settings read from a file
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._require_journal()
            if restart:
                path.unlink(missing_ok=True)
            whole_bytes = 0
            if path.exists():
                whole_bytes = self._read()
                os.truncate(path, whole_bytes)
            # Append only: two concurrent runs of one command repeat work but do not damage the file.
            self._file: IO[bytes] = path.open("ab")
        except OSError as exc:
            raise StateError(f"the journal {path} cannot be opened: {exc.strerror or exc}") from exc
        if whole_bytes:
            return
        try:
            self._write({"edgespec_bench": FORMAT, "settings": self._settings})
        except StateError:
            self._file.close()
            raise

    def add(self, trial: Trial) -> None:
        self._write(trial.to_json())
        self.trials[trial.key] = trial

    def remove(self) -> None:
        """Delete the journal of a finished run, so that the same command measures again."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        self._file.close()

    def _write(self, value: Any) -> None:
        try:
            self._file.write(json.dumps(value, allow_nan=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as exc:
            raise StateError(f"the journal {self.path} cannot be written: {exc.strerror or exc}") from exc

    def _require_journal(self) -> None:
        """Raise ConfigError for a file of another kind, which would be overwritten. A crash may have cut the start."""
        head = b""
        if self.path.exists():
            with self.path.open("rb") as file:
                head = file.read(len(_START))
        if not _START.startswith(head):
            raise ConfigError(f"{self.path} is not the journal of a benchmark: give another --resume FILE")

    def _read(self) -> int:
        """Read all complete lines; returns their length in bytes."""
        whole_bytes = 0
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break  # incomplete: the run was killed while writing it
            self._take(number, line)
            whole_bytes += len(line)
        return whole_bytes

    def _take(self, number: int, line: bytes) -> None:
        try:
            value = json.loads(line)
            if number > 1:
                trial = Trial.from_json(value)
                self.trials[trial.key] = trial
                return
            found, settings = value["edgespec_bench"], dict(value["settings"])
        except (ValueError, KeyError, TypeError) as exc:
            raise ConfigError(
                f"{self.path} line {number} is not a line of a benchmark journal ({exc!r}): give another --resume "
                "FILE, or start over with --restart"
            ) from exc
        changed = sorted(key for key in {*settings, *self._settings} if settings.get(key) != self._settings.get(key))
        if found != FORMAT or changed:
            raise ConfigError(
                f"{self.path} has other settings ({', '.join(changed) or 'an older format'}): use the same settings, "
                "give another --resume FILE, or start over with --restart"
            )
