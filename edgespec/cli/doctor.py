"""`edgespec doctor`: whether all is well, what runs models here, and the command that gets what is missing."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from edgespec import __version__
from edgespec.cli import say, wrapped
from edgespec.cli.terminal import counted
from edgespec.engines.onnx import library as onnxruntime
from edgespec.errors import CapabilityError, EdgespecError
from edgespec.formats.manifest import read_pair
from edgespec.installation import (
    build_command,
    has_engine,
    install_command,
    name_of,
    reinstall_command,
    requirements,
    swap_command,
)
from edgespec.kernels import library as kernels
from edgespec.kernels.tiles import path as instructions
from edgespec.loading.registry import registered_folders
from edgespec.platform.machine import default_threads, physical_cores, processor

PROBE_TIMEOUT_S = 60
# Backends of llama.cpp for GPUs, and what each is for.
GPUS = {"vulkan": "any GPU", "cuda": "NVIDIA", "rocm": "AMD", "metal": "Apple Silicon"}
NO_GPU = {"CPU", "BLAS", "RPC"}  # ggml's names of the other backends


@click.command(short_help="Show what is installed, what is missing and how to get it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> int:
    """Show whether all is well, versions, engines, devices, and how to get what is missing.

    Exit code 1 when something does not work.
    """
    report = examine()
    if as_json:
        click.echo(json.dumps(report, indent=1))
    else:
        _print(report)
    return 0 if not report["problems"] else 1


def examine() -> dict[str, Any]:
    """Everything that doctor prints, as plain JSON values; sizes in bytes."""
    engines = {"llamacpp": _llamacpp(), "onnx": _onnxruntime()}
    # llama.cpp is an extra: where nobody installed it nothing is wrong.
    problems = [found["reason"] for found in engines.values() if not found["available"] and found["installed"]]
    problems += _damaged_models()
    if not any(found["available"] for found in engines.values()):
        problems.append(f"no engine works, so nothing can be run: {install_command()}")
    if _is_installed("onnxruntime") and _is_installed("onnxruntime-gpu"):
        problems.append(
            "onnxruntime and onnxruntime-gpu overwrite each other's files: keep one. For the GPU: "
            f"{swap_command('onnxruntime', 'onnxruntime-gpu')}"
        )
    missing = [name for name in map(name_of, requirements().get("", ())) if not _is_installed(name)]
    if missing and not (missing == ["onnxruntime"] and engines["onnx"]["available"]):  # another build of it
        problems.append(f"packages are missing ({', '.join(missing)}): {install_command()}")
    return {
        "edgespec": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {"name": processor(), "logical_cores": os.cpu_count(), "physical_cores_usable": physical_cores()},
        "threads": default_threads(),
        "engines": engines,
        "kernels": _kernels(),
        "problems": problems,
    }


def _llamacpp() -> dict[str, Any]:
    """What llama.cpp says of itself; "reason" when it is not `available`, and whether it is `installed` at all."""
    if has_engine("llamacpp"):
        return {"installed": True, **_probe_llamacpp()}
    return {
        "installed": False,
        "available": False,
        "reason": f"not installed; for GGUF files: {install_command('llamacpp')}",
    }


def _probe_llamacpp() -> dict[str, Any]:
    probe = [sys.executable, "-m", "edgespec.cli.doctor"]
    rebuild = reinstall_command("llama-cpp-python", "--no-cache-dir", "--no-binary=llama-cpp-python")
    try:
        done = subprocess.run(
            probe, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return {"available": False, "reason": f"asking llama.cpp failed: {exc}"}
    if done.returncode:
        return {
            "available": False,
            "reason": f"llama.cpp ends its process (exit code {done.returncode}): this build does not suit the "
            f"processor. Build it here: {rebuild}",
        }
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _onnxruntime() -> dict[str, Any]:
    installed = has_engine("onnx")
    try:
        version, providers = onnxruntime.version(), onnxruntime.installed_providers()
        return {"installed": installed, "available": True, "version": version, "providers": providers}
    except CapabilityError as exc:
        return {"installed": installed, "available": False, "reason": str(exc)}


def _kernels() -> dict[str, str | None]:
    """The library of our own kernels and the instruction set that it uses, or the reason why there is none."""
    path = kernels.library_path()
    return {
        "library": str(path) if path else None,
        "instructions": instructions() if path else "",
        "reason": kernels.why_missing(),
    }


def _damaged_models() -> Iterator[str]:
    """What is wrong with models of the registry."""
    for folder in registered_folders().values():
        try:
            read_pair(folder, check_hashes=False)
        except EdgespecError as exc:
            yield str(exc)


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _say(text: str, commands: str = "") -> None:
    """A line; in a terminal it is broken at words, and `commands` follow on lines of their own."""
    if not commands or not sys.stdout.isatty():
        say(f"{text} {commands}".rstrip())
        return
    say(text)
    for command in commands.split(", then "):
        click.echo(f"  {command}")  # in one piece, to be copied


def verdict(report: dict[str, Any]) -> str:
    """One line that says whether all is well."""
    if report["problems"]:
        return f"Not ready: {counted(len(report['problems']), 'problem')}, said below"
    own, engines = report["kernels"], report["engines"]
    runs = [f"GGUF models on edgespec's kernels ({own['instructions']})"] if own["library"] else []
    runs += ["on llama.cpp"] if engines["llamacpp"]["available"] else []
    runs += ["ONNX models"] if engines["onnx"]["available"] else []
    slow = "" if own["library"] else "; GGUF models would be faster with the kernels, which are not built"
    gpu = (
        ""
        if engines["llamacpp"].get("gpu_offload") or not gpu_backend()
        else "; the GPU is not used, the command for it is below"
    )
    return f"Ready: {', '.join(runs)} with {counted(report['threads'], 'thread')}{slow}{gpu}"


def _print(report: dict[str, Any]) -> None:
    click.secho(wrapped(verdict(report), sys.stdout), bold=True)
    for problem in report["problems"]:
        click.secho(wrapped(f"problem: {problem}", sys.stdout), fg="red")
    _say(f"edgespec {report['edgespec']}, Python {report['python']}, {report['platform']}")
    _say(f"processor: {report['cpu']['name']}, {report['threads']} threads used of {report['cpu']['logical_cores']}")
    own, onnx = report["kernels"], report["engines"]["onnx"]
    _say("kernels: " + (f"{own['instructions']}, {own['library']}" if own["library"] else f"none: {own['reason']}"))
    _print_llamacpp(report["engines"]["llamacpp"])
    found = f"{onnx['version']}; providers: {', '.join(onnx['providers'])}" if onnx["available"] else onnx["reason"]
    _say(f"engine onnx: {found}")


def _print_llamacpp(llama: dict[str, Any]) -> None:
    backend = gpu_backend()
    if not llama["available"]:
        _say(f"engine llamacpp: {'NOT available' if llama['installed'] else llama['reason']}")
        if backend:
            _say(f"for this machine's GPU ({GPUS[backend]}):", build_command(backend))
        return
    _say(f"engine llamacpp: llama-cpp-python {llama['version']}")
    for device in llama["devices"]:
        memory = f", {device['total_bytes'] / 2**30:.1f} GiB" if device["total_bytes"] else ""
        _say(f"device {device['name']}: {device['description']} ({device['kind']}{memory})")
    idle = [name for name in llama["backends"] if name not in NO_GPU]
    if llama["gpu_offload"]:
        _say("to use the GPU: -ngl auto")
    elif idle:
        _say(f"no GPU: this build of llama.cpp has {', '.join(idle)}, which finds none (is its driver installed?)")
    else:
        what = f"this machine's GPU ({GPUS[backend]})" if backend else "a GPU, of which none was found here"
        _say(f"this build of llama.cpp uses no GPU; one for {what}:", build_command(backend or "vulkan"))
    rpc = ("yes (edgespec rpc-server, --rpc)", "") if llama["rpc"] else ("not in this build:", build_command("rpc"))
    _say(f"several machines (RPC): {rpc[0]}", rpc[1])


def gpu_backend() -> str:
    """The backend of llama.cpp for the GPU that this machine seems to have; empty for none."""
    if sys.platform == "darwin":
        return "metal"
    if shutil.which("nvidia-smi"):
        return "cuda"
    if Path("/dev/kfd").exists():
        return "rocm"
    return "vulkan" if sys.platform == "win32" or any(Path("/dev/dri").glob("renderD*")) else ""


# -- the llama.cpp library
#
# A build for another processor ends its process at the first instruction it lacks, so it is asked in a child:
# `python -m edgespec.cli.doctor` prints what it says of itself as one JSON object.


def describe_library() -> dict[str, Any]:
    """Version, backends, the devices that this build sees, and whether it has RPC. Memory in bytes."""
    from edgespec.engines.llamacpp.library import library, version

    try:
        llama = library()
    except CapabilityError as exc:
        return {"available": False, "reason": str(exc)}
    found = _devices()
    return {
        "available": True,
        "version": version(),
        "gpu_offload": any("gpu" in device["kind"] for device in found),
        "rpc": bool(llama.llama_supports_rpc()),
        "backends": _backends(),
        "devices": found,
    }


def _backends() -> list[str]:
    from edgespec.engines.llamacpp import devices

    try:
        return devices.backends()
    except CapabilityError:
        return []


def _devices() -> list[dict[str, Any]]:
    """ggml's devices; only the processor where the library does not export the question."""
    from edgespec.engines.llamacpp import devices

    try:
        return [asdict(device) for device in devices.devices()]
    except CapabilityError:
        return [asdict(devices.Device("CPU", "the processor", "cpu", 0, 0))]


if __name__ == "__main__":
    print(json.dumps(describe_library()))
