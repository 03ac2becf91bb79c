"""Give the CPU kernels random and hostile types, sizes and numbers, under AddressSanitizer and UBSan.

    python scripts/lab/fuzz_kernels.py --inputs 10000

An input is one matrix of random bytes (any scale, not finite ones included) with products and rows of it by the C
interface; one graph of an operator with attributes and shapes that may not fit; passes of Attention over a cache of
random bytes, or of recurrent layers over states, with rows that may be outside them; experts; or functions of caches
and states. What must hold: no report of a sanitizer; what is refused is not touched; a row has the same bits alone as
among others; operators give what the C interface or another path gives. Each batch is a child process. Exit code 1 if
there was a fault. Needs g++.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from onnx import TensorProto

import tiled
from edgespec.kernels import build, interface
from edgespec.kernels.interface import CHUNK, KernelCache, KernelStates, StateSizes, cache_bytes, states_bytes
from tiled import activation_block, node, session

# Checks as calls: inlined into the unrolled kernels they take the compiler many minutes.
CHECKED = (
    "-O1 -fsanitize=address,undefined -fno-sanitize-recover=all --param asan-instrumentation-with-call-threshold=0"
)
BATCH = 200  # inputs of a child
HOSTILE = (0, -1, 1, 7, 255, 257, 2**31, 2**32 + 256, 2**62, 2**63 - 1, -(2**63))
HOSTILE_32 = (0, -1, -2, 1, 15, 16, 17, 4096, 2**20 + 1, 2**31 - 1, -(2**31))
PATHS = ("portable", "avx2", "avx-vnni", "avx512-vnni", "neon-dot", "neon-i8mm")
NOWHERE = ctypes.c_void_p(16)
Floats = np.ndarray


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first batch")
    parser.add_argument("--batch", nargs=2, metavar=("LIBRARY", "SEED"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.batch:
        return run_batch(Path(given.batch[0]), int(given.batch[1]))
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
                print(f"seed {given.seed + number}: exit code {child.returncode}\n{child.stderr[:4000]}", flush=True)
            else:
                done += BATCH
                counts.update({name: int(count) for name, _, count in (w.partition("=") for w in child.stdout.split())})
    print(f"{done} inputs, {faults} faults;", ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return int(faults > 0)


def run_batch(path: Path, seed: int) -> int:
    interface.library_path = tiled.library_path = lambda: path  # type: ignore[attr-defined]
    rng, counts = np.random.default_rng(seed), Counter[str]()
    tries = [one_matrix, one_graph, hostile_sizes, one_attention, one_attention, one_experts, one_norm, one_cache]
    tries += [one_recurrence, one_recurrence, one_states]
    for _ in range(BATCH):
        counts[tries[int(rng.integers(len(tries)))](rng)] += 1
    print(*(f"{name}={count}" for name, count in counts.items()))
    return 0


# -- what the inputs have in common


def choose_path(rng: np.random.Generator) -> str:
    path = str(rng.choice(PATHS))
    return path if tiled.choose_path(path) else interface.path()


def same(a: Floats, b: Floats) -> bool:
    """Equal bits, but for those of a NaN."""
    return bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))))


def twice(
    rng: np.random.Generator, name: str, run: Callable[[int], Iterable[Floats]], *, is_compared: bool = True
) -> str:
    """Results of `run(threads)` on two paths, with one thread and two, have the same bits; or one of them refuses."""
    results = []
    for threads in (1, 2):
        path = choose_path(rng)
        try:
            results.append(list(run(threads)))
        except AssertionError:
            raise
        except Exception as exc:  # ONNX Runtime's errors have no common base; it refuses names of nothing itself
            assert any(word in str(exc) for word in ("edgespec:", "INVALID_GRAPH", "Missing Input")), exc
    if len(results) < 2:
        return f"{name}_refused"
    assert not is_compared or all(same(*pair) for pair in zip(*results, strict=True)), (name, path)
    return f"{name}_{path}"


def usually(rng: np.random.Generator, chance: float, values: dict[str, Any], names: Sequence[str], others: Any) -> None:
    """With this chance, one of `values` is another: of `others`, or what it returns."""
    if rng.random() < chance:
        values[str(rng.choice(names))] = others() if callable(others) else rng.choice(others).item()


def odd_shape(rng: np.random.Generator) -> list[int]:
    return [int(n) for n in rng.integers(0, 70, int(rng.integers(1, 4)))]


def random_matrix(rng: np.random.Generator, inputs: int = 0, outputs: int = 0) -> tuple[str, int, int, Floats, bool]:
    """Kind, outputs, inputs, tiles of random bytes, and whether all scales are finite."""
    kind = str(rng.choice([kind for kind in interface.TYPES if inputs % activation_block(kind) == 0]))
    block = activation_block(kind)
    outputs, inputs = outputs or int(rng.integers(1, 70)), inputs or block * int(rng.integers(1, 1 + 600 // block))
    rows = rng.integers(0, 256, (outputs, inputs // block * tiled.block_bytes(kind)), dtype=np.uint8)
    if rng.random() < 0.5:  # numbers of two bytes from 2^-14 to 4, but for their signs
        rows &= 0xBF
    size = interface.packed_bytes(kind, outputs, inputs)
    assert size is not None
    out = np.empty(size, np.uint8)
    return kind, outputs, inputs, out, interface.pack(kind, rows, inputs, out)


def random_x(rng: np.random.Generator, rows: int, inputs: int, *, is_strange: bool = True) -> Floats:
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    with np.errstate(over="ignore"):
        x *= rng.choice([0, 1e-45, 1e-38, 1, 1, 1, 1e4, 1e38], (rows, 1)).astype(np.float32)
    strange = rng.random(x.shape) < 0.001 * is_strange
    x[strange] = rng.choice([np.nan, np.inf, -np.inf, -0.0, 3e38, 1e-45], int(strange.sum()))
    return x


def random_rows(rng: np.random.Generator, slots: int, starts: Callable[[int], int], cells: int) -> np.ndarray:
    """Rows (slot, position, cell, parent) of chains and trees, usually as they should be.

    `starts(slot)`: where its text ends; `cells`: of a cache, in which cells may also be drawn, or 0.
    """
    rows: list[list[int]] = []
    for slot in rng.permutation(slots).tolist():
        first, base = len(rows), starts(slot)
        is_tree = rng.random() < 0.3
        for i in range(int(rng.choice([0, 1, 2, 5, 17, 40]))):
            parent = first + int(rng.integers(-1, i)) if is_tree and i else first + i - 1
            parent = parent if parent >= first else -1
            position = rows[parent][1] + 1 if parent >= 0 else base
            cell = int(rng.integers(cells)) if cells and rng.random() < 0.3 else base + i
            if cells and max(position, cell) >= cells:
                break
            rows.append([slot, position, cell, parent])
    numbers = np.array(rows, np.int32).reshape(-1, 4)
    if len(rows) and rng.random() < 0.1:
        hostile = (0, -1, -2, 1, slots, cells, cells - 1, len(rows), 2**31 - 1, -(2**31))
        numbers[int(rng.integers(len(rows))), int(rng.integers(4))] = int(rng.choice(hostile))
    if len(rows) and rng.random() < 0.03:
        rng.shuffle(numbers)
    return numbers


def random_pass(rng: np.random.Generator, rows: np.ndarray, widths: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Inputs of these widths for some rows; seldom one of them is too narrow."""
    given = {name: random_x(rng, len(rows), width)[None] for name, width in widths.items()} | {"rows": rows}
    if rng.random() < 0.05:
        name = str(rng.choice(list(given)))
        given[name] = given[name][..., : int(rng.integers(given[name].shape[-1]))]
    return given


