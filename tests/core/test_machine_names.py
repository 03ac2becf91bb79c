"""The name that measurements of a processor are kept under."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from edgespec.engines import machine

ARM = "processor\t: {}\nFeatures\t: fp asimd {}\nCPU implementer\t: 0x41\nCPU part\t: {}\n\n"


def name_of(monkeypatch: pytest.MonkeyPatch, path: Path, text: str) -> str:
    path.write_text(text)
    monkeypatch.setattr(machine, "_CPUINFO", path)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(sys, "platform", "linux")
    machine.processor.cache_clear()
    try:
        return machine.processor()
    finally:
        machine.processor.cache_clear()


def test_arm_processors_with_other_kernels_have_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    texts = [
        ARM.format(0, "", "0xd08"),
        ARM.format(0, "asimddp", "0xd0c"),
        ARM.format(0, "asimddp i8mm", "0xd0c"),
        ARM.format(0, "asimddp", "0xd0b") + ARM.format(1, "asimddp", "0xd05"),
    ]
    names = [name_of(monkeypatch, tmp_path / "cpuinfo", text) for text in texts]
    assert len(set(names)) == len(texts) and all(name.startswith("aarch64 0x41 0xd0") for name in names)


def test_old_arm_processors_lack_dot_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "_CPUINFO", path)
    old, new, x86 = ARM.format(0, "", "0xd08"), ARM.format(0, "asimddp", "0xd0c"), "flags : avx2\n"
    for text, lacks in ((old, True), (new, False), (new + old, True), (x86, False), (None, False)):
        path.write_text(text) if text is not None else path.unlink()
        machine.lacks_dot_products.cache_clear()
        assert machine.lacks_dot_products() is lacks
    machine.lacks_dot_products.cache_clear()


def test_a_processor_with_a_name_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert name_of(monkeypatch, tmp_path / "cpuinfo", "processor : 0\nmodel name\t: A CPU\nflags : x\n") == "A CPU"
