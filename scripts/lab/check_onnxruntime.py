"""Run the kernels' tests with the oldest ONNX Runtime that pyproject.toml allows and with the newest on the index.

    python scripts/lab/check_onnxruntime.py [ARGUMENT...]     of pytest; default: tests/kernels -q

Each version is put into a folder of its own, in front of the one that is installed. Needs a package index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def oldest() -> str:
    """The lower bound of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (bound,) = (found[1] for text in project["dependencies"] if (found := re.fullmatch(r"onnxruntime>=([\d.]+)", text)))
    return f"onnxruntime=={bound}"


def failures(requirement: str, arguments: list[str]) -> int:
    """The exit code of pytest with that ONNX Runtime."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, requirement]
        subprocess.run(command, check=True)
        search_path = os.pathsep.join(filter(None, (folder, str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": search_path}
        shown = "import onnxruntime; print('ONNX Runtime', onnxruntime.__version__, onnxruntime.__file__, flush=True)"
        subprocess.run([sys.executable, "-c", shown], env=environment, cwd=ROOT, check=True)
        return subprocess.run([sys.executable, "-m", "pytest", *arguments], env=environment, cwd=ROOT).returncode


def main() -> int:
    arguments = sys.argv[1:] or ["tests/kernels", "-q"]
    return max([failures(requirement, arguments) for requirement in (oldest(), "onnxruntime")])


if __name__ == "__main__":
    sys.exit(main())