# -- products, experts and norms


def one_matrix(rng: np.random.Generator) -> str:
    kind, outputs, inputs, tile, finite = random_matrix(rng)
    path = choose_path(rng)
    x = random_x(rng, int(rng.integers(1, 70)), inputs)
    bias = rng.standard_normal(outputs).astype(np.float32) if rng.random() < 0.5 else None
    y, at = tiled.product(kind, tile, outputs, x, bias), int(rng.integers(0, len(x)))
    assert same(y[at], tiled.product(kind, tile, outputs, x[at : at + 1], bias)[0]), f"{kind} {path} row {at}"
    ids = rng.integers(-1 if rng.random() < 0.1 else 0, outputs + (rng.random() < 0.1), 5)
    try:
        tiled.lookup(kind, tile, outputs, inputs, ids)
    except IndexError:
        assert ids.min() < 0 or ids.max() >= outputs
    return f"{path}{'' if finite else '_not_finite'}"


def hostile_sizes(rng: np.random.Generator) -> str:
    """Whatever is refused must not be touched: the pointers lead nowhere."""
    kernels = interface.kernels()
    kind = int(rng.choice([*interface.TYPES.values(), -1, 4, 5, 99, 2**31 - 1]))
    outputs, inputs, rows = (int(rng.choice([*HOSTILE, 256])) for _ in range(3))
    size = kernels.edgespec_packed_bytes(kind, outputs, inputs)
    if size >= 0:
        assert outputs > 0 and inputs > 0 and outputs * inputs // 8 <= size, (kind, outputs, inputs, size)
        return "accepted_sizes"
    assert kernels.edgespec_pack(kind, NOWHERE, outputs, inputs, NOWHERE) < 0
    assert kernels.edgespec_lookup(kind, NOWHERE, outputs, inputs, NOWHERE, rows, NOWHERE) < 0
    arguments = (kind, NOWHERE, outputs, inputs, NOWHERE, rows, NOWHERE, NOWHERE, NOWHERE, 0, 1)
    assert kernels.edgespec_product(*arguments) < 0
    return "refused_sizes"


