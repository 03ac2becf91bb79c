"""The search for the best settings: successive halving over engines, threads, drafters and draft lengths.

Each round decodes more prompts with fewer settings. One pair is loaded at a time; the last round visits the loaded
configurations in order and then in reverse, so that a machine that slows down meanwhile does not favour one of them.
Two settings are never dropped: the best plain decoding, which is the baseline, and the best automatic setting, which
learns while it runs and would be judged too early. Several quantisations of one model are measured in the same rounds,
but each has its own best setting: speed does not say which quantisation is good enough.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from edgespec.config import DrafterName, DraftLength, EngineName, GenerateOptions
from edgespec.errors import CapabilityError, EdgespecError, PromptError
from edgespec.generation.totals import Totals
from edgespec.reports import Stats
from edgespec.runtime import Model
from edgespec.tuning.same_model import KnownVocabulary
from edgespec.tuning.settings_grid import Candidate, Loaded, TuneRequest, candidates, needed

logger = logging.getLogger("edgespec")
SHARES = (0.25, 0.5, 1.0)  # fraction of the prompts decoded in each round
VISITS = (1, 1, 2)  # how often each round visits a loaded configuration
KEPT_SHARE = 1 / 3  # fraction of the settings kept for the next round
_LEAST_KEPT, _LEAST_PROMPTS = 4, 2  # with fewer, chance would decide
ABOUT_AS_FAST = 0.98
_WARM_UP_TOKENS = 6
_MEDIAN_OF_DIFFERENCE = 0.954  # of two draws from a normal distribution, in standard deviations


@dataclass(slots=True)
class Score:
    """Results of one setting: seconds of each run by prompt, tokens by prompt; `rounds`: the last completed round."""

    candidate: Candidate
    seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens: dict[int, int] = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals)
    rounds: int = 0

    def add(self, prompt: int, stats: Stats) -> None:
        self.totals.add(stats)
        self.seconds[prompt].append(stats.decode_s)
        self.tokens[prompt] = max(stats.new_tokens - 1, 0)

    def rate(self, prompts: Iterable[int] | None = None) -> float:
        """Tokens per second over `prompts` (None: all), with the median time of each prompt's repetitions."""
        chosen = list(self.seconds if prompts is None else prompts)
        taken = sum(median(self.seconds[prompt]) for prompt in chosen)
        return sum(self.tokens[prompt] for prompt in chosen) / taken if taken > 0 else 0.0


