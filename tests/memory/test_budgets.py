"""Real budgets and a real control group: a child fills its context within them, or says in one line why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("reads /proc and makes control groups", allow_module_level=True)

import measure_memory
from measure_memory import MIB, needs, under_budget
from waiting import until

OUTCOMES = {0: "ran", measure_memory.REFUSED: "refused"}


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