def one_graph(rng: np.random.Generator) -> str:
    """Usually a graph that fits; else one attribute, shape or weight that does not."""
    count = int(rng.integers(1, 4))
    inputs = int(rng.choice([256, 512, 768]))
    matrices = [random_matrix(rng, inputs)[:4] for _ in range(count)]
    types = [interface.TYPES[kind] for kind, *_ in matrices]
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
    if change == 5 and len(results) > 1:
        results[-1] = ""
    product = node("TiledMatMul", ["x", "bias", *names], results, K=k, types=types, outputs=outputs)
    weights = {"bias": bias} | {name: tile for name, (*_, tile) in zip(names, matrices, strict=True)}
    is_strange = bool(rng.random() < 0.5)
    x = random_x(rng, int(rng.choice([0, 1, 2, 8, 65, 130])), inputs + (change == 4), is_strange=is_strange)
    try:
        kept = [name for name in results if name]
        model = session([product], {"x": TensorProto.FLOAT}, kept, weights, int(rng.integers(1, 4)))
        got = np.concatenate(model.run(None, {"x": x}), 1)
    except Exception as exc:  # ONNX Runtime's errors have no common base
        assert "edgespec:" in str(exc), exc
        return "graph_refused"
    if is_strange and len(x):
        # What the codes of uneven rows leave is multiplied, too, which the C interface does not do.
        at = int(rng.integers(len(x)))
        path = choose_path(rng)
        assert same(got[at], np.concatenate(model.run(None, {"x": x[at : at + 1]}), 1)[0]), (matrices, change, path)
    elif len(x):
        parts = np.split(bias, np.cumsum(outputs)[:-1])
        direct = [tiled.product(m[0], m[3], m[1], x, b) for m, b in zip(matrices, parts, strict=True)]
        assert same(got, np.concatenate(direct, 1)), (matrices, change)
    return "graph"


