"""Damage everything that can be damaged, ask for what cannot be had, and count how edgespec takes it.

    python scripts/lab/fuzz.py --cases 500            # of each kind: files, requests, structures
    python scripts/lab/fuzz.py --kind files --only 17  # one case again, with what it said

Every case runs in a child of its own (of requests, several share one until it ends badly) with a limit of time, and is
the same for the same --seed. Verdicts: ok; refused, by a typed error or one line; and what must not be: signal (the
process died of one), traceback, hang, garbage (an answer that a checksum or a promise rules out). Exit code 1 if any
was. What this does not find: wrong text from a bare model file, which nobody knows a checksum of.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from edgespec.errors import EdgespecError
from fuzz_cases import Case, Garbage, Known

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"files": 1, "requests": 30, "structures": 50}  # and how many cases a child runs
GOOD = ("ok", "refused")
VERDICTS = (*GOOD, "signal", "traceback", "hang", "garbage")
WARM = ("edgespec.runtime", "edgespec.cli.run", "edgespec.cli.chat", "edgespec.cli.corpus", "onnxruntime",
        "edgespec.engines.llamacpp.library", "edgespec.engines.onnx", "jinja2", "tokenizers")  # fmt: skip
Verdict = tuple[str, str]  # and what it was about


def main() -> int:
    given = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the folder goes, and what was counted is told
    kinds = list(KINDS) if given.kind == "all" else [given.kind]
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1"))
    for name in WARM:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="edgespec-fuzz-") as scratch:
        os.environ.update(EDGESPEC_HOME=f"{scratch}/home", EDGESPEC_THREADS="1", PYTHONPATH=str(ROOT))
        Path(scratch, "home").mkdir()
        known = _known(Path(scratch), given.timeout)
        bad = 0
        for kind in kinds:
            numbers = range(given.cases) if given.only is None else [given.only]
            bad += run_kind(kind, list(numbers), given, known, Path(scratch))
    return 1 if bad else 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--kind", choices=("all", *KINDS), default="all", help="default: all, one after the other")
    made.add_argument("--cases", type=int, default=100, help="of each kind (default %(default)s)")
    made.add_argument("--only", type=int, metavar="CASE", help="this one again")
    made.add_argument("--seed", type=int, default=0, help="default %(default)s")
    made.add_argument("--timeout", type=float, default=120.0, help="seconds for a case (default %(default)s)")
    return made


def run_kind(kind: str, numbers: list[int], given: argparse.Namespace, known: Known, scratch: Path) -> int:
    """Run the cases of one kind, print what was bad and the counts by verdict; how many were bad."""
    counts: Counter[str] = Counter()
    by_part: Counter[tuple[str, str]] = Counter()
    started_s = time.monotonic()
    module = importlib.import_module(f"fuzz_{kind}")
    cases = [(n, module.cases(random.Random(f"{given.seed} {kind} {n}"), n, known)) for n in numbers]
    for number, case, (verdict, said) in _verdicts(cases, KINDS[kind], scratch, given.timeout):
        counts[verdict] += 1
        by_part[case.label.partition(":")[0], verdict] += 1
        if verdict not in GOOD or given.only is not None:
            print(f"--- {kind} {number} {verdict}: {case.label}\n{said[-3000:]}", flush=True)
    for part in sorted({part for part, _ in by_part}):
        print(f"{part:20}", "  ".join(f"{verdict} {by_part[part, verdict]}" for verdict in VERDICTS))
    taken_s = time.monotonic() - started_s
    print(
        f"{kind}: {len(cases)} cases in {taken_s:.0f} s:", "  ".join(f"{v} {counts[v]}" for v in VERDICTS), flush=True
    )
    return sum(count for verdict, count in counts.items() if verdict not in GOOD)


def _verdicts(
    cases: list[tuple[int, Case]], batch: int, scratch: Path, timeout_s: float
) -> Iterator[tuple[int, Case, Verdict]]:
    """(number, case, verdict) of each; a child runs `batch` of them, or as many as it lives for."""
    waiting = list(cases)
    while waiting:
        found = _run_child([case for _, case in waiting[:batch]], scratch, timeout_s)
        for (number, case), verdict in zip(waiting, found, strict=False):
            yield number, case, verdict
        waiting = waiting[len(found) :]


def _run_child(cases: list[Case], scratch: Path, timeout_s: float) -> list[Verdict]:
    """The verdicts of the first cases, the last of them perhaps on how the child ended."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _be_child(cases, folder, os.fdopen(writer, "w"))
    os.close(writer)
    found: list[Verdict] = []
    with os.fdopen(reader, "rb") as lines:
        while len(found) < len(cases):
            ready, _, _ = select.select([lines], [], [], timeout_s)
            line = lines.readline() if ready else b""
            if line.endswith(b"\n"):
                found.append(tuple(json.loads(line)))
                continue
            _end(child)
            _, status = os.waitpid(child, 0)
            said = (folder / "said").read_text(errors="replace") if (folder / "said").exists() else ""
            kind = "signal" if ready else "hang"
            found.append((kind, f"{_ending(status)}: {said[-1500:]}"))
            break
        else:
            os.waitpid(child, 0)
    _end(child)
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return signal.Signals(-code).name if code < 0 else f"exit {code}"


def _end(child: int) -> None:
    """The child and what it started: its group is its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)


def _be_child(cases: list[Case], folder: Path, told: IO[str]) -> None:
    """Run the cases, tell their verdicts a line each, and end."""
    os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    said = os.open(folder / "said", os.O_RDWR | os.O_CREAT)
    for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, said), (2, said)):
        os.dup2(source, stream)
    home = os.environ["EDGESPEC_HOME"]
    for place, case in enumerate(cases):
        own = folder / str(place)
        own.mkdir()
        os.chdir(own)
        os.environ["EDGESPEC_HOME"] = home
        verdict = _judged(case, own)
        shutil.rmtree(own, ignore_errors=True)
        print(json.dumps(verdict), file=told, flush=True)
    os._exit(0)


def _judged(case: Case, folder: Path) -> Verdict:
    try:
        case.run(folder)
    except Garbage as exc:
        return "garbage", str(exc)
    except subprocess.TimeoutExpired as exc:
        return "hang", str(exc)
    except EdgespecError as exc:
        return ("refused", str(exc)) if str(exc) else ("traceback", f"{type(exc).__name__} without a message")
    except BaseException:  # whatever it is, it is what is looked for
        return "traceback", traceback.format_exc()
    return "ok", ""


def _known(scratch: Path, timeout_s: float) -> Known:
    """What the undamaged models say; made in a child, so that no library has begun its threads in this process."""

    def run(folder: Path) -> None:
        from fuzz_files import known

        (scratch / "known.json").write_text(json.dumps(known()))

    ((verdict, said),) = _run_child([Case("the undamaged models", run)], scratch, 4 * timeout_s)
    if verdict != "ok":
        raise SystemExit(f"the undamaged models: {verdict}: {said}")
    found: Any = json.loads((scratch / "known.json").read_text())
    return dict(found)


if __name__ == "__main__":
    sys.exit(main())
