"""Sampling: logits to sparse distributions, and tokens sampled from them.

The order is fixed: logit bias and penalties -> the mask of a constraint -> temperature -> top-k -> top-p -> min-p.
Temperature 0 is argmax (ties: the lowest id). Every step is a function of one logits row and the tokens before it, so a
row of a draft gives the same distribution as the same row in plain decoding.
"""

from __future__ import annotations

import math
import sys

import numpy as np
from numpy.typing import NDArray

from edgespec.config.options import Sampling
from edgespec.errors import EngineError, SamplingError
from edgespec.sampling.constraint.state import Constraint
from edgespec.sampling.noise import Noise, Stream
from edgespec.types import Distribution, Draft, Logits, TokenIds, one_hot

_LEAST_WEIGHT = sys.float_info.min
# It divides a difference of two logits, so that lower ones give the same weights, 0 and 1, and would only overflow.
_LEAST_DIVISOR = 1e-30
_LEAST_SAFE_SUM, _MOST_SAFE_SUM = 1e-25, 1e37  # range without relevant under- or overflow in float32
_FIRST_NUCLEUS = 256  # number of candidates tried first for top-p without top-k
# Elements per column of the top-k prefilter. In a short row, comparing all elements is cheaper than selecting columns.
_FOLD, _SHORT_FOLD, _SHORT_ROW = 64, 16, 8192


class NoTokenLeft(EngineError):
    """All logits of a row are -inf, once a constraint and biases are applied: nothing can be sampled from it."""


