#!/usr/bin/env python3
"""Set edgespec up in .venv beside this checkout, then run it. Standard library only.

    python3 scripts/run.py chat              talk to a model; it offers a small real one
    python3 scripts/run.py test [ARGS]       run the tests (arguments go to pytest)
    python3 scripts/run.py lint              check style and types
    python3 scripts/run.py COMMAND [ARGS]    any edgespec command
    python3 scripts/run.py kernels           compile the processor kernels now
    python3 scripts/run.py install EXTRA...  add an extra: llamacpp, export, train, ...
    python3 scripts/run.py install llamacpp --backend cuda
                                             compile llama.cpp for a GPU: cuda, metal, rocm or vulkan; rpc: to spread a
                                             model over several machines; several with commas: cuda,rpc

The first call installs, in half a minute and without a compiler. A later call starts at once and needs no network.
llama.cpp comes with the tests and with `install llamacpp`, which edgespec names where it is needed: a ready wheel where
pip finds one, else it is compiled, 4 to 6 minutes on two cores. Ctrl-C stops that and keeps all that was there.
The processor kernels, which make answers faster, are compiled in the background while the first command runs, and anew
when their sources have changed; without a C++ compiler that fetches Zig's, 100 MB. EDGESPEC_KERNELS=none leaves it out.
Further settings for the compiler go through CMAKE_ARGS.
"""

import contextlib
import sys

if sys.version_info < (3, 11):  # noqa: UP036 - this file is also read by older interpreters
    found = sys.version.split()[0]
    sys.exit(f"error: edgespec needs Python 3.11 or newer, this is {found}: run this file with a newer one")

import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import textwrap
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
MARKER = VENV / "edgespec-ready.json"
MADE = VENV / "made-by-run.py"
LOG = VENV / "setup.log"
WHEELS = VENV / "wheels"
BYTECODE = VENV / "bytecode"
KERNELS = ROOT / "edgespec" / "kernels"
ZIG = VENV / "zig"
KERNELS_LOG = VENV / "kernels.log"
KERNELS_LOCK = VENV / "kernels.lock"
KERNELS_FAILED = VENV / "kernels-failed.txt"  # hash of the sources that could not be compiled; TOLD is appended
TOLD = " told"
PAGE_FAILED = VENV / "page-libraries-failed"  # when it is from
DAY_S = 86400
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
# Commands that need more than the package's own requirements.
EXTRAS = {"test": ["test", "llamacpp"], "lint": ["lint"], "serve": ["server"], "export": ["export"]}
RUNS_A_MODEL = ("bench", "chat", "generate", "race", "run", "serve", "verify")  # whose first argument it is
# How many processes that is, tests/support/workers.py says. Each takes whole stretches of files, in whose order they
# would run in one process, so that what the tests of a file share is rarely made twice; who is done takes half of the
# rest of another.
IN_PARALLEL = ("-n", "auto", "--dist", "worksteal")
# Backends of llama.cpp, and what CMake has to be told for each.
BACKENDS = {
    "cuda": "-DGGML_CUDA=ON",
    "metal": "-DGGML_METAL=ON",
    "rocm": "-DGGML_HIP=ON",
    "vulkan": "-DGGML_VULKAN=ON",
    "rpc": "-DGGML_RPC=ON",
}
SECONDS_BETWEEN_LINES = 30
MOST_SHOWN = 240  # characters of a line of somebody else's output
LIKELY_FIXES = (
    ("ensurepip is not available|No module named (ensurepip|venv)", "install Python's venv: apt install python3-venv"),
    ("Could NOT find Vulkan|GLSLC_EXECUTABLE-NOTFOUND|LayerSettingEXT",
     "install the Vulkan SDK, 1.3.272 or newer: vulkan.lunarg.com, or apt install libvulkan-dev glslc spirv-headers"),
    ("CUDA Toolkit not found|No CMAKE_CUDA_COMPILER|nvcc", "install the CUDA toolkit, and put its nvcc on the PATH"),
    (r"CMAKE_C(XX)?_COMPILER|Microsoft Visual C|command '?(gcc|cc|c\+\+|clang)|compiler.*not (found|able)",
     "install a C++ compiler: apt install build-essential, dnf install gcc-c++, xcode-select --install (macOS), or "
     "Visual Studio Build Tools (Windows)"),
    ("No space left|Errno 28|Killed|Cannot allocate memory", "free disk space and memory: the build takes 2 GB each"),
    ("name resolution|ConnectionError|Read timed out|SSLError|ProxyError|No matching distribution",
     "the package index cannot be reached or lacks it: check the network connection and `pip config list`"),
)  # fmt: skip


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    command = arguments[0]
    if command == "install":
        return install_extras(arguments[1:])
    if command == "kernels":
        make_ready([])
        build_kernels_quietly() if "--background" in arguments else build_kernels()
        return run_python("-m", "edgespec.kernels.library")
    if command not in ("lint", "test") and {"-h", "--help", "--help-all"} & set(arguments):
        make_ready([])  # reading about a command takes none of what it needs
        return run_python("-m", "edgespec", *arguments)
    make_ready(needed_extras(command, arguments))
    if command == "lint":
        return lint()
    if command in ("serve", "test"):
        fetch_page_libraries()
    if command == "test":
        build_kernels()
        keep_bytecode()
        return run_python("-m", "pytest", *IN_PARALLEL, *(arguments[1:] or ["-q"]))
    start_kernels(waits=wants_kernels(arguments))
    return run_python("-m", "edgespec", *arguments)


