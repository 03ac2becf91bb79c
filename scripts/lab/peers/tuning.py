"""The best settings of each contestant, one axis after the other, on prompts that are not measured later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from edgespec.errors import EdgespecError
from peers.base import Request
from peers.field import Contestant
from peers.process import PeerProcess

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
