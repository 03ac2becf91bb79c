"""One served model: what is loaded, the defaults of its requests, the limits, and its life in memory."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import monotonic
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
from edgespec.server.http_errors import HttpError, queue_full, stopping
from edgespec.server.metrics import Metrics
from edgespec.server.requests import wrong
from edgespec.server.residence import Loading, Places
from edgespec.server.scheduler import Scheduler

logger = logging.getLogger("edgespec")


@dataclass(frozen=True, slots=True)
class RequestLimits:
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

    model: Model
    scheduler: Scheduler
    sampling: Sampling
    options: GenerateOptions
    reasoning_format: ReasoningFormat
    service: Service


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


@dataclass(eq=False)
class Service:
    """The state of a model. `name`: what answers call it, never a path; `metrics`, `places`: of all models here.

    `idle_unload_s`: seconds without a request after which it is unloaded, None for never; a client may choose others
    for as long as the model then stays loaded. Requests are users from before they wait for it until their answer has
    ended.
    """

    name: str
    limits: RequestLimits = field(default_factory=RequestLimits)
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    loaded: Loaded | None = None
    aliases: tuple[str, ...] = ()
    idle_unload_s: float | None = None
    places: Places = field(default_factory=Places)
    files: Loading = field(init=False)
    is_loading: bool = False
    is_stopping: bool = False
    num_waiting: int = 0  # users that wait for it
    used_s: float = 0.0  # when a request last ended
    loaded_s: float = 0.0  # 0 before it was
    asked_s: float = 0.0  # when the wait for it began
    _num_users: int = 0
    _idle_s: float = math.inf
    _has_to_leave: bool = False
    _awaited: Future[None] | None = None  # of the users that wait until it is loaded
    _preloaded: Future[None] | None = None

    def begin(self, files: Loading) -> None:
        """Load the model when it is needed, and unload it when it is not used."""
        self.files = files
        self.places.add(self)

    @property
    def names(self) -> tuple[str, ...]:
        """All that clients may call it."""
        return tuple(dict.fromkeys((self.name, *self.aliases)))

    @property
    def left_s(self) -> float:
        """Seconds until the model is unloaded if no request comes; infinite for never."""
        used_s = 0.0 if self._num_users else monotonic() - self.used_s
        return max(self._idle_s - used_s, 0.0)

    @property
    def is_open(self) -> bool:
        """Whether a request that comes now need not wait."""
        return self.loaded is not None and not self._has_to_leave

    @property
    def is_wanted(self) -> bool:
        """Whether it is to be loaded."""
        return self.loaded is None and not self.is_stopping and (self.num_waiting > 0 or self.is_loading)

    @property
    def is_idle(self) -> bool:
        """Whether no request uses it."""
        return self._num_users == self.num_waiting

    @property
    def is_over(self) -> bool:
        """Whether it is to be unloaded now."""
        return self.is_idle and not self.is_stopping and (self._has_to_leave or self.left_s <= 0)

    def make_way(self, has_to: bool) -> None:
        """Take no new requests and go once it is idle; `has_to` False: stay."""
        self._has_to_leave = has_to
        if self.is_open:
            self._answer(None)

    def preload(self) -> Future[None]:
        """Load it now, before a request needs it. Raises what loading raises, in the future."""
        with self.places.changed:
            self.is_loading, self.asked_s = True, monotonic()
            self._preloaded = Future()
            self.places.changed.notify_all()
        return self._preloaded

    @asynccontextmanager
    async def using(self) -> AsyncIterator[Loaded]:
        """What is loaded, which it stays within the block; where it is not, it is loaded first.

        Raises HttpError 503 where it cannot be loaded, and when the server stops meanwhile; 429 where too many wait.
        """
        if self.num_waiting > self.limits.max_queued and not self.is_open:
            self.metrics.refused += 1
            raise queue_full(self.num_waiting)
        await self._enter()
        try:
            yield self.require()
        finally:
            self._leave()

    async def _enter(self) -> None:
        """Be a user from now on, and wait until the model is loaded."""
        with self.places.changed:
            if self.is_stopping:
                raise stopping()
            self._num_users += 1
            if self.is_open:
                return
            if self._awaited is None:
                self._awaited = Future()
                self._awaited.set_running_or_notify_cancel()  # one of its waiters cannot cancel it for all
                self.asked_s = monotonic()
            awaited = self._awaited
            self.num_waiting += 1
            self.places.changed.notify_all()
        try:
            await asyncio.wrap_future(awaited)
        except BaseException:
            with self.places.changed:
                if self._awaited is awaited:  # it is still waited for
                    self.num_waiting -= 1
                self._leave()
            raise

    def _leave(self) -> None:
        with self.places.changed:
            self._num_users -= 1
            self.used_s = monotonic()
            self.places.changed.notify_all()

    def keep_for(self, idle_s: float) -> None:
        """Unload the model after `idle_s` without a request, infinite for never, until it is loaded the next time."""
        with self.places.changed:
            self._idle_s = idle_s
            self.places.changed.notify_all()

    def use(
        self,
        model: Model,
        sampling: Sampling | None = None,
        options: GenerateOptions | None = None,
        reasoning_format: ReasoningFormat = "auto",
    ) -> None:
        """Answer with `model` from now on. `sampling` None: as the model recommends, with random seeds."""
        loaded = Loaded(
            model,
            Scheduler(model, self.limits.max_queued, self.metrics),
            sampling or model.recommended_sampling,
            replace(options or GenerateOptions(), logprobs=False),
            reasoning_format,
            self,
        )
        with self.places.changed:
            self.loaded, self.is_loading = loaded, False
            self._idle_s = math.inf if self.idle_unload_s is None else self.idle_unload_s
            self.used_s = self.loaded_s = monotonic()
            self._answer(None)
            self.places.changed.notify_all()

    @cached_property
    def known(self) -> Known:
        """Reads the model's files the first time. Raises HttpError and EdgespecError."""
        return self.files.known()

    @property
    def context_length(self) -> int:
        loaded = self.loaded
        return self.known.context_length if loaded is None else loaded.model.context_length

    def require(self) -> Loaded:
        """What is loaded. Raises HttpError 503 before."""
        if self.loaded is None:
            raise HttpError(503, "the model is not loaded: try again soon", code="loading")
        return self.loaded

    def _answer(self, failure: Exception | None) -> None:
        """Let those that wait go on."""
        awaited, self._awaited = self._awaited, None
        self.num_waiting = 0
        if awaited is None:
            return
        if failure is None:
            awaited.set_result(None)
        else:
            awaited.set_exception(failure)

    def stop(self) -> None:
        """Load and unload nothing from now on, and accept no more requests; the running ones go on."""
        with self.places.changed:
            self.is_stopping = True
            self._answer(stopping())
            self.places.changed.notify_all()
        if self.loaded is not None:
            self.loaded.scheduler.stop()

    def close(self) -> None:
        """End what runs and free the model. Blocks until that is done, but not for a load: that one is freed after."""
        self.stop()
        self.places.close()
        if self.loaded is not None:
            _free(self.loaded)

    # -- what the thread of its places calls

    def load(self) -> None:
        self.is_loading, began_s = True, monotonic()
        self.files.load()
        logger.info("model %r is loaded, which took %.1f s", self.name, monotonic() - began_s)
        if (preloaded := self._preloaded) is not None and not preloaded.done():
            preloaded.set_result(None)
        if self.is_stopping:
            self.unload()

    def fail(self, why: BaseException) -> None:
        """It could not be loaded."""
        if (preloaded := self._preloaded) is not None and not preloaded.done():
            preloaded.set_exception(why)  # whose owner says it
        else:
            logger.warning("model %r cannot be loaded: %s", self.name, why)
        message = f"model {self.name!r} cannot be loaded: the server's log says why"
        with self.places.changed:
            self.is_loading = False
            self._answer(HttpError(503, message, code="load_failed"))

    def unload(self) -> None:
        """Who comes from now on waits until it is loaded again."""
        with self.places.changed:
            loaded, self.loaded, self._has_to_leave = self.loaded, None, False
        try:
            if loaded is not None:
                _free(loaded)
                del loaded
                gc.collect()  # what holds it in a cycle
            logger.info("model %r is unloaded: the next request loads it again", self.name)
        except Exception as exc:  # the next load may say more
            logger.warning("unloading model %r failed: %s: %s", self.name, type(exc).__name__, exc)


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
    def limits(self) -> RequestLimits:
        return self.default.limits

    @property
    def metrics(self) -> Metrics:
        return self.default.metrics

    @property
    def is_loading(self) -> bool:
        return any(service.is_loading for service in self.all)

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

    def end_answers(self) -> None:
        """End what runs, which the clients are told."""
        for service in self.all:
            if service.loaded is not None:
                service.loaded.scheduler.close()

    def close(self) -> None:
        """End what runs and free the models. Blocks until that is done, but not for a load."""
        self.stop()
        for service in self.all:
            service.close()
