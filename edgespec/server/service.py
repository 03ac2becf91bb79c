"""One served model: what is loaded, the defaults of its requests, the limits, and whether it is ready."""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

from edgespec.chat.template import read_template
from edgespec.config.options import GenerateOptions, LoadOptions, Sampling
from edgespec.config.values import POOLINGS, ReasoningFormat
from edgespec.formats.gguf.header import keeping_headers
from edgespec.formats.manifest import ModelPair
from edgespec.loading.model_facts import ModelFacts
from edgespec.memory.fit import chosen_context
from edgespec.memory.plan import Room, planned
from edgespec.runtime import Model
from edgespec.server.http_errors import HttpError, queue_full
from edgespec.server.metrics import Metrics
from edgespec.server.requests import wrong
from edgespec.server.residence import Places, Residence
from edgespec.server.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of requests. Times in seconds; None: no limit. `timeout_s`: from the request to the end of its answer."""

    max_queued: int = 32
    max_body_bytes: int = 8 * 1024 * 1024
    timeout_s: float | None = 3600.0


def without_tag(name: str) -> str:
    return name.removesuffix(":latest")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that answers. `sampling`, `options`: those of requests that choose none; seed None: random for each.

    `reasoning_format`: the same; "none" leaves reasoning in the text.
    """

    name: str
    model: Model
    scheduler: Scheduler
    sampling: Sampling
    options: GenerateOptions
    reasoning_format: ReasoningFormat
    residence: Residence


@dataclass(frozen=True, slots=True)
class Known:
    """A model as `/props`, `/api/show` and the lists know it from its files and options. `embeds`: whether it gives
    embeddings; `settings`: what it runs with, under their names in `/props`.
    """

    facts: ModelFacts
    context_length: int
    embeds: bool
    sampling: Sampling
    max_tokens: int | None
    settings: dict[str, Any]

    @classmethod
    def read(cls, options: LoadOptions, pair: ModelPair, sampling: Sampling, max_tokens: int | None) -> Self:
        """Of `pair` under `options`. Raises what a load would raise of what its files lack."""
        with keeping_headers():
            length = planned(chosen_context(options, pair, Room.now(options.memory)), pair).context_length
            facts = ModelFacts.read(pair)
        template = read_template(options.chat_template_file)
        facts = facts if template is None else replace(facts, chat_template=template)
        embeds = facts.engine == "llamacpp" and (bool(options.pooling) or facts.pooling in POOLINGS)
        chosen = {name: getattr(options, name) for name in ("drafter", "verify", "reproducible")}
        settings = {"total_slots": 0, "engine": facts.engine, "device": None, **chosen}
        return cls(facts, length, embeds, sampling, max_tokens, settings)


