"""Whole passes over 1 to 64 rows of several runtimes, interleaved: processor time of one thread, wall time of more.

    python scripts/lab/measure_passes.py ours=MODEL.gguf@onnx llama.cpp=MODEL.gguf@llamacpp int4=FOLDER \
        [ik=MODEL.gguf@ik] [openvino=MODEL.gguf@openvino] [--python ik=PYTHON openvino=PYTHON] [--threads 1 2] \
        [--contexts 16 500 4000] [--rounds 8] [-o FILE.json]
    python scripts/lab/measure_passes.py --operators MODEL.gguf [--threads 1] [--contexts 500 4000]

Each runtime is loaded in a process of its own, so that none meets another's threads or libraries; the passes go round
in turn, and of each the least of all rounds is shown, with its ratio to the runtime's own single row. NAME=PATH@ENGINE
is opened by `edgespec.load`; @ik by ik_llama.cpp with repacked tensors (pip install ik-llama-cpp-python); @openvino by
OpenVINO, which makes its own model of a GGUF first, where it knows all types in it (pip install openvino-genai). Both
are best in environments of their own: --python. With one thread the time is the processor's, which other programs
disturb least. "prompt" is the wall time of reading 512 tokens. --operators shows where the time of our passes goes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
PROMPT_TOKENS = 512
TEXT = "def merge(a, b):\n    return sorted(a + b)\n"


class Runtime(Protocol):
    def fill(self, length: int) -> None:
        """Have `length` tokens in the cache."""

    def back(self) -> None:
        """Have the tokens of `fill` alone in the cache again."""

    def run(self, rows: int) -> None:
        """A pass over so many rows behind them, with the logits of all."""


class Edgespec:
    def __init__(self, path: str, engine: str, threads: int, context: int) -> None:
        import edgespec
        from edgespec.types import Batch

        size = context + PROMPT_TOKENS + max(ROWS)
        options: dict[str, Any] = {"threads": threads, "context_length": size, "engine": engine or "auto"}
        if engine != "onnx":
            options["reproducible"] = False
        self._model = edgespec.load(path, drafter="none", **options)
        self._engine, self._batch = self._model.target, Batch
        self._ids = self._model.encode(TEXT * (size // 6))[:size]
        self._length = 0

    def fill(self, length: int) -> None:
        self._engine.rollback(min(length, self._engine.length()))
        step = self._engine.facts.max_batch
        for start in range(self._engine.length(), length, step):
            self._engine.forward(self._batch.chain(self._ids[start : min(start + step, length)], last_only=True))
        self._length = length

    def back(self) -> None:
        self._engine.rollback(self._length)

    def run(self, rows: int) -> None:
        self._engine.forward(self._batch.chain(self._ids[self._length : self._length + rows]))


class IkLlama:
    def __init__(self, path: str, _engine: str, threads: int, context: int) -> None:
        from ik_llama_cpp import _ctypes_api as api  # type: ignore[import-not-found]

        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.use_mmap, params.repack_tensors = False, True
        self._api, self._model = api, api.llama_model_load_from_file(path.encode(), params)
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context + PROMPT_TOKENS + 2 * max(ROWS), 512, 512
        params.n_threads = params.n_threads_batch = threads
        self._context = api.llama_init_from_model(self._model, params)
        self._batch, self._length = api.llama_batch_init(512, 0, 1), 0
        self._drop = ctypes.CDLL(api._lib._name).llama_kv_cache_seq_rm  # not among the package's own bindings
        self._drop.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]

    def fill(self, length: int) -> None:
        self._api.llama_kv_cache_clear(self._context)
        for start in range(0, length, 512):
            self._decode(start, min(512, length - start), outputs=False)
        self._length = length

    def back(self) -> None:
        self._drop(self._context, 0, self._length, -1)

    def run(self, rows: int) -> None:
        self._decode(self._length, rows, outputs=True)

    def _decode(self, start: int, count: int, *, outputs: bool) -> None:
        batch = self._batch
        batch.n_tokens = count
        for row in range(count):
            batch.token[row], batch.pos[row] = 1000 + (start + row) % 5000, start + row
            batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, 0, outputs
        if self._api.llama_decode(self._context, batch):
            raise RuntimeError("ik_llama.cpp cannot decode")


class OpenVino:
    def __init__(self, path: str, _engine: str, threads: int, _context: int) -> None:
        import numpy as np
        import openvino  # type: ignore[import-not-found]
        import openvino_genai  # type: ignore[import-not-found]

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "model.gguf").symlink_to(Path(path).resolve())
            openvino_genai.LLMPipeline(f"{folder}/model.gguf", "CPU", enable_save_ov_model=True)
            core = openvino.Core()
            model = core.read_model(f"{folder}/openvino_model.xml")
            compiled = core.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": threads})
        self._np, self._tensor, self._request = np, openvino.Tensor, compiled.create_infer_request()
        self._length, self._states = 0, list[Any]()

    def fill(self, length: int) -> None:
        self._request.reset_state()
        self._length = 0
        for start in range(0, length, 512):
            self._decode(start, min(512, length - start))
        self._length = length
        self._states = [self._np.array(each.state.data) for each in self._request.query_state()] if length else []

    def back(self) -> None:
        if not self._states:
            self._request.reset_state()
        for each, values in zip(self._request.query_state(), self._states, strict=False):
            each.state = self._tensor(values)

    def run(self, rows: int) -> None:
        self._decode(self._length, rows)

    def _decode(self, start: int, count: int) -> None:
        np = self._np
        places = np.arange(start, start + count)[None]
        self._request.infer(
            {
                "input_ids": 1000 + places % 5000,
                "attention_mask": np.ones((1, start + count), np.int64),
                "position_ids": places,
                "beam_idx": np.zeros(1, np.int32),
            }
        )


def serve(path: str, engine: str, threads: int, context: int) -> None:
    """In the child: read "fill N" and "run N" from standard input, write seconds."""
    made: dict[str, Callable[..., Runtime]] = {"ik": IkLlama, "openvino": OpenVino}
    runtime = made.get(engine, Edgespec)(path, engine, threads, context)
    clock = time.process_time if threads == 1 else time.perf_counter
    print("ready", flush=True)
    for line in sys.stdin:
        word, number = line.split()
        if word == "run":
            runtime.back()
        begin = clock()
        (runtime.fill if word == "fill" else runtime.run)(int(number))
        print(f"seconds {clock() - begin}", flush=True)


class Child:
    def __init__(self, python: str, path: str, engine: str, threads: int, context: int) -> None:
        command = [python, __file__, "--serve", path, engine, str(threads), str(context)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        self._read("ready")

    def ask(self, what: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return float(self._read("seconds"))

    def _read(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):  # libraries write lines of their own
                return line.removeprefix(word)
        raise SystemExit("a runtime ended")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(runtimes: dict[str, tuple[str, str, str]], threads: int, context: int, rounds: int) -> dict[str, Any]:
    """Milliseconds by runtime and number of rows, and of a prompt."""
    children = {
        name: Child(python, path, engine, threads, context) for name, (python, path, engine) in runtimes.items()
    }
    found: dict[str, dict[Any, float]] = {name: {} for name in runtimes}
    try:
        for name, child in children.items():
            for _ in range(2):
                child.ask("fill 0")
                found[name]["prompt"] = min(found[name].get("prompt", 1e9), 1e3 * child.ask(f"fill {PROMPT_TOKENS}"))
            child.ask(f"fill {context}")
        for _ in range(rounds):
            for rows in ROWS:
                for name, child in children.items():
                    found[name][rows] = min(found[name].get(rows, 1e9), 1e3 * child.ask(f"run {rows}"))
    finally:
        for child in children.values():
            child.close()
    return found


def operators(path: str, threads: int, context: int, rounds: int) -> None:
    """Print the milliseconds that each kind of operator takes in a pass, by ONNX Runtime's own profile."""
    import onnxruntime as ort

    plain, sessions = ort.InferenceSession, []

    def profiled(model: Any, options: Any, **given: Any) -> Any:
        options.enable_profiling, options.profile_file_prefix = True, f"{tempfile.gettempdir()}/passes"
        sessions.append(plain(model, options, **given))
        return sessions[-1]

    table: dict[int, Counter[str]] = {}
    ort.InferenceSession = profiled
    for rows in (1, 8, 16):
        sessions.clear()
        runtime = Edgespec(path, "onnx", threads, context)
        runtime.fill(context)
        for _ in range(rounds):
            runtime.back()
            runtime.run(rows)
        table[rows] = Counter()
        for profile in map(Path, [each.end_profiling() for each in sessions]):
            events = json.loads(profile.read_text(encoding="utf-8"))
            profile.unlink()
            starts = sorted(event["ts"] for event in events if event["name"] == "model_run")[-rounds:]
            for event in events:
                if starts and event["ts"] >= starts[0] and event["name"].endswith("_kernel_time"):
                    table[rows][event["args"]["op_name"]] += event["dur"] / 1e3 / rounds
    ort.InferenceSession = plain
    print(f"\ncontext {context}, threads {threads}, wall time, ms; load {os.getloadavg()[0]:.1f}")
    print("| | " + " | ".join(f"{rows} rows" for rows in table) + " |\n|" + "---|" * (len(table) + 1))
    for name, _ in table[1].most_common(8):
        print(f"| {name} | " + " | ".join(f"{found[name]:.2f}" for found in table.values()) + " |")


