"""Runs the application on a socket: binding, announcing, loading the model meanwhile, stopping gracefully.

SIGINT and SIGTERM end it: running answers are finished within a limit, waiting ones are refused; a second SIGINT ends
it at once. With `until_stdin_closes`, the end of standard input does the same, so that no server outlives its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import uvicorn

from edgespec.errors import ConfigError
from edgespec.server.app import create_app
from edgespec.server.guard import LOOPBACK
from edgespec.server.residence import handling
from edgespec.server.service import Services

logger = logging.getLogger("edgespec")


@dataclass(frozen=True, slots=True)
class Binding:
    """Where to listen. `port` 0: any free one; `origins`: web pages that may call; `drain_s`: see `serve`.

    `allowed_hosts`: names in the Host header that clients may use besides local ones.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    drain_s: int = 10
    until_stdin_closes: bool = False

    @property
    def is_local(self) -> bool:
        return self.host in LOOPBACK

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names in the Host header that are allowed besides local ones; empty for any."""
        return (*LOOPBACK, self.host, *self.allowed_hosts) if self.is_local or self.allowed_hosts else ()


def bind(binding: Binding) -> socket.socket:
    """A listening socket. Raises ConfigError if the address cannot be used."""
    bound = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            binding.host, binding.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        if os.name != "nt":  # there it would let two servers share a port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()
    except (OSError, OverflowError) as exc:
        if bound is not None:
            bound.close()
        reason = getattr(exc, "strerror", None) or exc
        raise ConfigError(
            f"cannot listen on {binding.host} port {binding.port}: {reason}; choose another --host or --port (0: any)"
        ) from exc
    return bound


def serve(services: Services, binding: Binding, announce: Callable[[str], None]) -> None:
    """Serve until a signal. The first model is loaded meanwhile, after which `announce` gets the URL; the others are
    loaded by requests (`Residence`).

    Answers that run when it is stopped have `drain_s` seconds to end. If it is stopped while a model is being loaded,
    it returns all the same (`is_loading`), and loading goes on: native code cannot be interrupted, so end the process.
    Raises ConfigError if the address cannot be used, and what loading raises.
    """
    # Requests are checked in threads beside the one that decodes, which takes the interpreter several times a pass: at
    # Python's 5 ms each it would wait for as long as a pass takes.
    sys.setswitchinterval(0.0005)
    bound = bind(binding)
    host = f"[{binding.host}]" if ":" in binding.host else binding.host
    url = f"http://{host}:{bound.getsockname()[1]}"
    config = uvicorn.Config(
        create_app(services, origins=binding.origins, hosts=binding.hosts),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # its error messages may quote what a client sent
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=binding.drain_s,
    )
    server = _Server(config, services, binding.drain_s)

    def on_loaded(done: Future[None]) -> None:
        if done.exception() is None:
            announce(url)
        else:
            server.should_exit = True

    loaded = services.default.preload()
    loaded.add_done_callback(on_loaded)
    if binding.until_stdin_closes:
        threading.Thread(target=_await_end_of_input, args=(server,), name="edgespec-stdin", daemon=True).start()
    try:
        asyncio.run(server.serve(sockets=[bound]))
    finally:
        services.close()
    if loaded.done():
        loaded.result()


def _await_end_of_input(server: uvicorn.Server) -> None:
    with contextlib.suppress(OSError, ValueError):
        while os.read(sys.stdin.fileno(), 4096):
            pass
    server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn's server, which ends with exit code 0 on a signal and refuses waiting requests then."""

    def __init__(self, config: uvicorn.Config, services: Services, drain_s: int) -> None:
        super().__init__(config)
        self._services, self._drain_s = services, drain_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with handling(self.handle_exit):
            yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._services.stop()
        if count := self._services.num_running:
            answers = "1 answer" if count == 1 else f"{count} answers"
            logger.warning("finishing %s, for at most %s s; Ctrl-C ends at once", answers, self._drain_s)
        await super().shutdown(sockets)  # which cuts off what still runs after `drain_s`
