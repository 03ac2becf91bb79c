"""Compares the memory that edgespec plans with what a child process takes, or loads pairs under many budgets.

    python scripts/lab/measure_memory.py models/demo=demo FOLDER=NAME ... [--cases 24] [--seed 1] [--most-s 900]
    python scripts/lab/measure_memory.py models/demo=demo ... --budgets 50 [--engine NAME]

Each child loads one combination, fills its context, drafts and chats; meanwhile its /proc/PID/smaps_rollup is read.
Measured is the peak of its own pages, those of the process that renders its template included, and of those of files
that are resident, counted in full although other processes may share them; PSS, which divides shared pages, stands
beside it. A plan is right within 5% or 30 MB, and low when it is more than 3% under the measured peak. The combinations
are drawn from contexts, types of caches and drafters that the formulas were never corrected with, as evenly from each
engine of each pair as their number allows.

With --budgets the children get as many budgets (`--memory N`), from too small to plenty. Each must run and stay within
its own, or refuse in one line before anything is loaded; one that fails in another way or takes more is listed.
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
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from edgespec.config.options import LoadOptions
from edgespec.errors import CapabilityError
from edgespec.loading.registry import resolve
from edgespec.loading.requirements import resolve_pair
from edgespec.memory.fit import fit
from edgespec.memory.plan import Room

RIGHT_SHARE, RIGHT_BYTES, LOW_SHARE = 0.05, 30_000_000, 0.03
EVERY_S, CHILD_S = 0.02, 900.0
MIB = 1 << 20
CONTEXTS = (768, 1024, 1536, 3000, 4096)
# Of each cache the keys' and the values' type, and None for the plain one.
CACHES: dict[str, tuple[tuple[str | None, str | None], ...]] = {
    "llamacpp": ((None, None), ("q8_0", "q8_0"), ("f32", "f32"), ("q8_0", "f16"), ("q4_0", "q4_0")),
    "onnx": ((None, None),),
}
NEW_TOKENS = 24
MOST_CHARACTERS = 6  # of a token, on average
PARTS = ("own", "own_peak"), ("mapped", "file_peak")
REFUSED = 2  # the exit code of a child whose load was refused
TEXTS = Path(__file__).resolve().parents[2] / "docs"  # prose: the rows of an embedding that occur in it are mapped


# -- a child that takes memory


@dataclass
class Ended:
    """How a child ended, its peaks in bytes, and what it told."""

    code: int
    peak: dict[str, float]
    told: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def run_child(options: dict[str, Any]) -> int:
    """In the child: load, fill the context, draft, chat, and print the plan."""
    import edgespec

    try:
        with edgespec.load(**options) as model:
            memory = model.memory
            assert memory is not None
            most = model.context_length - NEW_TOKENS - 1
            text = " ".join(path.read_text(encoding="utf-8") for path in sorted(TEXTS.glob("*.md")))
            words = model.encode(text[: most * MOST_CHARACTERS])  # as long as such a prompt: encoding takes memory too
            prompt = (words * (most // len(words) + 1))[:most]
            if model.target.vocabulary.chat_template:  # which a child process renders
                question = [{"role": "user", "content": "Hello"}]
                model.chat(question, options=edgespec.GenerateOptions(max_tokens=1)).result()
            model.generate(prompt, options=edgespec.GenerateOptions(max_tokens=NEW_TOKENS, ignore_eos=True))
            plan = memory.plan
            planned = {"own": plan.own_bytes, "mapped": plan.mapped_bytes, "planned": plan.total_bytes}
            given_up = [each.what for each in memory.given_up]
            told = {**planned, "peak": memory.peak_rss_bytes, "context": model.context_length, "given_up": given_up}
            print(json.dumps(told))
    except CapabilityError as exc:
        print(exc, file=sys.stderr)
        return REFUSED
    return 0


def run(options: dict[str, Any], home: str) -> Ended:
    command = [sys.executable, __file__, "--child", json.dumps(options)]
    pipes: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    child = subprocess.Popen(command, **pipes, text=True, env={**os.environ, "EDGESPEC_HOME": home})
    peak = {"pss": 0.0, "own_peak": 0.0, "file_peak": 0.0, "whole": 0.0}
    looks = 0
    while child.poll() is None:
        sizes = _rollup(child.pid)
        own, whole = sizes.get("Anonymous", 0), sizes.get("Rss", 0)
        seen = {"pss": sizes.get("Pss", 0), "own_peak": own, "file_peak": whole - own, "whole": whole}
        peak = {name: max(size, seen[name]) for name, size in peak.items()}
        looks += 1
        if looks * EVERY_S > CHILD_S:  # of its own time: a machine that stops both for a while is not counted
            child.kill()
            child.communicate()
            return Ended(1, peak, error="took too long")
        sleep(EVERY_S)
    output, errors = child.communicate()
    lines = errors.strip().splitlines()
    if child.returncode:
        one_line = child.returncode != REFUSED or len(lines) == 1
        return Ended(child.returncode if one_line else 1, peak, error=(lines or ["failed"])[-1])
    return Ended(0, peak, json.loads(output.splitlines()[-1]))


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


# -- plans beside peaks


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


def cases(pairs: dict[str, str], number: int, seed: int, most_context: int) -> Iterator[Case]:
    """`number` cases, the engines of the pairs in turn."""
    draw = random.Random(seed)
    engines = [(path, engine) for path in pairs for engine in _engines(path)]
    seen: set[str] = set()
    for path, engine in itertools.islice(itertools.cycle(engines), 50 * number):
        pair = resolve(path, engine=engine)
        drafters = ("none", "ngram", "lookahead") if pair.draft is None else ("none", "ngram", "model", "tree")
        keys, values = draw.choice(CACHES[engine])
        contexts = [size for size in CONTEXTS if size <= min(pair.context_length or size, most_context)]
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
    return resolve_pair(LoadOptions(model=path)).engines


def measured(case: Case, home: str) -> dict[str, float] | str:
    """Peaks of a child and its plan, in bytes, or why there are none."""
    ended = run(case.options, home)
    if ended.code:
        return ended.error
    return {**ended.peak, **ended.told, "peak": max(ended.peak["whole"], ended.told["peak"])}


def judged(planned: float, peak: float) -> str:
    if planned < (1 - LOW_SHARE) * peak:
        return "low"
    return "right" if abs(planned - peak) <= max(RIGHT_SHARE * peak, RIGHT_BYTES) else "high"


def compare(given: argparse.Namespace, pairs: dict[str, str], end_s: float, home: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    print(f"{'case':58} {'planned':>8} {'peak':>8} {'PSS':>8} {'own':>12} {'mapped':>12}  verdict (MB)")
    for case in cases(pairs, given.cases, given.seed, given.most_context):
        found = "not run: out of time" if monotonic() > end_s else measured(case, home)
        if isinstance(found, str):
            counts["no figure"] += 1
            print(f"{case!s:58} {found}", flush=True)
            continue
        planned, peak = found["planned"], found["peak"]
        verdict = judged(planned, peak)
        counts[verdict] += 1
        parts = (f"{found[a] / 1e6:.0f}/{found[b] / 1e6:.0f}" for a, b in PARTS)
        sizes = (f"{size / 1e6:8.0f}" for size in (planned, peak, found["pss"]))
        print(f"{case!s:58}", *sizes, *(f"{part:>12}" for part in parts), verdict, flush=True)
    return counts


# -- budgets


def needs(options: dict[str, Any]) -> tuple[int, int]:
    """(bytes of the least that the pair can be loaded with, bytes of all of it)."""
    chosen = LoadOptions(**options, memory="auto")  # as with a budget, all that nobody gave may change
    pair = resolve_pair(chosen)
    whole = fit(chosen, pair, Room(1 << 50, ())).plan
    least = whole.own_bytes
    while True:
        try:
            fit(chosen, pair, Room(least - MIB, ()))
            least -= MIB
        except CapabilityError:
            return least, whole.total_bytes + whole.reserved_bytes


def under_budget(limit: int, base: dict[str, Any], home: str) -> tuple[str, str]:
    """(outcome, a line about it) of one budget."""
    ended = run({**base, "memory": limit}, home)
    own = ended.peak["own_peak"]
    outcome = "killed" if ended.code < 0 else {0: "ran", REFUSED: "refused"}.get(ended.code, "failed")
    if outcome == "ran" and own > limit:
        outcome = "over its budget"
    told = [ended.told["context"], ended.told["given_up"]] if ended.told else ended.error
    return outcome, f"own {own / MIB:.1f} MiB {told}"


def load_under(given: argparse.Namespace, pairs: dict[str, str], end_s: float, home: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for path, name in pairs.items():
        base: dict[str, Any] = {"model": path, "engine": given.engine, "threads": 1}
        least, most = needs(base)
        run(base, home)  # what is measured once per model is not measured under a limit
        counts: Counter[str] = Counter()
        for index in range(given.budgets):  # a third of them, or more, are too small
            low, high = 0.8 * least, 1.2 * most
            limit = int(low * (high / low) ** (index / max(given.budgets - 1, 1)))
            outcome, line = ("not run", "") if monotonic() > end_s else under_budget(limit, base, home)
            counts[outcome] += 1
            if outcome not in ("ran", "refused", "not run"):
                print(f"  {limit / MIB:6.0f} MiB: {outcome} {line}"[:230], flush=True)
        print(f"{name} {least / MIB:.0f}..{most / MIB:.0f} MiB: {dict(counts)}", flush=True)
        total += counts
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", metavar="PATH=NAME")
    parser.add_argument("--cases", type=int, default=24, help="combinations (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most-context", type=int, default=CONTEXTS[-1], help="of a combination, in tokens")
    parser.add_argument("--budgets", type=int, metavar="N")
    parser.add_argument("--engine", default="auto", help="of --budgets")
    parser.add_argument("--most-s", type=float, default=900.0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return run_child(json.loads(given.child))
    pairs = dict(pair.rpartition("=")[::2] for pair in given.pairs)
    with tempfile.TemporaryDirectory() as home:
        work = load_under if given.budgets else compare
        print(dict(work(given, pairs, monotonic() + given.most_s, home)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