def one_experts(rng: np.random.Generator) -> str:
    """Usually experts that fit; a row has the same bits alone."""
    count, used = int(rng.integers(1, 12)), int(rng.integers(1, 5))
    size, inner = (int(rng.choice([256, 512, 32, 64, 16])) for _ in range(2))
    has_up = bool(rng.random() < 0.5)
    shapes = [(inner if has_up else 2 * inner, size), (size, inner), *([(inner, size)] if has_up else [])]
    made = [random_matrix(rng, inputs, count * outputs)[:4] for outputs, inputs in shapes]
    attributes: dict[str, Any] = {"K": size, "F": inner, "experts": count, "used": used}
    attributes["gate"] = int(rng.integers(1, 4))
    usually(rng, 0.2, attributes, list(attributes), HOSTILE)
    attributes["types"] = [interface.TYPES[kind] for kind, *_ in made]
    if rng.random() < 0.1:
        attributes["types"][-1] = int(rng.choice(HOSTILE))
    names = ["gate", "down", "up"][: len(shapes)]
    weights = {name: tile for name, (*_, tile) in zip(names, made, strict=True)}
    places = ["gate_bias", "down_bias", "up_bias", "scales"]
    for place, outputs in zip(places, [*(n for n, _ in shapes), *[inner] * (3 - len(shapes)), 1], strict=True):
        if rng.random() < 0.5 and (has_up or place != "up_bias"):
            weights[place] = rng.standard_normal(count * outputs - (rng.random() < 0.03)).astype(np.float32)
    inputs = ["x", "logits", *(place if place in weights else "" for place in places), *names]
    if rng.random() < 0.3:
        weights["preference"] = rng.standard_normal(count - (rng.random() < 0.05)).astype(np.float32)
        inputs += [*[""] * (3 - len(names)), "", "preference"]
    rows = int(rng.choice([0, 1, 3, 60, 600]))
    given = {"x": random_x(rng, rows, size + (rng.random() < 0.03)), "logits": random_x(rng, rows, count)}

    def run(threads: int) -> Iterator[Floats]:
        kinds: dict[str, int] = dict.fromkeys(given, TensorProto.FLOAT)
        model = session([node("Experts", inputs, ["y"], **attributes)], kinds, ["y"], weights, threads)
        yield (found := model.run(None, given)[0])
        if rows:
            at = int(rng.integers(rows))
            alone = model.run(None, {name: values[at : at + 1] for name, values in given.items()})[0]
            assert same(alone[0], found[at]), (attributes, at)

    return twice(rng, "experts", run)


def one_norm(rng: np.random.Generator) -> str:
    width, rows = int(rng.choice([0, 1, 15, 16, 100, 1000])), int(rng.choice([0, 1, 3, 100]))
    names, outputs = ["x", "weight", "delta"][: int(rng.choice([2, 3, 3]))], ["y", "sum"][: int(rng.integers(1, 3))]
    for each in (names, outputs):
        if rng.random() < 0.05:
            each[int(rng.integers(len(each)))] = ""
    inputs: dict[str, int] = {name: TensorProto.FLOAT for name in ("x", "delta") if name in names}
    given = {name: random_x(rng, rows + int(rng.random() < 0.05), width) for name in inputs}
    weights = {"weight": rng.standard_normal(width + int(rng.random() < 0.1)).astype(np.float32)}
    made = [node("Norm", names, outputs, epsilon=1e-6)]
    kept = [name for name in outputs if name]
    return twice(rng, "norm", lambda threads: session(made, inputs, kept, weights, threads).run(None, given))


# -- attention and recurrent layers


