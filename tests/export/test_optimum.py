"""What edgespec does around Optimum's exporter; the exporter itself, which needs torch and a network, is no test's."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgespec.engines.onnx.library import open_session
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.export.onnx.optimum import exporter, quantise, run, save

EXPORTER = """
import sys
print("tracing")
sys.exit("KeyError: 'rope_type'")
"""


def test_a_failure_is_told_by_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="model cannot be exported with Optimum: KeyError: 'rope_type'"):
        run([sys.executable, "-c", EXPORTER], tmp_path / "model")


def test_it_is_the_package_or_the_program_or_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "optimum", None)
    with pytest.raises(CapabilityError, match=r"needs Optimum's optimum-cli on the PATH: uv tool install optimum"):
        exporter()
    program = tmp_path / ("optimum-cli.exe" if sys.platform == "win32" else "optimum-cli")
    program.write_bytes(b"")
    program.chmod(0o755)
    assert exporter() == [str(program), "export", "onnx"]


@pytest.mark.parametrize(("bits", "least"), [(8, 0.9999), (4, 0.99)])
def test_products_are_quantised_in_groups(bits: int, least: float, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    weights = random.normal(size=(128, 96)).astype(np.float32)
    weights[:, 3] = 0  # ONNX Runtime's products of groups round; what is zero must not become a thousandth through that
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 128])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 96])
    node = helper.make_node("MatMul", ["x", "weights"], ["y"], "product")
    graph = helper.make_graph([node], "product", [x], [y], [numpy_helper.from_array(weights, "weights")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    save(quantise(model, f"int{bits}"), tmp_path)
    session = open_session((tmp_path / "model.onnx").read_bytes(), tmp_path)
    rows = random.normal(size=(5, 128)).astype(np.float32)
    (found,) = session.run(None, {"x": rows})
    assert np.corrcoef(found.ravel(), (rows @ weights).ravel())[0, 1] > least
    assert np.abs(found[:, 3]).max() < 1e-30
