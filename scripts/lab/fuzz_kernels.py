"""Give the CPU kernels random and hostile types, sizes and numbers, under AddressSanitizer and UBSan.

    python scripts/lab/fuzz_kernels.py --inputs 10000

An input is one matrix of random bytes (any scale, not finite ones included) with products and rows of it by the C
interface, or one graph of an operator with attributes and shapes that may not fit. What must hold: no report of a
sanitizer; sizes that are refused are not touched; a row has the same bits alone as among others; the operator gives
what the C interface gives. Each batch is a child process. Exit code 1 if there was a fault. Needs g++.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

# Checks as calls: inlined into the unrolled kernels they take the compiler many minutes.
CHECKED = (
    "-O1 -fsanitize=address,undefined -fno-sanitize-recover=all --param asan-instrumentation-with-call-threshold=0"
)
BATCH = 200  # inputs of a child
HOSTILE = (0, -1, 1, 7, 255, 257, 2**31, 2**32 + 256, 2**62, 2**63 - 1, -(2**63))
PATHS = ("portable", "avx2", "avx-vnni", "avx512-vnni")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first batch")
    parser.add_argument("--batch", nargs=2, metavar=("LIBRARY", "SEED"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.batch:
        return run_batch(Path(given.batch[0]), int(given.batch[1]))

    from edgespec.kernels import build

    build.FLAGS = (*build.FLAGS, *CHECKED.split())  # type: ignore[assignment]
    runtime = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")  # what throws is looked up when the first starts
    ]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(runtime),  # Python was built without them
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }
    faults, done, counts = 0, 0, Counter[str]()
    with tempfile.TemporaryDirectory(prefix="edgespec-fuzz-kernels-") as folder:
        path = build.build(Path(folder), ("g++", "-fsanitize=address,undefined"))
        for number in range(-(-given.inputs // BATCH)):
            command = [sys.executable, __file__, "--batch", str(path), str(given.seed + number)]
            child = subprocess.run(
                command, capture_output=True, text=True, errors="replace", env=environment, timeout=900
            )
            if child.returncode:
                faults += 1
                print(f"seed {given.seed + number}: exit code {child.returncode}\n{child.stderr[-4000:]}", flush=True)
            else:
                done += BATCH
                counts.update({name: int(count) for name, _, count in (w.partition("=") for w in child.stdout.split())})
    print(f"{done} inputs, {faults} faults;", ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return int(faults > 0)


def run_batch(path: Path, seed: int) -> int:
    from edgespec.kernels import library

    library.library_path = lambda: path
    rng = np.random.default_rng(seed)
    counts = Counter[str]()
    for _ in range(BATCH):
        tries = one_matrix, one_matrix, one_graph, hostile_sizes
        counts[tries[int(rng.integers(len(tries)))](rng)] += 1
    print(*(f"{name}={count}" for name, count in counts.items()))
    return 0


def random_matrix(rng: np.random.Generator, inputs: int = 0) -> tuple[str, int, int, np.ndarray, bool]:
    """Kind, outputs, inputs, tiles of random bytes, and whether all scales are finite."""
    from edgespec.kernels import tiles
    from tiled import activation_block

    kind = str(rng.choice(list(tiles.TYPES)))
    block = activation_block(kind)
    outputs, inputs = int(rng.integers(1, 70)), inputs or block * int(rng.integers(1, 1 + 600 // block))
    row_bytes = tiles.kernels().edgespec_row_bytes(tiles.TYPES[kind], inputs)
    rows = rng.integers(0, 256, (outputs, row_bytes), dtype=np.uint8)
    if rng.random() < 0.5:  # numbers of two bytes from 2^-14 to 4, but for their signs
        rows &= 0xBF
    size = tiles.packed_bytes(kind, outputs, inputs)
    assert size is not None
    out = np.empty(size, np.uint8)
    return kind, outputs, inputs, out, tiles.pack(kind, rows, inputs, out)


def random_x(rng: np.random.Generator, rows: int, inputs: int) -> np.ndarray:
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    scale = rng.choice([0, 1e-45, 1e-38, 1, 1, 1, 1e4, 1e38], (rows, 1)).astype(np.float32)
    with np.errstate(over="ignore"):
        x *= scale
    strange = rng.random(x.shape) < 0.001
    x[strange] = rng.choice([np.nan, np.inf, -np.inf, -0.0, 3e38, 1e-45], int(strange.sum()))
    return x


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bits, but for those of a NaN."""
    return bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))))