def needed_extras(command: str, arguments: list[str]) -> list[str]:
    """The extras of a command; a GGUF is converted without torch."""
    if command == "export" and any(word.lower().endswith(".gguf") for word in arguments):
        return ["convert"]
    return EXTRAS.get(command, [])


def wants_kernels(arguments: list[str]) -> bool:
    """Whether a command names a model, other than the demo, which runs without; a bare chat offers one."""
    command, *words = arguments
    named = words[0] if command in RUNS_A_MODEL and words else "demo"
    is_other = named != "demo" and not named.startswith("-")
    return arguments == ["chat"] or is_other or any(word.lower().endswith(".gguf") for word in words)


def make_ready(extras: list[str]) -> None:
    """Install what is missing, if anything is."""
    if not is_ready(extras):
        with setup_lock():
            if not is_ready(extras):  # another call may have finished it meanwhile
                set_up(extras)


def install_extras(words: list[str]) -> int:
    known = requirements()
    names, backends = split_backends(words)
    unknown = [name for name in names if name not in known]
    unknown_backends = [name for name in backends if name not in BACKENDS]
    asks = any(word.partition("=")[0] == "--backend" for word in words)
    if unknown_backends or (asks and not backends):
        what = f"no backend {', '.join(map(repr, unknown_backends))}" if unknown_backends else "which backend?"
        print(f"error: {what}; known: {', '.join(BACKENDS)}", file=sys.stderr)
        return 2
    if unknown or not (names or backends):
        what = f"no extra {', '.join(map(repr, unknown))}" if unknown else "which extra?"
        print(f"error: {what}; known: {', '.join(known)}", file=sys.stderr)
        return 2
    if backends:
        return install_backends(names, backends)
    is_new = not is_ready(names)
    make_ready(names)
    if not is_new:
        say(f"already installed: {', '.join(names)}")
    return 0


def split_backends(words: list[str]) -> tuple[list[str], list[str]]:
    """Names of extras, and those that follow --backend, which asks for llama.cpp."""
    names = [part for word in words for part in split_option(word)]
    backends: list[str] = []
    while "--backend" in names:
        at = names.index("--backend")
        backends += [name for name in "".join(names[at + 1 : at + 2]).split(",") if name]
        del names[at : at + 2]
    return names, list(dict.fromkeys(backends))


def install_backends(names: list[str], backends: list[str]) -> int:
    """Compile llama.cpp with `backends` and put it in place of the one that is there; it is kept until then."""
    make_ready([name for name in names if name != "llamacpp"])
    set_compiler(backends)
    with setup_lock():
        say(f"compiling llama.cpp with {', '.join(backends)}: 4 to 6 minutes on two cores, longer for a GPU")
        shutil.rmtree(WHEELS, ignore_errors=True)
        WHEELS.mkdir()
        wanted = requirements()["llamacpp"]
        fresh = ["--no-deps", "--no-cache-dir", "--no-binary=llama-cpp-python"]
        command = pip("wheel", "--verbose", *fresh, f"--wheel-dir={WHEELS}", *wanted)
        step("building llama.cpp", command, log=VENV / "llamacpp.log")
        command = pip("install", "--force-reinstall", "--no-deps", "--no-index", f"--find-links={WHEELS}", *wanted)
        step("installing it", command, log=LOG)
        install(sorted({"llamacpp", *names, *installed_extras()} & requirements().keys()))
    return 0


def set_compiler(backends: list[str]) -> None:
    """Leave out of llama.cpp what edgespec never loads, half of the work: images, sound and the tools' library."""
    text_only = (
        "-DLLAVA_BUILD=OFF",
        f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={(ROOT / 'scripts' / 'llamacpp.cmake').as_posix()}",
    )
    settings = [*map(shlex.quote, text_only), os.environ.get("CMAKE_ARGS", ""), *(BACKENDS[name] for name in backends)]
    os.environ["CMAKE_ARGS"] = " ".join(filter(None, settings))


