"""What was measured, one JSON object per line, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.bench.peers.base import Answer
from edgespec.bench.peers.tuning import Trial, Tuned

Answers = dict[str, Answer]


class Journal:
    """Sweeps and answers of one run, in memory and in a file that only grows.

    A file of another run, as `identity` tells, is put aside; a last line that was cut off is ignored.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self._path = path
        self.tuned: dict[str, Tuned] = {}
        self.answers: dict[int, Answers] = {}
        self.failed: dict[str, str] = {}
        entries = _read(path)
        if entries and entries[0].get("identity") == dict(identity):
            for entry in entries[1:]:
                self._take(entry)
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

    def _take(self, entry: dict[str, Any]) -> None:
        if "tuned" in entry:
            trials = tuple(Trial(*trial) for trial in entry["trials"])
            self.tuned[entry["tuned"]] = Tuned(entry["settings"], trials)
        elif "failed" in entry:
            self.failed[entry["failed"]] = entry["reason"]
        elif "prompt" in entry:
            answers = {name: Answer.from_json(values) for name, values in entry["answers"].items()}
            self.answers[entry["prompt"]] = answers

    def _write(self, entry: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(entry) + "\n")


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    return entries
