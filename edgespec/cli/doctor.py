"""`edgespec doctor`: whether all is well, what runs models here, and the command that gets what is missing."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from edgespec import __version__
from edgespec.cli.terminal import counted
from edgespec.contained import Child, ChildEnded
from edgespec.engines.onnx import library as onnxruntime
from edgespec.errors import CapabilityError, EdgespecError
from edgespec.formats.manifest import read_pair
from edgespec.installation import build_command, has_engine, install_command, reinstall_command
from edgespec.kernels import library as kernels
from edgespec.kernels.interface import path as instructions
from edgespec.loading.registry import registered_folders
from edgespec.platform.machine import default_threads, physical_cores, processor

PROBE_TIMEOUT_S = 60
# Backends of llama.cpp for GPUs, and what each is for.
GPUS = {"vulkan": "any GPU", "cuda": "NVIDIA", "rocm": "AMD", "metal": "Apple Silicon"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> int:
    """Show whether all is well, versions, engines, devices, and how to get what is missing.

    Exit code 1 when something does not work.
    """
    report = examine()
    if as_json:
        click.echo(json.dumps(report, indent=1))
    else:
        click.secho(verdict(report), bold=True)
        for problem in report["problems"]:
            click.secho(f"problem: {problem}", fg="red")
        for line in _lines(report):
            click.echo(line)
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
            f"{install_command('gpu')}"
        )
    path = kernels.library_path()
    return {
        "edgespec": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {"name": processor(), "logical_cores": os.cpu_count(), "physical_cores_usable": physical_cores()},
        "threads": default_threads(),
        "engines": engines,
        "kernels": {
            "library": str(path) if path else None,
            "instructions": instructions() if path else "",
            "reason": kernels.why_missing(),
        },
        "problems": problems,
    }


def _llamacpp() -> dict[str, Any]:
    """What llama.cpp says of itself; "reason" when it is not `available`, and whether it is `installed` at all."""
    if not (installed := has_engine("llamacpp")):
        reason = f"not installed; for GGUF files: {install_command('llamacpp')}"
    else:
        try:
            # A build for another processor ends its process at the first instruction that this one lacks.
            with Child(__name__) as child:
                return {"installed": True, **child.call(describe_library, limit_s=PROBE_TIMEOUT_S)}
        except ChildEnded as exc:
            build = reinstall_command("llama-cpp-python", "--no-cache-dir", "--no-binary=llama-cpp-python")
            why = f"llama.cpp ends its process ({exc.how}): this build does not suit the processor"
            reason = f"{why}. Build it here: {build}"
        except (TimeoutError, CapabilityError) as exc:
            reason = f"asking llama.cpp failed: {exc}"
    return {"installed": installed, "available": False, "reason": reason}


def _onnxruntime() -> dict[str, Any]:
    installed = has_engine("onnx")
    try:
        version, providers = onnxruntime.version(), onnxruntime.installed_providers()
        return {"installed": installed, "available": True, "version": version, "providers": providers}
    except CapabilityError as exc:
        return {"installed": installed, "available": False, "reason": str(exc)}


def _damaged_models() -> Iterator[str]:
    """What is wrong with models of the registry."""
    for folder in registered_folders().values():
        try:
            read_pair(folder)
        except EdgespecError as exc:
            yield str(exc)


def _is_installed(package: str) -> bool:
    return any(True for _ in metadata.distributions(name=package))


def verdict(report: dict[str, Any]) -> str:
    """One line that says whether all is well."""
    if report["problems"]:
        return f"Not ready: {counted(len(report['problems']), 'problem')}, said below"
    own, llama, onnx = report["kernels"], report["engines"]["llamacpp"], report["engines"]["onnx"]
    runs = [f"GGUF models on edgespec's kernels ({own['instructions']})"] if own["library"] else []
    runs += ["on llama.cpp"] if llama["available"] else []
    runs += ["ONNX models"] if onnx["available"] else []
    said = f"Ready: {', '.join(runs)} with {counted(report['threads'], 'thread')}"
    if not own["library"]:
        said += "; GGUF models would be faster with the kernels, which are not built"
    if gpu_backend() and not llama.get("gpu_offload"):
        said += "; the GPU is not used, the command for it is below"
    return said


def _lines(report: dict[str, Any]) -> Iterator[str]:
    own, llama, onnx = report["kernels"], report["engines"]["llamacpp"], report["engines"]["onnx"]
    backend = gpu_backend()
    yield f"edgespec {report['edgespec']}, Python {report['python']}, {report['platform']}"
    yield f"processor: {report['cpu']['name']}, {report['threads']} threads used of {report['cpu']['logical_cores']}"
    yield "kernels: " + (f"{own['instructions']}, {own['library']}" if own["library"] else f"none: {own['reason']}")
    if llama["available"]:
        yield f"engine llamacpp: llama-cpp-python {llama['version']}"
        for device in llama["devices"]:
            memory = f", {device['total_bytes'] / 2**30:.1f} GiB" if device["total_bytes"] else ""
            yield f"device {device['name']}: {device['description']} ({device['kind']}{memory})"
        what = f"this machine's GPU ({GPUS[backend]})" if backend else "a GPU, of which none was found here"
        build = f"this build of llama.cpp finds no GPU; one for {what}: {build_command(backend or 'vulkan')}"
        yield "to use the GPU: -ngl auto" if llama["gpu_offload"] else build
        how = "yes (edgespec rpc-server, --rpc)" if llama["rpc"] else f"not in this build: {build_command('rpc')}"
        yield f"several machines (RPC): {how}"
    else:
        yield f"engine llamacpp: {'NOT available' if llama['installed'] else llama['reason']}"
        if backend:
            yield f"for this machine's GPU ({GPUS[backend]}): {build_command(backend)}"
    found = f"{onnx['version']}; providers: {', '.join(onnx['providers'])}" if onnx["available"] else onnx["reason"]
    yield f"engine onnx: {found}"


def gpu_backend() -> str:
    """The backend of llama.cpp for the GPU that this machine seems to have; empty for none."""
    if sys.platform == "darwin":
        return "metal"
    if shutil.which("nvidia-smi"):
        return "cuda"
    if Path("/dev/kfd").exists():
        return "rocm"
    return "vulkan" if sys.platform == "win32" or any(Path("/dev/dri").glob("renderD*")) else ""


def describe_library() -> dict[str, Any]:
    """The version of llama.cpp, the devices that this build sees, and whether it has RPC. Memory in bytes."""
    from edgespec.engines.llamacpp import devices
    from edgespec.engines.llamacpp.library import library, version

    try:
        llama, found = library(), devices.devices()
    except CapabilityError as exc:
        return {"available": False, "reason": str(exc)}
    return {
        "available": True,
        "version": version(),
        "gpu_offload": any("gpu" in device.kind for device in found),
        "rpc": bool(llama.llama_supports_rpc()),
        "devices": [asdict(device) for device in found],
    }
