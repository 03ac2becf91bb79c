"""What is installed here, and the command that adds what is missing: every hint to install something comes from here.

A command names what pip can really find: the checkout that edgespec lies in, or the packages themselves.
What this module does not know: whether a library that is there also loads.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType

from edgespec.errors import CapabilityError

# ONNX Runtime reports its use to Microsoft from 1.29 on (docs/Privacy.md there), unless this is 1 when it is loaded.
NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"
ENGINE_MODULES = {"llamacpp": "llama_cpp", "onnx": "onnxruntime"}
# What CMake has to be told for each backend of llama.cpp.
BACKENDS = {
    "cuda": "-DGGML_CUDA=ON",
    "metal": "-DGGML_METAL=ON",
    "rocm": "-DGGML_HIP=ON",
    "vulkan": "-DGGML_VULKAN=ON",
    "rpc": "-DGGML_RPC=ON",
}
_MOST_REASON = 200  # characters
# What importing a library raises that has no memory for a part of itself, or is damaged; MemoryError is one for all.
IMPORT_FAILURES = (ImportError, AttributeError, NameError, OSError, RuntimeError, SystemError, TypeError)
COMPILES = "a prebuilt wheel is used if pip finds one, else it is compiled once: 4 to 10 minutes on two cores"


def is_importable(module: str) -> bool:
    """Whether a top-level module is there. Nothing is imported."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None  # None: a folder that an uninstallation left behind


def has_engine(engine: str) -> bool:
    """Whether the library of an engine is there."""
    return is_importable(ENGINE_MODULES[engine])


def require_engine(engine: str, what: str, otherwise: str = "") -> None:
    """Raises CapabilityError when the library of an engine, which `what` needs, is not installed.

    `otherwise`: what could be done instead of installing llama.cpp.
    """
    if has_engine(engine):
        return
    if engine == "onnx":
        raise CapabilityError(f"{what} needs ONNX Runtime, which is not installed here: {install_command()}")
    raise CapabilityError(
        f"{what} needs llama.cpp, which is not installed here: {install_command('llamacpp')} ({COMPILES})"
        f"{otherwise and f', {otherwise}'}"
    )


