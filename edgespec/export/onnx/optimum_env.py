"""Optimum's exporter (`--exporter optimum`), run in a separate virtual environment that this module creates.

Optimum needs an older transformers than the other exporters. The environment is created once, in the user's data
folder; it falls back to this environment's packages, so that torch is not installed twice. Optimum's graphs
concatenate the KV cache in every pass, which makes them slower.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import onnx

from edgespec.errors import CapabilityError, ModelFileError
from edgespec.export.onnx.child import run_child, run_command
from edgespec.export.onnx.integer import to_integer
from edgespec.export.onnx.quantise import save
from edgespec.export.onnx.source import Source
from edgespec.formats.onnx import DATA, MODEL
from edgespec.loading.registry import models_folder

PACKAGES = ("optimum-onnx==0.1.0", "transformers>=4.56,<4.58")
OPTIMUM_DATA = "model.onnx_data"
STEPS = 4


def environment_folder() -> Path:
    """The environment's folder, beside the folder of the user's models."""
    return models_folder().parent / "optimum-environment"


def export_with_optimum(
    source: Source, output: Path, quant: str, group_size: int, progress: Callable[[int, int, str], None]
) -> None:
    """Write model.onnx and model.onnx.data to `output`.

    Raises CapabilityError if the environment cannot be created (no network, no pip) or for fp16, and the errors of
    `run_child`.
    """
    if quant == "fp16":
        raise CapabilityError("the exporter 'optimum' does not support fp16; allowed: int4, int8, w8a8, fp32")
    progress(0, STEPS, "preparing Optimum's environment")
    python = prepare_environment()
    progress(1, STEPS, "tracing")
    made = output / "optimum"
    command = [str(python), "-m", "optimum.exporters.onnx", "--model", str(source.folder), str(made)]
    what = f"{source.architecture} from {source.folder} with Optimum"
    run_command([*command, "--task", "text-generation-with-past"], _ignore, what=what)
    progress(2, STEPS, "writing")
    _take_over(made, output)
    if quant == "w8a8":
        progress(3, STEPS, "quantising")
        to_integer(output, group_size)
    elif quant != "fp32":
        progress(3, STEPS, "quantising")
        order = {"output": str(output), "quant": quant, "group_size": group_size}
        order |= {"source": str(source.folder), "architecture": source.architecture}
        run_child("edgespec.export.onnx.quantise", order, _ignore)


def prepare_environment() -> Path:
    """The environment's Python; creates the environment unless it is complete and up to date."""
    folder = environment_folder()
    ready = folder / "ready"
    place = "Scripts/python.exe" if sys.platform == "win32" else "bin/python"
    if ready.is_file() and ready.read_text(encoding="utf-8") == _recipe():
        return folder / place
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True, symlinks=sys.platform != "win32")
    packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    (Path(packages) / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    install = [str(folder / place), "-m", "pip", "install", "--disable-pip-version-check", *PACKAGES]
    try:
        run_command(install, _ignore, what="environment")
    except (CapabilityError, ModelFileError) as error:
        raise CapabilityError(f"Optimum's environment could not be created in {folder}: {error}") from error
    ready.write_text(_recipe(), encoding="utf-8")
    return folder / place


def _recipe() -> str:
    return "\n".join((sys.executable, *PACKAGES))


def _ignore(line: str) -> None:
    return None


def _take_over(made: Path, output: Path) -> None:
    """Move the graph and its data file to edgespec's file names and delete Optimum's other files."""
    if not (made / MODEL).is_file():
        raise ModelFileError(f"Optimum wrote no {MODEL} but: {', '.join(sorted(p.name for p in made.iterdir()))}")
    if (made / OPTIMUM_DATA).is_file():
        model = onnx.load(made / MODEL, load_external_data=False)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = DATA
        (made / OPTIMUM_DATA).replace(output / DATA)
        (output / MODEL).write_bytes(model.SerializeToString())
    else:
        save(onnx.load(made / MODEL), output)
    shutil.rmtree(made)
