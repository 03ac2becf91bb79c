"""Rotary tables are computed here, and not by an exporter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from demo import DEMO
from edgespec.formats.gguf.check import check_gguf
from edgespec.formats.gguf.model import read_model
from edgespec.formats.onnx.llama import rotary_tables

TARGET, SHIPPED = DEMO / "demo-target-q8_0.gguf", DEMO / "onnx" / "target" / "model.onnx"
pytestmark = pytest.mark.skipif(not TARGET.is_file(), reason="the demo family is not built")


def test_rotary_tables_are_the_exporters_but_for_a_last_bit() -> None:
    config = read_model(TARGET, check_gguf(TARGET)).config
    found = {tensor.name: tensor for tensor in onnx.load(SHIPPED).graph.initializer}
    for ours, name in zip(rotary_tables(config), ("cos_cache", "sin_cache"), strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, numpy_helper.to_array(found[name]), rtol=0, atol=1.2e-7)
    further = rotary_tables(replace(config, rope_theta=5e5, max_positions=3, head_dim=4))[0]
    np.testing.assert_allclose(further[2], [np.cos(2), np.cos(2 / np.sqrt(5e5))], rtol=1e-6)
