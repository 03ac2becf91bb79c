"""Stop rules of a generation, and the text that can be shown before a stop string is complete."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.reports import FinishReason
from edgespec.vocabulary import IncrementalDecoder, Vocabulary


@dataclass(frozen=True, slots=True)
class StopRules:
    """End token ids, stop strings and the maximum number of tokens; None: only the context limits it."""

    end_ids: frozenset[int]
    strings: tuple[str, ...] = ()
    max_tokens: int | None = None


class TextStream:
    """Text of the emitted tokens; withholds text that may be the beginning of a stop string."""

    def __init__(self, vocabulary: Vocabulary, rules: StopRules) -> None:
        self._decoder = IncrementalDecoder(vocabulary)
        self._rules = rules
        self._held = ""
        self.num_tokens = 0

    def push(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Add an emitted token; returns the text that can be shown now, and the finish reason if the text ends here."""
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
        """The rest of the withheld text."""
        shown, self._held = self._held + self._decoder.finish(), ""
        return shown

    def _possible_stop(self) -> int:
        """Length of the longest suffix of the withheld text that is a prefix of a stop string."""
        longest = max((len(text) - 1 for text in self._rules.strings), default=0)
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-size:]) for text in self._rules.strings):
                return size
        return 0
