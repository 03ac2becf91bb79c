"""Addresses of RPC servers, as options and messages spell them."""

from __future__ import annotations

import ipaddress
import re

from edgespec.errors import ConfigError, shown

MAX_SERVERS = 16  # ggml's limit
DEFAULT_PORT = 50052
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_FORM = "give HOST:PORT[,HOST:PORT...], for example 192.168.1.20:50052"


def parse_endpoints(text: object) -> tuple[str, ...]:
    """`HOST:PORT[,HOST:PORT...]` as a tuple, in its order. Raises ConfigError."""
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"rpc {shown(text)} does not name a server: {_FORM}")
    found = tuple(parse_endpoint(part.strip()) for part in text.split(","))
    repeated = {endpoint for endpoint in found if found.count(endpoint) > 1}
    if repeated:
        raise ConfigError(f"rpc lists {min(repeated)} twice: list each server once")
    if len(found) > MAX_SERVERS:
        raise ConfigError(f"rpc lists {len(found)} servers; llama.cpp accepts at most {MAX_SERVERS}")
    return found


def parse_endpoint(text: str) -> str:
    """One `HOST:PORT`. Raises ConfigError; for an IPv6 address too, since llama.cpp connects by IPv4 only."""
    host, colon, port = text.rpartition(":")
    if ":" in host:
        raise ConfigError(f"rpc {shown(text)}: llama.cpp reaches RPC servers over IPv4 only; {_FORM}")
    if not colon or not _HOST.fullmatch(host):
        raise ConfigError(f"rpc {shown(text)} is not an address: {_FORM}")
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"rpc {shown(text)}: the port must be a whole number from 1 to 65535; {_FORM}")
    return f"{host}:{int(port)}"


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """A checked endpoint as (host, port)."""
    host, _, port = endpoint.rpartition(":")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine can reach an IPv4 address that a server listens on."""
    return ipaddress.IPv4Address(host).is_loopback
