"""How much acceptance a draft temperature other than the target's brings, by factor, computed rather than sampled.

    python scripts/lab/measure_draft_temperature.py [--model demo] [--temps 0.8 1.2] [--factors 0.6 ... 1.2] [--seeds N]

The target writes texts; at every position of them the distributions p of the target and q of the draft, sampled at the
target's temperature times a factor, are compared: the rejection rule accepts a drafted token with probability sum
min(p, q), the coupled rule one with sum over v of 1 / sum over w of max(p(w) / p(v), q(w) / q(v)), which is how often
two races with the same noise are won by the same token. The last line is Brier's score of q, the sum of 2 p q - q q:
it could be learnt from the target's tokens alone, and it prefers other factors than acceptance does. Errors are those
of the mean over positions.
"""

from __future__ import annotations

import argparse
import dataclasses

import numpy as np
from numpy.typing import NDArray

import edgespec
from edgespec import GenerateOptions, Model, Sampling
from edgespec.engines.base import Engine
from edgespec.loading.sample_prompts import PROMPTS
from edgespec.sampling import Sampler
from edgespec.types import Batch, Distribution, Logits, TokenIds

UNFILTERED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def rows(engine: Engine, token_ids: TokenIds) -> Logits:
    """Logits [n, vocabulary] behind every one of `token_ids` [n], read afresh."""
    engine.rollback(0)
    step = engine.widest_pass
    parts = [engine.forward(Batch.chain(token_ids[at : at + step])).copy() for at in range(0, token_ids.size, step)]
    return np.concatenate(parts)


def dense(distribution: Distribution, size: int) -> NDArray[np.float64]:
    found = np.zeros(size)
    found[distribution.token_ids] = distribution.probs
    return found


def agreement(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """The probability that p and q [n] draw the same token from the same exponential noise."""
    either = (p > 0) | (q > 0)
    ours, theirs = p[either], q[either]
    with np.errstate(divide="ignore"):
        order = (ours / theirs).argsort()  # the greater of two ratios is p's for all tokens behind one's own place
    ours, theirs = ours[order], theirs[order]
    above, below = ours.sum() - ours.cumsum(), theirs.cumsum()
    shared = (ours > 0) & (theirs > 0)
    worse = above[shared] / ours[shared] + below[shared] / theirs[shared]
    return float((1.0 / worse).sum())


def measure(model: Model, settings: Sampling, factors: list[float], num_seeds: int, tokens: int) -> NDArray[np.float64]:
    """[positions, factors, 3]: acceptance under the rejection and the coupled rule, the expected Brier score."""
    found = []
    size = model.target.vocabulary.size
    for seed in range(num_seeds):
        for prompt in PROMPTS:
            sampling = dataclasses.replace(settings, seed=seed)
            samplers = [
                Sampler(dataclasses.replace(sampling, temperature=sampling.temperature * factor), size)
                for factor in (1.0, *factors)
            ]
            ids = model.encode_chat([{"role": "user", "content": prompt.text}])
            options = GenerateOptions(max_tokens=tokens, ignore_eos=True, logprobs=False)
            text = np.array([*ids, *model.generate(ids, sampling, options).token_ids], np.int32)
            with model.measuring() as (target, draft):
                assert draft is not None, "a pair with a draft model is needed"
                ours, theirs = rows(target, text)[len(ids) :], rows(draft, text)[len(ids) :]
            for one, other in zip(ours, theirs, strict=True):
                p = dense(samplers[0].distribution(one, text), size)
                drafted = [dense(sampler.distribution(other, text), size) for sampler in samplers[1:]]
                found.append(
                    [(float(np.minimum(p, q).sum()), agreement(p, q), float(2 * p @ q - q @ q)) for q in drafted]
                )
    return np.array(found)


def tell(title: str, found: NDArray[np.float64], factors: list[float]) -> None:
    print(f"{title}: {len(found)} positions")
    unchanged = factors.index(1.0)
    for rule, name in enumerate(("rejection", "coupled", "Brier")):
        best_each = found[:, :, rule].max(axis=1).mean()
        parts = []
        for place, factor in enumerate(factors):
            gain = found[:, place, rule] - found[:, unchanged, rule]
            error = gain.std(ddof=1) / np.sqrt(len(gain))
            parts.append(f"{factor:g}: {found[:, place, rule].mean():.4f} ({gain.mean():+.4f} +- {error:.4f})")
        print(f"  {name:10}" + "  ".join(parts) + f"  best of them at each position: {best_each:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--temps", type=float, nargs="+", default=[0.8, 1.2])
    parser.add_argument("--factors", type=float, nargs="+", default=[0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2])
    parser.add_argument("--seeds", type=int, default=14)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--unfiltered", action="store_true", help="without top-k, top-p and min-p")
    chosen = parser.parse_args()
    filters = UNFILTERED if chosen.unfiltered else {}
    with edgespec.load(chosen.model, engine=chosen.engine, reproducible=False) as model:
        for temperature in chosen.temps:
            settings = Sampling(temperature=temperature, **filters)  # type: ignore[arg-type]
            found = measure(model, settings, chosen.factors, chosen.seeds, chosen.tokens)
            tell(f"T={temperature:g}{', unfiltered' if filters else ''}", found, chosen.factors)


if __name__ == "__main__":
    main()