def child_environment(**settings: str) -> dict[str, str]:
    """Of a child process that runs a module of this very package, wherever it lies; `settings` are added.

    What it imports reports no use, as in this process.
    """
    settings = {NO_TELEMETRY: os.environ.get(NO_TELEMETRY, "1"), **settings}
    search_path = filter(None, (str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")))
    return {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(search_path)}


def cause_of(exc: BaseException) -> str:
    """What a failure began with, in a short line; numpy's own message is a page about installing it."""
    while exc.__cause__ is not None:
        exc = exc.__cause__
    return " ".join(str(exc).split())[:_MOST_REASON]


def has_memory_limit() -> bool:
    """Whether this process may have only so many bytes of addresses or of its own (`ulimit -v`, `ulimit -d`)."""
    if sys.platform == "win32":
        return False
    import resource  # not there on Windows

    kinds = resource.RLIMIT_AS, resource.RLIMIT_DATA
    return any(resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in kinds)


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Ctrl-C is answered at the end: some libraries crash, or say that they are damaged, when their import is cut."""
    answer = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(answer):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *interrupt: came.append(interrupt))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, answer)
        for interrupt in came:
            answer(*interrupt)


def not_importable(what: str, exc: Exception, module: str, extra: str = "") -> CapabilityError:
    """The error for a library that `what` needs and whose import raised `exc`: absent, without memory, or damaged.

    A package that was imported in part fails in any way, also the next time.
    """
    missing = exc.name if isinstance(exc, ModuleNotFoundError) else None
    if missing is not None and not is_importable(missing.partition(".")[0]):
        return CapabilityError(f"{what} needs {missing}: {install_command(extra)}")
    return CapabilityError(
        f"{what} needs {module}, which fails: {cause_of(exc)}. Install it again: {reinstall_command(module)}; where "
        "memory may be short, raise the limits of this process (ulimit -v, ulimit -d)"
    )


def install_command(extra: str = "") -> str:
    """What to type to get an extra into the environment that runs this; "": edgespec's own requirements.

    onnxruntime-gpu holds the same files as onnxruntime, so `gpu` is two commands: one goes before the other comes.
    """
    if extra and (script := _script_of_checkout()):
        return f"{script} install {extra}"
    if extra == "gpu":
        remove = pip_command("uninstall", "-y", "onnxruntime", "onnxruntime-gpu")
        return f"{joined(remove)}, then {joined(pip_command('install', _requirement_of('onnxruntime-gpu')))}"
    if (checkout := _checkout()) is not None:
        return joined(pip_command("install", "-e", f"{checkout}[{extra}]" if extra else str(checkout)))
    return joined(pip_command("install", *requirements().get(extra, ())))


def pip_command(command: str, *arguments: str) -> list[str]:
    """The program and arguments of a command of pip for this environment; one made by uv has no pip of its own."""
    if is_importable("pip"):
        return [sys.executable, "-m", "pip", command, *arguments]
    return ["uv", "pip", command, "--python", sys.executable, *arguments]


def reinstall_command(package: str, *options: str) -> str:
    """What to type to replace a package that is there and does not work; `options` go to pip."""
    return joined(pip_command("install", "--force-reinstall", *options, _requirement_of(package)))


def build_command(backend: str) -> str:
    """What to type to compile llama.cpp with one of BACKENDS, in place of the build that is there."""
    if script := _script_of_checkout():
        return f"{script} install llamacpp --backend {backend}"
    options = ["--no-deps", "--no-cache-dir", "--no-binary=llama-cpp-python"]
    if os.name == "nt":  # cmd.exe and PowerShell set variables in different ways
        return reinstall_command("llama-cpp-python", *options, f"--config-settings=cmake.args={BACKENDS[backend]}")
    return f"CMAKE_ARGS={BACKENDS[backend]} {reinstall_command('llama-cpp-python', *options)}"


def build_kernels_command() -> str:
    """What to type to compile our own kernels, whose library is missing."""
    if (script := _script_of_checkout()) and os.access(Path(__file__).parent, os.W_OK):
        return f"{script} kernels"  # which works in the checkout only
    return f"{quoted(sys.executable)} -m edgespec.kernels.library"


@cache
def requirements() -> dict[str, list[str]]:
    """What edgespec needs ("") and what each extra adds, as pip takes it; empty where edgespec is not installed."""
    from importlib import metadata  # 10 ms that only a hint needs

    try:
        lines = metadata.requires("edgespec") or []
    except metadata.PackageNotFoundError:
        return {}
    declared: dict[str, list[str]] = {"": []}
    for line in lines:
        text, _, marker = line.partition(";")
        extra = re.search(r"extra == ['\"]([^'\"]+)['\"]", marker)
        declared.setdefault(extra.group(1) if extra else "", []).append(text.strip())
    return declared


def _requirement_of(package: str) -> str:
    """`onnx>=1.19` for onnx; the name itself where edgespec asks for no version."""
    declared = (text for texts in requirements().values() for text in texts)
    return next((text for text in declared if re.split(r"[^\w.-]", text)[0] == package), package)


def _checkout() -> Path | None:
    """The source checkout that this very file lies in."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "pyproject.toml").is_file() and (root / "scripts" / "run.py").is_file() else None


def _script_of_checkout() -> str:
    """How to call the checkout's scripts/run.py, if its own environment runs this; else empty."""
    checkout = _checkout()
    if checkout is None or Path(sys.prefix).resolve() != (checkout / ".venv").resolve():
        return ""
    return f"{'python' if os.name == 'nt' else 'python3'} {quoted(str(checkout / 'scripts' / 'run.py'))}"


def quoted(text: str) -> str:
    """`text` as one word of the shell; on Windows of both: cmd.exe knows no other marks than double ones."""
    if os.name == "nt":
        escaped = text.replace('"', '\\"')
        return f'"{escaped}"' if not text or re.search(r"[\s<>&|^,;=()'\"]", text) else text
    return text if re.fullmatch(r"[\w./:=-]+", text) else shlex.quote(text)  # which quotes letters beyond ASCII, too


def joined(words: Iterable[str]) -> str:
    """A command line of the shell."""
    return " ".join(map(quoted, words))
