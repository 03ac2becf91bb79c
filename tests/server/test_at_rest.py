"""What the files of a model say of it before it is loaded, and what a load says then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from demo import TEST_THREADS
from edgespec import LoadOptions, Sampling
from edgespec.loading.requirements import resolve_pair
from edgespec.server.facts import at_rest, described
from edgespec.server.service import Service
from several import GGUF, ONNX, PATHS
from tiny_bert import write_bert
from tiny_gguf import SPECIALS, Shape, write_model

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
DECODER = {"llama.pooling_type": np.uint32(3), "tokenizer.ggml.add_eos_token": True}
MAKE: dict[str, Callable[[Path], object]] = {
    "demo": lambda _: PATHS[GGUF],
    "graph": lambda _: PATHS[ONNX],
    "coder": lambda path: write_model(path, Shape(specials=(*SPECIALS, *FIM))),
    "decoder of embeddings": lambda path: write_model(path, metadata=DECODER),
    "encoder": write_bert,
}


@pytest.mark.parametrize(
    ("kind", "options", "capabilities"),
    [
        ("demo", {}, ["completion", "tools"]),
        ("graph", {"context_length": 512}, ["completion", "tools"]),
        ("coder", {"context_length": 0}, ["completion", "insert"]),
        ("coder", {"pooling": "mean"}, ["embedding", "completion", "insert"]),
        ("decoder of embeddings", {}, ["embedding"]),
        ("encoder", {}, ["embedding"]),
    ],
)
def test_it_is_told_as_after_its_load(tmp_path: Path, kind: str, options: dict[str, Any], capabilities: list[str]):
    chosen = LoadOptions(model=str(MAKE[kind](tmp_path / "model.gguf")), threads=TEST_THREADS, **options)
    pair = resolve_pair(chosen)
    before = at_rest("name", chosen, pair, Sampling(**dict(pair.recommended)), None, None)
    with edgespec.load(chosen) as model:
        service = Service("name")
        service.use(model)
        after = described(service.require())
        service.require().scheduler.close()
    assert before.entry == after.entry and before.shown == after.shown
    assert before.shown["capabilities"] == capabilities
    assert before.context_length == after.context_length
    unknown = {"total_slots", "device", "reproducible"}
    assert {key for key, value in after.properties.items() if before.properties[key] != value} <= unknown


def test_a_template_of_ones_own_is_told(tmp_path: Path):
    chosen = LoadOptions(model=str(write_model(tmp_path / "model.gguf")))
    told = at_rest("name", chosen, resolve_pair(chosen), Sampling(), 7, "<think>{{ messages }}</think>")
    assert told.shown["template"] == told.properties["chat_template"] == "<think>{{ messages }}</think>"
    assert "thinking" in told.shown["capabilities"]
    assert told.properties["default_generation_settings"]["params"]["max_tokens"] == 7
