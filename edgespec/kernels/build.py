"""Compile the kernels into one shared library. Standard library only: a build hook loads this very file by its path.

A compiler of the system is taken, else Zig's from the package index. The library's name holds two hashes: one of what
it is made from, so that an outdated one is not found, and one of its bytes, since loading a file that was cut short
ends the process. Nothing of the C++ library is linked.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).with_name("src")
HOST = f"{sys.platform}-{platform.machine().lower()}"
SUFFIXES = {"win32": ".dll", "darwin": ".dylib"}
X86, ARM = ("x86_64", "amd64"), ("aarch64", "arm64")
# All instruction sets give the same bits. Nobody reads the processor's exception flags; else GCC vectorises no exp().
_FLOATS = ("-ffp-contract=off", "-fno-trapping-math")
FLAGS = ("-O3", "-std=c++17", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", *_FLOATS)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
# What path.cpp is compiled with for each instruction set, the best first, and the header of its lanes.
X86_SETS = {
    "avx512": (*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni"))),
    "avxvnni": (*_AVX2, "-mavxvnni"),
    "avx2": _AVX2,
}
ARM_SETS = {"neoni8mm": ("-march=armv8.2-a+dotprod+i8mm",), "neondot": ("-march=armv8.2-a+dotprod",)}
LANES = {"avx512": "512", "avxvnni": "256", "avx2": "256", "neoni8mm": "neon", "neondot": "neon"}
ZIG = "ziglang>=0.16"
MOST_SHOWN = 2000  # characters of what a compiler says


class BuildError(Exception):
    """The kernels cannot be built here. The message says why, and the fix."""


class NoCompiler(BuildError):
    """No C++ compiler works here, and Zig is not installed."""


def source_hash(target: str = HOST) -> str:
    """Changes with the sources, the flags and the `target` that is built for: a system and a processor."""
    parts = [repr((target, flags(target), X86_SETS, ARM_SETS, LANES, link_flags(target))).encode()]
    for path in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        parts += [path.name.encode(), path.read_bytes()]
    return _hash_of(b"\0".join(parts))


def find_library(folder: Path, target: str = HOST) -> Path | None:
    """The library in `folder` that was built from these very sources and is whole."""
    stem, suffix = _stem(target), _suffix(target)
    for path in sorted(folder.glob(f"{stem}-*{suffix}")):
        with contextlib.suppress(OSError):
            if path.name == f"{stem}-{_hash_of(path.read_bytes())}{suffix}":
                return path
    return None


def find_compiler(python: str = sys.executable) -> tuple[str, ...]:
    """The command of a C++ compiler that works: $CXX, the system's, or Zig in this Python. Raises NoCompiler.

    The system's compilers for C compile C++ too, and link no library of it.
    """
    # macOS has stubs that open a window which offers to install the compiler.
    has_none = sys.platform == "darwin" and subprocess.run(["xcode-select", "-p"], capture_output=True).returncode
    commands = [os.environ.get("CXX", ""), *(() if has_none else ("cc", "gcc", "clang"))]
    for words in filter(None, map(shlex.split, commands)):
        if shutil.which(words[0]) and _compiles(tuple(words), flags(HOST)):
            return tuple(words)
    # Zig compiles for the processor at hand unless told otherwise.
    zig = (python, "-m", "ziglang", "c++", "-mcpu=baseline")
    if _compiles(zig, flags(HOST)):
        return zig
    raise NoCompiler(
        "no C++ compiler was found: install one (apt install g++, dnf install gcc-c++, xcode-select --install), name "
        f"one with CXX=, or add Zig's, the package ziglang, to {python}"
    )


def build(
    folder: Path,
    compiler: tuple[str, ...] | None = None,
    target: str = HOST,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Compile and link the library into `folder`, which is made; returns its path. Any number of processes may do so.

    `compiler`: the command of a C++ compiler for `target`; None: the one that is found. `say` gets what is left out.
    Raises BuildError, and OSError where `folder` cannot be written.
    """
    compiler = compiler or find_compiler()
    sets = X86_SETS if _machine(target) in X86 else ARM_SETS if _machine(target) in ARM else {}
    if {"zig", "ziglang"} & set(compiler):  # its -march is the name of a processor
        sets = {name: tuple(re.sub("^-march=armv[^+]+", "-mcpu=generic", word) for word in sets[name]) for name in sets}
    known = {name: extra for name, extra in sets.items() if _compiles(compiler, (*flags(target), *extra))}
    for name in sets.keys() - known.keys():
        say(f"{shlex.join(compiler)} does not know {name}: the kernels are built without")
    common = [*flags(target), f"-DEDGESPEC_PATHS={''.join(f'PATH({name})' for name in known)}"]
    with tempfile.TemporaryDirectory(prefix="edgespec-kernels-") as scratch:
        commands, objects = [], []
        for name, source, extra in _units(known):
            objects.append(str(Path(scratch, f"{name}.o")))
            commands.append([*compiler, *common, *extra, "-c", str(source), "-o", objects[-1]])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda command: _run(command, scratch), commands))
        linked = Path(scratch, f"kernels{_suffix(target)}")
        # Zig would compile a whole library of C++ first, minutes.
        linker = ["cc" if word == "c++" else word for word in compiler]
        _run([*linker, "-shared", *objects, *link_flags(target), "-o", str(linked)], scratch)
        data = linked.read_bytes()
    path = folder / f"{_stem(target)}-{_hash_of(data)}{_suffix(target)}"
    if find_library(folder, target) == path:  # Windows does not replace a library that is in use
        return path
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{path.name}.{secrets.token_hex(4)}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def flags(target: str) -> tuple[str, ...]:
    """For every source; Windows' code can be loaded anywhere without a flag."""
    return FLAGS if target.startswith("win32") else (*FLAGS, "-fPIC")


