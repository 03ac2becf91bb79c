"""`edgespec rpc-server`: lends this machine's devices to a target on another one (`--rpc`)."""

from __future__ import annotations

import signal
import sys

import click

from edgespec.errors import EngineError
from edgespec.installation import require_engine
from edgespec.platform.files import user_folder
from edgespec.platform.machine import default_threads

DEFAULT_PORT = 50052
WARNING = (
    "WARNING: an RPC server has no password and no encryption, and its protocol is not safe against bad input: whoever "
    "can reach this port can read what you write, and can probably run programs here. Use it only in a network that "
    "you trust, never on the internet, and stop it when it is not needed."
)


@click.command()
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="IPv4 address to listen on [this machine only]")
@click.option("--port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, metavar="N", help=f"Port [{DEFAULT_PORT}]")
@click.option("-t", "--threads", type=click.IntRange(1, 512), metavar="N", help="CPU threads [fast cores]")
@click.option(
    "-dev", "--device", metavar="NAMES", help="Devices to lend, as doctor lists them [GPUs, else the processor]"
)
@click.option(
    "-c", "--cache", is_flag=True, help="Store received weights on this disk, so that they are sent only once"
)
def command(host: str, port: int, threads: int | None, device: str | None, cache: bool) -> int:
    """Lend this machine's devices to a target on another machine, which names this one with --rpc HOST:PORT.

    It serves one program after another until Ctrl-C. Both machines need the same version of llama.cpp, built with RPC.

    There is no password and no encryption, and the protocol is not safe against bad input: use it only in a network
    that you trust.
    """
    require_engine("llamacpp", "rpc-server")
    from edgespec.engines.llamacpp.remote import require_rpc, serve_rpc

    require_rpc("edgespec rpc-server")
    names = tuple(name.strip() for name in device.split(",")) if device else ()
    if not host.startswith("127."):
        click.secho(WARNING, err=True, fg="yellow")
    address = "ADDRESS" if host == "0.0.0.0" else host  # to type on the other machine
    click.echo(f"RPC server on {host}:{port}; on the other machine: edgespec chat MODEL --rpc {address}:{port}")
    sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the library would only drop its client
    folder = user_folder("cache") / "rpc" if cache else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    serve_rpc(f"{host}:{port}", threads=threads or default_threads(), names=names, cache_folder=folder)
    raise EngineError(
        f"the RPC server on {host}:{port} stopped by itself; the library says above why. It listens on a port "
        "that is free (--port), and on an IPv4 address of this machine (--host), 0.0.0.0 for all networks"
    )
