"""scripts/run.py without the network: when it is ready, how it waits, what it says when a step fails."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest

from edgespec.installation import BACKENDS

PROJECT = """[project]
[project.optional-dependencies]
llamacpp = ["llama-cpp-python>=0.3"]
server = ["uvicorn"]
test = ["pytest"]
gpu = ["onnxruntime-gpu>=1"]
"""
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
    monkeypatch.setenv("CMAKE_ARGS", "")  # the script adds to it: not for the tests that follow
    module = load_script()
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.7\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "MARKER", tmp_path / ".venv" / "edgespec-ready.json")
    monkeypatch.setattr(module, "MADE", tmp_path / ".venv" / "made-by-run.py")
    monkeypatch.setattr(module, "WHEELS", tmp_path / ".venv" / "wheels")
    monkeypatch.setattr(module, "PYTHON", Path(sys.executable))
    for name in ("LOG", "ZIG", "KERNELS_LOG", "KERNELS_LOCK", "KERNELS_FAILED", "PAGE_FAILED"):
        monkeypatch.setattr(module, name, tmp_path / ".venv" / getattr(module, name).name)
    for name in ("ENGINE", "KERNELS", "MODEL", "MODELS", "HOME"):
        monkeypatch.delenv(f"EDGESPEC_{name}", raising=False)
    return module


@pytest.fixture
def installed(script, monkeypatch):
    """The script with every step replaced by a record of its command."""
    commands: list[list[str]] = []
    monkeypatch.setattr(script, "step", lambda name, command, log: commands.append(command))
    monkeypatch.setattr(script, "has_pip", lambda: True)
    monkeypatch.setattr(script, "has_llamacpp", lambda: False)
    return commands


def test_extras_add_up_and_a_setup_is_ready_until_something_changes(script, installed, tmp_path):
    script.set_up(["test"])
    assert installed[-1][-2:] == ["-e", f"{tmp_path}[test]"]
    assert script.is_ready([]) and script.is_ready(["test"]) and not script.is_ready(["server"])
    script.set_up(["server"])
    assert installed[-1][-1] == f"{tmp_path}[server,test]"
    assert script.is_ready(["server", "test"])
    (tmp_path / "pyproject.toml").write_text(PROJECT + "other = []\n")
    assert not script.is_ready([])


def test_llama_cpp_is_built_last_and_alone(script, installed, tmp_path, capsys):
    script.set_up(["llamacpp", "test"])
    without, wheel, complete = installed
    assert without[-1] == f"{tmp_path}[test]"
    assert wheel[3] == "wheel" and wheel[-1] == "llama-cpp-python>=0.3"
    assert complete[-1] == f"{tmp_path}[llamacpp,test]"
    said = capsys.readouterr().err
    assert "4 to 6 minutes" in said and "Ctrl-C skips it" in said
    assert "LLAVA_BUILD=OFF" in os.environ["CMAKE_ARGS"] and SCRIPT.with_name("llamacpp.cmake").is_file()
    assert script.is_ready(["llamacpp", "test"])


def test_an_interrupted_build_of_llama_cpp_leaves_a_ready_environment(script, installed, monkeypatch):
    script.set_up(["server"])
    monkeypatch.setattr(script, "build_llamacpp", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        script.set_up(["llamacpp"])
    assert script.is_ready(["server"])
    assert not script.is_ready(["llamacpp"])


def test_the_gpu_build_takes_the_place_of_the_other_each_time(script, installed, tmp_path):
    script.set_up(["gpu"])
    assert [command[3] for command in installed] == ["install", "uninstall", "install"]
    assert installed[1][-1] == "onnxruntime" and installed[2][-1] == "onnxruntime-gpu>=1"
    script.set_up(["server"])
    assert installed[3][-1] == f"{tmp_path}[gpu,server]" and installed[5][-1] == "onnxruntime-gpu>=1"


def test_a_command_with_a_model_waits_for_the_kernels(script):
    waiting, others = (
        ("chat", "run x.gguf hello", "chat -m=x.GGUF"),
        ("chat demo", "doctor", "run", "generate -p hello"),
    )
    assert [line for line in (*waiting, *others) if script.wants_kernels(line.split())] == [*waiting]


def test_extras_are_installed_by_name(script, installed, tmp_path, capsys):
    assert script.main(["install", "server"]) == 0
    assert installed[-1][-1] == f"{tmp_path}[server]"
    assert script.main(["install", "server"]) == 0
    assert "already installed: server" in capsys.readouterr().err
    assert script.main(["install", "sever"]) == 2
    assert "no extra 'sever'; known: llamacpp, server, test, gpu" in capsys.readouterr().err
    assert script.main(["install"]) == 2
    assert script.main(["install", "llamacpp", "--backend", "opengl"]) == 2
    assert "known: cuda, metal, rocm, vulkan, rpc" in capsys.readouterr().err and len(installed) == 1
    assert script.BACKENDS == BACKENDS, "the package names them, too"


@pytest.mark.parametrize("is_ours", [False, True])
def test_an_environment_without_pip_is_replaced_only_if_it_is_ours(script, installed, monkeypatch, is_ours):
    own = script.VENV / "own.txt"
    own.touch()
    monkeypatch.setattr(script, "has_pip", lambda: False)
    monkeypatch.setattr(script, "gets_pip", lambda: False)
    monkeypatch.setattr(script, "environment_key", lambda: "key")
    (script.ROOT / ".venv.log").touch()
    if is_ours:
        script.MADE.touch()
        script.set_up([])
        assert not own.exists() and script.MADE.exists()
        return
    with pytest.raises(SystemExit, match="was not made by this script"):
        script.set_up([])
    assert own.exists() and installed == []


@pytest.mark.parametrize(
    ("output", "fix"),
    [
        ("Temporary failure in name resolution", "network connection"),
        ("glslc -O x.comp\ng++: fatal error: Killed signal terminated program cc1plus", "memory"),
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


# -- kernels


@pytest.fixture
def builder(script, installed, monkeypatch):
    """Stands for edgespec/kernels/build.py."""

    found = SimpleNamespace(ZIG="ziglang>=0", NoCompiler=LookupError, library=None, find_compiler=Mock())
    found.find_library, found.source_hash = lambda folder: found.library, lambda: "1234"
    monkeypatch.setattr(script, "kernels_builder", lambda: found)
    monkeypatch.setattr(script.os, "nice", lambda by: None, raising=False)  # for the tests that follow
    return found


@pytest.fixture
def started(script, monkeypatch):
    """The commands of processes in the background, none of which runs."""
    commands: list[list[str]] = []
    monkeypatch.setattr(script.subprocess, "Popen", lambda command, **options: commands.append(command))
    return commands


def test_kernels_are_compiled_in_the_background_until_they_are_there(script, builder, started, capsys):
    script.start_kernels()
    (command,) = started
    assert command[1:] == [str(SCRIPT), "kernels", "--background"]
    assert "compiling the processor kernels in the background" in capsys.readouterr().err
    builder.library = Path("there")
    script.start_kernels()
    assert len(started) == 1 and capsys.readouterr().err == ""


def test_a_failure_in_the_background_is_told_once_and_not_tried_again(script, builder, started, monkeypatch, capsys):
    monkeypatch.setattr(script, "step", Mock(side_effect=SystemExit(1)))
    with pytest.raises(SystemExit):
        script.build_kernels_quietly()
    for said in ("could not be compiled", ""):
        script.start_kernels()
        assert said in capsys.readouterr().err and started == []
    monkeypatch.setattr(builder, "source_hash", lambda: "5678")
    script.start_kernels()
    assert len(started) == 1, "other sources may do"


@pytest.mark.parametrize("has_compiler", [True, False])
def test_zig_is_fetched_where_there_is_no_compiler_and_removed(script, builder, installed, monkeypatch, has_compiler):
    monkeypatch.setenv("PYTHONPATH", "before")
    if not has_compiler:
        builder.find_compiler.side_effect = LookupError
    script.ZIG.mkdir()
    script.KERNELS_FAILED.write_text("1234")
    script.build_kernels()
    *fetched, compiled = installed
    assert compiled[1:] == ["-m", "edgespec.kernels.library"]
    assert [command[-2:] for command in fetched] == ([] if has_compiler else [[f"--target={script.ZIG}", "ziglang>=0"]])
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == ("before" if has_compiler else str(script.ZIG))
    assert not script.ZIG.exists() and not script.KERNELS_FAILED.exists()
