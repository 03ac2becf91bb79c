"""Build the wheels of all systems on one machine, with Zig's compiler.

    pip install hatchling ziglang
    python scripts/wheels.py [PLATFORM ...] --out dist

Platforms: TARGETS in build_backend.py; all if none is named. Each wheel is checked: it holds one library of kernels, of
its system's format, and the libraries of the chat page. Exit code 1 if one was not made.
"""

from __future__ import annotations

import argparse
import os
import sys
import zipfile
from pathlib import Path

import hatchling.build
from build_backend import WHEEL_FOR

FORMATS = {
    "manylinux_2_17_x86_64": "ELF 62",
    "manylinux_2_17_aarch64": "ELF 183",
    "macosx_11_0_arm64": "Mach-O 0x100000c",
    "win_amd64": "PE 0x8664",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platforms", nargs="*", metavar="PLATFORM", help=", ".join(FORMATS))
    parser.add_argument("--out", type=Path, default=Path("dist"), metavar="FOLDER")
    given = parser.parse_args()
    if unknown := set(given.platforms) - FORMATS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: allowed are {', '.join(FORMATS)}")
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(Path(__file__).resolve().parents[1])
    return max([build(platform, out) for platform in given.platforms or FORMATS])


def build(platform: str, out: Path) -> int:
    os.environ[WHEEL_FOR] = platform
    wheel = out / hatchling.build.build_wheel(str(out))
    with zipfile.ZipFile(wheel) as archive:
        found = [format_of(archive.read(name)) for name in archive.namelist() if "/libedgespec_kernels-" in name]
        has_page = "edgespec/server/static/vendor/versions.json" in archive.namelist()
    if not wheel.stem.endswith(platform) or found != [FORMATS[platform]]:
        wheel.unlink()
        print(f"error: {wheel.name} held the libraries {found}, not {FORMATS[platform]}", file=sys.stderr)
        return 1
    if not has_page:
        wheel.unlink()
        print(f"error: {wheel.name} lacked the libraries of the chat page", file=sys.stderr)
        return 1
    print(f"{wheel} {wheel.stat().st_size / 1e6:.1f} MB, {found[0]}", flush=True)
    return 0


def format_of(library: bytes) -> str:
    """The format of a library and the number of its processor there."""
    if library.startswith(b"\x7fELF"):
        return f"ELF {int.from_bytes(library[18:20], 'little')}"
    if library.startswith(b"\xcf\xfa\xed\xfe"):
        return f"Mach-O {int.from_bytes(library[4:8], 'little'):#x}"
    header = int.from_bytes(library[0x3C:0x40], "little")
    if library.startswith(b"MZ") and library[header : header + 4] == b"PE\0\0":
        return f"PE {int.from_bytes(library[header + 4 : header + 6], 'little'):#x}"
    return "unknown"


if __name__ == "__main__":
    sys.exit(main())