def one_attention(rng: np.random.Generator) -> str:
    """Passes over a cache of random bytes."""
    kind = str(rng.choice(["F16", "Q8_0"]))
    kv_heads, size = int(rng.integers(1, 4)), int(rng.choice([16, 32, 48, 64, 128] if kind == "F16" else [32, 64, 96]))
    heads, slots, chunks = kv_heads * int(rng.integers(1, 9)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    sizes, gated = [*[32] * int(rng.integers(0, 3)), *[size] * kv_heads], int(rng.random() < 0.3)
    attributes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_size": size}
    attributes |= {"first_head": len(sizes) - kv_heads, "window": int(rng.choice([0, 0, 1, 40, 300, 2**62]))}
    attributes |= {"gated": gated} if gated else {}
    usually(rng, 0.2, attributes, ["heads", "kv_heads", "head_size", "first_head", "window", "gated"], HOSTILE)
    attributes |= {"scale": 0.1, "cap": float(rng.choice([0, 0, 5, 1e-30])), "epsilon": 1e-6}
    usually(rng, 0.1, attributes, ["scale", "cap", "epsilon"], (np.nan, np.inf, -1.0, 0.0, 1e38))
    positions = int(rng.choice([chunks * CHUNK, 2000, 100], p=[0.6, 0.35, 0.05]))
    shapes = {"cosines": [positions, int(rng.integers(1, size // 2 + 1))], "q_norm": [size], "k_norm": [size]}
    shapes |= {"sines": shapes["cosines"], "sinks": [heads], "v_norm": [size]}
    usually(rng, 0.1, shapes, list(shapes), lambda: odd_shape(rng))
    has = {name: rng.random() < 0.5 for name in ("rotary", "q_norm", "k_norm", "sinks", "v_norm", "split")}
    has |= {"cosines": has["rotary"], "sines": has["rotary"] != (rng.random() < 0.05)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items() if has[name]}
    names = ["q", *(["k", "v"] if has["split"] else ["", ""]), "rows", "cache"]
    names += [name if has[name] else "" for name in ("cosines", "sines", "q_norm", "k_norm", "sinks", "v_norm")]
    if rng.random() < 0.03:
        names[int(rng.integers(len(names)))] = ""
    inputs = dict.fromkeys("qkv", TensorProto.FLOAT) | {"rows": TensorProto.INT32, "cache": TensorProto.INT64}
    inputs = {name: element for name, element in inputs.items() if name in names}
    joined = 0 if has["split"] else int(rng.choice([2, 2, 1, 0]))  # keys and values, keys that are both, neither
    widths = {"q": (heads * size << gated) + joined * kv_heads * size, "k": kv_heads * size, "v": kv_heads * size}
    passes = []
    for _ in range(int(rng.integers(1, 4))):
        rows = random_rows(rng, slots, lambda _: int(rng.integers(chunks * CHUNK)), chunks * CHUNK)
        passes.append({name: each for name, each in random_pass(rng, rows, widths).items() if name in inputs})
    number = int(rng.choice(HOSTILE)) if rng.random() < 0.03 else None
    filled = rng.integers(0, 256, cache_bytes(kind, sizes, slots, chunks), dtype=np.uint8)

    def run(threads: int) -> Iterator[Floats]:
        cache = KernelCache(kind, sizes, slots, chunks)
        cache.memory[:] = filled
        try:
            model = session([node("Attention", names, ["y"], **attributes)], inputs, ["y"], weights, threads)
            named = {"cache": np.array([cache.number if number is None else number])} if "cache" in inputs else {}
            yield from [model.run(None, given | named)[0] for given in passes]
        finally:
            cache.close()

    # Rows that write one cell at once may come in any order.
    whole = [given["rows"] for given in passes if given.get("rows", filled).shape[-1] == 4]
    shared = any(len(np.unique(rows[:, [0, 2]], axis=0)) < len(rows) for rows in whole)
    return twice(rng, "attention", run, is_compared=not shared)


def one_recurrence(rng: np.random.Generator) -> str:
    """Passes of the recurrent operators over states."""
    keys, size, taps = int(rng.integers(1, 4)), int(rng.choice([16, 32, 48, 80])), int(rng.integers(2, 6))
    values, width, slots, log = keys * int(rng.integers(1, 4)), int(rng.integers(1, 70)), int(rng.integers(1, 4)), 24
    channels, inner = (2 * keys + values) * size, values * size
    wide = int(rng.choice([16, 64]))  # a value of Mamba's
    seen, result = 2 * keys * size + values * wide, values * wide
    layers = [StateSizes(channels, taps, keys, values, size, size), StateSizes(width, 3)]
    layers.append(StateSizes(seen, taps, keys, values, size, wide))
    attributes: dict[str, Any] = {
        "layer": 0,
        "key_heads": keys,
        "value_heads": values,
        "size": size,
        "value_size": size,
    }
    usually(rng, 0.1, attributes, list(attributes), HOSTILE)
    number = int(rng.choice(HOSTILE)) if rng.random() < 0.05 else 1
    of_mamba = attributes | {"layer": 2, "value_size": wide}
    shapes = {"kernel": [taps, channels], "bias": [values], "rate": [values], "norm": [size], "taps": [3, width]}
    shapes |= {"seen": [taps, seen], "skip": [values], "shift": [seen]}
    usually(rng, 0.1, shapes, list(shapes), lambda: odd_shape(rng))
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    names = ["x", "rates", "kernel", "bias", "rate", "norm", "rows", "states"]
    mamba_names = ["kqv", "times", "seen", "bias", "rate", "skip", "shift", "rows", "states"]
    inputs = dict.fromkeys(("x", "rates", "bcx", "kqv", "times"), TensorProto.FLOAT)
    inputs |= {"rows": TensorProto.INT32, "states": TensorProto.INT64}
    ends, passes = [0] * slots, []
    for _ in range(int(rng.integers(1, 5))):
        bases = [max(end - int(rng.choice([0, 0, 1, 3, 40])), 0) for end in ends]
        rows = random_rows(rng, slots, bases.__getitem__, 0)
        for slot, base in enumerate(bases):
            ends[slot] = base + int(rng.integers(0, int((rows[:, 0] == slot).sum()) + 1))
        widths = {"x": channels + inner, "rates": 2 * values, "bcx": 3 * width, "kqv": seen + result, "times": values}
        passes.append(random_pass(rng, rows, widths))
    filled = np.zeros(states_bytes(layers, slots, log) or 0, np.uint8)
    if rng.random() < 0.2:  # states that no pass wrote
        filled = rng.integers(0, 256, filled.size, dtype=np.uint8)
    hostile_name = int(rng.choice(HOSTILE)) if rng.random() < 0.03 else None
    floor = int(rng.choice([*[2**63 - 1] * 4, 0, 5, -3, -(2**63)]))

    def run(threads: int) -> Iterator[Floats]:
        states = KernelStates(layers, slots, log)
        states.memory[:] = filled
        states.floors[:] = floor
        try:
            delta = node("DeltaNet", names, ["y"], epsilon=1e-6, **attributes)
            short = node("ShortConv", ["bcx", "taps", "rows", "states"], ["z"], layer=number)
            mamba = node("Mamba2", mamba_names, ["m"], **of_mamba)
            model = session([delta, short, mamba], inputs, ["y", "z", "m"], weights, threads)
            named = {"states": np.array([states.number if hostile_name is None else hostile_name])}
            yield from [each for given in passes for each in model.run(None, given | named)]
        finally:
            states.close()

    return twice(rng, "recurrence", run)


# -- functions of caches and states, with any numbers


@contextmanager
def held(kind: str, memory: np.ndarray, *sizes: Any) -> Iterator[int]:
    """The number of a cache or of states in `memory`."""
    kernels = interface.kernels()
    number = getattr(kernels, f"edgespec_hold_{kind}")(memory.ctypes.data, *sizes)
    assert number
    try:
        yield number
    finally:
        getattr(kernels, f"edgespec_drop_{kind}")(number)


def one_states(rng: np.random.Generator) -> str:
    """What is written comes back, in another slot, too."""
    kernels = interface.kernels()
    sizes = np.array([[7, 3, 0, 0, 0, 0], [2 * 16 + 3 * 32, 4, 1, 3, 16, 32]], np.int32)
    if rng.random() < 0.4:
        sizes[int(rng.integers(2)), int(rng.integers(6))] = int(rng.choice(HOSTILE_32))
    layers, slots, log = (int(rng.choice([*[usual] * 30, *HOSTILE])) for usual in (2, 3, 9))
    layers = min(layers, 2)
    size = kernels.edgespec_state_bytes(sizes.ctypes.data, layers, slots, log)
    floors = np.full(max(min(slots, 1 << 20), 1), 2**63 - 1, np.int64)
    described = sizes.ctypes.data, layers, slots, log, floors.ctypes.data
    if size < 0:
        assert not kernels.edgespec_hold_states(NOWHERE, *described)
        return "states_refused"
    if size > 1 << 24:
        return "states_not_touched"
    memory = rng.integers(0, 256, size, dtype=np.uint8) if rng.random() < 0.5 else np.zeros(size, np.uint8)
    with held("states", memory, *described) as number:
        slot, length = int(rng.integers(slots)), int(rng.choice([0, 1, 2, 50, 2**31, 2**62]))
        flat = np.zeros(kernels.edgespec_copy_states(number, 0, slot, 0, None), np.uint8)
        asked = [number, 0, slot, length, flat.ctypes.data]
        if (change := int(rng.integers(0, 6))) < 3:
            asked[(0, 2, 3)[change]] = int(rng.choice([-1, slots, *HOSTILE]))
        before = memory.copy()
        status = kernels.edgespec_copy_states(*asked)
        assert np.array_equal(memory, before)
        if change > 2:
            given, again = rng.integers(0, 256, flat.size, dtype=np.uint8), np.zeros_like(flat)
            other = int(rng.integers(slots))
            assert kernels.edgespec_copy_states(number, 1, other, length, given.ctypes.data) == flat.size
            assert kernels.edgespec_copy_states(number, 0, other, length, again.ctypes.data) == flat.size
            assert np.array_equal(given, again)
        cells = rng.choice([0, 1, 5, 2**31 - 1, -1, -(2**31)], 4, p=[0.3, 0.3, 0.2, 0.1, 0.05, 0.05]).astype(np.int32)
        where = int(rng.choice([slot, -1, slots]))
        moved = kernels.edgespec_move_rows(number, where, cells[:2].ctypes.data, cells[2:].ctypes.data, 2)
        assert moved == (0 if where == slot and cells.min() >= 0 else -1)
    return "states_copied" if status >= 0 else "states_not_reached"


def one_cache(rng: np.random.Generator) -> str:
    """What is written comes back, in another slot, too."""
    kernels = interface.kernels()
    kind = int(rng.choice([*[1, 8] * 6, 0, 2, -1, 99]))
    sizes = np.array(
        rng.choice([32, 64, 96, 16, 1024, 0, -32, 33, 2**31 - 1], 3, p=[0.6, 0.2, 0.14, *[0.01] * 6]), np.int32
    )
    slots, chunks = (int(rng.choice([1, 2, 3, *HOSTILE], p=[0.4, 0.3, 0.19, *[0.01] * 11])) for _ in range(2))
    described = kind, sizes.ctypes.data, int(rng.choice([*[3] * 16, 0, -1, 2**20 + 1, -(2**63)])), slots, chunks
    size = kernels.edgespec_cache_bytes(*described)
    if size < 0:
        assert not kernels.edgespec_hold_cache(NOWHERE, *described)
        return "cache_refused"
    if size > 1 << 24:
        return "cache_not_touched"
    memory = rng.integers(0, 256, size, dtype=np.uint8)
    with held("cache", memory, *described) as number:
        cells = rng.permutation(chunks * 256).astype(np.int32)[: int(rng.integers(0, 60))]
        slot, room = int(rng.integers(slots)), -(-len(cells) // 16) * 16
        flat = np.zeros(room * size // (slots * chunks * 256), np.uint8)
        asked = [number, 0, slot, cells.ctypes.data, len(cells), flat.ctypes.data, room]
        wrong = {0: HOSTILE, 2: (-1, slots, *HOSTILE), 4: (-1, room + 1, 2**62, -(2**63))}
        wrong[6] = (-16, room + 1, 15, 2**62, 2**63 - 16, -(2**63))
        if (change := int(rng.integers(0, 8))) < 4:
            place = (0, 2, 4, 6)[change]
            asked[place] = int(rng.choice(wrong[place]))
        elif change == 4 and len(cells):
            cells[int(rng.integers(len(cells)))] = int(rng.choice([-1, chunks * 256, 2**31 - 1, -(2**31)]))
        before = memory.copy()
        for into in (0, 1):
            asked[1] = into
            status = kernels.edgespec_copy_cells(*asked)
            assert np.array_equal(memory, before)
        if status == 0:
            asked[2], again = int(rng.integers(slots)), np.zeros_like(flat)
            assert kernels.edgespec_copy_cells(*asked) == 0
            asked[1], asked[5] = 0, again.ctypes.data
            assert kernels.edgespec_copy_cells(*asked) == 0 and np.array_equal(again, flat)
    return "cells_copied" if status == 0 else "cells_refused"


if __name__ == "__main__":
    sys.exit(main())
