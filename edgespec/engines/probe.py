"""Loads files of unknown origin in a child process first: a file can end the process that loads it.

As a program (`python -m edgespec.engines.probe FILE...`) it tries each file the way an engine would use it and prints
one JSON object per file, flushed before the next is touched: {"path": ..., "fault": null or the reason}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from edgespec.engines.eagle3_header import is_eagle3
from edgespec.engines.gguf_check import check_gguf
from edgespec.engines.gguf_split import model_files
from edgespec.engines.measurements import CHECKED_FILE, file_key, key_of, recall, remember
from edgespec.errors import EdgespecError, ModelFileError
from edgespec.types import Logits

PROBE_VERSION = 2  # raise it when the probe learns to find more, and files are probed again
START_S = 60.0
READ_BYTES_PER_S = 50e6  # a slow disk


def check_model_file(path: Path, *, is_trusted: bool = False) -> None:
    """What the runtime calls before it loads a file.

    `is_trusted`: the caller knows the file's checksum; then only the header is read. Another file is loaded once in
    a child process; one that passed is not probed again until it changes. Raises ModelNotFound and ModelFileError.
    """
    check_gguf(path)
    if is_trusted:
        return
    key = key_of(PROBE_VERSION, _library_version(), tuple(map(file_key, model_files(path))))
    if recall("probed", key, CHECKED_FILE) is None:
        probe(path)
        remember("probed", key, {"path": str(path)})


def probe(path: Path, *, timeout_s: float | None = None) -> None:
    """Load `path` in a child process. Raises ModelFileError when that fails, crashes or takes longer.

    `timeout_s` None allows for reading the whole file from a slow disk.
    """
    if timeout_s is None:
        timeout_s = START_S + sum(file.stat().st_size for file in model_files(path)) / READ_BYTES_PER_S
    fault = next(faults([path], timeout_s=timeout_s))
    if fault is not None:
        raise ModelFileError(fault)


def faults(paths: Sequence[Path], *, timeout_s: float) -> Iterator[str | None]:
    """What is wrong with each file, or None. One child, given `timeout_s`, serves many files until one ends it."""
    waiting = list(paths)
    while waiting:
        reports, ending = _run_child(waiting, timeout_s)
        yield from (report["fault"] for report in reports)
        waiting = waiting[len(reports) :]
        if waiting:
            yield f"{waiting[0]} is not a usable model: loading it {ending}. Download or export it again"
            waiting = waiting[1:]


def _run_child(paths: Iterable[Path], timeout_s: float) -> tuple[list[dict[str, str | None]], str]:
    """The reports of the files the child got through, and how it ended."""
    package_root = str(Path(__file__).resolve().parents[2])
    search_path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "edgespec.engines.probe", *map(str, paths)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
            env={**os.environ, "PYTHONPATH": search_path},
        )
        output, ending = done.stdout, f"ended a trial process (status {done.returncode})"
    except subprocess.TimeoutExpired as exc:
        output, ending = exc.stdout or b"", f"took more than {timeout_s:g} s in a trial process"
    lines = output.decode("utf-8", errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")], ending


def try_model(path: Path) -> str | None:
    """In the child: use a model the way the engine will; the reason when it cannot be used."""
    from edgespec.engines.llamacpp import Eagle3Head, LlamaCppEngine
    from edgespec.types import Batch

    try:
        if is_eagle3(path):
            Eagle3Head.try_alone(path)
            return None
        with LlamaCppEngine.load(
            path, context_length=16, max_batch=8, threads=1, reproducible=False, check_tensors=True
        ) as engine:
            vocabulary = engine.vocabulary
            ids = vocabulary.encode("".join(map(chr, range(256))), parse_special=True)
            _ = vocabulary.pieces, [vocabulary.token_name(token_id) for token_id in range(vocabulary.size)]
            fault = fault_of(engine.forward(Batch.chain(ids[:8] or [0])))
            if fault:
                return f"{path} is not a usable model: {fault}. Download or export it again"
            engine.rollback(0)
            engine.forward(Batch.chain([0], last_only=True))
    except EdgespecError as exc:
        return str(exc)
    return None


def fault_of(logits: Logits) -> str:
    """What is wrong with the logits [rows, vocabulary] of a few different tokens; empty when nothing shows.

    Weights that are all zero load without complaint and give every token the same score.
    """
    if not np.isfinite(logits).all():
        return "its logits are not numbers"
    if logits.shape[1] > 1 and (logits.max(axis=1) == logits.min(axis=1)).any():
        return "it gives every token the same score, as weights that are all zero do"
    return ""


def _library_version() -> str:
    from edgespec.engines.llamacpp.library import version

    return version()


def main(paths: Sequence[str]) -> None:
    for path in paths:
        print(json.dumps({"path": path, "fault": try_model(Path(path))}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
