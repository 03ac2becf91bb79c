"""What w8a8 loses of a model and what a pass costs, by the matrices that are kept in groups: one run, by turns.

    python scripts/lab/measure_groups.py MODEL.gguf --data DATA [--groups none down_proj lm_head,down_proj ...]
    python scripts/lab/measure_groups.py --graphs FOLDER FOLDER ...

DATA is the folder with spec_bench_dev.jsonl.xz, whose prompts are the text. The loss is the mean KL to the float32
graph of the same file; costs are ratios to the first of `--groups`, each pass over cached text next to the same pass of
that one. With `--graphs` only costs are measured, of graphs that are there already.
"""

from __future__ import annotations

import argparse
import json
import lzma
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, perf_counter

import numpy as np

from edgespec.bench.prompts import SPEC_BENCH_FILE
from edgespec.engines.onnx import OnnxEngine
from edgespec.export.onnx.from_gguf import convert_gguf, open_gguf
from edgespec.export.request import parse_grouped
from edgespec.formats.onnx import MODEL
from edgespec.types import Batch

CHOICES = ("none", "down_proj", "lm_head", "lm_head,down_proj", "lm_head,down_proj,gate_proj,up_proj")
WIDTHS = (1, 2, 4, 8, 16)
CACHED, ROWS, CUT = 128, 50, 150
EXACT = "fp32"


def texts(folder: Path, count: int) -> list[str]:
    with lzma.open(folder / SPEC_BENCH_FILE, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    long = [record["turns"][0] for record in records if record["category"] in ("summarization", "rag")]
    return long[:: max(len(long) // count, 1)][:count]


def made(source: Path, folder: Path, choices: list[str]) -> Iterator[Path]:
    """The graphs: float32, and w8a8 with each choice in groups."""
    model = open_gguf(source)
    for choice in (EXACT, *choices):
        (folder / choice).mkdir()
        is_exact = choice == EXACT
        grouped = () if is_exact else parse_grouped(choice)
        yield convert_gguf(model, folder / choice, EXACT if is_exact else "w8a8", grouped=grouped)


def opened(path: Path) -> OnnxEngine:
    return OnnxEngine.load(path, context_length=512, reproducible=False)


def log_probs(path: Path, asked: list[str]) -> np.ndarray:
    """[tokens of all texts, vocabulary]"""
    rows = []
    with opened(path) as engine:
        for text in asked:
            ids = engine.vocabulary.encode(text)[:CUT]
            engine.rollback(0)
            rows += [engine.forward(Batch.chain(ids[at : at + ROWS])).copy() for at in range(0, len(ids), ROWS)]
    scores = np.concatenate(rows).astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    found: np.ndarray = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return found


def tell_losses(paths: list[Path], asked: list[str]) -> None:
    exact = log_probs(paths[0], asked)
    for path in paths[1:]:
        found = log_probs(path, asked)
        losses = (np.exp(exact) * (exact - found)).sum(axis=1)
        agreement = (exact.argmax(axis=1) == found.argmax(axis=1)).mean()
        print(
            f"{path.parent.name:36} mean KL {losses.mean():.4f} +- {losses.std() / losses.size**0.5:.4f} nats, "
            f"greedy agreement {agreement:.3f}, {losses.size} tokens",
            flush=True,
        )


def tell_costs(paths: list[Path], seconds: float) -> None:
    """Median pass times, and their ratios to those of the first graph with the standard error of the ratios."""
    engines = {path: opened(path) for path in paths}
    ids = np.random.default_rng(0).integers(10, min(e.vocabulary.size for e in engines.values()) // 2, CACHED).tolist()
    taken: dict[tuple[Path, int], list[float]] = defaultdict(list)
    for engine in engines.values():
        engine.forward(Batch.chain(ids))
    began_s = monotonic()
    while monotonic() - began_s < seconds:
        for width in WIDTHS:
            for path in paths if len(taken[paths[0], width]) % 2 else reversed(paths):
                taken[path, width].append(pass_s(engines[path], ids[:width]))
    for path in paths:
        row = []
        for width in WIDTHS:
            ratios = np.array(taken[path, width]) / np.array(taken[paths[0], width])
            spread = np.subtract(*np.percentile(ratios, (75, 25))) / 1.349  # outliers are passes that were interrupted
            row.append(f"{np.median(ratios):.3f} +- {1.25 * spread / ratios.size**0.5:.3f}")
        own_ms = 1000 * float(np.median(taken[path, 1]))
        print(f"{path.parent.name:36} one token {own_ms:.1f} ms, over {WIDTHS}: {', '.join(row)}", flush=True)


def pass_s(engine: OnnxEngine, ids: list[int]) -> float:
    """The second of two passes: the first brings the weights of this graph back into the caches."""
    for _ in range(2):
        engine.rollback(CACHED)
        started_s = perf_counter()
        engine.forward(Batch.chain(ids))
        taken_s = perf_counter() - started_s
    engine.rollback(CACHED)
    return taken_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--groups", nargs="+", default=CHOICES, metavar="LIST", help="as --in-groups of the export")
    parser.add_argument("--graphs", type=Path, nargs="+", default=[], metavar="FOLDER")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60, help="of timed passes (default %(default)s)")
    chosen = parser.parse_args()
    if chosen.graphs:
        tell_costs([folder / MODEL for folder in chosen.graphs], chosen.seconds)
    elif chosen.model is None or chosen.data is None:
        parser.error("give MODEL.gguf and --data, or --graphs")
    else:
        with tempfile.TemporaryDirectory() as folder:
            paths = list(made(chosen.model, Path(folder), list(chosen.groups)))
            tell_losses(paths, texts(chosen.data, chosen.texts))
            tell_costs(paths[1:], chosen.seconds)


if __name__ == "__main__":
    main()