@dataclass(slots=True)
class Sweep:
    """A search, running or done. Results so far remain available after an interruption.

    `prompts`: token ids of each prompt, by (model, engine). `advance(n)` is called after n runs; `on_progress(text)`
    when a round begins. `usual_engines`: by model, the engine that runs it when none is named.
    """

    request: TuneRequest
    prompts: dict[tuple[str, EngineName], list[list[int]]]
    scores: dict[Candidate, Score]
    advance: Callable[[int], None] = lambda steps: None
    on_progress: Callable[[str], None] = lambda text: None
    usual_engines: Mapping[str, EngineName] = field(default_factory=dict)

    def run(self) -> None:
        """Run all rounds. Raises PromptError if no answer of a model has two tokens, and the errors of generating."""
        alive = list(self.scores)
        for number, (share, visits) in enumerate(zip(SHARES, VISITS, strict=True), 1):
            count = self.num_prompts(share)
            self.on_progress(f"round {number} of {len(SHARES)}: {len(alive)} settings")
            self._decode(alive, count, visits)
            alive = [candidate for candidate in alive if candidate in self.scores]
            timed = {one.loaded.model for one in alive if sum(self.scores[one].tokens.values())}
            if len(timed) < len(self.models):
                raise PromptError(
                    "every answer ended with its first token, so there is nothing to measure: give other prompts"
                )
            for candidate in alive:
                self.scores[candidate].rounds = number
            if number < len(SHARES):
                alive = self._survivors(alive, range(count))

    @property
    def models(self) -> list[str]:
        """The models to tune, as given and in that order."""
        return list(dict.fromkeys(candidate.loaded.model for candidate in self.scores))

    @property
    def num_all_prompts(self) -> int:
        return len(next(iter(self.prompts.values())))

    def num_prompts(self, share: float) -> int:
        return max(round(share * self.num_all_prompts), min(_LEAST_PROMPTS, self.num_all_prompts))

    def num_runs(self) -> int:
        """Upper limit of the number of generations in `run`."""
        total = 0
        for model in self.models:
            alive = sum(candidate.loaded.model == model for candidate in self.scores)
            for share, visits in zip(SHARES, VISITS, strict=True):
                total += alive * self.num_prompts(share) * visits
                alive = min(_num_kept(alive) + 4, alive)
        return total

    def finalists(self) -> list[Score]:
        """The settings of the last completed round, fastest first."""
        last = max(score.rounds for score in self.scores.values())
        found = [score for score in self.scores.values() if score.rounds == last and score.tokens]
        return sorted(found, key=lambda score: score.rate(), reverse=True)

    def best(self, model: str) -> Score:
        """The fastest finalist of `model` in the requested mode; the automatic setting if it is about as fast.

        A fixed setting was chosen on these prompts and may be slower on others; the automatic one adapts.
        """
        own = [score for score in self.finalists() if score.candidate.loaded.model == model]
        allowed = [score for score in own if score.candidate.loaded.reproducible is None]
        enough = ABOUT_AS_FAST * allowed[0].rate()
        return next((s for s in allowed if s.candidate.is_adaptive and s.rate() >= enough), allowed[0])

    def speedup(self, score: Score) -> float:
        """Speedup over the best plain decoding, in any mode, of the same prompts and weights; 0 if there is none."""
        prompts = score.seconds.keys()
        plain = [
            other.rate(prompts)
            for other in self.scores.values()
            if other.candidate.is_plain
            and other.candidate.loaded.model == score.candidate.loaded.model
            and prompts <= other.seconds.keys()
        ]
        best = max(plain, default=0.0)
        return score.rate() / best if best else 0.0

    def default(self, model: str) -> Score | None:
        """What a run without a profile would use: the usual engine, most threads, `auto`; None where it was left out.

        What the user fixed is the same in every setting, so it is part of this one.
        """
        engine = self.usual_engines.get(model)
        own = [score for score in self.scores.values() if score.candidate.loaded.model == model and score.seconds]
        own = [s for s in own if s.candidate.loaded.engine == engine and s.candidate.loaded.reproducible is None]
        options = self.request.options
        drafter = options.drafter if "drafter" in self.request.fixed else "auto"
        length = options.draft_length if "draft_length" in self.request.fixed else "auto"
        wanted = [s for s in own if s.candidate.drafter == drafter and s.candidate.draft_length in (length, "auto")]
        found = wanted or [score for score in own if score.candidate.is_plain]
        return max(found, key=lambda score: score.candidate.loaded.threads, default=None)

    def gain(self, score: Score) -> tuple[float, float]:
        """(times the rate of the default setting on the same prompts, the error of that factor).

        The error is two standard errors, from the rates of the last round's two visits: a machine that is busy during
        one of them shows there. Infinite where nothing was decoded twice; (1, 0) for the default setting itself.
        """
        default = self.default(score.candidate.loaded.model)
        if default is score:
            return 1.0, 0.0
        if default is None or default.rounds < score.rounds:
            return 1.0, math.inf
        prompts = score.seconds.keys() & default.seconds.keys()
        factor = score.rate(prompts) / default.rate(prompts) if default.rate(prompts) else 1.0
        spread = self._visit_spread()
        return factor, 2 * factor * spread * math.sqrt(self.num_all_prompts / max(len(prompts), 1))

    def _visit_spread(self) -> float:
        """Standard deviation of the logarithm of a setting's rate in one visit, robust against a few disturbed ones."""
        differences = [
            abs(math.log(sum(times[-1] for times in all_times) / sum(times[-2] for times in all_times)))
            for score in self.finalists()
            if (all_times := list(score.seconds.values())) and min(map(len, all_times)) > 1
        ]
        return median(differences) / _MEDIAN_OF_DIFFERENCE if differences else math.inf

    def _survivors(self, alive: Sequence[Candidate], prompts: Iterable[int]) -> list[Candidate]:
        """Per model: the best third, the best plain decoding in each mode, the best automatic one, and the default."""
        kept: set[Candidate] = set()
        for model in self.models:
            own = [candidate for candidate in alive if candidate.loaded.model == model]
            ranked = sorted(own, key=lambda candidate: self.scores[candidate].rate(prompts), reverse=True)
            kept.update(ranked[: _num_kept(len(ranked))])
            for mode in {candidate.loaded.reproducible for candidate in ranked}:
                kept.add(next(c for c in ranked if c.is_plain and c.loaded.reproducible is mode))
            kept.update([candidate for candidate in ranked if candidate.is_adaptive][:1])
            if (default := self.default(model)) is not None:  # what a gain is told over is measured as well as the rest
                kept.add(default.candidate)
        return [candidate for candidate in alive if candidate in kept]

    def _decode(self, alive: Sequence[Candidate], count: int, visits: int) -> None:
        groups: dict[Loaded, list[Candidate]] = defaultdict(list)
        for candidate in alive:
            groups[candidate.loaded].append(candidate)
        there = list(groups)
        order = [loaded for visit in range(visits) for loaded in (there if visit % 2 == 0 else reversed(there))]
        for loaded, repeats in itertools.groupby(order):  # at each turn a model stays loaded
            model = self._open(loaded, groups[loaded])
            if model is None:
                continue
            with model:
                self._warm_up(model, groups[loaded], loaded)
                for _ in repeats:
                    self._visit(model, groups[loaded], count)

    def _open(self, loaded: Loaded, chosen: Sequence[Candidate]) -> Model | None:
        """Load the pair; if a drafter that the user did not ask for is not available, drop its settings: None."""
        try:
            return self.request.load(loaded, needed(loaded, chosen))
        except EdgespecError as exc:
            is_asked_for = loaded.opens == self.request.options.drafter and loaded.exit_layer is None
            if is_asked_for:
                raise
            logger.warning("drafter %s is skipped: %s", loaded.opens, exc)
        for candidate in chosen:
            self.scores.pop(candidate, None)
        return None

    def _warm_up(self, model: Model, candidates: Sequence[Candidate], loaded: Loaded) -> None:
        ids = self.prompts[loaded.model, loaded.engine][-1]
        for drafter in dict.fromkeys(candidate.drafter for candidate in candidates):
            self._generate(model, ids, drafter, "auto", _WARM_UP_TOKENS)

    def _visit(self, model: Model, candidates: Sequence[Candidate], count: int) -> None:
        """Run every setting on every prompt. Prompts alternate, or they would still be in the draft model's cache."""
        for turn in range(count):
            for index, candidate in enumerate(candidates):
                prompt = (turn + index) % count
                ids = self.prompts[candidate.loaded.model, candidate.loaded.engine][prompt]
                stats = self._generate(model, ids, candidate.drafter, candidate.draft_length, self.request.max_tokens)
                self.scores[candidate].add(prompt, stats)
                self.advance(1)

    def _generate(
        self, model: Model, ids: list[int], drafter: DrafterName, length: DraftLength, max_tokens: int
    ) -> Stats:
        options = GenerateOptions(max_tokens=max_tokens, drafter=drafter, draft_length=length, logprobs=False)
        return model.generate(ids, self.request.sampling, options).stats


