"""Ctrl-C while a library's call runs, which Python's own handlers wait for."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from time import monotonic

import pytest

from edgespec.cli.terminal import stops


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot send SIGINT to this process alone")
def test_ctrl_c_cancels_before_a_long_call_returns() -> None:
    called: list[tuple[float, threading.Thread]] = []
    with stops(lambda: called.append((monotonic(), threading.current_thread()))) as interruption:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 5_000_000)  # as long as a pass, and like it without Python's lock
        returned = monotonic()
    assert interruption.is_set()
    (called_s, thread), *_ = called
    assert called_s < returned and thread is not threading.main_thread()  # which the call has


def test_the_wakeup_of_others_is_given_back() -> None:
    before = signal.set_wakeup_fd(-1)
    try:
        with stops(lambda: None):
            pass
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.set_wakeup_fd(before)
