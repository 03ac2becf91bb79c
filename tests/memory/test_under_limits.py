"""Too little memory gives a one-line error with needed and available bytes, never a signal or a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo import DEMO

if sys.platform != "win32":
    import resource

CHILD = """
import resource, sys
import edgespec
edgespec.load
if sys.argv[1].endswith(".onnx"):
    from edgespec.engines.onnx.library import library
else:
    from edgespec.engines.llamacpp.library import library
library()
field = "VmSize" if sys.argv[2] == "RLIMIT_AS" else "VmData"
used = int(next(l for l in open("/proc/self/status") if l.startswith(field)).split()[1]) << 10
limit = used + (int(sys.argv[3]) << 20)
resource.setrlimit(getattr(resource, sys.argv[2]), (limit, limit))
try:
    with edgespec.load(sys.argv[1], reproducible=False, threads=2) as model:
        words = model.encode("Once upon a time in the West ")
        prompt = (words * model.context_length)[: model.context_length - 5]
        model.generate(prompt, options=edgespec.GenerateOptions(max_tokens=4))
    print("works")
except edgespec.EdgespecError as exc:
    print("refused:", exc)
"""


def run_with(path: Path, limit: str, mib_left: int, engine: str) -> str:
    command = [sys.executable, "-c", CHILD, str(path), limit, str(mib_left)]
    environment = {**os.environ, "EDGESPEC_KERNELS": "none"} if engine == "llamacpp" else None
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.returncode == 0, (done.returncode, done.stderr[-500:])
    assert "Traceback" not in done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="limits of addresses are kept by Linux only")
@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
@pytest.mark.parametrize("engine", ["llamacpp", "onnx", "kernels"])
def test_under_any_limit_a_model_works_or_says_what_it_needs(target_path: Path, limit: str, engine: str) -> None:
    """Wherever the limit lies: a library that has too little ends the process, or fails in the middle of an answer."""
    path = DEMO / "onnx" / "target" / "model.onnx" if engine == "onnx" else target_path
    found = {mib: run_with(path, limit, mib, engine) for mib in (20, 57, 1000)}
    for said in found.values():
        assert said == "works" or (said.startswith("refused:") and "more memory" in said and "\n" not in said)
    assert engine == "kernels" or "is left under the limit of" in found[20]
    assert found[1000] == "works"


@pytest.mark.skipif(sys.platform != "linux", reason="limits of addresses are kept by Linux only")
@pytest.mark.parametrize(("limit", "mib"), [("RLIMIT_AS", 150), ("RLIMIT_AS", 300), ("RLIMIT_DATA", 64)])
@pytest.mark.parametrize("engine", ["llamacpp", "onnx"])
def test_a_command_that_starts_under_a_limit_fails_in_one_line(
    target_path: Path, limit: str, mib: int, engine: str
) -> None:
    """Where not even the libraries can be imported."""
    path = target_path if engine == "llamacpp" else DEMO / "onnx" / "target" / "model.onnx"
    command = [sys.executable, "-m", "edgespec", "generate", str(path), "-p", "hi", "-n", "2", "-t", "1"]
    most = mib << 20
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(getattr(resource, limit), (most, most)),
    )
    assert done.returncode in (0, 1, 2), (done.returncode, done.stderr[-500:])
    assert "Traceback" not in done.stderr
    if done.returncode:
        assert "emory" in done.stderr.strip().splitlines()[-1]
