"""How the page's libraries are fetched: from a registry on this machine, with archives made here."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import vendor_page
from vendor_page import CannotFetch, Library

FILES = {"package/lib/a.js": b"export {}", "package/LICENSE": b"MIT", "package/fonts/b.woff2": b"font"}
FILES |= {"package/fonts/b.ttf": b"older", "package/../../evil.js": b"evil", "package/other.js": b"not asked for"}
KEPT = {"lib/a.js": "a.js", "LICENSE": "a.LICENSE.txt", "fonts": "fonts"}


class Quiet(SimpleHTTPRequestHandler):
    asked: list[str] = []  # noqa: RUF012 - of the one server of a test

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Its folder. npm is not there, so that the settings of this machine do not matter."""
    folder = tmp_path / "registry"
    folder.mkdir()
    Quiet.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("npm_config_registry", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield folder
        server.shutdown()
        thread.join()


def publish(registry: Path, name: str, files: dict[str, bytes] = FILES) -> str:
    """Put an archive there; its hash."""
    file = registry / name / "-" / f"{name.rpartition('/')[2]}-1.0.0.tgz"
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return "sha512-" + base64.b64encode(hashlib.sha512(file.read_bytes()).digest()).decode()


def tree(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_only_what_is_asked_for_is_kept_and_fetched_once(registry: Path, tmp_path: Path):
    library = Library("@scope/a", "1.0.0", publish(registry, "@scope/a"), KEPT)
    folder = tmp_path / "static" / "vendor"
    folder.mkdir(parents=True)
    (folder / "old.js").touch()
    for _ in range(2):
        vendor_page.vendor(folder, (library,))
    assert tree(folder) == {"a.js", "a.LICENSE.txt", "fonts/b.woff2", "versions.json"}
    assert Quiet.asked == ["/@scope/a/-/a-1.0.0.tgz"]
    assert not list(tmp_path.rglob("evil.js"))


@pytest.mark.parametrize("fault", ["other content", "a file is missing", "not there"])
def test_what_was_there_stays_where_that_fails(registry: Path, tmp_path: Path, fault: str):
    expected = publish(registry, "a")
    if fault == "other content":
        publish(registry, "a", FILES | {"package/lib/a.js": b"changed"})
    elif fault == "a file is missing":
        expected = publish(registry, "a", {"package/LICENSE": b"MIT"})
    else:
        (registry / "a" / "-" / "a-1.0.0.tgz").unlink()
    folder = tmp_path / "vendor"
    folder.mkdir()
    (folder / "a.js").write_text("before")
    with pytest.raises(CannotFetch):
        vendor_page.vendor(folder, (Library("a", "1.0.0", expected, KEPT),))
    assert tree(folder) == {"a.js"} and (folder / "a.js").read_text() == "before"
