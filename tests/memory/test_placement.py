"""`-ngl auto`: numbers of layers by the free memory of devices, on the demo pair's files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.config.options import LoadOptions
from edgespec.engines.llamacpp import devices
from edgespec.engines.llamacpp.devices import Device
from edgespec.errors import CapabilityError, ConfigError
from edgespec.formats.gguf.header import read_header
from edgespec.formats.manifest import ModelPair
from edgespec.loading.requirements import resolve_pair
from edgespec.memory.fit import placed
from edgespec.memory.plan import Room, planned
from tiny_gguf import Shape, write_model
from tiny_mixtures import Case, write

GIB = 1 << 30


def layers(options: LoadOptions, room: int) -> tuple[object, object]:
    found = placed(options, resolve_pair(options), lambda _names: room)
    return found.gpu_layers, found.draft_gpu_layers


def needed(options: LoadOptions, pair: ModelPair, target: int, draft: int) -> tuple[int, int]:
    """Bytes on devices, of target and draft."""
    plan = planned(replace(options, gpu_layers=target, draft_gpu_layers=draft), pair)
    return plan.models["target"].device, plan.models["draft"].device


@pytest.fixture
def options(target_path: Path, draft_path: Path) -> LoadOptions:
    chosen = {"gpu_layers": "auto", "context_length": 512, "engine": "llamacpp"}
    return LoadOptions(model=str(target_path), draft=draft_path, **chosen)


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
    for room in range(0, whole, whole // 8):
        count, draft = layers(options, room)
        assert draft == 0
        assert needed(options, pair, count, 0)[0] <= room < needed(options, pair, count + 1, 0)[0]
        seen.add(count)
    assert len(seen) > 4


@pytest.fixture
def mixture(tmp_path: Path) -> LoadOptions:
    """Eight layers of experts, with a draft of one layer that has none."""
    target = write(tmp_path / "mixture.gguf", Case("qwen3moe", 8, experts=(32, 2, 256)))
    draft = write_model(tmp_path / "small.gguf", Shape(layers=1, merges=0))
    chosen = {"gpu_layers": "auto", "context_length": 256, "engine": "llamacpp"}
    return LoadOptions(model=str(target), draft=draft, **chosen)


def test_experts_leave_the_gpu_before_anything_else(mixture):
    pair = resolve_pair(mixture)

    def at(experts_here: int | None) -> int:
        return needed(replace(mixture, cpu_moe_layers=experts_here), pair, -1, 0)[0]

    def chosen(room: int) -> tuple[object, object, int | None]:
        found = placed(mixture, pair, lambda _names: room)
        return found.gpu_layers, found.draft_gpu_layers, found.cpu_moe_layers

    draft = needed(mixture, pair, -1, -1)[1]
    assert at(0) == at(None) > at(1) > at(8)
    header = read_header(pair.target)
    experts = [tensor.num_bytes for tensor in header.tensors if "_exps" in tensor.name]
    assert at(1) - at(8) == sum(experts) * 7 // 8
    assert chosen(at(0) + draft) == (-1, -1, None)
    assert chosen(at(0)) == (-1, 0, None)
    assert chosen(at(0) - 1) == (-1, -1, 1)  # the draft goes there before experts do
    for count in range(2, 9):
        assert chosen(at(count) + draft) == (-1, -1, count)
    assert chosen(at(8) + draft - 1) == (-1, 0, 8)
    layers, small, here = chosen(at(8) - 1)
    assert (0 < layers < 9, small, here) == (True, 0, 8)
    assert needed(replace(mixture, cpu_moe_layers=8), pair, layers, 0)[0] < at(8)
    fixed = replace(mixture, cpu_moe_layers=2)
    assert placed(fixed, pair, lambda _names: at(2)).gpu_layers == -1
    assert placed(fixed, pair, lambda _names: at(2) - 1).gpu_layers < 9


def test_tensors_are_counted_where_they_are_put(mixture):
    pair = resolve_pair(mixture)
    everywhere = replace(mixture, gpu_layers=-1, draft_gpu_layers=0)

    def on_device(text: str | None) -> int:
        return planned(replace(everywhere, override_tensor=text), pair).device_bytes

    sizes = {tensor.name: tensor.num_bytes for tensor in read_header(pair.target).tensors}
    name = "blk.0.ffn_up_exps.weight"
    assert on_device(None) - on_device(r"blk\.0\.ffn_up_exps=CPU") == 0  # a copy visits the GPU for wide passes
    assert on_device(None) - on_device(r"blk\.[01]\.ffn_up_exps=CPU") == sizes[name]
    assert on_device("token_embd=CUDA0") - on_device(None) == sizes["token_embd.weight"]
    assert on_device("blk=CPU,blk=CUDA0") == on_device("blk=CPU") < on_device(None)  # the first one counts
    assert replace(everywhere, cpu_moe_layers=8).target_overrides[-1][1] == "CPU"


@pytest.mark.parametrize("text", ["exps", "=CPU", "exps=CPU,", "a(=CPU"])
def test_a_bad_pattern_is_refused_before_anything_is_opened(text: str):
    with pytest.raises(ConfigError, match=r"does not say which tensors go where: .*give REGEX=DEVICE"):
        LoadOptions(override_tensor=text)


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
    assert layers(replace(options, gpu_layers=None), GIB) == (None, None)
    fixed = replace(options, gpu_layers=3)
    assert placed(fixed, resolve_pair(fixed)) is fixed


def test_a_gpu_is_used_where_nobody_says_how_many_layers(options, monkeypatch):
    monkeypatch.setattr("edgespec.memory.fit.has_gpu", lambda: True)
    options = replace(options, gpu_layers=None)
    assert layers(options, 4 * GIB) == (-1, -1)
    assert layers(replace(options, reproducible=True), GIB) == layers(replace(options, device="none"), GIB)
    assert layers(replace(options, reproducible=True), GIB) == (None, None)


def test_a_gpu_without_memory_of_its_own_has_no_more_room_than_the_machine(monkeypatch):
    monkeypatch.setattr(devices, "gpus", lambda: [Device("Vulkan1", "two", "integrated gpu", 3 * GIB, 4 * GIB)])
    monkeypatch.setattr(devices, "free_memory", lambda: GIB)
    assert devices.room_on_devices(None) == GIB * 3 // 4


@pytest.mark.parametrize("kind, shares", [("gpu", False), ("integrated gpu", True)])
def test_what_lies_on_a_gpu_that_shares_this_machines_memory_counts_in_the_plan(monkeypatch, kind, shares, options):
    monkeypatch.setattr("edgespec.engines.llamacpp.devices.gpus", lambda: [Device("GPU", "one", kind, GIB, GIB)])
    everywhere = replace(options, gpu_layers=-1)
    plan = planned(everywhere, resolve_pair(everywhere))
    assert plan.shares_device is shares and plan.device_bytes > 0
    rest = replace(plan, shares_device=False).own_bytes
    assert plan.own_bytes >= rest + (plan.device_bytes if shares else 0)
    assert ("which shares this machine's memory" in plan.device_note) is shares
    budget = Room(rest + plan.device_bytes // 2, (), plan.process.own)
    assert (budget.verdict(plan).fit == "refused") is shares
    assert not planned(replace(options, gpu_layers=0), resolve_pair(options)).shares_device


def test_a_gpu_of_apple_silicon_has_no_memory_of_its_own(monkeypatch):
    metal = Device("MTL0", "Apple M4", "gpu", 8 * GIB, 10 * GIB)
    assert not metal.shares_memory
    monkeypatch.setattr("edgespec.engines.llamacpp.devices.is_apple_silicon", lambda: True)
    assert metal.shares_memory and not Device("CPU", "Apple M4", "cpu", GIB, GIB).shares_memory


def test_room_is_what_devices_have_free_less_a_margin(monkeypatch):
    monkeypatch.setattr(devices, "free_memory", lambda: 8 * GIB)
    found = [
        Device("Vulkan0", "one", "gpu", 8 * GIB, 10 * GIB),
        Device("Vulkan1", "two", "integrated gpu", 3 * GIB, 4 * GIB),
        Device("Vulkan2", "three", "gpu", 0, 0),
    ]
    monkeypatch.setattr(devices, "gpus", lambda: found[:2])
    assert devices.room_on_devices(None) == int(7.5 * GIB) + int(2.75 * GIB)
    assert devices.room_on_devices(["Vulkan1"]) == int(2.75 * GIB)
    assert devices.room_on_devices(["CUDA0"]) == 0
    monkeypatch.setattr(devices, "gpus", lambda: found)
    with pytest.raises(CapabilityError, match="driver of Vulkan2 does not report"):
        devices.room_on_devices(None)
