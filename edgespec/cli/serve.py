"""`edgespec serve`: the OpenAI-compatible server, or a sidecar that speaks JSON lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from edgespec.cli.help import GroupedOption, SettingsCommand
from edgespec.cli.options import resolve_settings, settings_options
from edgespec.cli.served_models import API_KEY, OF_ONE_MODEL, served_models
from edgespec.cli.status import stop_waiting
from edgespec.cli.terminal import note
from edgespec.config.options import STRUCTURE, ServeOptions
from edgespec.config.values import MAX_PARALLEL
from edgespec.errors import CapabilityError, ConfigError
from edgespec.installation import install_command, is_importable

if TYPE_CHECKING:
    from edgespec.server.residence import Loading
    from edgespec.server.run import Binding
    from edgespec.server.service import Service, Services

_NEEDED = ("starlette", "uvicorn")
_OF_ONE_ANSWER = ("system", "thinking", "chat_template", "show_draft", "stats", "raw")  # a request says these itself
_OWN_HTTP = ("host", "port", "api_key", "exit_with_stdin")
_HTTP_ONLY = (*_OWN_HTTP, "cors_origin", "allowed_host")
_OWN = (*_OWN_HTTP, "alias", "any_model", "parallel", "max_queue", "timeout", "stdio")


def _option(*flags: str, **attributes: Any) -> Callable[[Any], Any]:
    return click.option(*flags, cls=GroupedOption, group="Options", **attributes)


@click.command(cls=SettingsCommand)
@settings_options(
    *("load", "generate", "sampling", "session", "serve"),
    leave_out=("stop", "ignore_eos", *STRUCTURE, *_OF_ONE_ANSWER),
    takes_models=True,
)
@_option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on [127.0.0.1: this machine only]")
@_option("--port", type=click.IntRange(0, 65535), default=8080, metavar="N", help="Port; 0 chooses a free one [8080]")
@_option("--api-key", metavar="KEY", help=f"Key that clients must send; better in {API_KEY} [any key]")
@_option("--alias", multiple=True, metavar="NAME", help="Name for clients; NAME=MODEL: of another model [its own]")
@_option("--any-model", is_flag=True, help="Of several models, let the first answer for unknown names")
@_option(
    "-np",
    "--parallel",
    type=click.IntRange(1, MAX_PARALLEL),
    default=1,
    metavar="N",
    help="Answers generated at once, each with its own context; others wait [1]",
)
@_option("--max-queue", type=click.IntRange(0, 4096), metavar="N", help="Requests that may wait; more get 429 [32]")
@_option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    metavar="S",
    help="Seconds per request, waiting included [600]",
)
@_option("--exit-with-stdin", is_flag=True, help="Exit when standard input closes: the parent has ended")
@_option("--stdio", is_flag=True, help="Speak JSON lines on standard streams instead of HTTP")
def command(model_names: tuple[str, ...], config_file: Path | None, **given: Any) -> int:
    """Serve models to other programs: OpenAI's API over HTTP, or JSON lines with --stdio.

    MODEL is a name (demo), a GGUF or ONNX file, or a folder with one. Of several, "model" in a request picks one, which
    is loaded then; the first answers where it is absent. Options hold for all of them, but those that name files or
    layers (-md, --medium, --heads, --exit-layer, --chat-template-file) and --pooling for the first alone.
    """
    context = click.get_current_context()
    own = {name: given.pop(name) for name in _OWN}
    if own["stdio"]:
        _refuse_http_options(context)
    else:
        _require_libraries()
    from edgespec.server.service import Services

    first = resolve_settings(given, model_names[0] if model_names else None, config_file)
    others = given | dict.fromkeys(OF_ONE_MODEL) | {"model": None}
    more = [resolve_settings(others, name, config_file, leave_out=OF_ONE_MODEL) for name in model_names[1:]]
    options = ServeOptions(**first.part("serve"))
    served = served_models([first, *more], own, options)
    services = served[0].service if len(served) == 1 else Services(*(each.service for each in served))
    _serve(services, own, options, served[0].loading)
    if services.is_loading:  # stopped meanwhile, and it goes on in native code
        stop_waiting()
        os._exit(0)
    return 0


def _serve(services: Service | Services, own: dict[str, Any], options: ServeOptions, load: Loading) -> None:
    if own["stdio"]:
        from edgespec.server.stdio import serve_stdio

        serve_stdio(services, load, *_private_streams())
        return
    from edgespec.server.run import serve

    binding = _binding(own, options)
    if not binding.is_local and services.api_key is None:
        note(f"warning: everybody who can reach {binding.host} can use this server: set {API_KEY}")
    serve(services, binding, load, _announce)


def _refuse_http_options(context: click.Context) -> None:
    given = [name for name in _HTTP_ONLY if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if given:
        flag = f"--{given[0].replace('_', '-')}"
        raise ConfigError(f"--stdio has no HTTP server and always ends with standard input: leave out {flag}")


def _require_libraries() -> None:
    missing = [name for name in _NEEDED if not is_importable(name)]
    if missing:
        raise CapabilityError(
            f"edgespec serve needs {' and '.join(missing)}, not installed here: {install_command('server')}"
        )


def _binding(own: dict[str, Any], options: ServeOptions) -> Binding:
    from edgespec.server.run import Binding

    lists = options.cors_origin, options.allowed_host
    return Binding(own["host"], own["port"], *lists, until_stdin_closes=own["exit_with_stdin"])


def _announce(url: str) -> None:
    """One line on standard output once the server answers: text for a person, JSON for a program."""
    from edgespec import __version__

    line = {"event": "listening", "url": url, "pid": os.getpid(), "version": __version__}
    click.echo(
        f"Listening on {url}, a page for people and APIs for programs (Ctrl-C stops)"
        if sys.stdout.isatty()
        else json.dumps(line)
    )
    sys.stdout.flush()


def _private_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Standard input and output for the protocol alone: whatever else prints goes to standard error.

    Input is a file of its own too: the interpreter cannot end while a thread waits for a line of `sys.stdin`.
    """
    source, sink = os.fdopen(os.dup(sys.stdin.fileno()), "rb"), os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return source, sink
