"""What an answer tells while it is made and at its end: rounds, token events, progress of the prompt, counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """Decisions, times and result of one round. Times in seconds.

    `position`: index of the first token it could emit; `drafter`: name of the drafter, None for a plain pass; `width`:
    rows of the target pass; `confidences`: per draft token, the estimated probability that it is accepted if its
    parent is; `draft_s`: control and drafting; `verify_s`: the target pass alone; `judge_s`: applying the acceptance
    rule and updating the cache; `tree_depth`: tokens of the longest path of a draft with branches, None for a chain.
    """

    position: int
    drafter: str | None
    drafted_tokens: int
    accepted_tokens: int
    confidences: tuple[float, ...]
    draft_s: float
    verify_s: float
    judge_s: float = 0.0
    tree_depth: int | None = None

    @property
    def depth(self) -> int:
        """Tokens of the draft's longest path: the most that could be accepted."""
        return self.drafted_tokens if self.tree_depth is None else self.tree_depth

    @property
    def width(self) -> int:
        """Rows of the target pass: the draft and the pending token."""
        return self.drafted_tokens + 1


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One emitted token.

    `text`: the text that became printable with it, empty inside a UTF-8 sequence or a possible stop string;
    `position`: its index in the sequence, prompt included; `drafter`: name of the drafter that proposed it, None for
    a token that the target added; `logprob`: its natural log probability under the target's raw softmax, before
    temperature, bias, penalties and truncation; `top_logprobs`, if requested: (token id, log probability) of the most
    likely tokens under the same softmax, most likely first; `finish_reason`: set on the last event only.
    """

    token_id: int
    text: str
    position: int
    drafter: str | None
    logprob: float | None = None
    finish_reason: FinishReason | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()

    @property
    def from_draft(self) -> bool:
        """Whether the token was drafted and accepted."""
        return self.drafter is not None


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How far a prompt has been read: of its `total` tokens `processed` are cached, of these `reused` from before."""

    total: int
    reused: int
    processed: int
    seconds: float


@dataclass(slots=True)
class Stats:
    """Counters of one generation. Ratios are properties, 0 if there is nothing to divide by. Times in seconds.

    `notes`: events that the user should see, such as a drafter that failed and was disabled. `planned_bytes`: what the
    plan before loading expected of `peak_rss_bytes`, the process's peak, and what saved states of other texts take by
    now; 0 without a plan.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    target_passes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    wall_s: float = 0.0
    peak_rss_bytes: int = 0
    planned_bytes: int = 0
    finish_reason: FinishReason | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens; 0 if nothing was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per verifying target pass, residual or bonus token included, the prefill's token excluded."""
        return (self.new_tokens - 1) / self.rounds if self.rounds else 0.0

    @property
    def decode_s(self) -> float:
        """Time after prefill."""
        return self.wall_s - self.prefill_s

    @property
    def overhead_s(self) -> float:
        """Time outside prefill, drafting and target passes: sampling, acceptance and bookkeeping."""
        return max(self.wall_s - self.prefill_s - self.draft_s - self.verify_s, 0.0)

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed, without prefill and the token that prefill yields."""
        return (self.new_tokens - 1) / self.decode_s if self.decode_s > 0 and self.new_tokens else 0.0
