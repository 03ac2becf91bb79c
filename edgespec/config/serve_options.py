"""Typed options of `edgespec serve` that an environment variable or a config file may set."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgespec.config.checks import at_least, refuses_unknown
from edgespec.errors import ConfigError


@refuses_unknown(ConfigError)
@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Who may call the server besides local programs and pages, and for how long it keeps its models.

    `cors_origin`: web pages; `allowed_host`: names of this machine in the Host header; `idle_unload`: seconds without a
    request after which a model is unloaded, None or negative for never; `models_max`: models loaded at once.

    Raises ConfigError for an empty name, for a host with a scheme, a port or a path, for 0 seconds, and for no model.
    """

    cors_origin: tuple[str, ...] = ()
    allowed_host: tuple[str, ...] = ()
    idle_unload: float | None = None
    models_max: int = 1

    @property
    def idle_unload_s(self) -> float | None:
        """The same without negative values."""
        return None if self.idle_unload is None or self.idle_unload < 0 else self.idle_unload

    def __post_init__(self) -> None:
        if not all((*self.cors_origin, *self.allowed_host)):
            raise ConfigError("cors-origin and allowed-host must not be empty: leave them out for local ones only")
        for host in self.allowed_host:
            if "/" in host or host.count(":") == 1:  # several are those of an IPv6 address
                raise ConfigError(f"allowed-host {host!r} must be a name alone, such as models.example, without a port")
        if self.idle_unload is not None and not (math.isfinite(self.idle_unload) and self.idle_unload):
            raise ConfigError(f"idle-unload {self.idle_unload:g} must be a number of seconds, or -1 for never")
        at_least("models-max", self.models_max, 1, "it is how many of the served models may be loaded at once")
