"""Decoding beside a busy program: fixed numbers of threads against the automatic one.

`PYTHONPATH=. python scripts/lab/measure_busy.py [MODEL] [--drafter NAME]`. Runs take turns, idle and beside
one busy child, which is a Python loop on no particular core; what is printed are ratios of tokens per second, paired by
turn, with their standard errors. "light" is a child that computes for 1.5 ms a hundred times a second, as programs do
that wait in the background. MODEL is a registry name or a path (default: the demo). Two minutes for a model of
135M. OMP_WAIT_POLICY must not be set: it changes what is measured.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import edgespec
from edgespec import GenerateOptions, Sampling
from edgespec.platform.machine import physical_cores

LIGHT = """import time
while True:
    until = time.perf_counter() + 0.0015
    while time.perf_counter() < until: pass
    time.sleep(0.0085)
"""
LOADS = {"idle": "", "light": LIGHT, "busy": "while True: pass"}
PROMPT = "Explain in a few sentences how a bicycle stays upright, and what that has to do with its wheels."
MOST_S = 200.0  # after which no further turn begins
RUN_S = 4.0


@contextmanager
def busy_child(program: str) -> Iterator[None]:
    """Another program; none for ""."""
    children = [subprocess.Popen([sys.executable, "-c", program])] if program else []
    try:
        time.sleep(0.3)
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def rate(model: edgespec.Model, tokens: int, seed: int) -> float:
    """Tokens per second of an answer, its prompt aside; of RUN_S seconds of it at most."""
    options = GenerateOptions(max_tokens=tokens, ignore_eos=True, logprobs=False)
    first_s = last_s = 0.0
    count = 0
    for _ in model.stream(model.encode(PROMPT), Sampling(temperature=0.8, seed=seed), options):
        last_s = perf_counter()
        first_s = first_s or last_s
        count += 1
        if last_s - first_s > RUN_S:
            break
    return (count - 1) / (last_s - first_s)


def summed(ratios: list[float]) -> str:
    """Geometric mean of ratios and its standard error."""
    logs = [math.log(ratio) for ratio in ratios]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    mean = math.exp(statistics.mean(logs))
    return f"{mean:.2f} +- {mean * error:.2f}"


def measure(
    models: dict[str, edgespec.Model], turns: int, tokens: int, until_s: float
) -> dict[str, dict[str, list[float]]]:
    """Tokens per second by load and by kind of model, one of each per turn."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    order = list(models)
    for turn in range(turns):
        for load, program in LOADS.items():
            with busy_child(program):
                random.Random(turn).shuffle(order)
                for name in order:
                    found[load][name].append(rate(models[name], tokens, turn))
            if perf_counter() > until_s:
                return found
    return found


def report(found: dict[str, dict[str, list[float]]], all_cores: str) -> None:
    for load, rates in found.items():
        fixed = {name: statistics.geometric_mean(each) for name, each in rates.items() if name != "auto"}
        best = max(fixed, key=fixed.__getitem__)
        against = all_cores if load == "idle" else best
        for name, each in rates.items():
            ratios = [mine / theirs for mine, theirs in zip(each, rates[against], strict=True)]
            print(f"{load}: {name:>9} threads / {against}: {summed(ratios)}   ({len(each)} runs)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--most-s", type=float, default=MOST_S, help="no further runs after so many seconds")
    given = parser.parse_args()
    if "OMP_WAIT_POLICY" in os.environ:
        sys.exit("OMP_WAIT_POLICY is set: start again without it")
    started_s = perf_counter()
    options: dict[str, Any] = {"drafter": given.drafter, "engine": given.engine, "context_length": 1024}
    cores = physical_cores()
    kinds = {"auto": None, str(cores): cores, "1": 1}
    models = {name: edgespec.load(given.model, threads=threads, **options) for name, threads in kinds.items()}
    for model in models.values():
        rate(model, 16, 0)  # the first passes touch memory
    print(f"{given.model}, drafter {given.drafter}: loaded in {perf_counter() - started_s:.0f} s", flush=True)
    report(measure(models, given.turns, given.tokens, started_s + given.most_s), str(cores))
    for model in models.values():
        model.close()


if __name__ == "__main__":
    main()
