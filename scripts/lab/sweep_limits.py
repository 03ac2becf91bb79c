"""Runs a model under limits of its addresses and data from too tight to plenty: it works, or says that memory is short.

    python scripts/lab/sweep_limits.py demo --engine onnx [--kinds addresses,data] [--when start,loaded] [--step 16]

`start`: the whole command runs under the limit, as after `ulimit -v`; `loaded`: with that much left once the libraries
are imported. Right is an answer, or one line that names memory; a signal, a traceback, more lines or another reason is
listed. A row ends after some limits in a row that suffice.
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
from functools import partial

from measure_budgets import CHILD, KINDS, NEW_TOKENS

LEAST_MIB = {"start": 48, "loaded": 0}  # Python alone
CHILD_S, ENOUGH = 300.0, 4


def outcome(model: str, engine: str, kind: str, when: str, mib: int, home: str) -> tuple[str, str]:
    """("works", "refused" or what went wrong, what was said)."""
    number, most = KINDS[kind][0], mib << 20
    assert number is not None
    environment = {**os.environ, "EDGESPEC_HOME": home}
    if when == "start":
        command = ["-m", "edgespec", "generate", model, "--engine", engine, "-p", "hi", "-n", "4", "-t", "1"]
    else:
        options = {"model": model, "engine": engine, "threads": 1}
        command = ["-c", CHILD, json.dumps([number, KINDS[kind][1], most, options, NEW_TOKENS])]
    done = subprocess.run(
        [sys.executable, *command],
        input="\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=CHILD_S,
        env=environment,
        preexec_fn=partial(resource.setrlimit, number, (most, most)) if when == "start" else None,
    )
    lines = done.stderr.strip().splitlines()
    last = lines[-1] if lines else ""
    if done.returncode < 0:
        return f"signal {-done.returncode}", last
    if done.returncode == 0:
        return "works", ""
    if "Traceback" in done.stderr:
        return "traceback", last
    if len(lines) != 1:
        return f"{len(lines)} lines", " | ".join(lines)[-300:]
    return ("refused" if "memory" in last.lower() and "nstall it again" not in last else "another reason"), last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--kinds", default="addresses,data")
    parser.add_argument("--when", default="start,loaded")
    parser.add_argument("--step", type=int, default=16, help="MiB")
    parser.add_argument("--least", type=int, help="MiB to begin with")
    parser.add_argument("--most", type=int, default=4096, help="MiB to end with")
    parser.add_argument("-v", "--verbose", action="store_true", help="one line per limit")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        for when in given.when.split(","):
            for kind in given.kinds.split(","):
                counts: Counter[str] = Counter()
                enough, first = 0, 0
                for mib in range(given.least or LEAST_MIB[when], given.most, given.step):
                    found, said = outcome(given.model, given.engine, kind, when, mib, home)
                    counts[found] += 1
                    enough = enough + 1 if found == "works" else 0
                    first = mib if enough == 1 else first
                    if given.verbose or found not in ("works", "refused"):
                        print(f"  {when} {kind} {mib} MiB: {found} {said}"[:400], flush=True)
                    if enough == ENOUGH:
                        break
                print(f"{given.model} {given.engine} {when} {kind}: works from {first} MiB; {dict(counts)}", flush=True)


if __name__ == "__main__":
    main()
