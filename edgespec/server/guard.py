"""Who may use the server: the API key, the Host header, and which web pages. Also counts requests by path and status.

A web page that a user visits can send requests to 127.0.0.1. Its browser names the page in the Origin header, so that
requests of other pages are refused; a name that the page's owner points to 127.0.0.1 shows in the Host header.
Which hosts and origins are local: as in Ollama, so that its clients work here.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import socket
from dataclasses import dataclass
from time import monotonic
from typing import Any
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.server.http_errors import HttpError
from edgespec.server.service import Services
from edgespec.server.web import error_response

logger = logging.getLogger("edgespec")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# No public name ends in one of these (RFC 6761, RFC 6762, ICANN's decision on .internal), so a page from the internet
# cannot have one. Docker Desktop's containers send host.docker.internal.
_LOCAL_ENDINGS = (".localhost", ".local", ".internal")
# Pages that lie on this machine: those of its own servers and of installed programs. Such a page gets nothing from us
# but text that a model writes: no conversations are stored here. `null` is not among them: any page can send it from a
# sandboxed frame.
LOCAL_ORIGINS = re.compile(
    r"https?://(localhost|[a-z0-9.-]+\.localhost|127\.0\.0\.1|\[::1\]|0\.0\.0\.0)(:\d+)?"
    r"|(vscode-webview|vscode-file|app|tauri|file)://[A-Za-z0-9._~-]*"
)


@dataclass(frozen=True, slots=True)
class Guard:
    """ASGI middleware. `hosts`: allowed names in the Host header, in small letters, empty for any; `origins`: web pages
    that may call. Local ones are allowed besides.

    `paths`: those that are counted under their own name; `open_paths`: those that need no API key.
    """

    app: ASGIApp
    services: Services
    paths: frozenset[str]
    open_paths: frozenset[str]
    hosts: frozenset[str]
    origins: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, began_s, status = scope["path"], monotonic(), 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check(path, Headers(scope=scope))
        except HttpError as exc:
            await error_response(exc, path)(scope, receive, counted)
        else:
            await self.app(scope, receive, counted)
        finally:
            shown = path if path in self.paths else "other"
            self.services.metrics.answered[shown, status] += 1
            # Before, a line would take the place of what loading is busy with.
            if any(each.loaded is not None for each in self.services.all):
                took_ms = 1000 * (monotonic() - began_s)
                logger.info("%s %s %d %.0f ms", scope["method"], shown, status, took_ms)

    def _check(self, path: str, headers: Headers) -> None:
        host = (_parts_of(f"//{headers.get('host', '')}").hostname or "").removesuffix(".")
        is_known = host in self.hosts or is_local_host(host)
        if self.hosts and not is_known:
            raise HttpError(
                403, "the Host header names a different machine; --allowed-host allows a name", code="wrong_host"
            )
        origin = headers.get("origin")
        if origin is not None and not self._may_call(origin, headers.get("host"), is_known=is_known):
            raise HttpError(
                403,
                "requests from web pages are refused; --cors-origin allows one, --allowed-host this machine's name",
                code="wrong_origin",
            )
        if path not in self.open_paths:
            self._check_key(headers)

    def _may_call(self, origin: str, host: str | None, *, is_known: bool) -> bool:
        """Whether a page may: our own, a local one, or one that was allowed."""
        # Any page may call its own server's name so; under a rented one it proves nothing, but such a page has no key.
        is_own = _parts_of(origin).netloc == host and (is_known or self.services.api_key is not None)
        return is_own or bool({origin, "*"} & self.origins) or LOCAL_ORIGINS.fullmatch(origin) is not None

    def _check_key(self, headers: Headers) -> None:
        wanted: Any = self.services.api_key
        if wanted is None:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode("latin-1"), wanted.encode()):
            raise HttpError(
                401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key"
            )


def is_local_host(host: str) -> bool:
    """Whether a name in the Host header can only mean this machine or its network: nobody can rent such a name.

    An address is one that a page has only if its own server has it, and no name stands for another one then.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host in ("localhost", socket.gethostname().lower()) or host.endswith(_LOCAL_ENDINGS)
    return True


def _parts_of(address: str) -> SplitResult:
    try:
        return urlsplit(address)
    except ValueError:  # brackets that are no IPv6 address
        return urlsplit("")
