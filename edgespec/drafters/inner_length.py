"""How many tokens a small model drafts for a medium one, before the medium verifies them in a pass of its own.

The pair inside a drafter is a speculative decoder without a text to keep: tokens of the medium per second are all that
counts. With c the chance that the medium agrees with one more token, s the small model's seconds per token and t(w)
those of a medium pass over w rows, the best number is argmax_k of (1 + c + ... + c^k) / (k s + t(1 + k)) (Leviathan
2211.17192, theorem 3.8, with a pass that costs what its width costs). All three are learnt from what happens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_INNER = 8
_RATE = 0.05  # of an outcome, in what is believed
_PRIOR = 0.7
_TRY_EVERY = 16  # rounds of the medium alone: what is never tried would stay refused for ever
_SLOWER, _FASTER = 0.03, 0.3  # of a time, in what is believed: what disturbs a pass makes it longer
_SLOWEST = 3.0  # times what is believed, that one time may say


@dataclass(slots=True)
class InnerLength:
    """Times in seconds. A width that was never seen costs what the widest narrower one did, so that it is tried."""

    chance: float = _PRIOR
    token_s: float = 0.0
    _pass_s: dict[int, float] = field(default_factory=dict)
    _alone: int = 0

    def best(self, most: int) -> int:
        """Tokens that the small model should draft, 0 to `most` (and never above MAX_INNER)."""
        best, best_rate = 0, 0.0
        expected, reach, pass_s = 1.0, 1.0, 0.0
        for count in range(min(most, MAX_INNER) + 1):
            pass_s = max(self._pass_s.get(1 + count, pass_s), pass_s)
            rate = expected / max(count * self.token_s + pass_s, 1e-9)
            if rate > best_rate:
                best, best_rate = count, rate
            reach *= self.chance
            expected += reach
        self._alone = 0 if best or not most else self._alone + 1
        return best if self._alone % _TRY_EVERY or not self._alone else 1

    def outcome(self, agreed: int, tried: int) -> None:
        """Of `tried` small tokens, none behind a refused one, the medium chose the first `agreed` as well."""
        for index in range(tried):
            self.chance += _RATE * ((index < agreed) - self.chance)

    def drafted(self, num_tokens: int, seconds: float) -> None:
        """The small model took `seconds` for its tokens."""
        self.token_s = _moved(self.token_s, seconds / num_tokens)

    def passed(self, width: int, seconds: float) -> None:
        """The medium took `seconds` for one pass over `width` rows."""
        self._pass_s[width] = _moved(self._pass_s.get(width, 0.0), seconds)


def _moved(old: float, seen: float) -> float:
    if not old:
        return seen
    return old + (_FASTER if seen < old else _SLOWER) * (min(seen, _SLOWEST * old) - old)