def split_option(argument: str) -> list[str]:
    """`--model=x.gguf` as two words."""
    return argument.split("=", 1) if argument.startswith("--") else [argument]


def kernels_builder() -> ModuleType:
    """edgespec/kernels/build.py, which needs nothing but Python."""
    spec = importlib.util.spec_from_file_location("kernels_build", KERNELS / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_kernels() -> None:
    """Compile the kernels if they are missing or their sources have changed; exits with 1 where that fails."""
    builder = kernels_builder()
    if os.environ.get("EDGESPEC_KERNELS") or builder.find_library(KERNELS):
        return
    with setup_lock(KERNELS_LOCK):
        if builder.find_library(KERNELS):  # another call has built it meanwhile
            return
        try:
            try:
                builder.find_compiler(str(PYTHON))
            except builder.NoCompiler:
                fetch_zig(builder.ZIG)
            step("compiling the kernels", [str(PYTHON), "-m", "edgespec.kernels.library"], log=KERNELS_LOG)
        finally:
            shutil.rmtree(ZIG, ignore_errors=True)
    KERNELS_FAILED.unlink(missing_ok=True)


def fetch_zig(requirement: str) -> None:
    """Have the Pythons that are started from here on find Zig's compiler, until ZIG is removed: it takes 440 MB."""
    say("no C++ compiler was found: Zig's is fetched from the package index, 100 MB")
    shutil.rmtree(ZIG, ignore_errors=True)
    step("fetching Zig", pip("install", "--no-deps", "--no-compile", f"--target={ZIG}", requirement), log=KERNELS_LOG)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ZIG), os.environ.get("PYTHONPATH"))))


def build_kernels_quietly() -> None:
    """In the process that `start_kernels` starts: whatever happens, later calls do not try the same sources again."""
    if os.name != "nt":
        os.nice(10)
    try:
        build_kernels()
    except BaseException:
        KERNELS_FAILED.write_text(kernels_builder().source_hash(), encoding="utf-8")
        raise


def start_kernels(*, waits: bool = False) -> None:
    """Compile the kernels, if that is due, in a process of its own unless this one `waits` for them.

    A failure is told once, and hinders nothing.
    """
    builder = kernels_builder()
    if os.environ.get("EDGESPEC_KERNELS") or builder.find_library(KERNELS):
        return
    with contextlib.suppress(OSError):  # the checkout may be read-only
        failed = KERNELS_FAILED.read_text(encoding="utf-8") if KERNELS_FAILED.exists() else ""
        if failed == builder.source_hash():
            KERNELS_FAILED.write_text(failed + TOLD, encoding="utf-8")
            say(
                f"the kernels could not be compiled, so answers are slower; {KERNELS_LOG} says why. To try again: "
                f"{Path(sys.executable).name} {Path(__file__)} kernels"
            )
        if failed.removesuffix(TOLD) == builder.source_hash():
            return
        if waits:
            try:
                build_kernels()
            except SystemExit:  # it has said why
                KERNELS_FAILED.write_text(builder.source_hash(), encoding="utf-8")
            return
        with KERNELS_LOCK.open("a+b") as lock:
            if not try_lock(lock):
                return
        say("compiling the processor kernels in the background (where there is no compiler, Zig's is fetched, 100 MB)")
        command = [sys.executable, str(Path(__file__).resolve()), "kernels", "--background"]
        low = 0
        if sys.platform == "win32":
            low = subprocess.BELOW_NORMAL_PRIORITY_CLASS | subprocess.CREATE_NO_WINDOW
        null = subprocess.DEVNULL  # in a session of its own, since Ctrl-C is for the command
        subprocess.Popen(command, stdin=null, stdout=null, stderr=null, creationflags=low, start_new_session=True)


