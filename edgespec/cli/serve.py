"""`edgespec serve`: the OpenAI-compatible server, or a sidecar that speaks JSON lines."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from edgespec.chat.template import read_template
from edgespec.cli import complete_model
from edgespec.cli.options import SettingsCommand, resolve_settings, settings_options
from edgespec.cli.session import open_session, show_beginning
from edgespec.cli.terminal import note, stop_waiting
from edgespec.config.options import OF_ONE_MODEL, STRUCTURE, GenerateOptions, LoadOptions, Sampling, ServeOptions
from edgespec.config.sources import Settings
from edgespec.config.values import NumSequences
from edgespec.errors import CapabilityError, ConfigError
from edgespec.formats.manifest import ModelPair
from edgespec.installation import install_command, is_importable
from edgespec.loading.requirements import resolve_pair
from edgespec.memory.plan import Room

if TYPE_CHECKING:
    from edgespec.server.residence import SharedMemory
    from edgespec.server.service import Known, Service


_NEEDED = ("starlette", "uvicorn")
_OF_ONE_ANSWER = ("system", "thinking", "chat_template", "stats", "raw")  # a request says these itself
_HTTP_ONLY = ("host", "port", "api_key", "exit_with_stdin", "cors_origin", "allowed_host")


@click.command(cls=SettingsCommand)
@settings_options(
    *("load", "generate", "sampling", "session", "serve"),
    leave_out=("stop", "ignore_eos", *STRUCTURE, *_OF_ONE_ANSWER),
    model=click.argument("model_names", metavar="[MODEL]...", nargs=-1, shell_complete=complete_model),
)
def command(model_names: tuple[str, ...], config_file: Path | None, **given: Any) -> int:
    """Serve models to other programs: OpenAI's API over HTTP, or JSON lines with --stdio.

    MODEL is a name (demo), a GGUF or ONNX file, or a folder with one. Of several, "model" in a request picks one, which
    is loaded then; the first answers where it is absent. Options hold for all of them, but those that name files or
    layers (-md, --medium, --heads, --exit-layer, --chat-template-file) and --pooling for the first alone.
    """
    from edgespec.server.service import Services

    first = resolve_settings(given, model_names[0] if model_names else None, config_file)
    others = given | {"model": None}
    more = [resolve_settings(others, name, config_file).without(OF_ONE_MODEL) for name in model_names[1:]]
    options = ServeOptions(**first.part("serve"))
    for name in _HTTP_ONLY if options.stdio else ():
        if first.sources.get(name) == "the command line":
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"--stdio has no HTTP server and always ends with standard input: leave out {flag}")
    if not options.stdio:
        _require_libraries()
    services = Services(*served_models([first, *more], options), api_key=options.api_key)
    if options.stdio:
        from edgespec.server.stdio import serve_stdio

        serve_stdio(services, *_private_streams())
    else:
        from edgespec.server.run import hosts_of, serve

        if services.api_key is None and options.host not in hosts_of(ServeOptions()):
            note(f"warning: everybody who can reach {options.host} can use this server: set EDGESPEC_API_KEY")
        serve(services, options, _announce)
    if services.is_loading:  # stopped meanwhile, and it goes on in native code
        stop_waiting()
        os._exit(0)
    return 0


def _require_libraries() -> None:
    missing = [name for name in _NEEDED if not is_importable(name)]
    if missing:
        raise CapabilityError(
            f"edgespec serve needs {' and '.join(missing)}, not installed here: {install_command('server')}"
        )


def _announce(url: str) -> None:
    """One line on standard output once the server answers: text for a person, JSON for a program."""
    from edgespec import __version__

    person = f"Listening on {url}, a page for people and APIs for programs (Ctrl-C stops)"
    program = {"event": "listening", "url": url, "pid": os.getpid(), "version": __version__}
    click.echo(person if sys.stdout.isatty() else json.dumps(program))
    sys.stdout.flush()


def _private_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Standard input and output for the protocol alone: whatever else prints goes to standard error.

    Input is a file of its own too: the interpreter cannot end while a thread waits for a line of `sys.stdin`.
    """
    source, sink = os.fdopen(os.dup(sys.stdin.fileno()), "rb"), os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return source, sink


# -- the models, from their settings: names for clients, limits, and what they share


