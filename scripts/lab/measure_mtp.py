"""What the layer of a hybrid that predicts a further token gains, by how often it is right: on weights made for that.

    python scripts/lab/measure_mtp.py [--shares 1 0.8 0.6 0] [--layers 24] [--tokens 120] [--rounds 3]

The target has the shape of Qwen3.5-0.8B without its vocabulary and writes its tokens in a cycle (`hybrid_gguf`), Q4_0.
Plain decoding and the default take turns; a ratio is that of the least processor time of one thread, reading the
prompt included, so that other load on the machine matters little. Texts and log probabilities have to be the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from time import process_time

import gguf

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import edgespec
from edgespec import GenerateOptions, Result, Sampling
from hybrid_gguf import HybridShape, cycle_tensors, write_qwen35

SHAPE = HybridShape(
    width=1024,
    hidden=3584,
    heads=8,
    head_size=256,
    rotated=64,
    state_heads=16,
    key_heads=16,
    state_size=128,
    merges=700,
    weights=gguf.GGMLQuantizationType.Q4_0,
)


def timed(model: edgespec.Model, options: GenerateOptions) -> tuple[float, Result]:
    model.forget()
    started_s = process_time()
    found = model.generate([0, 1, 2], Sampling(temperature=0), options)
    return process_time() - started_s, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.8, 0.6, 0.0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    shape = replace(SHAPE, layers=given.layers)
    options = GenerateOptions(max_tokens=given.tokens, ignore_eos=True, logprobs=True)
    for share in given.shares:
        with tempfile.TemporaryDirectory() as folder:
            tensors, _ = cycle_tensors(shape, share)
            path = write_qwen35(Path(folder) / "cycle.gguf", shape, has_mtp=True, tensors=tensors)
            least: dict[str, float] = {}
            with edgespec.load(path, threads=1) as model:
                for _ in range(given.rounds):
                    results = {}
                    for drafter in ("none", "auto"):
                        took_s, results[drafter] = timed(model, replace(options, drafter=drafter))
                        least[drafter] = min(took_s, least.get(drafter, took_s))
                    plain, drafted = results["none"], results["auto"]
                    assert (plain.token_ids, plain.logprobs) == (drafted.token_ids, drafted.logprobs)
        stats, ratio = drafted.stats, least["none"] / least["auto"]
        print(
            f"right {share:.0%}: accepted {stats.acceptance_rate:.2f}, {stats.mean_accepted_length:.2f} tokens a pass, "
            f"{ratio:.2f} times as fast as plain decoding ({1000 * least['none'] / given.tokens:.1f} ms a token)",
            flush=True,
        )


if __name__ == "__main__":
    main()
