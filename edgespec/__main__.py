"""The `edgespec` command, and `python -m edgespec`.

All that it needs is imported only once Ctrl-C has an answer: pressed in the first tenths of a second it would
otherwise end in a traceback out of somebody's imports.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # importing typing would leave Ctrl-C unanswered for longer than all else here
if TYPE_CHECKING:
    from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    """Entry point of the console script."""
    is_heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background job ignores it
    if is_heeded:
        signal.signal(signal.SIGINT, _leave)
    from edgespec.cli.main import main as run

    try:
        if is_heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        if is_heeded:
            signal.signal(signal.SIGINT, _leave)  # what is left is to end, and everything was written


def _leave(*_: object) -> NoReturn:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
