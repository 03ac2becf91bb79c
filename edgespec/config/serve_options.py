"""Typed options of `edgespec serve` that an environment variable or a config file may set."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.config.checks import refuses_unknown
from edgespec.errors import ConfigError


@refuses_unknown(ConfigError)
@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Who may call the server besides local programs and pages. `cors_origin`: web pages; `allowed_host`: names of this
    machine in the Host header.

    Raises ConfigError for an empty one, and for a host with a scheme, a port or a path.
    """

    cors_origin: tuple[str, ...] = ()
    allowed_host: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not all((*self.cors_origin, *self.allowed_host)):
            raise ConfigError("cors-origin and allowed-host must not be empty: leave them out for local ones only")
        for host in self.allowed_host:
            if "/" in host or host.count(":") == 1:  # several are those of an IPv6 address
                raise ConfigError(f"allowed-host {host!r} must be a name alone, such as models.example, without a port")
