"""Loads a pair under many memory budgets, from too small to plenty, and measures whether each is kept.

    python scripts/lab/measure_budgets.py models/demo --kinds budget,addresses,data,group --budgets 50 [-c 1024]

Every child process fills its context and drafts. It must run and stay within its budget, or refuse in one line before
anything is loaded; a child that the kernel ends, that fails in another way or that takes more is listed. `budget` is
`--memory N`, and the child's own memory is read from /proc; `addresses` and `data` are `ulimit -v` and `-d` with that
much left once the libraries are imported; `group` is a control group with that much memory, caches of files included,
which needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from time import monotonic, sleep
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from edgespec.config.options import LoadOptions
from edgespec.errors import CapabilityError
from edgespec.loading.requirements import resolve_pair
from edgespec.memory.fit import fit
from edgespec.memory.plan import Room
from memory_group import MemoryGroup, NoGroup, memory_group

# The resource limit, and the line of /proc/self/status that counts against it.
KINDS: dict[str, tuple[int | None, str]] = {
    "budget": (None, ""),
    "addresses": (resource.RLIMIT_AS, "VmSize"),
    "data": (resource.RLIMIT_DATA, "VmData"),
    "group": (None, ""),
}
CHILD_S, EVERY_S = 300.0, 0.01
NEW_TOKENS = 16
MIB = 1 << 20
CHILD = """
import json, resource, sys
number, field, limit, options, new_tokens = json.loads(sys.argv[1])
sys.stdin.readline()
import edgespec
from edgespec.errors import CapabilityError
edgespec.load
if number is not None:
    if options["engine"] == "onnx":
        from edgespec.engines.onnx.library import library
    else:
        from edgespec.engines.llamacpp.library import library
    library()
    used = int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1]) << 10
    resource.setrlimit(number, (used + limit, used + limit))
try:
    with edgespec.load(**options) as model:
        words = model.encode("The quick brown fox jumps over the lazy dog and runs away. ")
        most = model.context_length - new_tokens - 1
        chosen = edgespec.GenerateOptions(max_tokens=new_tokens, ignore_eos=True)
        model.generate((words * (most // len(words) + 1))[:most], options=chosen)
        print(json.dumps([model.context_length, [each.what for each in model.memory.given_up]]))
except CapabilityError as exc:
    print(exc, file=sys.stderr)
    sys.exit(2)
"""


def run(options: dict[str, Any], kind: str, limit: int, group: MemoryGroup | None, home: str) -> tuple[str, int, str]:
    """(outcome, peak of the child's own memory in bytes, what it said)."""
    given = json.dumps([*KINDS[kind], limit, options, NEW_TOKENS])
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, given],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "EDGESPEC_HOME": home},
    )
    if group is not None:
        group.enter(child.pid)
    assert child.stdin is not None
    try:
        child.stdin.write("\n")
        child.stdin.flush()
    except BrokenPipeError:
        pass
    peak, looks = 0, 0
    while child.poll() is None:
        peak = max(peak, anonymous_bytes(child.pid))
        looks += 1
        if looks * EVERY_S > CHILD_S:  # of its own time: a machine that stops both for a while is not counted
            child.kill()
            child.communicate()
            return "too slow", peak, ""
        sleep(EVERY_S)
    said, errors = child.communicate()
    lines = errors.strip().splitlines()
    if child.returncode == 0:
        return "ran", peak, said.strip().splitlines()[-1]
    if child.returncode == 2 and len(lines) == 1:
        return "refused", peak, lines[0]
    how = "killed" if child.returncode < 0 else "failed"
    return how, peak, f"code {child.returncode}: {lines[-1] if lines else ''}"


def anonymous_bytes(process: int) -> int:
    try:
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


def needs(options: dict[str, Any]) -> tuple[int, int]:
    """(bytes of the least that the pair can be loaded with, bytes of all of it)."""
    chosen = LoadOptions(**options, memory="auto")  # as with a budget, all that nobody gave may change
    pair = resolve_pair(chosen)
    whole = fit(chosen, pair, Room(1 << 50, ())).plan
    least, step = whole.own_bytes, MIB
    while True:
        try:
            fit(chosen, pair, Room(least - step, ()))
            least -= step
        except CapabilityError:
            return least, whole.total_bytes + whole.reserved_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--budgets", type=int, default=50)
    parser.add_argument("-c", "--ctx-size", type=int, help="as it is given to every child; else a budget may change it")
    parser.add_argument("--draft", help="a draft model for a target that has none")
    parser.add_argument("--most-s", type=float, default=600.0)
    parser.add_argument("-v", "--verbose", action="store_true", help="one line per budget")
    given = parser.parse_args()
    base: dict[str, Any] = {"model": given.model, "engine": given.engine, "threads": 1}
    base |= {} if given.ctx_size is None else {"context_length": given.ctx_size}
    base |= {} if given.draft is None else {"draft": given.draft}
    least, most = needs(base)
    end_s = monotonic() + given.most_s
    with tempfile.TemporaryDirectory() as home:
        run(base, "budget", 0, None, home)  # what is measured once per model is not measured under a limit
        for kind in given.kinds.split(","):
            counts: Counter[str] = Counter()
            for index in range(given.budgets):
                # A third of the budgets, or more, are too small.
                low, high = 0.8 * least, 1.2 * most if kind in ("budget", "group") else 3 * most
                limit = int(low * (high / low) ** (index / max(given.budgets - 1, 1)))
                if monotonic() > end_s:
                    counts["not run"] += 1
                    continue
                outcome, line = measured(kind, limit, base, home)
                counts[outcome] += 1
                if given.verbose or outcome not in ("ran", "refused"):
                    print(f"  {kind} {limit / MIB:6.0f} MiB: {outcome} {line}"[:230], flush=True)
            span = f"{least / MIB:.0f}..{most / MIB:.0f} MiB"
            print(f"{given.model} {given.engine} {kind} {span}: {dict(counts)}", flush=True)


def measured(kind: str, limit: int, base: dict[str, Any], home: str) -> tuple[str, str]:
    """(outcome, a line about it) of one budget."""
    if kind == "group":
        try:
            with memory_group(limit) as group:
                outcome, peak, said = run({**base, "memory": "auto"}, kind, 0, group, home)
                if group.kills and outcome != "killed":
                    outcome = "killed"
                return outcome, f"own {peak / MIB:.0f}, group {(group.peak_bytes or 0) / MIB:.0f} MiB {said}"
        except NoGroup as exc:
            return "no group", str(exc)
    options = {**base, "memory": limit if kind == "budget" else "auto"}
    outcome, peak, said = run(options, kind, limit, None, home)
    if kind == "budget" and outcome == "ran" and peak > limit:
        outcome = "over its budget"
    return outcome, f"own {peak / MIB:.1f} MiB {said}"


if __name__ == "__main__":
    main()
