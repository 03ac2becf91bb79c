"""The models of `edgespec serve`, from their settings: names for clients, limits, and what they share."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgespec.chat.template import read_template
from edgespec.cli.served import Served, SharedMemory
from edgespec.config.options import LoadOptions, ServeOptions
from edgespec.config.sources import Settings
from edgespec.errors import ConfigError
from edgespec.formats.manifest import ModelPair
from edgespec.loading.requirements import resolve_pair
from edgespec.memory.plan import Room

if TYPE_CHECKING:
    from edgespec.server.service import Limits

API_KEY = "EDGESPEC_API_KEY"
# What means one model's files, layers or training, and so the first of several.
OF_ONE_MODEL = ("draft", "medium", "heads", "exit_layer", "chat_template_file", "pooling")


def served_models(settings: Sequence[Settings], own: dict[str, Any], options: ServeOptions) -> list[Served]:
    """A service for each of the models; all but the first are ready to be loaded by requests.

    Raises ConfigError, and what `resolve_pair` raises: before anything listens.
    """
    from edgespec.server.residence import Places
    from edgespec.server.service import Service

    loading = [LoadOptions(**each.part("load")) for each in settings]
    read_template(loading[0].chat_template_file)
    pairs = [resolve_pair(each) for each in loading]
    key = own["api_key"] if own["api_key"] is not None else os.environ.get(API_KEY)
    if key == "":
        raise ConfigError(f"the API key is empty: give --api-key a key, or leave it and {API_KEY} out")
    names = _names([each.model for each in loading], pairs, own["alias"])
    shared: dict[str, Any] = {"api_key": key, "idle_unload_s": options.idle_unload_s}
    if len(pairs) > 1:
        shared["places"] = Places(options.models_max)
    memory = SharedMemory(Room.now(loading[0].memory)) if len(pairs) > 1 and options.models_max > 1 else None
    found: list[Served] = []
    for each, pair, (name, *others) in zip(settings, pairs, names, strict=True):
        beside = tuple(other for known in names if known[0] != name for other in known)
        service = Service(name, _limits(own), aliases=tuple(others), beside=beside, **shared)
        found.append(Served(each, pair, service, own["parallel"], memory))
    found[0].service.any_model = own["any_model"]
    if memory is not None:
        memory.services = [served.service for served in found]
    for served in found[1:]:
        _wait_for_requests(served)
    return found


def _wait_for_requests(served: Served) -> None:
    from edgespec.server.facts import described

    served.service.unloaded = served.at_rest()
    served.service.may_unload(served.loading, described)


def _names(given: Sequence[str], pairs: Sequence[ModelPair], aliases: Sequence[str]) -> list[tuple[str, ...]]:
    """What clients call each model: its aliases, else its own name. Raises ConfigError where two have the same."""
    own: list[list[str]] = [[] for _ in pairs]
    for alias in aliases:
        index, name = (0, alias) if len(pairs) == 1 else _meant(alias, given, pairs)
        own[index].append(name)
    found = [tuple(dict.fromkeys(names)) or (pair.name,) for names, pair in zip(own, pairs, strict=True)]
    counts = Counter(name for names in found for name in names)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise ConfigError(f"two models are called {twice!r}: give one of them another name with --alias NAME=MODEL")
    return found


def _meant(alias: str, given: Sequence[str], pairs: Sequence[ModelPair]) -> tuple[int, str]:
    """Which of several models an alias is for, and the name: NAME for the first, NAME=MODEL."""
    if "=" not in alias:
        return 0, alias
    for index, (model, pair) in enumerate(zip(given, pairs, strict=True)):
        for known in (model, pair.name):
            if alias.endswith(f"={known}") and len(alias) > len(known) + 1:
                return index, alias.removesuffix(f"={known}")
    allowed = ", ".join(given)
    raise ConfigError(f"--alias {alias!r} names none of the models: give NAME, or NAME=MODEL with one of {allowed}")


def _limits(own: dict[str, Any]) -> Limits:
    from edgespec.server.service import Limits

    given = {"max_queued": own["max_queue"], "timeout_s": own["timeout"]}
    return replace(Limits(), **{name: value for name, value in given.items() if value is not None})
