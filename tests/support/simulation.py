"""A world without engines for the controller: texts, drafters, costs and a clock that only simulated work moves.

The text of a generation is realised beforehand, as coupling makes it: it does not depend on what is drafted. A drafter
knows at which of its positions it is right, so that a draft made anywhere agrees with the text up to the first position
at which it is wrong. `simulate` is decode.speculative without models, driving the production controller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgespec.config.options import Sampling
from edgespec.control.auto import AutoController
from edgespec.control.base import NOTHING, Controller, FixedLength
from edgespec.control.constants import KNOWN_AFTER, MOST_ROW
from edgespec.control.cost import WIDEST, CostCurve, DraftCost
from edgespec.control.prices import RunCosts
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.growth import CHAIN_PRIOR
from edgespec.drafters.ngram import NgramDrafter
from edgespec.engines.sequence import at_once
from edgespec.reports import RoundRecord
from edgespec.sampling.sampler import Sampler
from edgespec.types import EMPTY_DRAFT, Draft, Evidence, TokenIds, Verdict

VOCABULARY = 4096
TRACES = Path(__file__).parent / "data" / "traces.npz"

# Time of a pass by width over that of width 1, measured on models of 1B on two cores (ONNX Runtime, llama.cpp).
FLAT = {1: 1.0, 64: 1.05}
KERNELS = {1: 1.0, 2: 1.0, 4: 1.17, 8: 1.77, 16: 3.2, 32: 6.2}  # our own
LINEAR = {1: 1.0, 2: 2.0, 64: 64.0}
STAIRCASE = {1: 1.0, 2: 1.3, 4: 1.35, 5: 2.2, 8: 2.25, 9: 3.2, 16: 3.4, 64: 14.0}
ORT_INT8 = {1: 1.0, 2: 1.12, 4: 1.54, 6: 1.92, 8: 2.39, 12: 3.14, 16: 3.97, 32: 7.2}
LLAMA_Q8_0 = {1: 1.0, 2: 1.43, 4: 1.71, 5: 2.7, 6: 2.81, 8: 2.83, 12: 3.74, 16: 5.18, 32: 8.9}
LLAMA_Q4_K_M = {1: 1.0, 2: 1.58, 4: 2.89, 6: 4.13, 8: 5.58, 12: 7.53, 16: 7.6, 32: 13.5}
CURVES = {
    "flat": FLAT,
    "our kernels": KERNELS,
    "linear": LINEAR,
    "staircase": STAIRCASE,
    "onnx int8": ORT_INT8,
    "llamacpp q8_0": LLAMA_Q8_0,
    "llamacpp q4_k_m": LLAMA_Q4_K_M,
}
PREFILL_SHARE = 0.2  # of a plain pass, that the target takes to read one token of a prompt
PLAIN_S = 0.05  # a plain pass of a model of 1B
DRAFT_SHARE = 0.04  # of it, that a token of the draft model takes
READ_SHARE = 0.004  # of it, that the draft model takes to read a token among others


class Clock:
    """Seconds that pass only when something is done."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def known_curve(measured: Mapping[int, float]) -> CostCurve:
    """One that knows the times of passes of some widths: straight lines between them, the last slope beyond."""
    measured = dict(sorted(measured.items()))
    (*widths, last), (*_, before_s, last_s) = measured, (0.0, *measured.values())
    slope = (last_s - before_s) / (last - (widths[-1] if widths else 0))
    every = np.arange(WIDEST + 1)
    seconds = np.interp(every, list(measured), list(measured.values())) + slope * np.maximum(every - last, 0)
    rows = np.clip((seconds / seconds[1] - 1.0) / np.maximum(every - 1, 1), 0.0, MOST_ROW).tolist()
    found = CostCurve.from_json({"plain": float(seconds[1]), "rows": rows, "seen": KNOWN_AFTER})
    assert found is not None
    return found


@dataclass(frozen=True, slots=True)
class ContextCost:
    """Plain passes that each cached token adds to a pass: `fixed` whatever its width, `row` for every row."""

    fixed: float = 0.0
    row: float = 0.0

    def at(self, width: int, context_tokens: int) -> float:
        return context_tokens * (self.fixed + width * self.row)


