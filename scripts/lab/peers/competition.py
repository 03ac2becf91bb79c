"""One interleaved run: everyone is tuned, then all answer every prompt in turns, in an order that rotates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from edgespec.closing import Closing
from edgespec.errors import EdgespecError
from peers.base import Request
from peers.field import Contestant, Field
from peers.journal import Answers, Journal
from peers.process import PeerProcess
from peers.tuning import Settings, Trial, tune

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
