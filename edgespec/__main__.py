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


def main() -> NoReturn:
    """Entry point of the console script."""
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


def _leave(*_: object) -> NoReturn:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
