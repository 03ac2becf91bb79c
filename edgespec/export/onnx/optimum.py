"""Optimum's exporter (`--exporter optimum`), for models that edgespec's own writer does not know.

It is a program of the user's: the package in this environment, or `optimum-cli`, since Optimum needs an older
transformers than the comparison. Its graphs concatenate the KV cache in every pass, which makes them slower.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgespec.errors import CapabilityError, ModelFileError
from edgespec.export.request import GROUP_SIZES
from edgespec.formats.checkpoint import CHAT_TEMPLATE, chat_template, read_json
from edgespec.formats.onnx import DATA, MICROSOFT, MODEL
from edgespec.formats.onnx.forms import quantise_blocks
from edgespec.installation import child_environment
from edgespec.types import Progress

INSTALL = "uv tool install optimum --with 'optimum-onnx[onnxruntime]'"
STEPS = 3
REQUIRED = ("tokenizer.json", "tokenizer_config.json")
COPIED = ("config.json", "generation_config.json", "special_tokens_map.json", CHAT_TEMPLATE, *REQUIRED)


def exporter() -> list[str]:
    """The command that starts it. Raises CapabilityError where it is not installed."""
    try:
        if find_spec("optimum.exporters.onnx") is not None:
            return [sys.executable, "-P", "-m", "optimum.exporters.onnx"]
    except ModuleNotFoundError:  # not even the package
        pass
    if (program := shutil.which("optimum-cli")) is not None:
        return [program, "export", "onnx"]
    raise CapabilityError(f"--exporter optimum needs Optimum's optimum-cli on the PATH: {INSTALL}")


def export_with_optimum(source: Path, output: Path, quant: str, progress: Progress) -> None:
    """Write the model of the folder `source` to `output`: graph, weights, tokenizer and configuration.

    Raises CapabilityError if it is not installed, ModelFileError with the last line of its output for a failure.
    """
    made = output / "optimum"
    progress(0, STEPS, "tracing")
    run([*exporter(), "--model", str(source), "--task", "text-generation-with-past", str(made)], source)
    progress(1, STEPS, "reading")
    if not (made / MODEL).is_file():
        raise ModelFileError(f"Optimum wrote no {MODEL} but: {', '.join(sorted(p.name for p in made.iterdir()))}")
    model = onnx.load(made / MODEL)
    shutil.rmtree(made)
    progress(2, STEPS, "writing")
    save(model if quant == "fp32" else quantise(model, quant), output)
    copy_companions(source, output)


def run(command: list[str], source: Path) -> None:
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
        last = said[-1] if said else f"it ended with status {done.returncode}, as when memory runs out"
        raise ModelFileError(f"{source} cannot be exported with Optimum: {last}")


def quantise(model: onnx.ModelProto, quant: str) -> onnx.ModelProto:
    """Replace a graph's products by constant matrices with MatMulNBits: symmetric groups, int8 arithmetic."""
    bits, size = int(quant.removeprefix("int")), GROUP_SIZES[quant]
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    made: dict[str, tuple[onnx.TensorProto, onnx.TensorProto]] = {}
    for node in model.graph.node:
        if node.op_type != "MatMul" or (tensor := stored.get(node.input[1])) is None or len(tensor.dims) != 2:
            continue
        if tensor.name not in made:
            rows = numpy_helper.to_array(tensor).astype(np.float32).T
            codes, scales = quantise_blocks(rows, bits, size)
            names = (f"{tensor.name}_codes", f"{tensor.name}_scales")
            made[tensor.name] = (
                numpy_helper.from_array(codes, names[0]),
                numpy_helper.from_array(scales.reshape(-1), names[1]),
            )
        inputs = [node.input[0], *(each.name for each in made[tensor.name])]
        sizes = {"K": tensor.dims[0], "N": tensor.dims[1], "bits": bits, "block_size": size, "accuracy_level": 4}
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
    onnx.save_model(model, folder / MODEL, save_as_external_data=True, location=DATA, size_threshold=1024)


def copy_companions(folder: Path, target: Path) -> None:
    """Copy tokenizer, config and chat template of a model. Raises ModelFileError for what is missing or damaged."""
    for name in REQUIRED:
        read_json(folder / name)
    for name in COPIED:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
    template = chat_template(folder, read_json(folder / "tokenizer_config.json"))
    if template is not None and not (folder / CHAT_TEMPLATE).is_file():
        (target / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
