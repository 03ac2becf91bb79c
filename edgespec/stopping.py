"""When a generation ends, and which text is safe to show before it is known whether it does."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.types import FinishReason
from edgespec.vocabulary import IncrementalDecoder, Vocabulary


@dataclass(frozen=True, slots=True)
class StopRules:
    """End tokens, stop strings and the most tokens to emit; None is no limit but the context."""

    end_ids: frozenset[int]
    strings: tuple[str, ...] = ()
    max_tokens: int | None = None


class TextStream:
    """Text of the emitted tokens; holds back what may turn out to be the beginning of a stop string."""

    def __init__(self, vocabulary: Vocabulary, rules: StopRules) -> None:
        self._decoder = IncrementalDecoder(vocabulary)
        self._rules = rules
        self._held = ""
        self.num_tokens = 0

    def push(self, token_id: int) -> tuple[str, FinishReason | None]:
        """What may be shown now that `token_id` was emitted, and why the text ends with it, if it does."""
        self.num_tokens += 1
        if token_id in self._rules.end_ids:
            return self.finish(), "stop"
        self._held += self._decoder.push(token_id)
        found = [at for text in self._rules.strings if (at := self._held.find(text)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, "stop"
        if self._rules.max_tokens is not None and self.num_tokens >= self._rules.max_tokens:
            return self.finish(), "length"
        safe = len(self._held) - self._possible_stop()
        shown, self._held = self._held[:safe], self._held[safe:]
        return shown, None

    def finish(self) -> str:
        """All that was held back."""
        shown, self._held = self._held + self._decoder.finish(), ""
        return shown

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(text) - 1 for text in self._rules.strings), default=0)
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-size:]) for text in self._rules.strings):
                return size
        return 0
