"""The `edgespec` command, and `python -m edgespec`.

Installs a Ctrl-C handler before importing anything else: Ctrl-C during the imports would otherwise print a traceback.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing would leave Ctrl-C unanswered for longer than all else here
if TYPE_CHECKING:
    import signal
    from typing import NoReturn
else:
    import _signal as signal  # the same functions; `signal` itself imports enum, which takes ten times as long

INTERRUPTED = 130
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "PYTHONMALLOC": "malloc"}
_THP, _PAGE_BYTES = "/sys/kernel/mm/transparent_hugepage/", 2 << 20


def main() -> NoReturn:
    """Entry point of the console script."""
    _take_large_pages()
    # A background job of a shell ignores SIGINT, and must go on ignoring it.
    handles_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handles_interrupt:
        signal.signal(signal.SIGINT, _leave)
    from edgespec.cli.main import main as run

    try:
        if handles_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        if handles_interrupt:
            signal.signal(signal.SIGINT, _leave)  # all output is written; only the interpreter's shutdown is left


def _take_large_pages() -> None:
    """Start this program anew with all memory in pages of 2 MB, where Linux lends them: nothing turns them on later.

    What Python and ONNX Runtime touch between two products lies in thousands of pages of 4 KB, and each pass's weights
    drive their addresses out of the processor's caches. Saves up to 13% of an answer's time (docs/kernels.md).
    """
    if all(os.environ.get(name) == value for name, value in LARGE_PAGES.items()):
        for name in LARGE_PAGES:  # not for children, which begin sooner with small ones
            del os.environ[name]
        return
    is_ours = sys.argv[0].endswith(("/edgespec", "/__main__.py")) and not getattr(sys, "frozen", False)
    if sys.platform != "linux" or not is_ours or "t" in sys.abiflags or LARGE_PAGES.keys() & os.environ.keys():
        return
    try:
        with open(_THP + "enabled") as enabled, open(_THP + "hpage_pmd_size") as size:  # noqa: PTH123 - pathlib is slow
            lends = "[never]" not in enabled.read() and int(size.read()) == _PAGE_BYTES  # others: up to 512 MB
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        if lends and name == "glibc" and [int(part) for part in version.split(".")] >= [2, 35]:
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **LARGE_PAGES})
    except (OSError, ValueError):
        pass  # small ones will do


def _leave(*_: object) -> NoReturn:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