@dataclass(slots=True)
class Machine:
    """What passes really take: `ratios` by width times `plain_s`, with noise, outliers and a drift over time.

    `noise`: standard deviation of a pass's logarithm; `outliers`: share of passes that take four times as long;
    `drift`: logarithm by which everything slows down and recovers again, once in `period_s`; `judge_s`: what a round
    takes to judge a draft and to take back what does not stand; `after`: of a plain pass, that one takes longer after a
    wider pass; `context`: what each cached token adds, in plain passes; there are `context_tokens` now.
    """

    ratios: dict[int, float]
    plain_s: float = PLAIN_S
    noise: float = 0.0
    outliers: float = 0.0
    drift: float = 0.0
    period_s: float = 60.0
    seed: int = 0
    judge_s: float = 0.0
    after: float = 0.0
    context: ContextCost = ContextCost()
    context_tokens: int = 0
    _curve: CostCurve = field(init=False)
    _rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._curve = self.curve()
        self._rng = np.random.default_rng(self.seed)

    def curve(self, error: float = 0.0) -> CostCurve:
        """What a measurement says of this machine; wrong by `error` as a logarithm, the same everywhere."""
        return known_curve({width: ratio * self.plain_s * math.exp(error) for width, ratio in self.ratios.items()})

    def seconds(self, width: int, now_s: float) -> float:
        return (self._curve.at(width) + self.plain_s * self.context.at(width, self.context_tokens)) * self.factor(now_s)

    def factor(self, now_s: float) -> float:
        logarithm = self.drift * math.sin(2 * math.pi * now_s / self.period_s)
        if self.noise:
            logarithm += self.noise * self._rng.standard_normal()
        if self.outliers and self._rng.random() < self.outliers:
            logarithm += math.log(4.0)
        return math.exp(logarithm)


@dataclass(frozen=True, slots=True)
class Text:
    """One generation to come: prompt and answer [n], and what a draft model knows of each position of the answer.

    `agreed` [n]: how many tokens of a chain that begins there agree; `evidence[position][j]`: of its token j.
    """

    token_ids: TokenIds
    prompt_tokens: int
    agreed: Sequence[int]
    evidence: Sequence[Sequence[Evidence]]

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.size) - self.prompt_tokens


class TracedDrafter(Drafter):
    """A paid drafter that drafts what a text says it would; its time passes on the simulated clock."""

    name = "model"
    prior = CHAIN_PRIOR

    def __init__(self, clock: Clock, token_s: float, read_s: float = 0.0, slowdown: Callable[[], float] = lambda: 1.0):
        self._clock, self._token_s, self._read_s, self._slowdown = clock, token_s, read_s, slowdown
        self._text: Text | None = None
        self._known = 0

    def take(self, text: Text) -> None:
        """The next generation will be this one."""
        self._text = text

    def begin(self, prompt_ids: TokenIds) -> None:
        self._known = 0

    def draft(self, request: DraftRequest) -> Draft:
        assert self._text is not None
        text, position = self._text, request.token_ids.size
        evidence = text.evidence[position]
        most = min(request.max_tokens, len(evidence))
        if most < 1:
            return EMPTY_DRAFT
        self._clock.now_s += self.num_uncached(request.token_ids) * self._read_s * self._slowdown()
        self._known = position
        count = 0
        while count < most:
            self._clock.now_s += self._token_s * self._slowdown()
            count += 1
            if request.should_continue is not None and not request.should_continue(count, evidence[count - 1]):
                break
        ids = drafted_ids(text.token_ids, position, count, text.agreed[position])
        return Draft.chain(ids, evidence=list(evidence[:count]))

    def num_uncached(self, token_ids: TokenIds) -> int:
        return int(token_ids.size) - self._known


class CopyingDrafter(TracedDrafter):
    """A free drafter with one number as evidence, as lookups have."""

    name = "copy"
    is_free = True

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, 0.0)

    def draft(self, request: DraftRequest) -> Draft:
        assert self._text is not None
        text, position = self._text, request.token_ids.size
        evidence = text.evidence[position]
        count = min(request.max_tokens, len(evidence))
        ids = drafted_ids(text.token_ids, position, count, text.agreed[position])
        return Draft.chain(ids, evidence=list(evidence[:count]))


