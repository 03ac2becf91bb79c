"""Does automatic speculation ever lose to plain decoding? Adversaries on real weights; ratios in one run.

    python scripts/lab/measure_control.py MODEL --prompts FILE [--engine onnx] [--tokens N] [--slow-draft FILE]

FILE holds one JSON object per line: {"domain": ..., "text": ...}; scripts/lab/held_out_prompts.py makes one. The
adversaries: a drafter that claims .9 and is right one time in ten, random tokens as text, temperature 1.5, answers of 8
tokens, a draft slower than the target. Each setting runs between two plain runs of the same prompt, each adversary from
a fresh start (an empty cache folder) `--repeats` times over. A figure is the time that plain decoding took for all
prompts over the time that the setting took, prefill left out, with its standard error. How near `auto` is to the best
fixed setting: `edgespec bench --sweep`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

import edgespec
from edgespec import GenerateOptions, Model, Sampling
from edgespec.control.auto import AutoController
from edgespec.control.costs import WIDTHS
from edgespec.control.prices import RunCosts
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.engines.sequence import CachedSequence
from edgespec.generation.decode import speculative
from edgespec.generation.run_state import Run
from edgespec.sampling import Sampler
from edgespec.sampling.acceptance import coupled
from edgespec.sampling.stopping import StopRules
from edgespec.types import Draft, TokenIds

SHORT_ANSWER = 8
Runner = Callable[[list[int]], float]


class Liar(Drafter):
    """Claims that every token is all but certain; `truth` knows the plain text and one token in ten is from it."""

    name = "liar"
    is_free = True

    def __init__(self, truth: list[int]) -> None:
        self._truth, self._rng = truth, np.random.default_rng(0)

    def begin(self, prompt_ids: TokenIds) -> None:
        self._start = prompt_ids.size

    def draft(self, request: DraftRequest) -> Draft:
        at = request.token_ids.size - self._start
        ids = [token if self._rng.random() < 0.1 else (token + 1) % 1000 for token in self._truth[at : at + 8]]
        return Draft.chain(ids[: request.max_tokens], evidence=[(4.0, 4.0, 0.0)] * min(len(ids), request.max_tokens))


class Bench:
    """The models of one run and the settings that take turns."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        common = {"engine": chosen.engine, "draft": chosen.draft, "threads": chosen.threads, "context_length": 1024}
        self.models = {"": edgespec.load(chosen.model, reproducible=False, **common)}
        if chosen.reproducible:
            self.models[" reproducible"] = edgespec.load(chosen.model, reproducible=True, **common)
        self.slow = None
        if chosen.slow_draft is not None:
            self.slow = edgespec.load(
                chosen.model, reproducible=False, **(common | {"draft": chosen.slow_draft}), drafter="model"
            )

    def close(self) -> None:
        for model in (*self.models.values(), *([self.slow] if self.slow else [])):
            model.close()

    def between_plain(self, settings: dict[str, Runner], prompts: Sequence[list[int]], turn: int) -> dict[str, float]:
        """Time of `plain` over that of each other setting, all prompts together.

        Plain decoding runs before and behind each of them: the pace of a machine changes by minutes. `turn`: of the
        order in which they run.
        """
        plain, others = settings["plain"], [name for name in settings if name != "plain"]
        taken: dict[str, float] = defaultdict(float)
        plainly: dict[str, float] = defaultdict(float)
        for index, ids in enumerate(prompts, turn):
            first = index % len(others)
            for name in others[first:] + others[:first]:
                before_s, own_s, behind_s = plain(ids), settings[name](ids), plain(ids)
                taken[name] += own_s
                plainly[name] += 0.5 * (before_s + behind_s)
        return {name: plainly[name] / taken[name] for name in others}

    def decode(self, model: Model, ids: list[int], sampling: Sampling, **options: object) -> float:
        # Nothing of the text is cached then, nor parked; what drafters know of earlier ones stays.
        model.generate([ids[0]], sampling, GenerateOptions(max_tokens=1, drafter="none"))
        model._executor.parked.clear()
        options = {"ignore_eos": True, "logprobs": False, **options}
        stats = model.generate(ids, sampling, GenerateOptions(**options)).stats  # type: ignore[arg-type]
        return stats.decode_s

    def lie(
        self, model: Model, ids: list[int], sampling: Sampling, max_tokens: int, controller: AutoController
    ) -> float:
        options = GenerateOptions(max_tokens=max_tokens, drafter="none", ignore_eos=True, logprobs=False)
        truth = list(model.generate(ids, sampling, options).token_ids)[1:]
        controller.drafters["liar"]._truth = truth  # type: ignore[attr-defined]
        run = Run(
            CachedSequence(model.target),
            np.array(ids, np.int32),
            Sampler(sampling, model.target.vocabulary.size),
            StopRules(frozenset(), (), max_tokens),
            logprobs=False,
        )
        for _ in speculative(run, controller, coupled):
            pass
        return run.stats.decode_s


