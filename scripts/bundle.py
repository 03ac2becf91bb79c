"""Build one folder that runs edgespec without Python, and try it: PyInstaller's one-folder mode.

    python scripts/bundle.py [--output build/bundle] [--without-onnx] [--with-server] [--skip-build]

Run it with an environment that holds edgespec's packages and PyInstaller. The folder holds the command, llama.cpp, the
demo pair and, unless left out, ONNX Runtime; `--with-server` adds HTTP and the page. It is then run as a sidecar:
`edgespec serve demo --stdio` must answer a chat and end with its standard input; with the server, the page must come
too. Prints size and times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What edgespec imports only for export, training, plots and tests.
EXCLUDED = (
    *("torch", "transformers", "matplotlib", "PIL", "pytest", "_pytest", "mypy", "hatchling", "tkinter", "IPython"),
    *("contourpy", "fontTools", "kiwisolver", "safetensors", "gguf", "pandas", "scipy", "sympy", "setuptools", "pip"),
)
ONNX = ("onnxruntime", "onnx", "ml_dtypes", "google")
# edgespec starts itself as `python -m edgespec....` to try a file in a process of its own.
LAUNCHER = """\
import runpy
import sys

if sys.argv[1:2] == ["-m"] and len(sys.argv) > 2 and sys.argv[2].split(".")[0] == "edgespec":
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    from edgespec.__main__ import main

    main()
"""


def packaged() -> Iterator[tuple[Path, str]]:
    """Files and folders of the checkout that a wheel holds too, and the folder of each in the bundle."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for source, target in table["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"].items():
        path = ROOT / source
        yield path, target if path.is_dir() else target.rpartition("/")[0]


def program_in(output: Path) -> Path:
    """The command of the bundle in `output`."""
    return output / "dist" / "edgespec" / ("edgespec.exe" if os.name == "nt" else "edgespec")


def build(output: Path, *, has_onnx: bool, has_server: bool) -> None:
    """Make a new bundle in `output`."""
    output.mkdir(parents=True, exist_ok=True)
    launcher = output / "launcher.py"
    launcher.write_text(LAUNCHER, encoding="utf-8")
    excluded = [*EXCLUDED, *(() if has_onnx else ONNX), *(() if has_server else ("uvicorn", "starlette"))]
    command = [sys.executable, "-m", "PyInstaller", "--noconfirm", "--log-level", "WARN", "--name", "edgespec"]
    command += ["--distpath", str(output / "dist"), "--workpath", str(output / "work"), "--specpath", str(output)]
    command += ["--paths", str(ROOT), "--collect-submodules", "edgespec", "--collect-data", "edgespec"]
    command += ["--collect-all", "llama_cpp", "--copy-metadata", "llama-cpp-python"]
    command += ["--copy-metadata", "onnxruntime"] if has_onnx else []
    command += ["--collect-submodules", "uvicorn"] if has_server else []
    for name in excluded:
        command += ["--exclude-module", name]
    # As data, since its name holds a hash of its bytes, and PyInstaller may change a library.
    kernels = sorted((ROOT / "edgespec" / "kernels").glob("libedgespec_kernels-*")) if has_onnx else []
    for source, target in [*packaged(), *((path, "edgespec/kernels") for path in kernels)]:
        command += ["--add-data", f"{source}{os.pathsep}{target}"]
    began_s = time.monotonic()
    done = subprocess.run([*command, str(launcher)], check=False, env=os.environ | {"PYTHONPATH": str(ROOT)})
    if done.returncode != 0:
        raise SystemExit("PyInstaller has failed; its messages are above (to install it: pip install pyinstaller)")
    print(f"built in {time.monotonic() - began_s:.0f} s")


def size_of(folder: Path) -> int:
    """Bytes of all its files; links count nothing."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def started(program: Path, home: str, *options: str) -> subprocess.Popen[bytes]:
    """The bundle's `serve`, without anything of this Python in its environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([program, "serve", "demo", *options], **pipes, env=environment | {"EDGESPEC_HOME": home})


def page(program: Path) -> int:
    """The bytes of the page that the bundle's server sends; raises if it does not."""
    with tempfile.TemporaryDirectory() as home, started(program, home, "--port", "0", "--exit-with-stdin") as child:
        try:
            assert child.stdin is not None and child.stdout is not None
            url = json.loads(child.stdout.readline())["url"]
            with urllib.request.urlopen(url) as answer:
                content: bytes = answer.read()
            child.stdin.close()
            code = child.wait(60)
        finally:
            child.kill()
    if b"<title>edgespec" not in content or code != 0:
        raise SystemExit(f"the server of the bundle does not work: it ended with code {code}")
    return len(content)


def chat(program: Path) -> dict[str, Any]:
    """Run the bundle as a sidecar, ask once, close it. Times in seconds; raises if anything is not as it should be."""
    with tempfile.TemporaryDirectory() as home:
        began_s = time.monotonic()
        child = started(program, home, "--stdio")
        try:
            assert child.stdin is not None and child.stdout is not None
            found: dict[str, Any] = {"text": ""}
            request = {"op": "chat", "id": "a", "messages": [{"role": "user", "content": "Find me a bus to Fresno."}]}
            for line in child.stdout:
                event = json.loads(line)
                if event["event"] == "ready":
                    found["ready_s"] = time.monotonic() - began_s
                    child.stdin.write(json.dumps(request | {"max_tokens": 24}).encode() + b"\n")
                    child.stdin.flush()
                elif event["event"] == "delta":
                    found["text"] += event["text"]
                elif event["event"] in ("done", "error"):
                    found |= event
                    break
            child.stdin.close()
            found["code"] = child.wait(60)
        finally:
            child.kill()
    if found.get("event") != "done" or not found["text"] or found["code"] != 0:
        raise SystemExit(f"the bundle does not work: {found}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bundle")
    parser.add_argument("--without-onnx", action="store_true")
    parser.add_argument("--with-server", action="store_true")
    parser.add_argument("--skip-build", action="store_true", help="run the bundle that is there")
    options = parser.parse_args()
    output = options.output.resolve()
    if not options.skip_build:
        build(output, has_onnx=not options.without_onnx, has_server=options.with_server)
    program = program_in(output)
    answer = chat(program)
    print(f"{program.parent}: {size_of(program.parent) / 2**20:.0f} MiB")
    if options.with_server:
        print(f"the server sends its page: {page(program)} bytes")
    print(f"ready after {answer['ready_s']:.1f} s, answered {answer['text']!r}, ended with code {answer['code']}")


if __name__ == "__main__":
    main()