def drafted_ids(token_ids: TokenIds, position: int, count: int, agreed: int) -> TokenIds:
    """`count` tokens of which the first `agreed` are the text's own, as far as it is known, and the next is wrong."""
    ids = np.full(count, VOCABULARY, np.int32)  # no text holds it
    told = token_ids[position : position + min(count, agreed)]
    ids[: told.size] = told
    return ids


def simulate(
    controller: Controller,
    text: Text,
    machine: Machine,
    clock: Clock,
    sampling: Sampling | None = None,
    reads_prompts: bool = True,
) -> list[RoundRecord]:
    """One generation of the whole text; the seconds of its rounds pass on the clock, those of the prefill do not.

    `reads_prompts`: the prefill takes time; otherwise it was cached. One record per round.
    """
    sampler = Sampler(sampling or Sampling(temperature=0.0), VOCABULARY)
    for drafter in drafters_of(controller):
        if isinstance(drafter, TracedDrafter):
            drafter.take(text)
    prefill_s = text.prompt_tokens * PREFILL_SHARE * machine.plain_s if reads_prompts else 0.0
    controller.begin(text.token_ids[: text.prompt_tokens], prefill_s)
    records: list[RoundRecord] = []
    position = text.prompt_tokens + 1  # the prefill gave the first token
    while position < text.token_ids.size:
        context_ids, left = text.token_ids[:position], int(text.token_ids.size) - position
        started_s, proposal = clock(), NOTHING
        if left > 1:
            request = DraftRequest(context_ids, min(left - 1, WIDEST - 1), sampler)
            proposal = at_once(controller.proposing(request))
        draft, drafted_s = proposal.draft, clock()
        told = text.token_ids[position : position + draft.num_tokens]
        differs = np.flatnonzero(told != draft.token_ids)
        accepted = int(differs[0]) if differs.size else draft.num_tokens
        machine.context_tokens = position
        verify_s = machine.seconds(draft.num_tokens + 1, clock())
        if records and records[-1].drafted_tokens and not draft.num_tokens:
            verify_s *= 1.0 + machine.after
        judge_s = machine.judge_s if draft.num_tokens else 0.0
        clock.now_s += verify_s + judge_s
        verdict = Verdict(tuple(range(accepted)), int(text.token_ids[position + accepted]))
        confidences = tuple(draft.confidences.tolist())
        seconds = drafted_s - started_s, verify_s, judge_s
        record = RoundRecord(position, proposal.drafter, draft.num_tokens, accepted, confidences, *seconds)
        controller.observe(proposal, verdict, record)
        records.append(record)
        position += accepted + 1
        for _ in range(min(controller.rest(), int(text.token_ids.size) - position)):
            verify_s = machine.seconds(1, clock())
            clock.now_s += verify_s
            records.append(RoundRecord(position, None, 0, 0, (), 0.0, verify_s))
            position += 1
    return records


def drafters_of(controller: Controller) -> list[Drafter]:
    if isinstance(controller, AutoController):
        return list(controller.drafters.values())
    assert isinstance(controller, FixedLength)
    return [controller._drafter]


@dataclass(slots=True)
class World:
    """A machine, a clock, and the drafters that run on it. `draft_share`: a drafted token's time over a plain pass."""

    machine: Machine
    draft_share: float = DRAFT_SHARE
    lookup: Callable[[Clock], Drafter] | None = lambda clock: NgramDrafter()
    clock: Clock = field(default_factory=Clock)

    def model(self) -> TracedDrafter:
        machine, clock = self.machine, self.clock
        return TracedDrafter(
            clock, self.draft_share * machine.plain_s, READ_SHARE * machine.plain_s, lambda: machine.factor(clock())
        )

    def auto(self, share: float = 0.02, curve_error: float = 0.0) -> AutoController:
        drafters: dict[str, Drafter] = {} if self.lookup is None else {"ngram": self.lookup(self.clock)}
        drafters["model"] = self.model()
        plain_s = self.machine.plain_s
        costs = {"model": DraftCost(self.draft_share * plain_s, READ_SHARE * plain_s)}
        return AutoController(drafters, RunCosts(self.machine.curve(curve_error), costs), share, self.clock)

    def fixed(self, drafter: str, length: int) -> FixedLength:
        assert self.lookup is not None
        return FixedLength(self.model() if drafter == "model" else self.lookup(self.clock), length)

    def run(self, controller: Controller, texts: Sequence[Text], sampling: Sampling | None = None) -> float:
        """Seconds that the controller takes for all the texts."""
        started_s = self.clock()
        for text in texts:
            simulate(controller, text, self.machine, self.clock, sampling)
        return self.clock() - started_s

    def plain_s(self, texts: Sequence[Text]) -> float:
        """Seconds that plain decoding takes for all the texts: at the machine's own pace, noise and all."""
        started_s = self.clock()
        for text in texts:
            for position in range(text.prompt_tokens + 1, text.token_ids.size):
                self.machine.context_tokens = position
                self.clock.now_s += self.machine.seconds(1, self.clock())
        return self.clock() - started_s


