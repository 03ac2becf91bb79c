"""`-ngl auto`: numbers of layers by the free memory of devices, on the demo pair's files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.config import LoadOptions
from edgespec.engines.llamacpp import placement
from edgespec.engines.llamacpp.devices import Device
from edgespec.errors import CapabilityError, ConfigError
from edgespec.formats.manifest import ModelPair
from edgespec.loading.requirements import resolve_pair
from edgespec.memory.placement import placed
from edgespec.memory.plan import planned

GIB = 1 << 30


def layers(options: LoadOptions, room: int) -> tuple[object, object]:
    found = placed(options, resolve_pair(options), lambda _names: room)
    return found.gpu_layers, found.draft_gpu_layers


def needed(options: LoadOptions, pair: ModelPair, target: int, draft: int) -> tuple[int, int]:
    """Bytes on devices, of target and draft."""
    plan = planned(replace(options, gpu_layers=target, draft_gpu_layers=draft), pair)
    return plan.models[0].footprint.device, plan.models[1].footprint.device


@pytest.fixture
def options(target_path: Path, draft_path: Path) -> LoadOptions:
    return LoadOptions(model=str(target_path), draft=draft_path, gpu_layers="auto", context_length=512)


def test_the_target_comes_first_then_the_draft(options):
    pair = resolve_pair(options)
    target, draft = needed(options, pair, -1, -1)
    assert layers(options, target + draft) == (-1, -1)
    assert layers(options, target + draft - 1) == (-1, 0)
    assert layers(options, target) == (-1, 0)
    assert layers(options, 0) == (0, 0)


def test_as_many_layers_as_fit(options):
    pair = resolve_pair(options)
    whole = needed(options, pair, -1, 0)[0]
    seen = set()
    for room in range(0, whole, whole // 20):
        count, draft = layers(options, room)
        assert draft == 0
        assert needed(options, pair, count, 0)[0] <= room < needed(options, pair, count + 1, 0)[0]
        seen.add(count)
    assert len(seen) > 4


def test_a_cache_that_stays_here_leaves_room_for_layers(options):
    options = replace(options, context_length=None)
    room = needed(options, resolve_pair(options), 4, 0)[0]
    assert layers(options, room) == (4, 0)
    count, _ = layers(replace(options, kv_offload=False), room)
    assert count > 4


def test_a_draft_that_the_user_placed_keeps_its_place(options):
    pair = resolve_pair(options)
    target, draft = needed(options, pair, -1, -1)
    assert layers(replace(options, draft_gpu_layers=0), 2 * (target + draft)) == (-1, 0)
    count, drafted = layers(replace(options, draft_gpu_layers=-1), target + draft - 1)
    assert 0 < count < 513 and drafted == -1
    assert layers(replace(options, draft_device="none"), target) == (-1, None)


def test_without_a_device_of_ours_there_is_nothing_to_choose(options):
    assert layers(replace(options, device="none"), GIB) == (0, 0)
    assert layers(replace(options, rpc="h:1"), 0) == (-1, 0)
    assert layers(LoadOptions(model="demo", engine="onnx", gpu_layers="auto"), GIB) == (0, 0)
    fixed = replace(options, gpu_layers=3)
    assert placed(fixed, resolve_pair(fixed)) is fixed


def test_reproducible_mode_needs_a_number(options):
    with pytest.raises(ConfigError, match="edgespec plan -ngl auto"):
        replace(options, reproducible=True)


def test_room_is_what_devices_have_free_less_a_margin(monkeypatch):
    found = [
        Device("Vulkan0", "one", "gpu", 8 * GIB, 10 * GIB),
        Device("Vulkan1", "two", "integrated gpu", 3 * GIB, 4 * GIB),
        Device("Vulkan2", "three", "gpu", 0, 0),
    ]
    monkeypatch.setattr(placement, "gpus", lambda: found[:2])
    assert placement.room_on_devices(None) == int(7.5 * GIB) + int(2.75 * GIB)
    assert placement.room_on_devices(["Vulkan1"]) == int(2.75 * GIB)
    with pytest.raises(CapabilityError, match=r"no GPU 'CUDA0'.*Vulkan0, Vulkan1"):
        placement.room_on_devices(["CUDA0"])
    monkeypatch.setattr(placement, "gpus", lambda: found)
    with pytest.raises(CapabilityError, match="driver of Vulkan2 does not report"):
        placement.room_on_devices(None)
