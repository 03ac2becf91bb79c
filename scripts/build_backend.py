"""How pip builds edgespec: hatchling, with the library of the kernels and those of the chat page in the wheel.

Where no C++ compiler works, Zig's is asked for, 100 MB, which pip puts into a folder of its own for as long as it
builds. An editable installation builds nothing (scripts/run.py does), so nothing is asked for it: that is why this is
not the hook's own `dependencies`. A wheel for all systems, without the library: EDGESPEC_KERNELS=none. One for another
system, by Zig: EDGESPEC_WHEEL_FOR, which scripts/wheels.py sets. The page's come from the npm registry
(scripts/vendor_page.py); where that cannot be reached, the wheel has the page without them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
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
# The platform of a wheel -> our name of that system and processor, Zig's. Linux: glibc from that version on.
TARGETS = {
    "manylinux_2_17_x86_64": ("linux-x86_64", "x86_64-linux-gnu.2.17"),
    "manylinux_2_17_aarch64": ("linux-aarch64", "aarch64-linux-gnu.2.17"),
    "macosx_11_0_arm64": ("darwin-arm64", "aarch64-macos.11.0"),
    "win_amd64": ("win32-amd64", "x86_64-windows-gnu"),
}
WHEEL_FOR = "EDGESPEC_WHEEL_FOR"


def is_wanted() -> bool:
    return os.environ.get("EDGESPEC_KERNELS", "").lower() != "none"


def load_builder() -> ModuleType:
    """edgespec/kernels/build.py; the package itself needs more than what pip installs for building."""
    return load(KERNELS / "build.py")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"edgespec_{path.stem}", path)
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


class WheelHook(BuildHookInterface):  # type: ignore[misc]  # mypy does not see hatchling
    """Adds the libraries to the wheel; one without them works too, slower and plainer."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        self.add_page_libraries(build_data)
        if is_wanted():
            self.add_kernels(build_data)

    def add_page_libraries(self, build_data: dict[str, Any]) -> None:
        page = load(Path(__file__).with_name("vendor_page.py"))
        if not page.are_wanted():
            return
        try:
            page.vendor()
        except page.CannotFetch as exc:
            why = "formulas, highlighted code and PDFs, since its libraries cannot be fetched from the npm registry"
            self.app.display_warning(f"the chat page in this wheel has no {why}: {exc}")
        else:
            build_data["force_include"][str(page.VENDOR)] = "edgespec/server/static/vendor"

    def add_kernels(self, build_data: dict[str, Any]) -> None:
        builder, compiler, target = load_builder(), None, None
        platform = os.environ.get(WHEEL_FOR) or self.build_config.builder.get_best_matching_tag().rpartition("-")[2]
        if WHEEL_FOR in os.environ:
            target, zig = TARGETS[platform]
            # -g0: macOS's libraries name the folders of what has symbols for a debugger.
            compiler = (sys.executable, "-m", "ziglang", "c++", "-target", zig, "-mcpu=baseline", "-g0")
        self.scratch = tempfile.TemporaryDirectory(prefix="edgespec-wheel-")
        try:
            library = builder.build(
                Path(self.scratch.name), compiler, target or builder.HOST, say=self.app.display_warning
            )
        except builder.BuildError as exc:
            self.app.display_warning(f"this wheel has no kernels, since they cannot be built: {exc}")
            return
        build_data["force_include"][str(library)] = f"edgespec/kernels/{library.name}"
        build_data["pure_python"] = False
        # Nothing in it depends on Python's version or ABI.
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "scratch"):
            self.scratch.cleanup()
