"""What the types of a KV cache cost: bytes, and quality of the target's text.

    python scripts/lab/measure_cache_types.py MODEL --text FILE.jsonl.xz [--engine onnx] [--windows 4]
    python scripts/lab/measure_cache_types.py MODEL --text FILE.jsonl.xz [--engine onnx] --draft FILE [--prompts 8]

The target reads `--text` (records with `prompt` or `turns`) in windows of 512 tokens; perplexity, the share of tokens
whose most likely next token is that of the first type's, and the mean KL divergence from it, with standard errors over
windows.

With `--draft` it measures acceptance instead: answers to `--prompts` of the texts without temperature, 4 tokens drafted
by that model in every round, and the share of them that the target accepts. The draft's cache alone, the target's alone
and both have each type; changes against the first type in both are prompt by prompt, with standard errors over prompts.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import edgespec
from edgespec.types import Batch

WINDOW, PIECE, CONTEXT = 512, 32, 2048
MOST_TEXT, MOST_PROMPT = 20_000, 1000  # characters
DRAFT_LENGTH, NEW_TOKENS = 4, 96
TYPES = {"llamacpp": ("f16", "q8_0", "q4_0"), "onnx": ("f32", "int8")}


@dataclass
class Quality:
    """Per window: mean negative log likelihood in nats, share of equal choices, mean KL divergence in nats."""

    nll: list[float]
    agrees: list[float]
    divergence: list[float]


def texts(path: Path) -> list[str]:
    """The prompts, or the first turns, of a file's records."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return [record["prompt"] if "prompt" in record else record["turns"][0] for record in records]


def opened(model: str, engine: str, kind: str, **options: Any) -> edgespec.Model:
    kinds = {} if kind == "f32" else {"cache_type_k": kind, "cache_type_v": kind}
    given: dict[str, Any] = {
        "engine": engine,
        "context_length": CONTEXT,
        "threads": 1,
        "reproducible": False,
        **kinds,
        **options,
    }
    return edgespec.load(model, **given)


def log_probs(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """[rows, vocabulary] in nats."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    found: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


def quality(model: edgespec.Model, text: str, windows: int, reference: Path, *, is_first: bool) -> Quality:
    ids = np.array(model.encode(text)[: windows * WINDOW], np.int32)
    found = Quality([], [], [])
    with model.measuring() as (engine, _):
        shape = (ids.size, engine.vocabulary.size)
        kept = np.memmap(reference, np.float16, "w+" if is_first else "r", shape=shape)
        for start in range(0, ids.size - WINDOW + 1, WINDOW):
            engine.rollback(0)
            nll, agrees, divergence = [], [], []
            for at in range(start, start + WINDOW, PIECE):
                rows = log_probs(np.array(engine.forward(Batch.chain(ids[at : at + PIECE])), np.float32))
                if is_first:
                    kept[at : at + PIECE] = rows
                true = np.array(kept[at : at + PIECE], np.float32)
                following = ids[at + 1 : min(at + PIECE + 1, start + WINDOW)]
                nll += (-rows[np.arange(following.size), following]).tolist()
                agrees += (rows.argmax(axis=1) == true.argmax(axis=1)).tolist()
                divergence += (np.exp(true) * (true - rows)).sum(axis=1).tolist()
            for store, values in zip(
                (found.nll, found.agrees, found.divergence), (nll, agrees, divergence), strict=True
            ):
                store.append(float(np.mean(values)))
    return found


def error_of(values: list[float]) -> float:
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def accepted(model: edgespec.Model, prompts: list[str]) -> list[float]:
    """The acceptance rate of each prompt."""
    options = edgespec.GenerateOptions(max_tokens=NEW_TOKENS)
    greedy = edgespec.Sampling(temperature=0)
    found = []
    for prompt in prompts:
        stats = model.chat([{"role": "user", "content": prompt}], greedy, options).result().stats
        found.append(stats.acceptance_rate)
    return found


def show_acceptance(model: str, draft: Path, engine: str, prompts: list[str]) -> None:
    plain, *others = TYPES[engine]
    print("target  draft   acceptance     change", flush=True)
    pairs = (pair for kind in others for pair in ((plain, kind), (kind, plain), (kind, kind)))
    first: list[float] = []
    for target_kind, draft_kind in ((plain, plain), *pairs):
        kinds = {} if draft_kind == "f32" else {"draft_cache_type_k": draft_kind, "draft_cache_type_v": draft_kind}
        how = {"draft": draft, "drafter": "model", "draft_length": DRAFT_LENGTH, **kinds}
        with opened(model, engine, target_kind, **how) as pair:
            rates = accepted(pair, prompts)
        first = first or rates
        change = np.array(rates) - np.array(first)
        print(
            f"{target_kind:6}  {draft_kind:6}  {np.mean(rates):.4f}±{error_of(rates):.4f}  {np.mean(change):+.4f}±"
            f"{error_of(change.tolist()):.4f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--engine", default="llamacpp", choices=TYPES)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--prompts", type=int, default=8)
    given = parser.parse_args()
    if given.draft is not None:
        short = [text for text in texts(given.text) if len(text) < MOST_PROMPT]
        prompts = short[:: max(len(short) // given.prompts, 1)][: given.prompts]  # of all kinds
        show_acceptance(given.model, given.draft, given.engine, prompts)
        return
    text = "\n\n".join(sorted(texts(given.text), key=len)[-200:])[:MOST_TEXT]
    first: Quality | None = None
    print("type  bytes/token  perplexity     change        agrees        KL (nats)")
    with tempfile.TemporaryDirectory() as folder:
        for kind in TYPES[given.engine]:
            with opened(given.model, given.engine, kind, drafter="none") as model:
                found = quality(model, text, given.windows, Path(folder) / "first", is_first=first is None)
                per_token = model.target.facts.kv_bytes_per_token
            first = first or found
            change = np.array(found.nll) - np.array(first.nll)
            print(
                f"{kind:5} {per_token:10}  {math.exp(np.mean(found.nll)):10.3f}  {np.mean(change):+.4f}±"
                f"{error_of(change.tolist()):.4f}  {np.mean(found.agrees):.4f}±{error_of(found.agrees):.4f}  "
                f"{np.mean(found.divergence):.5f}±{error_of(found.divergence):.5f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