def prepare(
    request: TuneRequest, engines: Mapping[str, Sequence[EngineName]], encode: Callable[[Model], list[list[int]]]
) -> Sweep:
    """Load each model with each of its `engines`, one at a time, and list the settings to try.

    An engine that is not available is skipped with a log message; if none of a model's engines is, its CapabilityError
    is raised. `encode` returns the prompts' token ids. Raises VocabularyMismatch if the models differ.
    """
    prompts: dict[tuple[str, EngineName], list[list[int]]] = {}
    found: list[Candidate] = []
    first: KnownVocabulary | None = None
    for name, possible in engines.items():
        failure: EdgespecError | None = None
        for engine in possible:
            scout = Loaded(name, engine, request.options.threads or 0, None, request.options.drafter)
            try:
                model = request.load(scout, scout.opens)
            except CapabilityError as exc:
                logger.warning("engine %s is skipped: %s", engine, exc)
                failure = exc
                continue
            with model:
                if len(engines) > 1:
                    known = KnownVocabulary.of(model)
                    first = first or known
                    first.check(known)
                prompts[name, engine] = encode(model)
                found += candidates(request, scout, model)
        if failure is not None and not any(candidate.loaded.model == name for candidate in found):
            raise failure
    return Sweep(request, prompts, {candidate: Score(candidate) for candidate in found})


def _num_kept(count: int) -> int:
    return min(max(-(-count // round(1 / KEPT_SHARE)), _LEAST_KEPT), count)