def one_matrix(rng: np.random.Generator) -> str:
    from edgespec.kernels import tiles

    kind, outputs, inputs, tile, finite = random_matrix(rng)
    path = str(rng.choice(PATHS))
    if not tiles.choose_path(path):
        path = tiles.path()
    x = random_x(rng, int(rng.integers(1, 70)), inputs)
    bias = rng.standard_normal(outputs).astype(np.float32) if rng.random() < 0.5 else None
    y = tiles.product(kind, tile, outputs, x, bias)
    at = int(rng.integers(0, len(x)))
    assert same(y[at], tiles.product(kind, tile, outputs, x[at : at + 1], bias)[0]), f"{kind} {path} row {at}"
    ids = rng.integers(-1 if rng.random() < 0.1 else 0, outputs + (rng.random() < 0.1), 5)
    try:
        tiles.lookup(kind, tile, outputs, inputs, ids)
    except IndexError:
        assert ids.min() < 0 or ids.max() >= outputs
    return f"{path}{'' if finite else '_not_finite'}"


def hostile_sizes(rng: np.random.Generator) -> str:
    """Whatever is refused must not be touched: the pointers lead nowhere."""
    from edgespec.kernels import tiles

    kernels, nowhere = tiles.kernels(), ctypes.c_void_p(16)
    kind = int(rng.choice([*tiles.TYPES.values(), -1, 4, 5, 99, 2**31 - 1]))
    outputs, inputs, rows = (int(rng.choice([*HOSTILE, 256])) for _ in range(3))
    size = kernels.edgespec_packed_bytes(kind, outputs, inputs)
    if size >= 0:
        assert outputs > 0 and inputs > 0 and outputs * inputs // 8 <= size, (kind, outputs, inputs, size)
        return "accepted_sizes"
    assert kernels.edgespec_pack(kind, nowhere, outputs, inputs, nowhere) < 0
    assert kernels.edgespec_lookup(kind, nowhere, outputs, inputs, nowhere, rows, nowhere) < 0
    arguments = (kind, nowhere, outputs, inputs, nowhere, rows, nowhere, nowhere, nowhere, 0, 1)
    assert kernels.edgespec_product(*arguments) < 0
    return "refused_sizes"


def one_graph(rng: np.random.Generator) -> str:
    """Usually a graph that fits; else one attribute, shape or weight that does not."""
    from onnx import TensorProto

    from edgespec.kernels import tiles
    from tiled import node, session

    count = int(rng.integers(1, 4))
    inputs = int(rng.choice([256, 512, 768]))
    matrices = [random_matrix(rng, inputs)[:4] for _ in range(count)]
    types = [tiles.TYPES[kind] for kind, *_ in matrices]
    outputs = [n for _, n, *_ in matrices]
    k, bias = inputs, rng.standard_normal(sum(outputs)).astype(np.float32)
    change = rng.integers(0, 12)
    if change == 0:
        types[-1] = int(rng.choice(HOSTILE))
    elif change == 1:
        outputs[-1] = int(rng.choice(HOSTILE))
    elif change == 2:
        k = int(rng.choice(HOSTILE))
    elif change == 3:
        bias = bias[1:]
    names = [f"w{i}" for i in range(count)]
    results = [f"y{i}" for i in range(count if rng.random() < 0.5 else 1)]
    product = node("TiledMatMul", ["x", "bias", *names], results, K=k, types=types, outputs=outputs)
    weights = {"bias": bias} | {name: tile for name, (*_, tile) in zip(names, matrices, strict=True)}
    x = random_x(rng, int(rng.choice([0, 1, 2, 8, 65, 130])), inputs + (change == 4))
    try:
        model = session([product], {"x": TensorProto.FLOAT}, results, weights, int(rng.integers(1, 4)))
        got = np.concatenate(model.run(None, {"x": x}), 1)
    except Exception as exc:  # ONNX Runtime's errors have no common base
        assert "edgespec:" in str(exc), exc
        return "graph_refused"
    if len(x):
        parts = np.split(bias, np.cumsum(outputs)[:-1])
        direct = [tiles.product(m[0], m[3], m[1], x, b) for m, b in zip(matrices, parts, strict=True)]
        assert same(got, np.concatenate(direct, 1)), (matrices, change)
    return "graph"


if __name__ == "__main__":
    sys.exit(main())