class Sampler:
    """Turns logits rows into distributions and samples tokens from them, with the settings and noise of one generation.

    `constraint`: masks every row, that of the target and that of a draft alike; None: all tokens are allowed.
    Raises SamplingError if `logit_bias` names a token outside the vocabulary or forbids all tokens.
    """

    def __init__(self, sampling: Sampling, vocabulary_size: int, constraint: Constraint | None = None) -> None:
        outside = [token_id for token_id in sampling.logit_bias if not 0 <= token_id < vocabulary_size]
        if outside:
            raise SamplingError(f"logit_bias names token {outside[0]}; the vocabulary has 0..{vocabulary_size - 1}")
        if sum(bias == -math.inf for bias in sampling.logit_bias.values()) == vocabulary_size:
            raise SamplingError(f"logit_bias forbids all {vocabulary_size} tokens: leave at least one without -inf")
        self.sampling = sampling = sampling.seeded()
        self.vocabulary_size = vocabulary_size
        self.constraint = constraint
        self.seed = sampling.seed or 0  # `seeded` has replaced None
        self.noise = Noise(self.seed)
        self._scratch = np.empty(vocabulary_size, np.float32)  # allocating a row of 150k costs more than its exp
        self._ones = np.ones(vocabulary_size, np.float32)
        self._all_ids = np.arange(vocabulary_size, dtype=np.int32)
        self._bias_ids = np.fromiter(sampling.logit_bias.keys(), np.int64)
        self._bias = np.fromiter(sampling.logit_bias.values(), np.float32)
        self._adjusts = sampling.uses_history or self._bias_ids.size > 0
        # Whether distributions depend on the tokens before them.
        self.uses_history = constraint is not None or sampling.uses_history

    def permitted(self, draft: Draft, history: TokenIds) -> Draft:
        """`draft`, which follows all tokens `history` [n], without what the constraint forbids."""
        return draft if self.constraint is None else self.constraint.permitted(draft, history)

    def forced(self, history: TokenIds) -> tuple[int, ...]:
        """Tokens that spell what the constraint forces after `history` [n]; none without one."""
        return () if self.constraint is None else self.constraint.forced(history)

    def distribution(self, logits: Logits, history: TokenIds) -> Distribution:
        """Distribution of the next token from one row of logits [vocabulary] and all tokens before it [n].

        Raises EngineError if the row contains NaN or infinity, NoTokenLeft if it has only -inf left.
        """
        logits = logits[: self.vocabulary_size]  # a draft may have more ids, which the target cannot read
        row = self._adjusted(logits, history) if self._adjusts else logits
        best = int(row.argmax())
        if not math.isfinite(row[best]):
            raise _unusable(float(row[best]))
        if self.constraint is not None:
            mask = self.constraint.mask(history)
            if self.sampling.temperature > 0.0 or not mask.allows(best):  # else it would not change the choice
                row = mask.applied(row)
                best = int(row.argmax())
                if not math.isfinite(row[best]):
                    raise _unusable(float(row[best]))
        if self.sampling.temperature == 0.0:
            return one_hot(best)
        return self._truncated(row, float(row[best]))

    def pick(self, distribution: Distribution, position: int, stream: Stream = Stream.TARGET) -> int:
        """Sample by an exponential race: argmin of noise / prob (Gumbel coupling, arXiv 2408.07978, eq. 4)."""
        return self.race(distribution, position, stream)[0]

    def race(
        self, distribution: Distribution, position: int, stream: Stream = Stream.TARGET, index: int = 0
    ) -> tuple[int, float]:
        """(the token that `pick` returns, log of the second-smallest noise / prob over the smallest).

        With the same noise, another distribution gives the same token unless its log probabilities differ by at least
        that margin. inf if there is only one token.
        """
        token_ids = distribution.token_ids
        if token_ids.size == 1:
            return int(token_ids[0]), math.inf
        times = self._times(distribution, position, stream, index)
        first = times.argmin()
        first_time, times[first] = times[first], math.inf
        return int(token_ids[first]), math.log(times.min() / first_time)

    def _times(self, distribution: Distribution, position: int, stream: Stream, index: int) -> NDArray[np.float64]:
        with np.errstate(over="ignore"):  # inf for a token of hardly any probability, which then comes last
            return self.noise.exponential(stream, position, distribution.token_ids, index) / distribution.probs

    def ranked(self, distribution: Distribution, position: int) -> tuple[Distribution, NDArray[np.float64]]:
        """The tokens of a distribution [n], ordered by noise / prob ascending, and these values [n].

        The first k are a sample of size k without replacement (Kool et al. 2019, arXiv 1903.06059, section 3).
        """
        token_ids, probs = distribution
        times = self._times(distribution, position, Stream.TARGET, 0)
        order = times.argsort(kind="stable")
        return Distribution(token_ids[order], probs[order]), times[order]

    def likeliest(self, logits: Logits, history: TokenIds, count: int) -> Distribution:
        """The `count` most likely tokens, descending, with probabilities at temperature 1 that sum to 1 among them.

        Ignores top-k, top-p and min-p. Raises EngineError as `distribution` does.
        """
        logits = logits[: self.vocabulary_size]
        row = self._adjusted(logits, history) if self._adjusts else logits
        if self.constraint is not None:
            row = self.constraint.mask(history).applied(row)
        if not math.isfinite(best := float(row.max())):
            raise _unusable(best)
        token_ids = top_ids(row, count)
        weights = np.exp(row[token_ids].astype(np.float64) - float(row[token_ids[0]]))
        return Distribution(token_ids, weights / weights.sum())

    def accept(self, probability: float, position: int, attempt: int = 0) -> bool:
        """True with the given probability; the attempts at one position are independent."""
        return self.noise.uniform(Stream.ACCEPT, position, attempt) < probability

    def log_prob(self, logits: Logits, token_id: int) -> float:
        """Natural log probability of a token under the softmax of one raw logits row [vocabulary].

        Temperature, bias, penalties, truncation and constraints are not applied.
        """
        shift, log_sum = self._normaliser(logits)
        return float(logits[token_id]) - shift - log_sum

    def top_log_probs(self, logits: Logits, count: int) -> tuple[tuple[int, float], ...]:
        """(token id, `log_prob`) of the `count` most likely tokens of one row, most likely first."""
        shift, log_sum = self._normaliser(logits)
        token_ids = top_ids(logits, count)
        return tuple((token_id, float(logits[token_id]) - shift - log_sum) for token_id in token_ids.tolist())

    def _normaliser(self, logits: Logits) -> tuple[float, float]:
        """(shift to subtract from a row, log of the sum of exponentials after it); 0 unless that would overflow."""
        with np.errstate(over="ignore", under="ignore"):
            total = self._sum_of_exp(logits)
        if _LEAST_SAFE_SUM < total < _MOST_SAFE_SUM:
            return 0.0, math.log(total)
        best = logits.max()
        return float(best), math.log(self._sum_of_exp(logits - best))

    def _sum_of_exp(self, row: Logits) -> float:
        # With AVX2 numpy computes eight of these at once, but exp2, and exp in float64, one after the other.
        return float(np.exp(row, out=self._scratch[: row.size]).dot(self._ones[: row.size]))

    def _adjusted(self, logits: Logits, history: TokenIds) -> Logits:
        """A copy with bias and penalties applied, as in llama.cpp (repeat scales; frequency and presence subtract)."""
        row = logits.copy()
        known = self._bias_ids < row.size  # a draft's vocabulary may lack the padding ids of the target's
        row[self._bias_ids[known]] += self._bias[known]
        settings = self.sampling
        if settings.uses_history and history.size:
            latest = history[-settings.penalty_window :] if settings.penalty_window > 0 else history
            ids, counts = _counted(latest[latest < row.size])
            values = row[ids]
            values = np.where(values > 0, values / settings.repeat_penalty, values * settings.repeat_penalty)
            row[ids] = values - counts * settings.frequency_penalty - settings.presence_penalty
        return row

    def _truncated(self, row: Logits, best: float) -> Distribution:
        settings = self.sampling
        total: float | None = None
        if 0 < settings.top_k < row.size:
            token_ids = top_ids(row, settings.top_k)
        elif settings.top_p < 1.0:
            token_ids, total = self._nucleus_candidates(row, best)
        else:
            token_ids = self._all_ids[: row.size]  # a draft's vocabulary may lack the padding ids of the target's
        weights = self._weights(row[token_ids], best)
        if settings.top_p < 1.0:
            reach = weights.cumsum()
            keep = int(reach.searchsorted(settings.top_p * (reach[-1] if total is None else total))) + 1
            token_ids, weights = token_ids[:keep], weights[:keep]
        # exp underflows to 0 at low temperature; such tokens cannot be sampled, and noise / 0 must not occur
        kept = weights >= max(settings.min_p, _LEAST_WEIGHT)
        if not kept.all():
            token_ids, weights = token_ids[kept], weights[kept]
        return Distribution(token_ids, weights / weights.sum())

    def _weights(self, values: Logits, best: float) -> NDArray[np.float64]:
        """Unnormalised probabilities exp((value - best) / temperature); 1 for the best token."""
        return np.exp((values.astype(np.float64) - best) / max(self.sampling.temperature, _LEAST_DIVISOR))

    def _nucleus_candidates(self, row: Logits, best: float) -> tuple[TokenIds, float]:
        """(ids of the most likely tokens, descending, that hold at least `top_p` of the mass; the total mass)."""
        scaled = np.subtract(row, np.float32(best), out=self._scratch[: row.size])
        with np.errstate(over="ignore", under="ignore"):
            scaled /= np.float32(max(self.sampling.temperature, _LEAST_DIVISOR))
            total = self._sum_of_exp(scaled)
        count = _FIRST_NUCLEUS
        while count < row.size:
            token_ids = top_ids(row, count)
            if self._weights(row[token_ids], best).sum() >= self.sampling.top_p * total:
                return token_ids, total
            count *= 4
        return top_ids(row, row.size), total


