"""The command line where llama.cpp, or every engine, is not installed: simulated in a child, whose import fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("llama_cpp", "onnxruntime")
CHILD = """
import sys
blocked, sys.argv = sys.argv[1].split(","), sys.argv[1:]
sys.modules |= dict.fromkeys(blocked)
from edgespec.__main__ import main
main()
"""


def run(*arguments: str, without: tuple[str, ...] = ("llama_cpp",), said: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, ",".join(without), *arguments]
    return subprocess.run(command, capture_output=True, text=True, input=said, timeout=120, check=False)


@pytest.mark.parametrize("arguments", [["--engine", "llamacpp"], ["models/demo/demo-target-q8_0.gguf"]])
def test_gguf_names_the_command_in_one_line(arguments: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EDGESPEC_KERNELS", "none")
    if arguments[-1].endswith(".gguf"):
        arguments = [str(ROOT / arguments[-1])]
    done = run("generate", "-p", "hello", *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: demo-target-q8_0.gguf needs llama.cpp, which is not installed here: ")
    assert "llamacpp" in line and "install" in line and "4 to 10 minutes" in line


def test_a_damaged_gguf_is_told_of_before_anything_is_to_be_installed(tmp_path: Path):
    (tmp_path / "cut.gguf").write_bytes((ROOT / "models/demo/demo-target-q8_0.gguf").read_bytes()[:5000])
    done = run("generate", "-p", "hello", str(tmp_path / "cut.gguf"))
    assert done.returncode == 2
    assert "not a usable model" in done.stderr and "llama.cpp" not in done.stderr


def test_doctor_finds_nothing_wrong():
    done = run("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["problems"] == []
    assert report["engines"]["llamacpp"]["available"] is False
    assert "install" in report["engines"]["llamacpp"]["reason"]
    assert report["engines"]["onnx"]["available"] is True


def test_without_any_engine_only_doctor_complains():
    for arguments in (["--help"], ["corpus", "--help"], ["generate", "--help"]):
        done = run(*arguments, without=ENGINES)
        assert done.returncode == 0, done.stderr
    done = run("doctor", without=ENGINES)
    assert done.returncode == 1
    assert "problem: no engine works, so nothing can be run: " in done.stdout
    done = run("generate", "-p", "hello", without=ENGINES)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and " needs llama.cpp, which is not installed here: " in done.stderr


def test_a_server_without_its_libraries_names_the_command():
    done = run("serve", without=("starlette", "uvicorn"))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: edgespec serve needs starlette and uvicorn") and "install" in line


@pytest.mark.parametrize("package", ["onnx", "tokenizers"])
def test_a_damaged_installation_names_its_repair(package: str):
    done = run("generate", "-p", "hello", without=("llama_cpp", package))
    assert done.returncode == 2
    assert package in done.stderr and "pip install" in done.stderr