def link_flags(target: str) -> tuple[str, ...]:
    """What is missing in a library is otherwise found out when it is loaded; macOS writes down where it was linked."""
    if target.startswith("darwin"):
        return ("-Wl,-install_name,libedgespec_kernels.dylib",)
    return ("-s", "-pthread", "-Wl,--as-needed", "-Wl,-z,defs", "-lm") if target.startswith("linux") else ()


def _units(known: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, Path, tuple[str, ...]]]:
    """What is compiled: a name, the source and flags of its own; path.cpp for each instruction set."""
    for source in sorted(SOURCES.glob("*.cpp")):
        if source.stem != "path":
            yield source.stem, source, ()
            continue
        for name, extra in {**known, "portable": ()}.items():
            lanes = source.with_name(f"lanes_{LANES.get(name, name)}.h")
            yield f"path_{name}", source, (*extra, f"-DEDGESPEC_PATH={name}", "-include", str(lanes))


def _compiles(compiler: tuple[str, ...], options: tuple[str, ...]) -> bool:
    with tempfile.TemporaryDirectory(prefix="edgespec-kernels-") as scratch:
        source = Path(scratch, "try.cpp")
        source.write_text("#include <cstdint>\nint32_t one() { return 1; }\n")
        try:
            _run([*compiler, *options, "-c", str(source), "-o", str(source.with_suffix(".o"))], scratch)
        except BuildError:
            return False
    return True


def _run(command: list[str], scratch: str) -> None:
    """Zig keeps 50 MB of what it compiles, in the user's cache folder unless told otherwise."""
    environment = {"ZIG_GLOBAL_CACHE_DIR": scratch, **os.environ}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", env=environment
        )
    except OSError as exc:
        raise BuildError(f"{command[0]} cannot be run: {exc.strerror}") from exc
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[:MOST_SHOWN]
        raise BuildError(f"the compiler fails (exit code {done.returncode}): {shlex.join(command)}\n{said}")


def _stem(target: str) -> str:
    return f"libedgespec_kernels-{source_hash(target)}"


def _suffix(target: str) -> str:
    return SUFFIXES.get(target.partition("-")[0], ".so")


def _machine(target: str) -> str:
    return target.partition("-")[2]


def _hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
