"""What edgespec does around Optimum's exporter; the exporter itself, which needs torch and a network, is no test's."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from edgespec.engines.onnx.sessions import open_session  # noqa: E402
from edgespec.errors import CapabilityError, EdgespecError, ModelFileError  # noqa: E402
from edgespec.export.onnx.optimum import failure, quantise, save  # noqa: E402


@pytest.mark.parametrize(
    ("returncode", "said", "kind", "message"),
    [
        (1, ["Traceback", "KeyError: 'rope_type'"], ModelFileError, "cannot be exported: KeyError: 'rope_type'"),
        (1, ["ModuleNotFoundError: No module named 'onnx_ir'"], CapabilityError, r"needs onnx_ir: .* install "),
        (1, ["OSError: [Errno 28] No space left on device"], CapabilityError, "filled the disk"),
        (-signal.SIGKILL if hasattr(signal, "SIGKILL") else 137, ["layer 3"], CapabilityError, "memory ran out"),
        (3, [], ModelFileError, "no output"),
    ],
)
def test_the_reason_of_a_failed_child(
    returncode: int, said: list[str], kind: type[EdgespecError], message: str
) -> None:
    error = failure(returncode, said, "Llama from folder")
    assert type(error) is kind
    with pytest.raises(kind, match=message):
        raise error


@pytest.mark.parametrize(("bits", "least"), [(8, 0.9999), (4, 0.99)])
def test_products_are_quantised_in_groups(bits: int, least: float, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    weights = random.normal(size=(128, 96)).astype(np.float32)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 128])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 96])
    node = helper.make_node("MatMul", ["x", "weights"], ["y"], "product")
    graph = helper.make_graph([node], "product", [x], [y], [numpy_helper.from_array(weights, "weights")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    save(quantise(model, f"int{bits}", 32), tmp_path)
    session = open_session((tmp_path / "model.onnx").read_bytes(), tmp_path, threads=1, provider="cpu")
    rows = random.normal(size=(5, 128)).astype(np.float32)
    (found,) = session.run(None, {"x": rows})
    assert np.corrcoef(found.ravel(), (rows @ weights).ravel())[0, 1] > least
