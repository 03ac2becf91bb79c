"""What the hidden states of a smoothed model were divided by, kept in its graph file for heads that read them.

Earlier versions smoothed w8a8 graphs, which still run: the division is folded into the final norm and the product into
the target's head, so that the logits stay; heads that were trained for the model itself need its own states.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEY = "edgespec.hidden_scales"


def read(model: Any) -> NDArray[np.float32] | None:
    """The scales [width] of a loaded ONNX model; None for one that was not smoothed, or of which they are damaged."""
    for entry in model.metadata_props:
        if entry.key == KEY:
            try:
                return np.frombuffer(base64.b64decode(entry.value, validate=True), "<f4").astype(np.float32)
            except (binascii.Error, ValueError):
                return None
    return None
