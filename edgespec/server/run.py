"""Runs the application on a socket: binding, announcing, loading the model meanwhile, stopping gracefully.

SIGINT and SIGTERM end it: running answers are finished within a limit, waiting ones are refused; a second SIGINT ends
it at once. With --exit-with-stdin the end of standard input does the same, so that no server outlives its parent.
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

import uvicorn

from edgespec.config.options import ServeOptions
from edgespec.errors import ConfigError
from edgespec.server.app import create_app
from edgespec.server.guard import LOOPBACK
from edgespec.server.residence import handling
from edgespec.server.service import Services

logger = logging.getLogger("edgespec")
DRAIN_S = 10


def hosts_of(options: ServeOptions) -> tuple[str, ...]:
    """Names in the Host header that are allowed besides local ones; empty for any."""
    host, named = options.host, options.allowed_host
    return (*LOOPBACK, host, *named) if host in LOOPBACK or named else ()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = family is socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except (OSError, OverflowError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}; choose another --host or --port (0: any)"
        ) from exc


def serve(services: Services, options: ServeOptions, announce: Callable[[str], None]) -> None:
    """Serve until a signal. The first model is loaded meanwhile, after which `announce` gets the URL; the others are
    loaded by requests (`Residence`).

    Answers that run when it is stopped have DRAIN_S seconds to end. If it is stopped while a model is being loaded,
    it returns all the same (`is_loading`), and loading goes on: native code cannot be interrupted, so end the process.
    Raises ConfigError if the address cannot be used, and what loading raises.
    """
    # Requests are checked in threads beside the one that decodes, which takes the interpreter several times a pass: at
    # Python's 5 ms each it would wait for as long as a pass takes.
    sys.setswitchinterval(0.0005)
    bound = bind(options.host, options.port)
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{host}:{bound.getsockname()[1]}"
    config = uvicorn.Config(
        create_app(services, origins=options.cors_origin, hosts=hosts_of(options)),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # its error messages may quote what a client sent
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=DRAIN_S + 2,  # to say so where an answer is ended
    )
    server = _Server(config, services)

    def on_loaded(done: Future[None]) -> None:
        if done.exception() is None:
            announce(url)
        else:
            server.should_exit = True

    loaded = services.default.preload()
    loaded.add_done_callback(on_loaded)
    if options.exit_with_stdin:
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

    def __init__(self, config: uvicorn.Config, services: Services) -> None:
        super().__init__(config)
        self._services = services

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with handling(self.handle_exit):
            yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._services.stop()
        if count := self._services.num_running:
            answers = "1 answer" if count == 1 else f"{count} answers"
            logger.warning("finishing %s, for at most %s s; Ctrl-C ends at once", answers, DRAIN_S)
        loop = asyncio.get_running_loop()
        loop.call_later(DRAIN_S, loop.run_in_executor, None, self._services.end_answers)
        await super().shutdown(sockets)
