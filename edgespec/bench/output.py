"""The files that a benchmark leaves where the user asked: checked before the work."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from edgespec.errors import CapabilityError, ConfigError
from edgespec.installation import install_command


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check_outputs(plot: Path | None, html_file: Path | None) -> None:
    """Raises CapabilityError when figures are wanted and matplotlib is missing, ConfigError for impossible places."""
    if plot is not None:
        if not has_matplotlib():
            raise CapabilityError(f"--plot needs matplotlib, which is not installed: {install_command('bench')}")
        if plot.suffix.lower() == ".png":
            check_file("--plot", plot)
        elif plot.exists() and not plot.is_dir():
            raise ConfigError(f"--plot {plot} is a file: give a name that ends with .png, or a folder")
    if html_file is not None:
        check_file("--html", html_file)


def check_file(option: str, path: Path) -> None:
    """Raises ConfigError where no file can be written at `path`."""
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder: give a file name")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} {path}: its folder does not exist")
