"""llama.cpp on a GPU, which may be a program that acts as one: placement of target and draft, and the same bits."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgespec
from demo import TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.engines.llamacpp.devices import gpus
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.llamacpp.footprint import footprint
from edgespec.engines.llamacpp.library import library, logger
from edgespec.engines.model_use import ModelUse
from edgespec.errors import CapabilityError
from edgespec.types import Batch
from needs import needs_gpu

CONTEXT = 512
QUESTION = "I need a cheap place to eat Italian food in San Jose tonight."
BUFFER = re.compile(r"(\w+) (?:model|KV|compute) buffer size = +([\d.]+) MiB")
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def gpu() -> Iterator[str]:
    yield needs_gpu()


def load(path: Path, **options: object) -> LlamaCppEngine:
    settings = {"context_length": CONTEXT, "threads": TEST_THREADS, "reproducible": False} | options
    return LlamaCppEngine.load(path, **settings)  # type: ignore[arg-type]


def test_a_gpu_scores_as_the_processor_does(target_path, gpu):
    ids = np.random.default_rng(0).integers(0, 4000, 40).astype(np.int32)
    with load(target_path) as cpu, load(target_path, gpu_layers=-1) as device:
        assert (cpu.facts.device, device.facts.device) == ("cpu", "gpu")
        for first, last in ((0, 33), (33, 34), (34, 40)):
            wanted, found = (engine.forward(Batch.chain(ids[first:last])).copy() for engine in (cpu, device))
            np.testing.assert_allclose(found, wanted, atol=0.1 * wanted.std())


@pytest.mark.parametrize("gpu_layers", [0, 1, 3, -1])
def test_the_plan_of_a_device_is_what_llama_cpp_puts_there(target_path, gpu, gpu_layers, caplog):
    """Within a tenth and a MiB; with no layer there is nothing at all on the device."""
    caplog.set_level(logging.DEBUG, logger.name)
    with load(target_path, gpu_layers=gpu_layers, max_batch=64):
        found = sum(float(size) for name, size in BUFFER.findall("\n".join(caplog.messages)) if name == gpu)
    use = ModelUse(context_length=CONTEXT, gpu_layers=gpu_layers)
    planned = footprint(target_path, use).device / MIB
    if gpu_layers == 0:
        assert found == planned == 0
    else:
        assert found <= 1.1 * planned + 1, f"{found} MiB, planned {planned}"


PLACEMENTS = (
    {"gpu_layers": -1},
    {"gpu_layers": -1, "draft_device": "none"},
    {"device": "none", "draft_gpu_layers": -1},
    {"gpu_layers": 3, "draft_gpu_layers": 0},
    {"gpu_layers": "auto"},
)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_target_and_draft_are_placed_apart_and_bits_are_those_without_a_draft(
    target_path, draft_path, gpu, placement, temperature
):
    if placement.get("device") == "none":
        placement = {**placement, "draft_device": gpu}
    reproducible = None if placement.get("gpu_layers") == "auto" else True
    settings = {"threads": TEST_THREADS, "context_length": CONTEXT, "reproducible": reproducible, **placement}
    try:
        model = edgespec.load(target_path, draft=draft_path, **settings)
    except CapabilityError as exc:
        assert "reproducible" in str(exc)
        pytest.skip(f"the engine says: {exc}")
    with model:
        wanted = "cpu" if placement.get("device") == "none" else "gpu"
        assert model.target.facts.device == wanted
        if model.target.facts.pinned_class is None:
            pytest.skip("the fastest mode, which promises no bits")
        sampling = Sampling(temperature=temperature, seed=3)
        options = GenerateOptions(max_tokens=24, ignore_eos=True)
        texts = [
            model.generate(QUESTION, sampling, replace(options, drafter=drafter, draft_length=length))
            for drafter, length in (("none", 0), ("model", 4), ("ngram", 6), ("model", 1))
        ]
        assert len({tuple(text.token_ids) for text in texts}) == 1
        assert texts[1].stats.drafted_tokens > 0


def test_auto_takes_the_whole_model_where_the_device_has_room(target_path, draft_path, gpu):
    free = sum(device.free_bytes for device in gpus())
    if free < (2 << 30):
        pytest.skip("this device has less than 2 GiB free")
    with edgespec.load(target_path, draft=draft_path, gpu_layers="auto", context_length=CONTEXT) as model:
        assert (model.options.gpu_layers, model.options.draft_gpu_layers) == (-1, -1)
        assert 0 < model.memory.plan.device_bytes < free


def test_doctor_lists_the_device(gpu):
    from edgespec.cli.doctor import examine

    found = examine()["engines"]["llamacpp"]
    assert found["gpu_offload"]
    assert gpu in [device["name"] for device in found["devices"]]
    assert library().llama_supports_gpu_offload()


def test_what_is_measured_belongs_to_a_placement(target_path, gpu):
    from edgespec.control.pool import cost_key
    from edgespec.platform.disk_cache import file_key

    keys = set()
    for options in ({}, {"gpu_layers": 3}, {"gpu_layers": -1}):
        with load(target_path, **options) as engine:
            assert (gpu in engine.facts.placement) == bool(options)
            keys.add(cost_key(engine, [file_key(target_path)]))
    assert len(keys) == 3
