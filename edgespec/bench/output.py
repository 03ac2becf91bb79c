"""The files that a benchmark leaves where the user asked: checked before the work."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from edgespec.errors import CapabilityError, ConfigError
from edgespec.installation import install_command


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check_outputs(plot_folder: Path | None, html_file: Path | None) -> None:
    """Raises CapabilityError when figures are wanted and matplotlib is missing, ConfigError for impossible places."""
    if plot_folder is not None:
        if not has_matplotlib():
            raise CapabilityError(f"--plot needs matplotlib, which is not installed: {install_command('bench')}")
        if plot_folder.exists() and not plot_folder.is_dir():
            raise ConfigError(f"--plot {plot_folder} is a file: give a folder")
    if html_file is not None:
        if html_file.is_dir():
            raise ConfigError(f"--html {html_file} is a folder: give a file name")
        if not html_file.absolute().parent.is_dir():
            raise ConfigError(f"--html {html_file}: its folder does not exist")
