"""The text that a lookup drafter follows: it grows from round to round, until another one begins."""

from __future__ import annotations

from edgespec.types import TokenIds

_BYTES_PER_TOKEN = 36  # a number and its place in a list, measured on CPython 3.11


class FollowedText:
    """The token ids of the text that was drafted for last."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._may_differ = False

    def begin(self, prompt_ids: TokenIds) -> None:
        """A generation starts; its prompt is read with the first draft, if there is one. An empty one frees memory."""
        self._may_differ = True
        if not prompt_ids.size:
            self.ids = []

    def grow(self, token_ids: TokenIds) -> int:
        """Hold the text `token_ids` [n]; the place from which on it is new, 0 where it does not continue the last."""
        known = len(self.ids)
        if self._may_differ:
            self._may_differ = False
            if token_ids.size < known or token_ids[:known].tolist() != self.ids:
                self.ids, known = [], 0
        self.ids += token_ids[known:].tolist()
        return known

    @property
    def bytes_used(self) -> int:
        return _BYTES_PER_TOKEN * len(self.ids)
