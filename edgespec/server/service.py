"""What every endpoint shares: the loaded model, the defaults of its requests, the limits, and whether it is ready."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from edgespec.config import GenerateOptions, ReasoningFormat
from edgespec.runtime import Model
from edgespec.sampling import Sampling
from edgespec.server.http_errors import HttpError
from edgespec.server.metrics import Metrics
from edgespec.server.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of requests. Times in seconds; None: no limit. `timeout_s`: from the request to the end of its answer."""

    max_queued: int = 32
    max_body_bytes: int = 8 * 1024 * 1024
    body_timeout_s: float = 30.0
    timeout_s: float | None = 600.0
    max_choices: int = 16
    max_stops: int = 16
    max_stop_characters: int = 512
    max_biases: int = 1024
    max_tools: int = 128


@dataclass(frozen=True, slots=True)
class Names:
    """What clients may call the served model. `own`: what answers call it, never a path; `any_other`: anything goes."""

    own: str
    aliases: tuple[str, ...] = ()
    any_other: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        """Its names, each once."""
        return tuple(dict.fromkeys((self.own, *self.aliases)))

    def include(self, name: str) -> bool:
        """Whether a request that asks for `name` is answered."""
        return self.any_other or name in self.all


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that answers. `sampling`, `options`: those of requests that choose none; seed None: random for each.

    `reasoning_format`: the same; "none" leaves reasoning in the text. `noted`: notes that the log has.
    """

    names: Names
    model: Model
    scheduler: Scheduler
    sampling: Sampling
    options: GenerateOptions
    limits: Limits
    reasoning_format: ReasoningFormat = "auto"
    noted: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """What answers call it."""
        return self.names.own


@dataclass(slots=True)
class Service:
    """The state of the server. `name`: the model's name for clients, never a path; `api_key`: None accepts any.

    `aliases`: its other names; `any_model`: requests may give any name.
    """

    name: str
    limits: Limits = field(default_factory=Limits)
    api_key: str | None = None
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    loaded: Loaded | None = None
    aliases: tuple[str, ...] = ()
    any_model: bool = False

    @property
    def names(self) -> Names:
        """What clients may call the model."""
        return Names(self.name, self.aliases, self.any_model)

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
            sampling or replace(model.recommended_sampling, seed=None),
            replace(options or GenerateOptions(), logprobs=False),
            self.limits,
            reasoning_format,
        )

    def require(self) -> Loaded:
        """What is loaded. Raises HttpError 503 before."""
        if self.loaded is None:
            raise HttpError(503, "the model is being loaded: try again soon", code="loading")
        return self.loaded

    def stop(self) -> None:
        """Accept no more requests; the running one goes on."""
        if self.loaded is not None:
            self.loaded.scheduler.stop()

    def end_running(self) -> None:
        """End what runs, and tell its clients why."""
        if self.loaded is not None:
            self.loaded.scheduler.end_running()

    def close(self) -> None:
        """End what runs and free the model. Blocks until that is done."""
        if self.loaded is not None:
            self.loaded.scheduler.close()
            self.loaded.model.close()
