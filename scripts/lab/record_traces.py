"""Record what a draft model would have proposed along real texts, for the controller's simulations.

    python scripts/lab/record_traces.py --out tests/data/traces.npz

Every built-in prompt is answered by plain decoding at each temperature; at each position of the answer the pair's draft
model then drafts a chain under the same noise. Kept are the tokens, how many of each chain agree with the answer, and
the evidence of every drafted token in bytes. The texts do not depend on any controller.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import edgespec
from edgespec import GenerateOptions, Sampling
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.loading.drafts import PROMPTS
from edgespec.sampling.sampler import Sampler
from edgespec.types import TokenIds

CHAIN = 12  # tokens drafted from each position
LOWEST, STEP = -4.0, 1 / 32  # of the scores that a byte holds


def chains(drafter: Drafter, token_ids: TokenIds, start: int, sampler: Sampler) -> tuple[np.ndarray, np.ndarray]:
    """(tokens that agree [n], evidence [n, CHAIN, scores] in bytes) of drafts from `start` on and behind it."""
    drafter.begin(token_ids[:start])
    agreed, evidence = [], []
    for position in range(start, token_ids.size):
        draft = drafter.draft(DraftRequest(token_ids[:position], CHAIN, sampler))
        told = token_ids[position : position + draft.num_tokens]
        differs = np.flatnonzero(told != draft.token_ids[: told.size])
        agreed.append(int(differs[0]) if differs.size else told.size)
        scores = np.array(draft.evidence, np.float64)
        if draft.num_tokens < CHAIN:  # a chain ends behind an end token; what would follow is as doubtful as can be
            scores = np.vstack((scores, np.full((CHAIN - draft.num_tokens, scores.shape[1]), LOWEST)))
        evidence.append(np.clip(np.round((scores - LOWEST) / STEP), 0, 255).astype(np.uint8))
    return np.array(agreed, np.uint8), np.array(evidence)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--tokens", type=int, default=192, help="longest answer")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    kept: dict[str, np.ndarray] = {}
    with edgespec.load(chosen.model, engine=chosen.engine, reproducible=True) as model:
        for temperature in chosen.temperatures:
            for number, prompt in enumerate(PROMPTS):
                ids = model.encode_chat([{"role": "user", "content": prompt.text}])
                sampling = Sampling(temperature=temperature, seed=number)
                options = GenerateOptions(max_tokens=chosen.tokens, drafter="none", ignore_eos=True)
                answer = model.generate(ids, sampling, options)
                text = np.array([*ids, *answer.token_ids], np.int32)
                sampler = Sampler(sampling, model.target.vocabulary.size)
                agreed, evidence = chains(model.drafters.drafter("model"), text, len(ids) + 1, sampler)
                name = f"{prompt.domain}.{temperature}.{number}"
                kept[f"{name}.text"], kept[f"{name}.prompt"] = text.astype(np.uint32), np.array(len(ids))
                kept[f"{name}.agreed"], kept[f"{name}.evidence"] = agreed, evidence
                print(f"{name:<20} {len(answer.token_ids):>4} tokens, {agreed.mean():.2f} of a chain agree")
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(chosen.out, allow_pickle=False, **kept)
    print(f"{chosen.out}: {chosen.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