@dataclass(slots=True)
class Service:
    """The state of a model. `name`: what answers call it, never a path; `metrics`, `places`: of all models here.

    `idle_unload_s`: see `Residence`. `ran_with`: what `/props` shows of its last load.
    """

    name: str
    limits: Limits = field(default_factory=Limits)
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    loaded: Loaded | None = None
    aliases: tuple[str, ...] = ()
    idle_unload_s: float | None = None
    places: Places | None = None
    ran_with: dict[str, Any] = field(default_factory=dict)
    _known: Known | None = None
    residence: Residence = field(init=False)

    def __post_init__(self) -> None:
        self.residence = Residence(self._unload, self.idle_unload_s, self.places, name=self.name)

    @property
    def names(self) -> tuple[str, ...]:
        """All that clients may call it."""
        return tuple(dict.fromkeys((self.name, *self.aliases)))

    def use(
        self,
        model: Model,
        sampling: Sampling | None = None,
        options: GenerateOptions | None = None,
        reasoning_format: ReasoningFormat = "auto",
    ) -> None:
        """Answer with `model` from now on. `sampling` None: as the model recommends, with random seeds."""
        self.loaded = Loaded(
            self.name,
            model,
            Scheduler(model, self.limits.max_queued, self.metrics),
            sampling or model.recommended_sampling,
            replace(options or GenerateOptions(), logprobs=False),
            reasoning_format,
            self.residence,
        )
        engine = model.target.facts
        self.ran_with = {
            "total_slots": engine.max_sequences,
            "device": engine.device,
            "drafter": model.drafter_name,
            "reproducible": model.reproducible,
        }
        self.residence.has_loaded()

    def _unload(self) -> None:
        if (loaded := self.loaded) is not None:
            self.loaded = None
            _free(loaded)
            del loaded
            gc.collect()  # what holds it in a cycle

    @property
    def known(self) -> Known:
        """Reads the model's files the first time. Raises HttpError and EdgespecError."""
        if self._known is None:
            self._known = self.residence.loading.known() if self.residence.can_load else self._of_loaded()
        return self._known

    def _of_loaded(self) -> Known:
        loaded = self.require()
        model = loaded.model
        return Known.read(model.options, model.pair, loaded.sampling, loaded.options.max_tokens)

    @property
    def context_length(self) -> int:
        loaded = self.loaded
        return self.known.context_length if loaded is None else loaded.model.context_length

    @asynccontextmanager
    async def using(self) -> AsyncIterator[Loaded]:
        """What is loaded, which it stays within the block; where it is not, it is loaded first.

        Raises HttpError 503 where it cannot be loaded, and when the server stops meanwhile; 429 where too many wait.
        """
        residence = self.residence
        if residence.num_waiting > self.limits.max_queued and not residence.is_open:
            self.metrics.refused += 1
            raise queue_full(residence.num_waiting)
        await residence.enter()
        try:
            yield self.require()
        finally:
            residence.leave()

    def require(self) -> Loaded:
        """What is loaded. Raises HttpError 503 before."""
        if self.loaded is None:
            raise HttpError(503, "the model is not loaded: try again soon", code="loading")
        return self.loaded

    def stop(self) -> None:
        """Accept no more requests; the running one goes on."""
        self.residence.stop()
        if self.loaded is not None:
            self.loaded.scheduler.stop()

    def close(self) -> None:
        """End what runs and free the model. Blocks until that is done, but not for a load."""
        self.residence.close()
        if self.loaded is not None:
            _free(self.loaded)


def _free(loaded: Loaded) -> None:
    loaded.scheduler.close()
    loaded.model.close()


class Services:
    """`all`, of which the first is the `default`: it answers requests that name no model. They share limits, metrics
    and, where there are several, places.
    """

    def __init__(self, *services: Service, api_key: str | None = None) -> None:
        self.all = services
        self.default = services[0]
        self.api_key = api_key  # None accepts any

    @property
    def are_several(self) -> bool:
        return len(self.all) > 1

    @property
    def limits(self) -> Limits:
        return self.default.limits

    @property
    def metrics(self) -> Metrics:
        return self.default.metrics

    def count_request(self, path: str, status: int) -> None:
        self.metrics.answered[path, status] += 1

    @property
    def has_loaded(self) -> bool:
        return any(service.loaded is not None for service in self.all)

    @property
    def is_loading(self) -> bool:
        return any(service.residence.is_loading for service in self.all)

    def named(self, name: str | None, path: str = "", notes: list[str] | None = None) -> Service:
        """The one that a request to `path` asks for. `notes`: get that it has another name. Raises HttpError 404 where
        none of several has that name; Claude's names are those of the first for Anthropic's clients.
        """
        if name is None:
            return self.default
        shown = without_tag if path.startswith("/api/") else str
        for service in self.all:
            if shown(name) in map(shown, service.names):
                return service
        if self.are_several and not (path.startswith("/v1/messages") and name.startswith("claude-")):
            served = ", ".join(repr(each) for service in self.all for each in service.names)
            message = f"no such model here; this server serves {served} (under other names with --alias)"
            raise HttpError(404, message, param="model", code="model_not_found")
        if notes is not None:
            why = "no model here has that name" if self.are_several else "the only model here"
            notes.append(f"model: {self.default.name} answers, {why}")
        return self.default

    def asked_by(self, values: Mapping[str, Any], path: str = "", notes: list[str] | None = None) -> Service:
        """The one for a request with these `values`. Raises HttpError 400 and 404."""
        name = values.get("model") or None
        if name is None and path == "/api/show":  # older clients
            name = values.get("name")
        if name is not None and not isinstance(name, str):
            raise wrong("model", "must be a string", name)
        return self.named(name, path, notes)

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
