"""A model hub on this machine: the few endpoints that huggingface_hub asks when it fetches files of a model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Handler(BaseHTTPRequestHandler):
    """GET api/models/ID/revision/REV, HEAD and GET ID/resolve/REV/FILE."""

    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        """Tests print nothing."""

    def _answer(self, *, with_body: bool) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        self.server.asked.append(f"{self.command} {'/'.join(parts)}")
        if parts[:2] == ["api", "models"]:
            self._describe("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main")
        elif len(parts) > 4 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), "/".join(parts[4:]), with_body=with_body)
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _describe(self, hub_id: str, revision: str) -> None:
        folder = self.server.models.get(hub_id)
        if folder is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            files = [{"rfilename": f.name, "size": f.stat().st_size} for f in sorted(folder.iterdir())]
            answer = {"id": hub_id, "modelId": hub_id, "sha": COMMIT, "siblings": files, "tags": [], "private": False}
            self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _file(self, hub_id: str, name: str, *, with_body: bool) -> None:
        folder = self.server.models.get(hub_id)
        if folder is None or not (folder / name).is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        body = (folder / name).read_bytes()
        etag = hashlib.sha256(body).hexdigest()
        facts = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        self._send(200, body, facts, with_body=with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


class HubServer(ThreadingHTTPServer):
    """Serves `models`, folders by id; `asked` lists the requests."""

    daemon_threads = True

    def __init__(self, models: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models = models
        self.asked: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serve(models: dict[str, Path]) -> Iterator[HubServer]:
    """A running hub; it is gone when the block ends."""
    with HubServer(models) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
