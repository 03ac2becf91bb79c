"""Scales of an int8 KV cache: how large each channel of keys and values gets on a text of several kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgespec.engines.onnx.graph import Graph
from edgespec.engines.onnx.passes import PassRows, SharedPasses
from edgespec.engines.onnx.rewriting import CacheScales
from edgespec.types import TokenIds

MARGIN = 1.25  # values are clipped at this multiple of the largest one seen
STEP = 32
_LEAST_VALUE, _MOST_VALUE = 1e-6, 1e6  # plausible largest magnitude of a channel
TEXT = """The old harbour was quiet in the morning, and only two boats were out. "When do we leave?" she asked.
User: I need a table for four people at 7:30 pm on March 8th, please. Something Italian, not too expensive.
Assistant: I found 3 restaurants in San Jose. The first one has 4.5 stars and asks for about $25 a person.

def moving_average(values: list[float], width: int) -> list[float]:
    if width <= 0:
        raise ValueError(f"width must be positive, got {width}")
    return [sum(values[i : i + width]) / width for i in range(len(values) - width + 1)]

Anna has 12 apples and gives 3/4 of them away; then she buys 17 more. 12 - 9 + 17 = 20, so she has 20 apples.
{"name": "find_hotel", "arguments": {"city": "Z\u00fcrich", "nights": 3, "pets": false}}
Grüße aus München: 25 °C, € 4,50. ¿Dónde está la estación?
"""


def measure_scales(passes: SharedPasses, graph: Graph, token_ids: TokenIds) -> dict[str, list[list[float]]]:
    """The step of an int8 code [heads, head size] by name of the cache's input; uses sequence 0."""
    for start in range(0, token_ids.size, STEP):
        ids = token_ids[start : start + STEP]
        passes.run(0, PassRows(start, ids, np.array([ids.size - 1], np.intp)))
    largest = passes.largest_values(0, token_ids.size)
    return {
        entry.past: (np.maximum(found, _LEAST_VALUE) * MARGIN / 127).tolist()
        for entry, found in zip(graph.cache, largest, strict=True)
    }


def are_plausible(measured: Mapping[str, Sequence[Sequence[float]]], graph: Graph, head_size: int) -> bool:
    """Whether there is a possible scale for every channel of every head of `graph`."""
    if measured.keys() != {entry.past for entry in graph.cache}:
        return False
    shapes = all(
        len(measured[entry.past]) == entry.heads and all(len(head) == head_size for head in measured[entry.past])
        for entry in graph.cache
    )
    low, high = 0.99 * _LEAST_VALUE * MARGIN / 127, _MOST_VALUE * MARGIN / 127
    return shapes and all(low <= scale <= high for heads in measured.values() for head in heads for scale in head)


def as_scales(measured: dict[str, Sequence[Sequence[float]]]) -> CacheScales:
    return {name: np.array(values, np.float32) for name, values in measured.items()}
