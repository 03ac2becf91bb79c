"""The contract of a peer: one library that answers token ids with token ids and says how long decoding took.

Everything here runs in a child process; the values are what travels over the pipe.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Generic, Self, TypeVar

from edgespec.errors import CapabilityError

Held = TypeVar("Held")
Files = Mapping[str, str]
"""Paths by role as the peer's module names them, and `context_length` as text."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. `settings` holds "variant" (plain, draft, ...) and whatever the sweep chose for it."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Request:
        return Request(**{**values, "prompt_ids": tuple(values["prompt_ids"])})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def variant(self) -> str:
        return str(self.settings["variant"])


@dataclass(frozen=True, slots=True)
class Answer:
    """What a peer emitted. Times in seconds.

    `decode_s` leaves out reading the prompt; `decode_tokens` are the tokens that it paid for. Where a library reads the
    prompt and verifies its first draft in one pass, both begin after that pass. `total_s` is everything.
    `drafted_tokens` and `accepted_tokens` are None where the library does not tell.
    """

    token_ids: tuple[int, ...]
    decode_tokens: int
    decode_s: float
    total_s: float
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Answer:
        return Answer(**{**values, "token_ids": tuple(values["token_ids"])})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of decoding; 0 when nothing was decoded after the prompt."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0


class Peer(ABC):
    """One library. `open` comes first and once; requests follow one at a time."""

    @abstractmethod
    def open(self, files: Files) -> str:
        """Take the model files; returns the library's name and version.

        Raises CapabilityError when the library is missing or refuses the models, naming the fix.
        """

    @abstractmethod
    def generate(self, request: Request) -> Answer:
        """Exactly `max_tokens` tokens where the library can ignore the end token, fewer where it cannot.

        Raises CapabilityError for a variant that the library refuses for these models.
        """

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts; only edgespec's own child is asked, so that all race on the same ids."""
        raise CapabilityError(f"{type(self).__name__} does not encode prompts")

    def close(self) -> None:
        """Free what outlives the process otherwise."""


class Slots(Generic[Held]):
    """What each variant has loaded: one thing at a time, shared by variants that need the same."""

    def __init__(self, close: Callable[[Held], None] | None = None) -> None:
        self._held: dict[str, tuple[Hashable, Held]] = {}
        self._close = close

    def get(self, variant: str, key: Hashable, make: Callable[[], Held]) -> Held:
        """What `variant` needs under `key`; what it held before is dropped first, so that both never coexist."""
        for held_key, held in self._held.values():
            if held_key == key:
                self._swap(variant, (held_key, held))
                return held
        self._swap(variant, None)
        made = make()
        self._held[variant] = (key, made)
        return made

    def clear(self) -> None:
        for variant in list(self._held):
            self._swap(variant, None)

    def _swap(self, variant: str, new: tuple[Hashable, Held] | None) -> None:
        old = self._held.pop(variant, None)
        if new is not None:
            self._held[variant] = new
        if old is not None and self._close is not None and all(old[1] is not held for _, held in self._held.values()):
            self._close(old[1])


@dataclass(frozen=True, slots=True)
class Library:
    """A package that a peer needs: its import name, its name for pip, and what to install."""

    module: str
    package: str
    install: str

    def load(self) -> Any:
        """The imported module. Raises CapabilityError with the command that installs it."""
        try:
            return importlib.import_module(self.module)
        except ImportError as exc:
            raise CapabilityError(f"{self.package} is not installed ({exc}): {self.install}") from exc

    @property
    def title(self) -> str:
        try:
            return f"{self.package} {version(self.package)}"
        except PackageNotFoundError:
            return self.package


@dataclass(slots=True)
class Arrivals:
    """When tokens came out of a library that hands them over as they are made."""

    started_s: float
    times_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, now_s: float, count: int) -> Self:
        self.times_s.append(now_s)
        self.counts.append(count)
        return self

    def answer(self, token_ids: Sequence[int], ended_s: float) -> Answer:
        """Decoding begins when the first tokens are out."""
        if not self.times_s:
            return Answer(tuple(token_ids), 0, 0.0, ended_s - self.started_s)
        return Answer(
            token_ids=tuple(int(token_id) for token_id in token_ids),
            decode_tokens=len(token_ids) - self.counts[0],
            decode_s=ended_s - self.times_s[0],
            total_s=ended_s - self.started_s,
        )
