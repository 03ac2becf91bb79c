"""A model hub on this machine: the endpoints that fetching a model asks, and the ways in which a real one fails."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TAG = "v2"
_CHUNK = 1 << 16
_LARGE = (".gguf", ".safetensors", ".onnx", ".data", ".bin")  # stored by checksum; the others as blobs of git


@dataclass
class Faults:
    """What goes wrong. `refusals`: (status, headers) of the next answers, for paths with `refused` in them.

    `cut_after`: bytes after which a connection breaks, as often as `cuts`; `corrupt`: bodies with a wrong byte;
    `claimed_bytes`: sizes that the listing gives, by file; `pause_s`: before every 64 KiB; `token`: what a request
    must carry; `knows_ranges`: whether a download may go on in the middle.
    """

    refusals: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    refused: str = ""
    cut_after: int = 0
    cuts: int = 0
    corrupt: int = 0
    claimed_bytes: dict[str, int] = field(default_factory=dict)
    pause_s: float = 0.0
    token: str = ""
    knows_ranges: bool = True


class _Handler(BaseHTTPRequestHandler):
    """GET api/models/ID/revision/REV, HEAD and GET ID/resolve/REV/FILE; files are redirected to a second address."""

    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        """Tests print nothing."""

    def _answer(self, *, with_body: bool) -> None:
        path = urlsplit(self.path).path.strip("/")
        parts = [unquote(part) for part in path.split("/")]
        self.server.asked.append(f"{self.command} {'/'.join(parts)}")
        faults = self.server.faults
        if faults.refusals and faults.refused in self.path:
            status, headers = faults.refusals.pop(0)
            self._send(status, b"", headers)
        elif faults.token and self.headers.get("Authorization") != f"Bearer {faults.token}" and parts[0] != "store":
            self._send(401, b"", {"X-Error-Code": "GatedRepo"})
        elif parts[:2] == ["api", "models"]:
            self._describe("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main")
        elif parts[0] == "store":
            self._file("/".join(parts[1:3]), "/".join(parts[3:]), with_body=with_body)
        elif len(parts) > 4 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), "/".join(parts[4:]), with_body=with_body, redirects=with_body)
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _describe(self, hub_id: str, revision: str) -> None:
        folder = self.server.models.get(hub_id)
        if folder is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", TAG, COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            files = [self._listed(folder, path) for path in sorted(folder.rglob("*")) if path.is_file()]
            answer = {"id": hub_id, "modelId": hub_id, "sha": COMMIT, "siblings": files, "tags": [], "private": False}
            answer["cardData"] = {"license": "apache-2.0"}
            self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _listed(self, folder: Path, path: Path) -> dict[str, object]:
        name, body = path.relative_to(folder).as_posix(), path.read_bytes()
        size = self.server.faults.claimed_bytes.get(name, len(body))
        blob = hashlib.sha1(f"blob {len(body)}\0".encode() + body).hexdigest()
        made: dict[str, object] = {"rfilename": name, "size": size, "blobId": blob}
        if name.endswith(_LARGE):
            made["lfs"] = {"size": size, "sha256": hashlib.sha256(body).hexdigest(), "pointerSize": 130}
        return made

    def _file(self, hub_id: str, name: str, *, with_body: bool, redirects: bool = False) -> None:
        folder = self.server.models.get(hub_id)
        if folder is None or not (folder / name).is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        if redirects:
            self._send(302, b"", {"Location": f"/store/{hub_id}/{name}"})
            return
        body = (folder / name).read_bytes()
        facts = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        faults = self.server.faults
        wanted = self.headers.get("Range", "") if faults.knows_ranges else ""
        begin = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if wanted:
            facts["Content-Range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
        if faults.corrupt and with_body:
            faults.corrupt -= 1
            body = body[:-1] + bytes([body[-1] ^ 1])
        self._send(206 if wanted else 200, body[begin:], facts, with_body=with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self._write(body)

    def _write(self, body: bytes) -> None:
        faults = self.server.faults
        for begin in range(0, len(body), _CHUNK):
            if faults.cuts and begin >= faults.cut_after:
                faults.cuts -= 1
                self.close_connection = True
                return
            time.sleep(faults.pause_s)
            try:
                self.wfile.write(body[begin : begin + _CHUNK])
                self.wfile.flush()
            except OSError:  # the reader is gone
                self.close_connection = True
                return


class HubServer(ThreadingHTTPServer):
    """Serves `models`, folders by id; `asked` lists the requests."""

    daemon_threads = True

    def __init__(self, models: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models = models
        self.asked: list[str] = []
        self.faults = Faults()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def fetched(self) -> list[str]:
        """The files whose contents were asked for, in order, once per connection."""
        return [asked.split("/", 3)[3] for asked in self.asked if asked.startswith("GET store/")]


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
