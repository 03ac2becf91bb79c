"""Checks before an export that disk space and memory suffice."""

from __future__ import annotations

import shutil
from pathlib import Path

from edgespec.errors import CapabilityError
from edgespec.export.plan import Needs
from edgespec.platform.memory import free_memory


def check_room(needs: Needs, output: Path, cache: Path | None, finished_bytes: int = 0) -> None:
    """Raise CapabilityError with needed and available bytes if disk or memory do not suffice.

    `finished_bytes`: the part of the output that an interrupted export already wrote.
    """
    parent = _existing(output)
    wanted = max(needs.output_bytes + needs.temporary_bytes - finished_bytes, 0)
    places = {parent: wanted}
    if cache is not None and needs.download_bytes:
        shared = _existing(cache)
        same = next((place for place in places if place.stat().st_dev == shared.stat().st_dev), shared)
        places[same] = places.get(same, 0) + needs.download_bytes
    for place, needed in places.items():
        free = free_bytes(place)
        if needed > free:
            raise CapabilityError(
                f"not enough disk: the export needs {human(needed)} in {place}, {human(free)} are free. Free space, "
                "choose another disk with -o, or a smaller --quant"
            )
    available = free_memory()
    if available is not None and needs.memory_bytes > available:
        raise CapabilityError(
            f"not enough memory: the export needs {human(needs.memory_bytes)}, {human(available)} are available. Close "
            "other programs, or skip the comparison with transformers by --no-check"
        )


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def free_bytes(place: Path) -> int:
    return shutil.disk_usage(place).free


def human(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1000
    return f"{num_bytes:.2f} GB"
