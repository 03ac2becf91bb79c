"""scripts/run.py without the network: when it is ready, how it waits, what it says when a step fails."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "run.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script as if its checkout lay in `tmp_path`, with a Python that is there."""
    module = load_script()
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.7\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "MARKER", tmp_path / ".venv" / "edgespec-ready.json")
    monkeypatch.setattr(module, "PYTHON", Path(sys.executable))
    return module


@pytest.fixture
def installed(script, monkeypatch):
    """The script with every step replaced by a record of its command."""
    commands: list[list[str]] = []
    monkeypatch.setattr(script, "step", lambda name, command, log: commands.append(command))
    monkeypatch.setattr(script, "has_pip", lambda: True)
    return commands


def test_nothing_is_ready_before_the_marker_is_written(script):
    assert not script.is_ready([])


def test_a_complete_setup_is_ready_until_something_changes(script, installed, tmp_path):
    script.set_up(["test"])
    assert installed[-1][-2:] == ["-e", f"{tmp_path}[test]"]
    assert script.is_ready([])
    assert script.is_ready(["test"])
    assert not script.is_ready(["server"])
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert not script.is_ready([])


def test_another_python_in_the_environment_is_not_ready(script, installed, tmp_path):
    script.set_up([])
    (tmp_path / ".venv" / "pyvenv.cfg").write_text("version = 3.13.0\n")
    assert not script.is_ready([])


def test_extras_add_up(script, installed, tmp_path):
    script.set_up(["test"])
    script.set_up(["server"])
    assert installed[-1][-1] == f"{tmp_path}[server,test]"
    assert script.is_ready(["server", "test"])


def test_an_interrupted_setup_is_not_ready(script, monkeypatch):
    def interrupt(name: str, command: list[str], log: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        script.set_up([])
    assert not script.is_ready([])


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"key": 1}'])
def test_a_damaged_marker_is_not_ready(script, content):
    script.MARKER.write_text(content)
    assert not script.is_ready([])


def test_a_step_leaves_its_output_in_the_log(script, tmp_path, capsys):
    script.step("greeting", [sys.executable, "-c", "print('hello')"], tmp_path / "log")
    assert (tmp_path / "log").read_text() == "hello\n"
    assert "greeting: done in 0:0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "fix"),
    [
        ("CMake Error: No CMAKE_CXX_COMPILER could be found.", "install a C++ compiler"),
        ("error: command 'gcc' failed: No such file", "install a C++ compiler"),
        ("error: Microsoft Visual C++ 14.0 or greater is required", "Visual Studio Build Tools"),
        ("Temporary failure in name resolution", "network connection"),
        ("OSError: [Errno 28] No space left on device", "disk space"),
        ("The virtual environment was not created: ensurepip is not available", "python3-venv"),
    ],
)
def test_a_failed_step_shows_the_end_and_the_likely_fix(script, tmp_path, capsys, output, fix):
    code = f"print('first line'); [print(i) for i in range(50)]; print({output!r}); raise SystemExit(3)"
    with pytest.raises(SystemExit) as left:
        script.step("installing", [sys.executable, "-c", code], tmp_path / "log")
    said = capsys.readouterr().err
    assert left.value.code == 1
    assert output in said
    assert "first line" not in said
    assert "first line" in (tmp_path / "log").read_text()
    (likely,) = [line for line in said.splitlines() if line.startswith("likely fix: ")]
    assert fix in likely


def test_a_second_setup_waits_for_the_first(script, tmp_path, monkeypatch):
    holder = (
        "import importlib.util, pathlib, sys\n"
        f"spec = importlib.util.spec_from_file_location('run_script', {str(SCRIPT)!r})\n"
        "run = importlib.util.module_from_spec(spec); spec.loader.exec_module(run)\n"
        f"run.ROOT = pathlib.Path({str(tmp_path)!r})\n"
        "with run.setup_lock():\n    print('held', flush=True); sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", holder], **pipes) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "held\n"
        said = []
        # what it says while it waits lets the first one go on
        monkeypatch.setattr(script, "say", lambda text: (said.append(text), other.stdin.close()))
        with script.setup_lock():
            assert said == ["another installation is running in this checkout: waiting for it"]
        assert other.wait(60) == 0


def test_help_needs_no_setup():
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, check=True)
    assert "scripts/run.py chat" in done.stdout


@pytest.mark.skipif(os.name == "nt", reason="execs on POSIX only")
def test_commands_reach_the_package_and_tests_reach_pytest(script, monkeypatch):
    calls: list[list[str]] = []
    monkeypatch.setattr(script, "is_ready", lambda extras: True)

    def execv(path: str, command: list[str]) -> None:
        calls.append(command[1:])
        raise SystemExit

    monkeypatch.setattr(script.os, "execv", execv)
    monkeypatch.chdir(Path.cwd())
    for arguments in (["chat", "-n", "3"], ["test"], ["test", "-k", "cli"]):
        with pytest.raises(SystemExit):
            script.main(arguments)
    assert calls == [
        ["-m", "edgespec", "chat", "-n", "3"],
        ["-m", "pytest", "-q"],
        ["-m", "pytest", "-k", "cli"],
    ]
