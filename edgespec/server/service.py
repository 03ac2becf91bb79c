"""One served model: what is loaded, the defaults of its requests, the limits, and whether it is ready."""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

from edgespec.config.options import GenerateOptions, LoadOptions, Sampling
from edgespec.config.values import POOLINGS, ReasoningFormat
from edgespec.errors import CapabilityError
from edgespec.formats.gguf.header import keeping_headers
from edgespec.formats.manifest import ModelPair
from edgespec.loading.model_facts import ModelFacts
from edgespec.memory.fit import chosen_context
from edgespec.memory.plan import Room, planned
from edgespec.runtime import Model
from edgespec.server.http_errors import HttpError, queue_full
from edgespec.server.metrics import Metrics
from edgespec.server.requests import wrong
from edgespec.server.residence import Loading, Places, Residence
from edgespec.server.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of requests. Times in seconds; None: no limit. `timeout_s`: from the request to the end of its answer."""

    max_queued: int = 32
    max_body_bytes: int = 8 * 1024 * 1024
    timeout_s: float | None = 600.0


@dataclass(frozen=True, slots=True)
class Names:
    """What clients may call a served model. `own`: what answers call it, never a path.

    `beside`: names of the server's other models; without any, it answers to every name.
    """

    own: str
    aliases: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.own, *self.aliases)))

    def include(self, name: str) -> bool:
        return not self.beside or name in self.all


def unknown_model(names: Names) -> HttpError:
    served = ", ".join(map(repr, (*names.all, *names.beside)))
    message = f"no such model here; this server serves {served} (under other names with --alias)"
    return HttpError(404, message, param="model", code="model_not_found")


def without_tag(name: str) -> str:
    return name.removesuffix(":latest")


def asks_for_claude(name: str) -> bool:
    """Whether a model is one of Claude's, which are answered by a model that is here."""
    return name.startswith("claude-")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that answers. `sampling`, `options`: those of requests that choose none; seed None: random for each.

    `reasoning_format`: the same; "none" leaves reasoning in the text.
    """

    names: Names
    model: Model
    scheduler: Scheduler
    sampling: Sampling
    options: GenerateOptions
    limits: Limits
    reasoning_format: ReasoningFormat = "auto"

    @property
    def name(self) -> str:
        return self.names.own


@dataclass(frozen=True, slots=True)
class Known:
    """A model as `/props`, `/api/show` and the lists know it, loaded or not. `embeds`: whether it gives embeddings.

    `settings`: what it runs with, under their names in `/props`.
    """

    name: str
    facts: ModelFacts
    context_length: int
    embeds: bool
    sampling: Sampling
    max_tokens: int | None
    settings: dict[str, Any]

    @classmethod
    def of(cls, loaded: Loaded) -> Self:
        """Of a loaded model; reads its header the first time."""
        model, engine = loaded.model, loaded.model.target.facts
        settings = {
            "total_slots": engine.max_sequences,
            "engine": engine.name,
            "device": engine.device,
            "drafter": model.drafter_name,
            "verify": model.options.verify,
            "reproducible": model.reproducible,
        }
        facts = replace(ModelFacts.read(model.pair), chat_template=model.target.vocabulary.chat_template or "")
        most = loaded.options.max_tokens
        return cls(loaded.name, facts, model.context_length, _embeds(model), loaded.sampling, most, settings)

    @classmethod
    def read(
        cls,
        name: str,
        options: LoadOptions,
        pair: ModelPair,
        sampling: Sampling,
        max_tokens: int | None,
        template: str | None,
    ) -> Self:
        """Of `pair` under `options` before it is loaded; `template` replaces its chat template.

        Raises what a load would raise of what its files lack.
        """
        with keeping_headers():
            length = planned(chosen_context(options, pair, Room.now(options.memory)), pair).context_length
            facts = ModelFacts.read(pair)
            facts = facts if template is None else replace(facts, chat_template=template)
            embeds = facts.engine == "llamacpp" and (bool(options.pooling) or facts.pooling in POOLINGS)
        chosen = {name: getattr(options, name) for name in ("drafter", "verify", "reproducible")}
        settings = {"total_slots": 0, "engine": facts.engine, "device": None, **chosen}
        return cls(name, facts, length, embeds, sampling, max_tokens, settings)


def _embeds(model: Model) -> bool:
    try:
        model.embedder.pooling()
    except CapabilityError:
        return False
    return True


@dataclass(slots=True)
class Service:
    """The state of a model. `name`: the model's name for clients, never a path; `api_key`: None accepts any.

    `aliases`: its other names; `idle_unload_s`: see `Residence`.
    `unloaded`: what was told of the model when it was last unloaded, and is as long as `loaded` is None; given at the
    start for one that the first request for it is to load. `places`: of the server's models and `beside` their names,
    where it has several.
    """

    name: str
    limits: Limits = field(default_factory=Limits)
    api_key: str | None = None
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    loaded: Loaded | None = None
    aliases: tuple[str, ...] = ()
    idle_unload_s: float | None = None
    residence: Residence | None = None
    unloaded: Known | None = None
    places: Places | None = None
    beside: tuple[str, ...] = ()

    @property
    def names(self) -> Names:
        return Names(self.name, self.aliases, self.beside)

    def use(
        self,
        model: Model,
        sampling: Sampling | None = None,
        options: GenerateOptions | None = None,
        reasoning_format: ReasoningFormat = "auto",
    ) -> None:
        """Answer with `model` from now on. `sampling` None: as the model recommends, with random seeds."""
        self.loaded = Loaded(
            self.names,
            model,
            Scheduler(model, self.limits.max_queued, self.metrics),
            sampling or model.recommended_sampling,
            replace(options or GenerateOptions(), logprobs=False),
            self.limits,
            reasoning_format,
        )
        if self.residence is not None:
            self.residence.has_loaded()

    def may_unload(self, loading: Loading) -> None:
        """Unload the model when it is not used, and load it when it is needed then.

        The first time that is up to the caller, unless it is known what to tell of it before (`unloaded`).
        """
        self.residence = Residence(
            loading,
            self._unload,
            self.idle_unload_s,
            self.places,
            name="the model" if self.places is None else f"model {self.name!r}",
            is_at_rest=self.unloaded is not None,
        )

    def _unload(self) -> None:
        if (loaded := self.loaded) is not None:
            self.unloaded, self.loaded = Known.of(loaded), None
            _free(loaded)
            del loaded
            gc.collect()  # what holds it in a cycle

    @property
    def is_loading(self) -> bool:
        return self.loaded is None and (self.residence is None or self.residence.is_loading)

    @property
    def is_new(self) -> bool:
        return self.loaded is None and self.unloaded is None

    @property
    def known(self) -> Known:
        """What is told of the model. Raises HttpError 503 before that is known."""
        loaded, unloaded = self.loaded, self.unloaded
        return unloaded if loaded is None and unloaded is not None else Known.of(loaded or self.require())

    @property
    def answers_at_once(self) -> bool:
        """Whether a request that comes now need not wait for the model to be loaded."""
        return self.loaded is not None and (self.residence is None or self.residence.is_open)

    @property
    def num_waiting(self) -> int:
        return 0 if self.residence is None else self.residence.num_waiting

    @asynccontextmanager
    async def using(self) -> AsyncIterator[Loaded]:
        """What is loaded, which it stays within the block; where it was unloaded, it is loaded again first.

        Raises HttpError 503 before the model is loaded the first time, where it cannot be loaded again, and when the
        server stops meanwhile; 429 where too many wait for it among other models.
        """
        if self.residence is None or self.is_new:
            yield self.require()
            return
        if self.places is not None and self.num_waiting > self.limits.max_queued and not self.answers_at_once:
            self.metrics.refused += 1
            raise queue_full(self.num_waiting)
        await self.residence.enter()
        try:
            yield self.require()
        finally:
            self.residence.leave()

    def require(self) -> Loaded:
        """What is loaded. Raises HttpError 503 before."""
        if self.loaded is None:
            raise HttpError(503, "the model is being loaded: try again soon", code="loading")
        return self.loaded

    def stop(self) -> None:
        """Accept no more requests; the running one goes on."""
        if self.residence is not None:
            self.residence.stop()
        if self.loaded is not None:
            self.loaded.scheduler.stop()

    def close(self) -> None:
        """End what runs and free the model. Blocks until that is done, but not for a load."""
        if self.residence is not None:
            self.residence.close()
        if self.loaded is not None:
            _free(self.loaded)


def _free(loaded: Loaded) -> None:
    loaded.scheduler.close()
    loaded.model.close()


class Services:
    """`all`, of which the first is the `default`: it answers requests that name no model. They share limits, the API
    key and, where there are several, places.
    """

    def __init__(self, *services: Service) -> None:
        self.all = services
        self.default = services[0]

    @classmethod
    def of(cls, given: Service | Services) -> Services:
        return given if isinstance(given, Services) else cls(given)

    @property
    def are_several(self) -> bool:
        return len(self.all) > 1

    @property
    def limits(self) -> Limits:
        return self.default.limits

    @property
    def api_key(self) -> str | None:
        return self.default.api_key

    @property
    def metrics(self) -> Metrics:
        return Metrics.sum_of(service.metrics for service in self.all) if self.are_several else self.default.metrics

    def count_request(self, path: str, status: int) -> None:
        self.default.metrics.answered[path, status] += 1

    @property
    def has_loaded(self) -> bool:
        return any(service.loaded is not None for service in self.all)

    @property
    def is_loading(self) -> bool:
        return any(service.is_loading for service in self.all)

    def named(self, name: str | None, path: str = "") -> Service:
        """The one that a request to `path` asks for. Raises HttpError 404 where none has that name."""
        if not self.are_several or name is None:
            return self.default
        found = next((service for service in self.all if name in service.names.all), None)
        if found is None and path.startswith("/api/"):
            tagless = ((service, map(without_tag, service.names.all)) for service in self.all)
            found = next((service for service, names in tagless if without_tag(name) in names), None)
        if found is not None:
            return found
        if path.startswith("/v1/messages") and asks_for_claude(name):
            return self.default
        raise unknown_model(self.default.names)

    def asked_by(self, values: Mapping[str, Any], path: str = "") -> Service:
        """The one for a request with these `values`. Raises HttpError 400 and 404."""
        name = values.get("model")
        if name is None and path == "/api/show":  # older clients
            name = values.get("name")
        if name is not None and not isinstance(name, str):
            raise wrong("model", "must be a string", name)
        return self.named(name, path)

    @property
    def num_running(self) -> int:
        return sum(service.loaded.scheduler.num_running for service in self.all if service.loaded is not None)

    def stop(self) -> None:
        """Accept no more requests; the running ones go on."""
        for service in self.all:
            service.stop()

    def close(self) -> None:
        """End what runs and free the models. Blocks until that is done, but not for a load."""
        self.stop()
        for service in self.all:
            service.close()