@contextmanager
def fresh_start(chosen: argparse.Namespace) -> Iterator[Bench]:
    """Models loaded with an empty cache folder."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGESPEC_HOME"] = folder
        bench = Bench(chosen)
        try:
            yield bench
        finally:
            bench.close()


def settings_of(bench: Bench, temperature: float, tokens: int) -> dict[str, Runner]:
    sampling = Sampling(temperature=temperature, seed=1)
    found: dict[str, Runner] = {}
    for mode, model in bench.models.items():
        auto = partial(bench.decode, model, sampling=sampling, max_tokens=tokens)
        found["padded" if mode else "plain"] = partial(auto, drafter="none")
        found[f"auto{mode}"] = auto
    return found


def max_slowdown(chosen: argparse.Namespace, prompts: list[dict[str, str]]) -> None:
    found: dict[str, list[float]] = defaultdict(list)
    tried = {name: adversary for name, adversary in ADVERSARIES.items() if chosen.slow_draft or adversary is not slow}
    for repeat in range(chosen.repeats):
        for adversary, settings_and_prompts in tried.items():
            with fresh_start(chosen) as bench:
                if not found:
                    tell_costs(bench)
                texts = [bench.models[""].encode(prompt["text"], parse_special=True) for prompt in interleaved(prompts)]
                settings, asked = settings_and_prompts(bench, chosen.tokens, texts)
                for name, ratio in bench.between_plain(settings, asked, turn=repeat).items():
                    found[f"{adversary}, {name}"].append(ratio)
    for name, ratios in found.items():
        doubt = f" +- {np.std(ratios, ddof=1) / len(ratios) ** 0.5:.3f}" if len(ratios) > 1 else ""
        print(f"{name:48} {np.mean(ratios):.3f}{doubt}", flush=True)


Texts = list[list[int]]
Adversary = Callable[[Bench, int, Texts], tuple[dict[str, Runner], Texts]]  # of texts, the settings and prompts to run


def lying(bench: Bench, tokens: int, texts: Texts) -> tuple[dict[str, Runner], Texts]:
    model, greedy = bench.models[""], Sampling(temperature=0.0)
    liar = AutoController({"liar": Liar([])}, RunCosts(model.cost_curve, {}))
    plain = partial(bench.decode, model, sampling=greedy, drafter="none", max_tokens=tokens)
    return {"plain": plain, "auto": lambda ids: bench.lie(model, ids, greedy, tokens, liar)}, texts


def noise(bench: Bench, tokens: int, texts: Texts) -> tuple[dict[str, Runner], Texts]:
    rng, most = np.random.default_rng(0), min(bench.models[""].target.vocabulary.size, 4000)
    return settings_of(bench, 0.0, tokens), [rng.integers(0, most, 64).tolist() for _ in texts]


def hot(bench: Bench, tokens: int, texts: Texts) -> tuple[dict[str, Runner], Texts]:
    return settings_of(bench, 1.5, tokens), texts


def short(bench: Bench, tokens: int, texts: Texts) -> tuple[dict[str, Runner], Texts]:
    return settings_of(bench, 0.0, SHORT_ANSWER), texts * 3


def slow(bench: Bench, tokens: int, texts: Texts) -> tuple[dict[str, Runner], Texts]:
    assert bench.slow is not None
    auto = partial(bench.decode, bench.slow, sampling=Sampling(temperature=0.0), max_tokens=tokens)
    # Another copy of the target lies elsewhere in memory, which alone is worth a few percent.
    return {"plain": partial(auto, drafter="none"), "auto": auto}, texts


ADVERSARIES: dict[str, Adversary] = {
    "a drafter that lies": lying,
    "random tokens as text": noise,
    "temperature 1.5": hot,
    f"answers of {SHORT_ANSWER} tokens": short,
    "a slow draft": slow,
}


def interleaved(prompts: list[dict[str, str]]) -> list[dict[str, str]]:
    """The domains by turns."""
    rows = [[p for p in prompts if p["domain"] == domain] for domain in dict.fromkeys(p["domain"] for p in prompts)]
    return [row[index] for index in range(max(map(len, rows))) for row in rows if index < len(row)]


def tell_costs(bench: Bench) -> None:
    facts, curve, costs = bench.models[""].target.facts, bench.models[""].cost_curve, bench.models[""].draft_costs
    print(f"{facts.name}, {facts.threads} threads; cost by width", end=" ")
    print("  ".join(f"{w}: {curve.at(w) / curve.at(1):.2f}" for w in WIDTHS), end="; draft token ")
    slow = {} if bench.slow is None else {"slow draft": bench.slow.draft_costs["model"]}
    print(", ".join(f"{name} {cost.token_s / curve.at(1):.3f}" for name, cost in {**costs, **slow}.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--slow-draft", type=Path, help="a draft file that is slower than the target")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--no-reproducible", dest="reproducible", action="store_false")
    parser.add_argument("--repeats", type=int, default=3, help="fresh starts against the adversaries")
    chosen = parser.parse_args()
    prompts = [json.loads(line) for line in chosen.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    print(f"{chosen.model}: {len(prompts)} prompts, {chosen.tokens} tokens")
    max_slowdown(chosen, prompts)


if __name__ == "__main__":
    main()
