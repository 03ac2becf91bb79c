"""Optimum's exporter (`--exporter optimum`), run in a separate virtual environment that this module creates.

Optimum needs an older transformers than the other exporters. The environment is created once, in the user's data
folder; it falls back to this environment's packages, so that torch is not installed twice. Optimum's graphs
concatenate the KV cache in every pass, which makes them slower.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgespec.errors import CapabilityError, ModelFileError
from edgespec.export.onnx.hub_model import copy_companions
from edgespec.formats.onnx import DATA, MICROSOFT, MODEL
from edgespec.formats.onnx.forms import quantise_blocks
from edgespec.installation import child_environment, install_command
from edgespec.loading.registry import models_folder
from edgespec.types import Progress

PACKAGES = ("optimum-onnx==0.1.0", "transformers>=4.56,<4.58")
OPTIMUM_DATA = "model.onnx_data"
STEPS = 4
MISSING = "ModuleNotFoundError: No module named "
LINES_KEPT = 40
KILLED = (-9, 137)


def environment_folder() -> Path:
    """The environment's folder, beside the folder of the user's models."""
    return models_folder().parent / "optimum-environment"


def export_with_optimum(source: Path, output: Path, quant: str, group_size: int, progress: Progress) -> None:
    """Write the model of the folder `source` to `output`: graph, weights, tokenizer and configuration.

    Raises CapabilityError if the environment cannot be created (no network, no pip) or a package is missing,
    ModelFileError with the last line of Optimum's output for any other failure.
    """
    progress(0, STEPS, "preparing Optimum's environment")
    python = prepare_environment()
    progress(1, STEPS, "tracing")
    made, what = output / "optimum", f"{source} with Optimum"
    command = [str(python), "-m", "optimum.exporters.onnx", "--model", str(source), str(made)]
    run_command([*command, "--task", "text-generation-with-past"], what)
    progress(2, STEPS, "writing")
    _take_over(made, output)
    copy_companions(source, output)
    if quant != "fp32":  # in a process of its own, which gives back the memory that this takes
        progress(3, STEPS, "quantising")
        order = json.dumps({"output": str(output), "quant": quant, "group_size": group_size})
        run_command([sys.executable, "-P", "-m", __name__, order], what)


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
        run_command(install, "environment")
    except (CapabilityError, ModelFileError) as error:
        raise CapabilityError(f"Optimum's environment could not be created in {folder}: {error}") from error
    ready.write_text(_recipe(), encoding="utf-8")
    return folder / place


def _recipe() -> str:
    return "\n".join((sys.executable, *PACKAGES))


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


def run_command(command: list[str], what: str) -> None:
    """Run a command to its end; `what` names the work in errors, which are as in `export_with_optimum`."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=child_environment(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error"),
        check=False,
    )
    if done.returncode:
        said = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        raise failure(done.returncode, said[-LINES_KEPT:], what)


def failure(returncode: int, said: list[str], what: str) -> CapabilityError | ModelFileError:
    """The error for a failed exporter, derived from its last lines."""
    last = said[-1] if said else "no output"
    text = "\n".join(said)
    if MISSING in text:
        name = text.rpartition(MISSING)[2].splitlines()[0].strip("'\"")
        return CapabilityError(f"exporting {what} needs {name}: {install_command('export')}")
    if "No space left on device" in text:
        return CapabilityError(f"exporting {what} filled the disk: free some space and run it again")
    if returncode in KILLED:
        return CapabilityError(f"exporting {what} was killed, most likely because memory ran out: {last}")
    return ModelFileError(f"{what} cannot be exported: {last}")


# the child that quantises


def quantise(model: onnx.ModelProto, quant: str, group_size: int) -> onnx.ModelProto:
    """Replace a graph's products by constant matrices with MatMulNBits: symmetric groups, int8 arithmetic."""
    bits = int(quant.removeprefix("int"))
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    made: dict[str, tuple[onnx.TensorProto, onnx.TensorProto]] = {}
    for node in model.graph.node:
        if node.op_type != "MatMul" or (tensor := stored.get(node.input[1])) is None or len(tensor.dims) != 2:
            continue
        if tensor.name not in made:
            rows = numpy_helper.to_array(tensor).astype(np.float32).T
            codes, scales = quantise_blocks(rows, bits, group_size)
            names = (f"{tensor.name}_codes", f"{tensor.name}_scales")
            made[tensor.name] = (
                numpy_helper.from_array(codes, names[0]),
                numpy_helper.from_array(scales.reshape(-1), names[1]),
            )
        inputs = [node.input[0], *(each.name for each in made[tensor.name])]
        sizes = {"K": tensor.dims[0], "N": tensor.dims[1], "bits": bits, "block_size": group_size, "accuracy_level": 4}
        node.CopyFrom(helper.make_node("MatMulNBits", inputs, list(node.output), node.name, domain=MICROSOFT, **sizes))
    read = {name for node in model.graph.node for name in node.input}
    kept = [tensor for name, tensor in stored.items() if name in read]
    kept += [each for pair in made.values() for each in pair]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    if MICROSOFT not in {entry.domain for entry in model.opset_import}:
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    return model


def save(model: onnx.ModelProto, folder: Path) -> None:
    (folder / DATA).unlink(missing_ok=True)  # onnx would append to an existing file
    onnx.save_model(model, folder / MODEL, save_as_external_data=True, location=DATA, size_threshold=1024)


def main() -> None:
    order = json.loads(sys.argv[1])
    folder = Path(order["output"])
    save(quantise(onnx.load(folder / MODEL), order["quant"], order["group_size"]), folder)


if __name__ == "__main__":
    main()
