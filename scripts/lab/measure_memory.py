"""Compares the memory that edgespec plans with what a child process takes, for pairs, contexts, caches and drafters.

    python scripts/lab/measure_memory.py models/demo=demo FOLDER=NAME ... [--only TEXT] [--most-s 900]
    python scripts/lab/measure_memory.py models/demo=demo FOLDER=NAME ... --held-out 24 [--seed 1]

Each child loads one combination, fills its context, drafts and chats; meanwhile its /proc/PID/smaps_rollup is read.
Measured is the peak of its own pages, those of the process that renders its template included, and of those of files
that are resident, counted in full although other processes may share them; PSS, which divides shared pages, stands
beside it. A plan is right within 5% or 30 MB, and low when it is more than 3% under the measured peak. `--held-out N`
draws N combinations at random from contexts, types of caches and drafters that the formulas were never corrected with,
as evenly from each engine of each pair as N allows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from edgespec.config.options import LoadOptions
from edgespec.loading.registry import resolve
from edgespec.loading.requirements import resolve_pair

RIGHT_SHARE, RIGHT_BYTES, LOW_SHARE = 0.05, 30_000_000, 0.03
EVERY_S, CHILD_S = 0.02, 900.0
CONTEXTS = (512, 2048)
# Of --held-out; of each cache the keys' and the values' type, and None for the plain one.
OTHER_CONTEXTS = (768, 1024, 1536, 3000, 4096)
OTHER_CACHES: dict[str, tuple[tuple[str | None, str | None], ...]] = {
    "llamacpp": ((None, None), ("q8_0", "q8_0"), ("f32", "f32"), ("q8_0", "f16"), ("q4_0", "q4_0")),
    "onnx": ((None, None), ("int8", "int8")),
}
NEW_TOKENS = 24
MOST_CHARACTERS = 6  # of a token, on average
PARTS = ("own", "own_peak"), ("mapped", "file_peak")
TEXTS = Path(__file__).resolve().parents[2] / "docs"  # prose: the rows of an embedding that occur in it are mapped


@dataclass(frozen=True)
class Case:
    """One combination; `options` for `edgespec.load`."""

    name: str
    options: dict[str, Any]

    def __str__(self) -> str:
        shown = (
            f"{value}" for key, value in self.options.items() if key not in ("model", "threads") and value is not None
        )
        return " ".join((self.name, *shown))


def cases(pairs: dict[str, str]) -> Iterator[Case]:
    for path, name in pairs.items():
        engines = _engines(path)
        for engine, context, is_small, drafter in itertools.product(engines, CONTEXTS, (False, True), ("none", "auto")):
            options: dict[str, Any] = {"model": path, "engine": engine, "context_length": context, "drafter": drafter}
            options["threads"] = 1  # on a busy machine more wait for each other; memory is the same
            if is_small:
                kind = "int8" if engine == "onnx" else "q8_0"
                options |= {"cache_type_k": kind, "cache_type_v": kind}
            yield Case(name, options)


def held_out(pairs: dict[str, str], number: int, seed: int, most_context: int) -> Iterator[Case]:
    """`number` cases, the engines of the pairs in turn."""
    draw = random.Random(seed)
    engines = [(path, engine) for path in pairs for engine in _engines(path)]
    seen: set[str] = set()
    for path, engine in itertools.islice(itertools.cycle(engines), 50 * number):
        pair = resolve(path, engine=engine, check_hashes=False)
        drafters = ("none", "ngram", "lookahead") if pair.draft is None else ("none", "ngram", "model", "tree")
        keys, values = draw.choice(OTHER_CACHES[engine])
        contexts = [size for size in OTHER_CONTEXTS if size <= min(pair.context_length or size, most_context)]
        context, drafter = draw.choice(contexts), draw.choice(drafters)
        options: dict[str, Any] = {"model": path, "engine": engine, "context_length": context, "drafter": drafter}
        options |= {"cache_type_k": keys, "cache_type_v": values} if keys else {}
        if drafter in ("model", "tree"):
            options |= {"draft_context_length": draw.choice((512, context))}
        case = Case(pairs[path], {**options, "threads": 1})
        if str(case) not in seen:
            seen.add(str(case))
            yield case
        if len(seen) == number:
            return


def _engines(path: str) -> tuple[str, ...]:
    return resolve_pair(LoadOptions(model=path), check_hashes=False).engines


def run_child(options: dict[str, Any]) -> None:
    """In the child: load, fill the context, draft, and print the plan."""
    import edgespec

    with edgespec.load(**options) as model:
        memory = model.memory
        assert memory is not None
        most = model.context_length - NEW_TOKENS - 1
        text = " ".join(path.read_text(encoding="utf-8") for path in sorted(TEXTS.glob("*.md")))
        words = model.encode(text[: most * MOST_CHARACTERS])  # as long as such a prompt: encoding takes memory too
        prompt = (words * (most // len(words) + 1))[:most]
        chosen = edgespec.GenerateOptions(max_tokens=NEW_TOKENS, ignore_eos=True)
        if model.target.vocabulary.chat_template:  # which a child process renders
            question = [{"role": "user", "content": "Hello"}]
            model.chat(question, options=edgespec.GenerateOptions(max_tokens=1)).result()
        model.generate(prompt, options=chosen)
        plan = memory.plan
        planned = {"own": plan.own_bytes, "mapped": plan.mapped_bytes, "planned": plan.total_bytes}
        print(json.dumps({**planned, "peak": memory.peak_rss_bytes}))


def measured(case: Case, home: str) -> dict[str, float] | str:
    """Peaks of a child and its plan, in bytes, or why there are none."""
    environment = {**os.environ, "EDGESPEC_HOME": home}
    command = [sys.executable, __file__, "--child", json.dumps(case.options)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    peak = {"pss": 0.0, "own_peak": 0.0, "file_peak": 0.0}
    whole = 0  # with the child of the child that renders chat templates
    looks = 0
    while child.poll() is None:
        sizes = _rollup(child.pid)
        peak["pss"] = max(peak["pss"], sizes.get("Pss", 0))
        peak["own_peak"] = max(peak["own_peak"], sizes.get("Anonymous", 0))
        whole = max(whole, sizes.get("Rss", 0))
        peak["file_peak"] = max(peak["file_peak"], sizes.get("Rss", 0) - sizes.get("Anonymous", 0))
        looks += 1
        if looks * EVERY_S > CHILD_S:  # of its own time: a machine that stops both for a while is not counted
            child.kill()
            return "took too long"
        sleep(EVERY_S)
    output, errors = child.communicate()
    if child.returncode:
        return (errors.strip().splitlines() or ["failed"])[-1]
    found = {**peak, **json.loads(output.splitlines()[-1])}
    return {**found, "peak": max(whole, found["peak"])}


def _rollup(process: int) -> dict[str, int]:
    """Of a process; of its children, which map the same files, what is their own."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return {}
    fields = (line.split() for line in lines if line.endswith("kB"))
    found = {words[0].rstrip(":"): int(words[1]) << 10 for words in fields}
    for child in children:
        own = _rollup(int(child)).get("Anonymous", 0)
        found = {name: size + own if name in ("Rss", "Pss", "Anonymous") else size for name, size in found.items()}
    return found


