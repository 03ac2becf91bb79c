"""Output files of a benchmark: paths are checked before the run, files are written atomically after it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from edgespec.errors import CapabilityError, ConfigError, StateError


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check_outputs(plot_folder: Path | None, html_file: Path | None) -> None:
    """Raise CapabilityError if figures are requested and matplotlib is missing, ConfigError for a path not usable."""
    if plot_folder is not None:
        if not has_matplotlib():
            raise CapabilityError("--plot needs matplotlib, which is not installed: pip install 'edgespec[bench]'")
        if plot_folder.exists() and not plot_folder.is_dir():
            raise ConfigError(f"--plot {plot_folder} is a file: give a folder")
    if html_file is not None:
        if html_file.is_dir():
            raise ConfigError(f"--html {html_file} is a folder: give a file name")
        if not html_file.absolute().parent.is_dir():
            raise ConfigError(f"--html {html_file}: its folder does not exist; create it first")


def write_whole(path: Path, contents: bytes) -> None:
    """Write `path` atomically. Raises StateError if that fails."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(contents)
        temporary.replace(path)
    except OSError as exc:
        raise StateError(f"{path} cannot be written: {exc.strerror or exc}") from exc
