"""`edgespec serve`: the OpenAI-compatible server, or a sidecar that speaks JSON lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from edgespec.chat.template_file import read_template
from edgespec.cli.help import GroupedOption, SettingsCommand
from edgespec.cli.options import resolve_settings, settings_options
from edgespec.cli.session import open_session, show_beginning
from edgespec.cli.status import stop_waiting
from edgespec.cli.terminal import note
from edgespec.config import MAX_PARALLEL, RANDOM_SEED, LoadOptions, ServeOptions
from edgespec.config.settings import STRUCTURE
from edgespec.config.sources import Settings
from edgespec.errors import CapabilityError, ConfigError
from edgespec.installation import install_command, is_importable
from edgespec.loading.requirements import resolve_pair
from edgespec.memory.fit import usual_parallel

if TYPE_CHECKING:
    from edgespec.server.run import Binding
    from edgespec.server.service import Limits, Service

API_KEY = "EDGESPEC_API_KEY"
_NEEDED = ("starlette", "uvicorn")
_OF_ONE_ANSWER = ("system", "thinking", "chat_template", "show_draft", "stats", "raw")  # a request says these itself
_OWN_HTTP = ("host", "port", "api_key", "exit_with_stdin")
_HTTP_ONLY = (*_OWN_HTTP, "cors_origin", "allowed_host")
_OWN = (*_OWN_HTTP, "alias", "any_model", "parallel", "max_queue", "timeout", "stdio")


def _option(*flags: str, **attributes: Any) -> Callable[[Any], Any]:
    return click.option(*flags, cls=GroupedOption, group="Options", **attributes)


@click.command(cls=SettingsCommand)
@settings_options(
    "load", "generate", "sampling", "session", "serve", leave_out=("stop", "ignore_eos", *STRUCTURE, *_OF_ONE_ANSWER)
)
@_option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on [127.0.0.1: this machine only]")
@_option("--port", type=click.IntRange(0, 65535), default=8080, metavar="N", help="Port; 0 chooses a free one [8080]")
@_option("--api-key", metavar="KEY", help=f"Key that clients must send; better in {API_KEY} [any key]")
@_option("--alias", multiple=True, metavar="NAME", help="Name of the model for clients; repeatable [its own]")
@_option("--any-model", is_flag=True, help="Answer whatever model a request names")
@_option(
    "-np",
    "--parallel",
    type=click.IntRange(1, MAX_PARALLEL),
    metavar="N",
    help="Answers generated at once, each with its own context; others wait [4 if they fit]",
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
def command(model_name: str | None, config_file: Path | None, **given: Any) -> int:
    """Serve a model to other programs: OpenAI's API over HTTP, or JSON lines with --stdio.

    MODEL is a name (demo), a GGUF or ONNX file, or a folder with one.
    """
    context = click.get_current_context()
    own = {name: given.pop(name) for name in _OWN}
    if own["stdio"]:
        _refuse_http_options(context)
    else:
        _require_libraries()
    settings = resolve_settings(given, model_name, config_file)
    options = ServeOptions(**settings.part("serve"))
    service = _service(settings, own, options)

    def load() -> None:
        with context.scope(cleanup=False):  # click knows its context by thread
            parallel = own["parallel"] or _usual_parallel(settings)
            session = open_session(settings, remembers=True, parallel=parallel)
            if settings.values.get("seed", RANDOM_SEED) == RANDOM_SEED:
                session.sampling = replace(session.sampling, seed=None)  # another one for each request
            service.use(session.model, session.sampling, session.options, session.shown.reasoning_format)
            if service.unloaded is None:  # the first time
                show_beginning(session)

    _serve(service, own, options, load)
    if service.is_loading:  # stopped meanwhile, and it goes on in native code
        stop_waiting()
        os._exit(0)
    return 0


def _serve(service: Service, own: dict[str, Any], options: ServeOptions, load: Callable[[], None]) -> None:
    if own["stdio"]:
        from edgespec.server.stdio import serve_stdio

        serve_stdio(service, load, *_private_streams())
        return
    from edgespec.server.run import serve

    binding = _binding(own, options)
    if not binding.is_local and service.api_key is None:
        note(f"warning: everybody who can reach {binding.host} can use this server: set {API_KEY}")
    serve(service, binding, load, _announce)


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


def _service(settings: Settings, own: dict[str, Any], options: ServeOptions) -> Service:
    from edgespec.server.service import Service

    loading = LoadOptions(**settings.part("load"))
    read_template(loading.chat_template_file)
    pair = resolve_pair(loading)  # both fail before anything listens
    key = own["api_key"] if own["api_key"] is not None else os.environ.get(API_KEY)
    if key == "":
        raise ConfigError(f"the API key is empty: give --api-key a key, or leave it and {API_KEY} out")
    name, *others = own["alias"] or (pair.name,)
    names: dict[str, Any] = {"aliases": tuple(others), "any_model": own["any_model"]}
    return Service(name, _limits(own), key, **names, idle_unload_s=options.idle_unload_s)


def _usual_parallel(settings: Settings) -> int:
    """Answers at once where nobody said how many."""
    options = LoadOptions(**settings.part("load"))
    return usual_parallel(options, resolve_pair(options))


def _limits(own: dict[str, Any]) -> Limits:
    from edgespec.server.service import Limits

    given = {"max_queued": own["max_queue"], "timeout_s": own["timeout"]}
    return replace(Limits(), **{name: value for name, value in given.items() if value is not None})


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
