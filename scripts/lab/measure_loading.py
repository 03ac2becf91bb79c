"""How long models take to open: ours against the engine's own loader, and a first load against a second one.

Each load is a process of its own, those that are compared by turns; printed are ratios and differences of medians.
An empty EDGESPEC_HOME makes a load the first one. A plain pass is that of the loaded model, one token at a time.

    python scripts/lab/measure_loading.py MODEL.gguf MODEL/model.onnx ... [--repeats 5] [--option reproducible=false]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any


def ours(path: str, options: dict[str, Any]) -> dict[str, float]:
    """Seconds to open `path`, to its first token, and of a plain pass."""
    started_s = perf_counter()
    import edgespec

    model = edgespec.load(path, **options)
    loaded_s = perf_counter()
    chosen = edgespec.GenerateOptions(max_tokens=12, drafter="none", ignore_eos=True)
    arrivals = []
    for _ in model.stream("Once upon a time", None, chosen):
        arrivals.append(perf_counter())
    model.close()
    gaps = [after - before for before, after in pairwise(arrivals)]
    return {"load": loaded_s - started_s, "first": arrivals[0] - started_s, "pass": median(gaps)}


def theirs(path: str) -> dict[str, float]:
    """Seconds that the engine's own loader takes, its import included."""
    started_s = perf_counter()
    if path.endswith(".onnx"):
        import onnxruntime

        kept: Any = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    else:
        from llama_cpp import Llama

        kept = Llama(path, n_ctx=4096, verbose=False)
    found = {"load": perf_counter() - started_s}
    del kept
    return found


def child(kind: str, path: str, home: str, options: dict[str, Any]) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", kind, path, json.dumps(options)]
    # A user's Python keeps compiled modules; compiling ours anew takes longer than many a load.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["EDGESPEC_HOME"] = home
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(path: str, repeats: int, options: dict[str, Any]) -> None:
    first, second, own = [], [], []
    child("theirs", path, os.devnull, {})  # the file is in memory from here on
    with tempfile.TemporaryDirectory() as home:
        child("ours", path, home, options)  # and our modules are compiled
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as home:
            first.append(child("ours", path, home, options))
            second.append(child("ours", path, home, options))
        own.append(child("theirs", path, os.devnull, {}))
    pass_s = median(run["pass"] for run in second)
    own_s, load_s = median(run["load"] for run in own), median(run["load"] for run in second)
    later_s = median(a["first"] - b["first"] for a, b in zip(first, second, strict=True))
    print(f"{Path(path).parent.name}/{Path(path).name}")
    print(f"  load over the engine's own   {load_s / own_s:6.2f}x  ({load_s - own_s:+.2f} s)")
    print(
        f"  first token of a first run   {later_s:+6.2f} s after that of a second ({later_s / pass_s:.1f} plain passes)"
    )


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        kind, path, given = sys.argv[2:5]
        print(json.dumps(ours(path, json.loads(given)) if kind == "ours" else theirs(path)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON", help="of edgespec.load")
    chosen = parser.parse_args()
    options = {name: json.loads(value) for name, _, value in (given.partition("=") for given in chosen.option)}
    for path in chosen.models:
        measure(path, chosen.repeats, options)


if __name__ == "__main__":
    main()