def fetch_page_libraries() -> None:
    """Have the libraries of the chat page beside it; it works without them. After a failure a day passes."""
    script = ROOT / "scripts" / "vendor_page.py"
    with contextlib.suppress(OSError):
        if time.time() - PAGE_FAILED.stat().st_mtime < DAY_S:
            return
    if not (ROOT / "edgespec/server/static/vendor").is_dir():
        say("fetching the libraries of the chat page, 2.5 MB")
    done = subprocess.run([str(PYTHON), str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        with contextlib.suppress(OSError):  # the checkout may be read-only
            PAGE_FAILED.touch()
        say(f"the chat page has no formulas, highlighted code and PDFs: {done.stderr.strip().removeprefix('error: ')}")


def lint() -> int:
    checks = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",))
    codes = [subprocess.run([str(PYTHON), "-m", *check], cwd=ROOT, check=False).returncode for check in checks]
    return max(codes)


def keep_bytecode() -> None:
    """Containers have Python keep none beside the code: each worker of the tests would compile all of torch anew."""
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.environ.setdefault("PYTHONPYCACHEPREFIX", str(BYTECODE))


def run_python(*arguments: str) -> int:
    """Become the environment's Python, where the system can; tests run in the checkout, commands where the user is."""
    if arguments[1] == "pytest":
        os.chdir(ROOT)
    command = [str(PYTHON), *arguments]
    if os.name != "nt":
        os.execv(command[0], command)
    process = subprocess.Popen(command)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # it reaches the child too, which decides what it means
            continue


def is_ready(extras: list[str]) -> bool:
    """Whether the environment is complete for this checkout and holds `extras`."""
    try:
        marker = json.loads(MARKER.read_text(encoding="utf-8"))
        return marker["key"] == environment_key() and set(extras) <= set(marker["extras"]) and PYTHON.exists()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def environment_key() -> str:
    """Changes with the requirements, the checkout's place and the environment's Python version."""
    configuration = (VENV / "pyvenv.cfg").read_text(encoding="utf-8")
    version = re.search(r"^version(?:_info)?\s*=\s*(\S+)", configuration, re.MULTILINE)
    parts = ((ROOT / "pyproject.toml").read_bytes(), str(ROOT).encode(), (version.group(1) if version else "").encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


@contextmanager
def setup_lock(path: Path | None = None) -> Iterator[None]:
    """One installation at a time; a second call waits for the first."""
    try:
        lock = (path or ROOT / ".venv.lock").open("a+b")
    except OSError as exc:
        sys.exit(f"{ROOT} cannot be written ({exc.strerror}): edgespec is set up in its checkout; copy that elsewhere")
    with lock as file:
        waiting = False
        while not try_lock(file):
            if not waiting:
                say("another installation is running in this checkout: waiting for it")
                waiting = True
            time.sleep(0.5)
        yield  # closing the file gives the lock back, and so does the end of the process


def try_lock(file: IO[bytes]) -> bool:
    try:
        if sys.platform == "win32":  # os.name would not tell mypy that the other branch is of other systems
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def set_up(extras: list[str]) -> None:
    """Create what is missing. What takes long comes last, and what was ready before stays so if it ends early."""
    extras = sorted({*extras, *installed_extras()} & requirements().keys())
    if not has_pip() and not gets_pip():
        MARKER.unlink(missing_ok=True)
        if VENV.exists():
            if not (MADE.exists() or MARKER.exists()) or Path(sys.prefix).resolve() == VENV.resolve():
                sys.exit(f"{VENV} has no pip and was not made by this script: move it away, or install pip into it")
            shutil.rmtree(VENV)
        VENV.mkdir()
        MADE.touch()
        say(f"making the environment {VENV}")
        step("making the environment", [sys.executable, "-m", "venv", str(VENV)], log=ROOT / ".venv.log")
        (ROOT / ".venv.log").replace(LOG)
    if "llamacpp" in extras and not has_llamacpp():
        if not is_ready([]):
            install([extra for extra in extras if extra != "llamacpp"])
        build_llamacpp()
    install(extras)


def install(extras: list[str]) -> None:
    """Install edgespec with these extras, and mark the environment complete as the very last step.

    What was complete before stays marked so: pip changes an environment only when it has all that it needs.
    """
    if not is_ready([]):
        MARKER.unlink(missing_ok=True)
    say("installing edgespec" + (f" with {', '.join(extras)}" if extras else ""))
    target = str(ROOT) + (f"[{','.join(extras)}]" if extras else "")
    WHEELS.mkdir(exist_ok=True)
    # Python compiles a module when it is first imported: compiling all of them here takes longer than the rest.
    step("installing", pip("install", "--no-compile", f"--find-links={WHEELS}", "-e", target), log=LOG)
    if "gpu" in extras:
        swap_onnxruntime()
    temporary = MARKER.with_suffix(".tmp")
    temporary.write_text(json.dumps({"key": environment_key(), "extras": extras}), encoding="utf-8")
    temporary.replace(MARKER)


def build_llamacpp() -> None:
    """Get a wheel of llama.cpp, which touches nothing in the environment: that stays ready meanwhile."""
    say(
        "llama.cpp: a prebuilt wheel is used if pip finds one, else it is compiled once, 4 to 6 minutes on two cores\n"
        "Ctrl-C skips it: GGUF files on the kernels and ONNX models run without"
    )
    set_compiler([])
    WHEELS.mkdir(exist_ok=True)
    # pip's cache may hold one that was compiled for another processor or with other settings, and ends the process.
    fresh = ["--no-deps", "--no-cache-dir", f"--wheel-dir={WHEELS}"]
    command = pip("wheel", "--verbose", *fresh, *requirements()["llamacpp"])
    step("building llama.cpp", command, log=VENV / "llamacpp.log")


def swap_onnxruntime() -> None:
    """The GPU build of ONNX Runtime holds the same files as the other, which comes with edgespec: the last one wins."""
    command = [str(PYTHON), "-m", "pip", "uninstall", "-y", "onnxruntime"]
    step("removing the build for processors", command, log=LOG)
    step("installing the GPU build", pip("install", "--force-reinstall", "--no-deps", *requirements()["gpu"]), log=LOG)


def has_llamacpp() -> bool:
    """Whether what the extra asks for is installed, in that version."""
    command = pip("install", "--isolated", "--dry-run", "--no-index", "--no-deps", *requirements()["llamacpp"])
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def pip(command: str, *arguments: str) -> list[str]:
    """A command line; a ready wheel is better than a newer version that would have to be compiled."""
    options = ["--disable-pip-version-check", "--progress-bar=off", "--prefer-binary"]
    return [str(PYTHON), "-m", "pip", command, *options, *arguments]


def requirements() -> dict[str, list[str]]:
    """The extras of this checkout, and what each asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return dict(project.get("optional-dependencies", {}))


def installed_extras() -> list[str]:
    """Extras that an earlier, now outdated installation had."""
    try:
        return list(json.loads(MARKER.read_text(encoding="utf-8"))["extras"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def has_pip() -> bool:
    if not PYTHON.exists():
        return False
    return subprocess.run([str(PYTHON), "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0


def gets_pip() -> bool:
    """Whether pip could be put into an environment that was made without it, as uv makes them."""
    if not PYTHON.exists():
        return False
    subprocess.run([str(PYTHON), "-m", "ensurepip"], capture_output=True, check=False)
    return has_pip()


def step(name: str, command: list[str], log: Path) -> None:
    """Run one command with a ticker, its output into `log`; on failure, show its end and the likely fix, and leave."""
    started_s = shown_s = time.monotonic()
    live = sys.stderr.isatty()
    null = subprocess.DEVNULL  # a question that nobody sees would wait for ever
    with (
        log.open("wb") as output,
        subprocess.Popen(command, cwd=ROOT, stdin=null, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
                now_s = time.monotonic()
                if now_s - shown_s >= (0.2 if live else SECONDS_BETWEEN_LINES):
                    shown_s = now_s
                    tell_progress(name, now_s - started_s, (last_lines(log) or [""])[-1], live)
        except BaseException:
            process.terminate()
            raise
    if live:
        print("\r" + " " * (shutil.get_terminal_size().columns - 1), end="\r", file=sys.stderr, flush=True)
    elapsed = clock(time.monotonic() - started_s)
    if process.returncode:
        fail(name, elapsed, log)
    say(f"{name}: done in {elapsed}")


def last_lines(log: Path, most_bytes: int = 1 << 12) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - most_bytes, 0))
        return file.read().decode("utf-8", "replace").splitlines()


def tell_progress(name: str, elapsed_s: float, last_line: str, live: bool) -> None:
    columns = shutil.get_terminal_size().columns - 1
    text = f"{name} {clock(elapsed_s)}  {last_line.strip()}"[:columns]
    if live:  # spaces, since Windows' console prints escape codes
        print("\r" + text.ljust(columns), end="", file=sys.stderr, flush=True)
    else:
        say(text)


def fail(name: str, elapsed: str, log: Path) -> None:
    output = log.read_text(encoding="utf-8", errors="replace")
    print("\n".join(line[:MOST_SHOWN] for line in output.splitlines()[-20:]), file=sys.stderr)
    print(f"\nerror: {name} failed after {elapsed}; the whole output is in {log}", file=sys.stderr)
    fixes = [fix for pattern, fix in LIKELY_FIXES if re.search(pattern, output)]
    if fixes:
        print(f"likely fix: {fixes[0]}", file=sys.stderr)
    print("then run the same command again: what is already installed is kept", file=sys.stderr)
    sys.exit(1)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def say(text: str) -> None:
    """Lines on stderr, broken at words where it is a terminal."""
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns
        lines = (
            textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False) for line in text.split("\n")
        )
        text = "\n".join(lines)
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        say("\nstopped; what was ready still is, and the same command goes on from here")
        sys.exit(130)
