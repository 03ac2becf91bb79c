"""Proposals that were not used, judged by the text that came instead: free drafters learn without a target pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from edgespec.types import Draft, TokenIds

_MOST_PENDING = 64


@dataclass(frozen=True, slots=True)
class Shadow:
    """A draft that its drafter made for position `start`; `kept` of its tokens would have been verified.

    `gains`: what every drafter expected of that round; `cost_tokens`: what verifying would have cost, in tokens.
    """

    drafter: str
    start: int
    draft: Draft
    kept: int
    gains: Mapping[str, float]
    cost_tokens: float


class Shadows:
    """Drafts that wait for the text that decides about them."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Shadow, list[int], int]] = deque(maxlen=_MOST_PENDING)  # its tokens; how many agree

    def clear(self) -> None:
        self._pending.clear()

    def add(self, shadow: Shadow) -> None:
        if shadow.draft.num_tokens:
            self._pending.append((shadow, shadow.draft.token_ids.tolist(), 0))

    def resolved(self, token_ids: TokenIds) -> Iterator[tuple[Shadow, int]]:
        """Each draft that the committed `token_ids` [n] decide, with how many of its tokens agree from the first on."""
        if not self._pending:
            return
        begin = min(shadow.start + agreed for shadow, _, agreed in self._pending)
        told = token_ids[begin:].tolist()
        for _ in range(len(self._pending)):
            shadow, drafted, agreed = self._pending.popleft()
            place = shadow.start + agreed - begin
            while agreed < len(drafted) and place < len(told) and drafted[agreed] == told[place]:
                agreed, place = agreed + 1, place + 1
            if agreed < len(drafted) and place >= len(told):
                self._pending.append((shadow, drafted, agreed))
            else:
                yield shadow, agreed