def judged(planned: float, peak: float) -> str:
    if planned < (1 - LOW_SHARE) * peak:
        return "low"
    return "right" if abs(planned - peak) <= max(RIGHT_SHARE * peak, RIGHT_BYTES) else "high"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", metavar="PATH=NAME")
    parser.add_argument("--only", default="", help="cases whose description contains this")
    parser.add_argument("--held-out", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most-context", type=int, default=OTHER_CONTEXTS[-1], help="of --held-out, in tokens")
    parser.add_argument("--most-s", type=float, default=900.0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        run_child(json.loads(given.child))
        return
    pairs = dict(pair.rpartition("=")[::2] for pair in given.pairs)
    counts: Counter[str] = Counter()
    end_s = monotonic() + given.most_s
    print(f"{'case':58} {'planned':>8} {'peak':>8} {'PSS':>8} {'own':>12} {'mapped':>12}  verdict (MB)")
    with tempfile.TemporaryDirectory() as home:
        chosen = held_out(pairs, given.held_out, given.seed, given.most_context) if given.held_out else cases(pairs)
        for case in chosen:
            if not all(word in str(case).split() for word in given.only.split()):
                continue
            found = "not run: out of time" if monotonic() > end_s else measured(case, home)
            if isinstance(found, str):
                counts["no figure"] += 1
                print(f"{case!s:58} {found}", flush=True)
                continue
            planned, peak = found["planned"], found["peak"]
            verdict = judged(planned, peak)
            counts[verdict] += 1
            sizes = (planned, peak, found["pss"])
            parts = (f"{found[a] / 1e6:.0f}/{found[b] / 1e6:.0f}" for a, b in PARTS)
            columns = (*(f"{size / 1e6:8.0f}" for size in sizes), *(f"{part:>12}" for part in parts), verdict)
            print(f"{case!s:58}", *columns, flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
