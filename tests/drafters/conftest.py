"""What tests of heads in GGUF share: they run on two engines."""

from __future__ import annotations

import pytest

from edgespec.config.values import EngineName
from edgespec.kernels.library import library_path


@pytest.fixture(params=["llamacpp", "onnx"])
def engine_name(request: pytest.FixtureRequest) -> EngineName:
    if request.param == "onnx" and library_path() is None:
        pytest.skip("the kernels are not built: scripts/run.py test builds them")
    name: EngineName = request.param
    return name
