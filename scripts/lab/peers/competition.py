"""One interleaved run: everyone is tuned, then all answer every prompt in turns, in an order that rotates."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from edgespec.closing import Closing
from edgespec.errors import EdgespecError
from peers.base import Answer, Request
from peers.field import Contestant, Field
from peers.process import PeerProcess

Tell = Callable[[str], None]
WARM_TOKENS = 4


class Competition(Closing):
    """The children, who of the field is still in, and why the others are not (`out`).

    With `keeps_one`, a child ends when another one's turn comes: a machine with little memory holds one library's
    models at a time, and loads them again for every prompt.
    """

    def __init__(
        self,
        field: Field,
        pythons: Mapping[str, str],
        logs: Path,
        timeout_s: float,
        tell: Tell,
        *,
        keeps_one: bool = False,
    ) -> None:
        self.field = field
        self.out: dict[str, str] = {}
        self.peers = {
            name: PeerProcess(library.peer, library.files, _log(logs, name), pythons.get(library.peer, sys.executable))
            for name, library in field.libraries.items()
        }
        self._timeout_s = timeout_s
        self._tell = tell
        self._keeps_one = keeps_one
        self._warm: set[tuple[str, int]] = set()

    @property
    def runners(self) -> list[Contestant]:
        return [contestant for contestant in self.field.contestants if contestant.name not in self.out]

    def open(self) -> None:
        """Start every child; a library that is missing or refuses the models is out with all its contestants."""
        for name, library in self.field.libraries.items():
            reason = library.missing
            if not reason:
                try:
                    self._tell(f"{name}: {self.peers[name].open()}")
                except EdgespecError as error:
                    reason = str(error)
            if reason:
                self._tell(f"{name}: out: {reason}")
                self.out |= {c.name: reason for c in self.field.contestants if c.process == name}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts by edgespec. Raises the error of its child when that cannot run."""
        own = next(name for name, library in self.field.libraries.items() if library.peer == "edgespec")
        return self.peers[own].encode(texts)

    def tune(self, requests: Sequence[Request], journal: Journal) -> None:
        """Sweep everyone that the journal has no settings of."""
        for contestant in self.runners:
            if contestant.name in journal.tuned:
                continue
            if contestant.plain in self.out:
                self._drop(contestant, f"its plain decoding is out: {self.out[contestant.plain]}")
                continue
            base: Settings = {} if contestant.is_plain else journal.tuned[contestant.plain].settings
            self._tell(f"{contestant.name}: sweep")
            peer = self._turn(contestant)
            try:
                tuned = tune(contestant, peer, base, requests, self._timeout_s, self._tell_trial)
            except EdgespecError as error:
                self._drop(contestant, str(error))
            else:
                journal.add_tuned(contestant.name, tuned)
                self._tell(f"  best: {show(tuned.settings)}")

    def measure(self, requests: Sequence[Request], warm: Request, journal: Journal) -> None:
        """Every prompt whose answers the journal does not have of all who are in."""
        self.out |= journal.failed
        for index, request in enumerate(requests):
            if {contestant.name for contestant in self.runners} <= set(journal.answers.get(index, {})):
                continue
            turn = index % max(len(self.runners), 1)
            order = self.runners[turn:] + self.runners[:turn]
            answers: Answers = {}
            for contestant in order:
                self._run(contestant, request, warm, journal, answers)
            journal.add_prompt(index, answers)
            self._tell(f"prompt {index + 1}/{len(requests)}")

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()

    def _turn(self, contestant: Contestant) -> PeerProcess:
        """The child whose turn it is."""
        if self._keeps_one:
            for name, peer in self.peers.items():
                if name != contestant.process:
                    peer.close()
        return self.peers[contestant.process]

    def _run(self, contestant: Contestant, request: Request, warm: Request, journal: Journal, answers: Answers) -> None:
        peer, settings = self._turn(contestant), journal.tuned[contestant.name].settings
        try:
            peer.open()
            if (contestant.name, peer.starts) not in self._warm:
                peer.generate(replace(warm, settings=settings, max_tokens=WARM_TOKENS), self._timeout_s)
                self._warm.add((contestant.name, peer.starts))
            answers[contestant.name] = peer.generate(replace(request, settings=settings), self._timeout_s)
        except EdgespecError as error:
            journal.add_failed(contestant.name, str(error))
            self._drop(contestant, str(error))

    def _drop(self, contestant: Contestant, reason: str) -> None:
        self.out[contestant.name] = reason
        self._tell(f"{contestant.name}: out: {reason}")

    def _tell_trial(self, trial: Trial) -> None:
        outcome = f"failed: {trial.failure}" if trial.failure else f"{trial.tokens_per_second:.1f} tokens/s"
        self._tell(f"  {show(trial.settings)}: {outcome}")


def show(settings: Settings) -> str:
    """Settings in one line, without the variant."""
    return ", ".join(f"{name} {value}" for name, value in settings.items() if name != "variant")


def _log(folder: Path, process: str) -> Path:
    return folder / f"{process.replace(' ', '-')}.log"


# -- What was measured, one JSON object per line, so that an interrupted run goes on where it stopped.


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


# -- The best settings of each contestant, one axis after the other, on prompts that are not measured later.


Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Trial:
    """One try of a sweep: its settings and what they gave, or why they did not."""

    settings: Settings
    tokens_per_second: float
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The chosen settings and every trial that led to them."""

    settings: Settings
    trials: tuple[Trial, ...]


def tune(
    contestant: Contestant,
    peer: PeerProcess,
    base: Mapping[str, Any],
    requests: Sequence[Request],
    timeout_s: float,
    tell: Callable[[Trial], None],
) -> Tuned:
    """Sweep the axes of one contestant in turn, from the first value of each.

    `base` holds what its library's plain decoding was tuned to. Raises the last failure when no settings work.
    """
    settings: Settings = {**base, "variant": contestant.variant}
    settings |= {name: values[0] for name, values in contestant.axes.items()}
    trials: list[Trial] = []
    failures: list[EdgespecError] = []

    def attempt(tried: Settings) -> None:
        if any(trial.settings == tried for trial in trials):
            return
        try:
            trial = Trial(tried, _speed(peer, tried, requests, timeout_s))
        except EdgespecError as error:
            trial = Trial(tried, 0.0, str(error))
            failures.append(error)
            if trials and all(earlier.failure == trial.failure for earlier in trials):
                raise  # failing alike twice and never working is no matter of settings
        trials.append(trial)
        tell(trial)

    attempt(settings)
    for name, values in contestant.axes.items():
        for value in values[1:]:
            attempt({**settings, name: value})
        settings = max(trials, key=lambda trial: trial.tokens_per_second).settings
    if all(trial.failure for trial in trials):
        raise failures[-1]
    return Tuned(settings, tuple(trials))


def _speed(peer: PeerProcess, settings: Settings, requests: Sequence[Request], timeout_s: float) -> float:
    """Median tokens per second over the requests, after one that warms up."""
    chosen = [replace(request, settings=settings) for request in requests]
    peer.generate(replace(chosen[0], max_tokens=4), timeout_s)
    return median(peer.generate(request, timeout_s).tokens_per_second for request in chosen)