def served_models(settings: Sequence[Settings], options: ServeOptions) -> list[Service]:
    """A service for each of the models, ready to be loaded.

    Raises ConfigError, and what `resolve_pair` raises: before anything listens.
    """
    from edgespec.server.metrics import Metrics
    from edgespec.server.residence import Places, SharedMemory
    from edgespec.server.service import RequestLimits, Service

    loading = [LoadOptions(**each.part("load")) for each in settings]
    read_template(loading[0].chat_template_file)
    pairs = [resolve_pair(each) for each in loading]
    limits = RequestLimits(max_queued=options.max_queue, timeout_s=options.timeout)
    names = _names([each.model for each in loading], pairs, options.alias)
    metrics, places, idle_s = Metrics(), Places(options.models_max), options.idle_unload_s
    memory = SharedMemory(Room.now(loading[0].memory)) if len(pairs) > 1 and options.models_max > 1 else None
    # What several models share is not taken by the room of one.
    parallel: NumSequences = options.parallel or ("auto" if memory is None else 1)
    found: list[Service] = []
    for each, pair, (name, *others) in zip(settings, pairs, names, strict=True):
        service = Service(name, limits, metrics, aliases=tuple(others), idle_unload_s=idle_s, places=places)
        served = Served(each, pair, service, parallel, memory)
        if found:  # the first is loaded at once
            served.known()
        service.begin(served)
        found.append(service)
    if memory is not None:
        memory.services = found
    return found


def _names(given: Sequence[str], pairs: Sequence[ModelPair], aliases: Sequence[str]) -> list[tuple[str, ...]]:
    """What clients call each model: its aliases, else its own name; of several an alias is NAME=MODEL, or the first's.

    Raises ConfigError where two models have the same name, or an alias is of none.
    """
    own: list[list[str]] = [[] for _ in pairs]
    known = [(model, pair.name) for model, pair in zip(given, pairs, strict=True)]
    for alias in aliases:
        name, _, model = alias.rpartition("=") if len(pairs) > 1 and "=" in alias else (alias, "", given[0])
        meant = [names for names, called in zip(own, known, strict=True) if model in called]
        if not name or not meant:
            forms = f"give NAME, or NAME=MODEL with one of {', '.join(given)}"
            raise ConfigError(f"--alias {alias!r} names none of the models: {forms}")
        meant[0].append(name)
    found = [tuple(dict.fromkeys(names)) or (pair.name,) for names, pair in zip(own, pairs, strict=True)]
    counts = Counter(name for names in found for name in names)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise ConfigError(f"two models are called {twice!r}: give one of them another name with --alias NAME=MODEL")
    return found


# -- one model: its settings, and how it comes into memory beside the server's other models


@dataclass(slots=True)
class Served:
    """A model's `settings`; `parallel`: answers at once; `memory`: None where it is loaded alone."""

    settings: Settings
    pair: ModelPair
    service: Service
    parallel: NumSequences
    memory: SharedMemory | None = None
    has_begun: bool = False

    @property
    def options(self) -> LoadOptions:
        return LoadOptions(**self.settings.part("load"))

    def load(self) -> None:
        """Give the service its model."""
        settings = self.settings if self.memory is None else self.memory.share(self.settings)
        session = open_session(settings, remembers=True, parallel=self.parallel)
        if self.memory is not None:
            self.memory.keep(session.model)
        self.service.use(session.model, self.sampling, session.options, session.shown.reasoning_format)
        if not self.has_begun:
            show_beginning(session)
        self.has_begun = True

    def fits(self) -> bool:
        """Whether there is memory for it beside the models that are loaded."""
        return self.memory is None or self.memory.fits(replace(self.options, parallel=self.parallel), self.pair)

    def known(self) -> Known:
        """What is told of it before it is loaded. Raises what a load would raise of its files."""
        from edgespec.server.service import Known

        most = GenerateOptions(**self.settings.part("generate")).max_tokens
        return Known.read(self.options, resolve_pair(self.options), self.sampling, most)

    @property
    def sampling(self) -> Sampling:
        """With what the model recommends. Where nobody gave a seed, there is none: another one for each request."""
        settings = self.settings.below(self.pair.recommended, f"recommended for {self.pair.name}")
        return Sampling(**settings.part("sampling"))
