"""How pip builds edgespec: hatchling, with the library of the kernels in the wheel.

Where no C++ compiler works, Zig's is asked for, 100 MB, which pip puts into a folder of its own for as long as it
builds. An editable installation builds nothing (scripts/run.py does), so nothing is asked for it: that is why this is
not the hook's own `dependencies`. A wheel for all systems, without the library: EDGESPEC_KERNELS=none.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import hatchling.build
from hatchling.build import *  # noqa: F403
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path(__file__).resolve().parents[1] / "edgespec" / "kernels"
# Systems and processors of Zig's wheels; pip would fail elsewhere.
ZIG_RUNS_ON = {"linux-x86_64", "linux-aarch64", "darwin-x86_64", "darwin-arm64", "win32-amd64", "win32-arm64"}


def is_wanted() -> bool:
    return os.environ.get("EDGESPEC_KERNELS", "").lower() != "none"


def load_builder() -> ModuleType:
    """edgespec/kernels/build.py; the package itself needs more than what pip installs for building."""
    spec = importlib.util.spec_from_file_location("edgespec_kernels_build", KERNELS / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    found: list[str] = hatchling.build.get_requires_for_build_wheel(config_settings)
    builder = load_builder()
    try:
        if is_wanted():
            builder.find_compiler()
    except builder.NoCompiler:
        found += [builder.ZIG] if builder.HOST in ZIG_RUNS_ON else []
    return found


class KernelsHook(BuildHookInterface):  # type: ignore[misc]  # mypy does not see hatchling
    """Builds the library into the wheel; one without it works too, slower."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or not is_wanted():
            return
        builder = load_builder()
        self.scratch = tempfile.TemporaryDirectory(prefix="edgespec-wheel-")
        try:
            library = builder.build(Path(self.scratch.name), say=self.app.display_warning)
        except builder.BuildError as exc:
            self.app.display_warning(f"this wheel has no kernels, since they cannot be built: {exc}")
            return
        build_data["force_include"][str(library)] = f"edgespec/kernels/{library.name}"
        build_data["pure_python"] = False
        # Nothing in it depends on Python's version or ABI.
        build_data["tag"] = f"py3-none-{self.build_config.builder.get_best_matching_tag().rpartition('-')[2]}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "scratch"):
            self.scratch.cleanup()
