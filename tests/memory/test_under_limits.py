"""Real limits, budgets and control groups: a child works within them, or says in one line what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from demo import DEMO

if sys.platform != "linux":
    pytest.skip("reads /proc; only Linux keeps limits of addresses", allow_module_level=True)

import resource

import measure_memory
from measure_memory import MIB, needs, under_budget
from waiting import until

OUTCOMES = {0: "ran", measure_memory.REFUSED: "refused"}

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


# -- what ONNX models take of a process's own memory, in child processes, beside what is planned


TOKENIZER_CHILD = """
import sys
from pathlib import Path
import numpy, tokenizers
from edgespec.platform.memory import own_bytes
from edgespec.engines.onnx.tokenizer import TokenizerFile
before = own_bytes()
vocabulary = TokenizerFile(Path(sys.argv[1]), int(sys.argv[2]))
pieces = vocabulary.pieces
print(own_bytes() - before)
"""


@pytest.mark.quiet
def test_a_tokenizer_keeps_what_is_planned_and_not_what_reading_it_took(tmp_path: Path) -> None:
    size = 50_000
    write_tokenizer(tmp_path, size)
    command = [sys.executable, "-c", TOKENIZER_CHILD, str(tmp_path), str(size)]
    kept = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=180).stdout)
    assert 0.5 * 360 * size < kept < 1.25 * 360 * size


def write_tokenizer(folder: Path, size: int) -> None:
    """BPE over bytes with merges in lists, as converters write it today."""
    from edgespec.engines.onnx.tokenizer import BYTE_OF

    letters = list(BYTE_OF)
    merges = [[one, other] for one in letters for other in letters][: size - len(letters)]
    names = [*letters, *map("".join, merges)]
    model: dict[str, Any] = {
        "type": "BPE",
        "vocab": {name: index for index, name in enumerate(names)},
        "merges": merges,
        "unk_token": None,
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    whole = {"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": level, "decoder": level}
    (folder / "tokenizer.json").write_text(json.dumps(whole, ensure_ascii=False), encoding="utf-8")


# -- real budgets and a real control group: a child fills its context within them, or says in one line why not


@pytest.mark.parametrize("engine", ["llamacpp", "onnx"])
def test_a_budget_is_kept_or_refused(engine: str, tmp_path: Path) -> None:
    options = {"model": "demo", "engine": engine, "threads": 1}
    least, most = needs(options)
    outcomes = [under_budget(limit, options, str(tmp_path)) for limit in (least - MIB, least, (least + most) // 2)]
    assert [outcome for outcome, _ in outcomes] == ["refused", "ran", "ran"], outcomes


def own_group() -> tuple[Path, str]:
    """The folder of the memory group of this process, and the name of its limit in the group's version."""
    mounted = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return mounted / "memory" / path.strip("/"), "memory.limit_in_bytes"
        if number == "0" and (mounted / path.strip("/") / "cgroup.subtree_control").exists():
            return mounted / path.strip("/"), "memory.max"
    pytest.skip("no group with a memory controller")


def test_a_control_group_is_kept_or_the_load_refused(tmp_path: Path) -> None:
    options = {"model": "demo", "engine": "llamacpp", "threads": 1}
    least, most = needs(options)
    parent, limit_name = own_group()
    group = parent / f"edgespec-{os.getpid()}"
    child = [sys.executable, measure_memory.__file__, "--child", json.dumps({**options, "memory": "auto"})]
    enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    try:
        group.mkdir()
        (group / limit_name).write_text(str(least))
    except OSError as exc:
        pytest.skip(f"no control group can be made here: {exc}")
    try:
        outcomes = []
        for limit in (least - 8 * MIB, least + MIB, 2 * most):  # enough for Python with room to spare, and for no model
            (group / limit_name).write_text(str(limit))
            environment = os.environ | {"EDGESPEC_HOME": str(tmp_path)}
            done = subprocess.run([*enter, *child], capture_output=True, text=True, check=False, env=environment)
            outcomes.append((OUTCOMES.get(done.returncode, done.returncode), done.stderr))
        assert [outcome for outcome, _ in outcomes] == ["refused", "ran", "ran"], outcomes
    finally:
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
