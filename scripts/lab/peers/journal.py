"""What was measured, one JSON object per line, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.base import Answer
from peers.tuning import Trial, Tuned

Answers = dict[str, Answer]


class Journal:
    """Sweeps and answers of one run, in memory and in a file that only grows.

    A file of another run, as `identity` tells, is put aside. What a killed run left of a line is cut off, so that the
    next one begins a line of its own; with it goes all that follows a line which is none of a journal.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self._path = path
        self.tuned: dict[str, Tuned] = {}
        self.answers: dict[int, Answers] = {}
        self.failed: dict[str, str] = {}
        whole_bytes = self._read(dict(identity)) if path.is_file() else 0
        if whole_bytes:
            with path.open("r+b") as handle:
                handle.truncate(whole_bytes)
        else:
            if path.exists():
                path.replace(path.with_suffix(".old.jsonl"))
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write({"identity": dict(identity)})

    def add_tuned(self, name: str, tuned: Tuned) -> None:
        trials = [[trial.settings, trial.tokens_per_second, trial.failure] for trial in tuned.trials]
        self._write({"tuned": name, "settings": tuned.settings, "trials": trials})
        self.tuned[name] = tuned

    def add_prompt(self, index: int, answers: Answers) -> None:
        """All answers to one prompt at once: ratios are only worth something within minutes of each other."""
        self._write({"prompt": index, "answers": {name: answer.to_json() for name, answer in answers.items()}})
        self.answers[index] = answers

    def add_failed(self, name: str, reason: str) -> None:
        """A contestant that ended in the middle of a run: it is not tried again in this one."""
        self._write({"failed": name, "reason": reason})
        self.failed[name] = reason

    def _read(self, identity: dict[str, Any]) -> int:
        """Take in all whole lines of a run of this `identity`; their length in bytes, 0 for another run's file."""
        whole_bytes = 0
        for line in self._path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break  # the last line of a run that was killed
            try:
                entry = dict(json.loads(line))
                if whole_bytes:
                    self._take(entry)
                elif entry["identity"] != identity:
                    return 0
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                break
            whole_bytes += len(line)
        return whole_bytes

    def _take(self, entry: dict[str, Any]) -> None:
        if "tuned" in entry:
            trials = tuple(Trial(*trial) for trial in entry["trials"])
            self.tuned[entry["tuned"]] = Tuned(entry["settings"], trials)
        elif "failed" in entry:
            self.failed[entry["failed"]] = entry["reason"]
        elif "prompt" in entry:
            answers = {name: Answer.from_json(values) for name, values in entry["answers"].items()}
            self.answers[entry["prompt"]] = answers
        else:
            raise KeyError("no kind of entry that is known")

    def _write(self, entry: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(entry) + "\n")