# -- texts


def recorded() -> dict[str, dict[float, list[Text]]]:
    """What scripts/lab/record_traces.py kept: texts by domain and temperature."""
    found: dict[str, dict[float, list[Text]]] = {}
    with np.load(TRACES) as kept:
        for name in sorted(key.removesuffix(".text") for key in kept if key.endswith(".text")):
            domain, temperature = name.split(".", 1)[0], float(name.split(".", 1)[1].rsplit(".", 1)[0])
            scores = (kept[f"{name}.evidence"].astype(np.float64) / 32 - 4.0).tolist()
            ids, prompt = kept[f"{name}.text"].astype(np.int32), int(kept[f"{name}.prompt"])
            before = [0] * (prompt + 1)
            evidence: list[list[Evidence]] = [[] for _ in before]
            evidence += [[tuple(token) for token in chain] for chain in scores]
            text = Text(ids, prompt, before + kept[f"{name}.agreed"].tolist(), evidence)
            found.setdefault(domain, {}).setdefault(temperature, []).append(text)
    return found


def made_up(
    num_tokens: int,
    chances: Iterator[float] | Sequence[float],
    claims: Callable[[float, np.random.Generator], Evidence],
    seed: int = 0,
    prompt_tokens: int = 16,
    chain: int = 24,
) -> Text:
    """A text of random tokens in which a drafter is right at position i with probability `chances[i]`.

    `claims(chance, rng)`: the evidence that it gives of a position. Behind its first error it claims as for another
    position: it does not know that it is wrong.
    """
    rng = np.random.default_rng(seed)
    total = prompt_tokens + num_tokens
    ids = rng.integers(0, VOCABULARY, total).astype(np.int32)
    source = iter(chances)
    likely = [0.0] * prompt_tokens + [next(source) for _ in range(num_tokens)]
    right = [bool(rng.random() < chance) for chance in likely]
    agreed = [0] * (total + 1)
    for position in range(total - 1, -1, -1):
        agreed[position] = agreed[position + 1] + 1 if right[position] else 0
    claimed = [claims(chance, rng) for chance in likely]
    evidence = [
        [claimed[min(p + j, total - 1)] for j in range(chain)] if p > prompt_tokens else [] for p in range(total)
    ]
    return Text(ids, prompt_tokens, [min(count, chain) for count in agreed], evidence)


def log_odds(chance: float) -> float:
    chance = min(max(chance, 1e-3), 1 - 1e-3)
    return math.log(chance / (1 - chance))


def honest(chance: float, rng: np.random.Generator) -> Evidence:
    """Scores as a draft model gives them: they grow with the chance, with noise."""
    odds = log_odds(chance) + 0.7 * float(rng.standard_normal())
    return min(max(abs(odds) / 4, 0.0), 2.0), min(max(odds, -3.0), 6.0) / 2, max(math.log(chance + 1e-3), -4.0)


def always(chance: float) -> Callable[[float, np.random.Generator], Evidence]:
    """Claims the same whatever is the case."""
    return lambda _, rng: honest(chance, rng)


def opposite(chance: float, rng: np.random.Generator) -> Evidence:
    """The surer it is the more it is wrong."""
    return honest(1.0 - chance, rng)


def beta_chances(mean: float, seed: int, strength: float = 2.0) -> Iterator[float]:
    rng = np.random.default_rng(seed)
    while True:
        yield float(rng.beta(mean * strength, (1 - mean) * strength))


def bursts(good: float, bad: float, tokens: int, seed: int) -> Iterator[float]:
    """Good and bad stretches of `tokens` on average."""
    rng, is_good = np.random.default_rng(seed), True
    while True:
        yield good if is_good else bad
        if rng.random() < 1 / tokens:
            is_good = not is_good
