"""A child process that ends with its parent, however that ended."""

from __future__ import annotations

import os
import threading


def follow_parent() -> None:
    """End this process when the parent closes our standard input, which its death does too.

    Without it a killed export would leave a child that goes on writing into the folder of the next one.
    """

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin: its lock, held here, would abort the interpreter's exit
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()
