"""The library of our kernels that this process uses: from the wheel, the checkout or the user's cache folder.

    python -m edgespec.kernels.library       build it, if it is missing

EDGESPEC_KERNELS=PATH names a library, EDGESPEC_KERNELS=none switches the kernels off. Without them everything works,
slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from edgespec.errors import ConfigError
from edgespec.installation import build_kernels_command, cause_of
from edgespec.kernels.build import BuildError, build, find_library
from edgespec.platform.files import absolute, expanded, user_folder

ABI_VERSION = 5  # of the functions that the library exports
PACKAGE = Path(__file__).parent
SETTING = "EDGESPEC_KERNELS"


def library_path() -> Path | None:
    """The library, which this Python can load and whose functions are those expected; None: see `why_missing`."""
    return _find()[0]


def why_missing() -> str:
    """Why there is no library, and the fix, in one sentence; empty where there is one."""
    return _find()[1]


@cache
def _find() -> tuple[Path | None, str]:
    chosen = os.environ.get(SETTING, "")
    if chosen.lower() == "none":
        return None, f"{SETTING}=none switches them off: unset it"
    if chosen:
        named = absolute(expanded(chosen))
        if fault := _fault(named):
            return None, f"{SETTING}={chosen}: {fault}; name another library, or unset it"
        return named, ""
    reason = "they are not built"
    for folder in _folders():
        with contextlib.suppress(OSError):  # the sources, which the name depends on, were removed
            if (path := find_library(folder)) is not None:
                if not (fault := _fault(path)):
                    return path, ""
                reason = f"{path}: {fault}"
    return None, f"{reason}: {build_kernels_command()}"


def _folders() -> Iterator[Path]:
    """Where a library may lie, the user's own folder last: that takes longer to find out."""
    yield PACKAGE
    with contextlib.suppress(ConfigError):  # nobody's home
        yield user_folder("cache") / "kernels"


def _fault(path: Path) -> str:
    """What keeps a library from being used; empty: nothing."""
    try:
        found = ctypes.CDLL(str(path)).edgespec_abi_version()
    except (OSError, AttributeError) as exc:  # it cannot be loaded; it has no such function
        return f"not a library of kernels for this Python ({cause_of(exc)})"
    return "" if found == ABI_VERSION else f"its interface has version {found}, not {ABI_VERSION}"


def build_missing() -> int:
    """Build the library, if there is none, into the checkout or the user's cache folder; returns an exit code.

    What pip put into an environment, pip removes again: nothing is added there.
    """
    if library_path() is not None or os.environ.get(SETTING):
        print(library_path() or f"no kernels: {why_missing()}")
        return 0
    is_checkout = (PACKAGE.parents[1] / "pyproject.toml").is_file() and os.access(PACKAGE, os.W_OK)
    folder = PACKAGE if is_checkout else [*_folders()][-1]
    try:
        built = build(folder, say=print)
    except (BuildError, OSError) as exc:
        print(f"error: the kernels cannot be built: {exc}", file=sys.stderr)
        return 1
    if is_checkout:
        for old in set(folder.glob(f"libedgespec_kernels-*{built.suffix}")) - {built}:
            with contextlib.suppress(OSError):  # Windows keeps what is in use
                old.unlink()
    print(built)
    return 0


if __name__ == "__main__":
    sys.exit(build_missing())