def _unusable(best: float) -> EngineError:
    """The error for a row whose largest logit is not finite."""
    if best == -math.inf:
        return NoTokenLeft(
            "no token can be sampled: all logits are -inf, from the model, from logit_bias or from it with a grammar"
        )
    kind = "NaN" if math.isnan(best) else "infinite"
    return EngineError(f"the model returned {kind} logits: its weights are damaged or overflow in this precision")


def _counted(token_ids: TokenIds) -> tuple[TokenIds, NDArray[np.intp]]:
    """The tokens among `token_ids` [n], each once, and how often each is there.

    Not np.unique, whose first call imports numpy.ma: 65 ms of a first answer.
    """
    ordered = np.sort(token_ids)
    first = np.flatnonzero(np.diff(ordered, prepend=-1))
    return ordered[first], np.diff(first, append=ordered.size)


def top_ids(row: Logits, count: int) -> TokenIds:
    """Ids of the `count` largest elements of a row, descending, ties by lower id; all ids if the row is shorter.

    The row is folded into columns. The count-th largest column maximum is a lower bound of the count-th largest
    element, so only columns whose maximum reaches that bound are searched.
    """
    fold = _FOLD if row.size > _SHORT_ROW else _SHORT_FOLD
    num_columns = row.size // fold
    if num_columns <= count:
        return _sorted_ids(row, np.arange(row.size))[:count]
    folded = row[: num_columns * fold].reshape(fold, num_columns)
    maxima = folded.max(axis=0)
    bound = np.partition(maxima, num_columns - count)[num_columns - count]
    if row.size <= _SHORT_ROW:
        return _sorted_ids(row, np.flatnonzero(row >= bound))[:count]
    columns = np.flatnonzero(maxima >= bound)
    depth, column = np.nonzero(folded[:, columns] >= bound)
    rest = np.flatnonzero(row[num_columns * fold :] >= bound) + num_columns * fold
    return _sorted_ids(row, np.concatenate((depth * num_columns + columns[column], rest)))[:count]


def _sorted_ids(row: Logits, candidates: NDArray[np.intp]) -> TokenIds:
    """Ascending candidate ids [n], sorted by descending logit."""
    return candidates[(-row[candidates]).argsort(kind="stable")].astype(np.int32)