def shown(found: dict[str, Any], threads: int, context: int) -> None:
    kind = "processor time" if threads == 1 else "wall time"
    print(f"\ncontext {context}, threads {threads}, {kind}, ms (over one row); load {os.getloadavg()[0]:.1f}")
    print("| | prompt 512 | " + " | ".join(map(str, ROWS)) + " |\n|" + "---|" * (len(ROWS) + 2))
    for name, ms in found.items():
        cells = (f"{ms[rows]:.1f}" + (f" ({ms[rows] / ms[1]:.2f})" if rows > 1 else "") for rows in ROWS)
        print(f"| {name} | {ms['prompt']:.0f} | " + " | ".join(cells) + " |", flush=True)


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--serve"]:
        serve(arguments[1], arguments[2], int(arguments[3]), int(arguments[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runtimes", nargs="*", metavar="NAME=PATH[@ENGINE]")
    parser.add_argument("--operators", metavar="MODEL.gguf", help="where the time of a pass on our kernels goes")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--contexts", type=int, nargs="+", default=[16, 500, 4000])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--python", nargs="+", default=[], metavar="ENGINE=PATH", help="of @ik and @openvino")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args(arguments)
    if given.operators:
        for context in given.contexts:
            operators(given.operators, given.threads[0], context, given.rounds)
        return
    pythons = dict(each.split("=", 1) for each in given.python)
    runtimes = {}
    for each in given.runtimes:
        name, _, rest = each.partition("=")
        path, _, engine = rest.partition("@")
        runtimes[name] = (pythons.get(engine, sys.executable), path, engine)
    results = []
    for context in given.contexts:
        for threads in given.threads:
            found = measure(runtimes, threads, context, given.rounds)
            shown(found, threads, context)
            results.append({"context": context, "threads": threads, "ms": found, "load": os.getloadavg()})
            if given.output is not None:
                given.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
