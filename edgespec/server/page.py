"""The page at `/`: files of the package under fixed names, with a content security policy that allows nothing else.

No name in a request becomes a path: the files are listed once, and each has its own route. The page itself needs no API
key; it asks for one when the server does, and sends it with its requests.
"""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # no code can turn a text into HTML
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-cache",
}


def routes() -> list[Route]:
    """A route for the page and for each of its files."""
    found = []
    for file in sorted(files("edgespec.server").joinpath("static").iterdir(), key=lambda each: each.name):
        kind = _TYPES.get("." + file.name.rpartition(".")[2])
        if kind is not None:
            path = "/" if file.name == "index.html" else f"/static/{file.name}"
            found.append(_route(path, file.read_bytes(), kind))
    return found


def _route(path: str, content: bytes, kind: str) -> Route:
    async def handle(_: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return Route(path, handle, methods=["GET"])
