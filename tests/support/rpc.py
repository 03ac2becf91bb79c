"""RPC servers on this machine for tests, where llama.cpp has them."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from edgespec.engines.llamacpp.remote import ask
from edgespec.errors import Unreachable
from waiting import until


def needs_rpc() -> None:
    """Skip the test where this build of llama.cpp has no RPC."""
    from edgespec.engines.llamacpp.library import library

    if not library().llama_supports_rpc():
        pytest.skip("this build of llama.cpp has no RPC (run.py install llamacpp --backend rpc makes one)")


def free_port() -> int:
    """One that systems give to nobody who asks for any: it stays free until it is used, and while a server restarts."""
    while True:
        port = random.randint(20_000, 30_000)
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port


class Server:
    """`edgespec rpc-server` on a free port of the loopback; `start` again after `kill`."""

    def __init__(self) -> None:
        self.port = free_port()
        self.endpoint = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "edgespec", "rpc-server", "--port", str(self.port), "--threads", "1"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self.answers, process=self._process)

    def answers(self) -> bool:
        """Whether it runs and serves nobody."""
        try:
            ask(self.endpoint, 1.0)
            return True
        except Unreachable:
            return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Let it hang, as a machine does that is overloaded: connections stay open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)


@contextmanager
def started() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.kill()


def idle(*servers: Server) -> Server:
    """One of `servers` that serves nobody."""
    until(lambda: any(server.answers() for server in servers))
    return next(server for server in servers if server.answers())
