"""The page's files as the server sends them: policy, types, no key, no paths; and what they use."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import sys
import tarfile
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from edgespec.server.app import create_app, page_routes
from edgespec.server.service import Service, Services
from serving import BASE_URL

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import vendor_page
from vendor_page import CannotFetch, Library

PATHS = [route.path for route in page_routes()]


@pytest.fixture
def page() -> TestClient:
    """Before its model is loaded."""
    return TestClient(create_app(Services(Service("demo"))), base_url=BASE_URL)


def test_every_file_has_the_policy_and_needs_no_key():
    service = Service("demo")  # no model is loaded: the page comes before it
    client = TestClient(create_app(Services(service, api_key="secret")), base_url=BASE_URL)
    assert "/" in PATHS and len(PATHS) > 8
    for path in PATHS:
        answered = client.get(path)
        assert answered.status_code == 200
        policy = answered.headers["content-security-policy"].split("; ")
        assert policy[0] == "default-src 'none'"
        assert {"script-src 'self'", "frame-ancestors 'none'"} <= set(policy)
        assert "unsafe" not in str(policy) and "*" not in str(policy)
        assert answered.headers["x-content-type-options"] == "nosniff"
    assert client.get("/props").status_code == 401


@pytest.mark.parametrize("path", ["/static/", "/static/app.py", "/static/../page.py", "/static/%2e%2e/page.py"])
def test_nothing_else_is_sent(page: TestClient, path: str):
    assert page.get(path).status_code == 404
    assert page.get(PATHS[0], headers={"Host": "evil.example"}).status_code == 403


def test_the_files_use_nothing_from_elsewhere(page: TestClient):
    own = [path for path in PATHS if not path.startswith("/static/vendor/")]  # what others wrote, the policy keeps
    texts = {path: page.get(path).text for path in own}
    for path, text in texts.items():
        addresses = set(re.findall(r"https?://[\w./-]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        used = re.findall(r'(?:src|href)="(/[^"#]+)"', text) + re.findall(r'from "\./([^"]+)"', text)
        for name in used:
            assert (name if name.startswith("/") else f"/static/{name}") in PATHS, f"{path} uses {name}"
    assert not re.search(r"\son\w+=|style=|<script>", texts["/"])  # the policy would block them


def test_every_button_does_something(page: TestClient):
    code = "".join(page.get(path).text for path in PATHS if path.endswith(".js") and "/vendor/" not in path)
    names = set(re.findall(r'data-do="([\w-]+)"', page.get("/").text))
    ids = set(re.findall(r'\$\("([\w-]+)"\)', code))
    assert {name for name in names if not re.search(rf'(?:"{name}"|\b{name})\s*[:(]', code)} == set()
    assert ids <= set(re.findall(r'id="([\w-]+)"', page.get("/").text))


# -- how the page's libraries are fetched: from a registry that is a folder here, with archives made here


FILES = {"package/lib/a.js": b"export {}", "package/LICENSE": b"MIT", "package/fonts/b.woff2": b"font"}
FILES |= {"package/fonts/b.ttf": b"older", "package/../../evil.js": b"evil", "package/other.js": b"not asked for"}
KEPT = {"lib/a.js": "a.js", "LICENSE": "a.LICENSE.txt", "fonts": "fonts"}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """npm is not there, so that the settings of this machine do not matter."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("npm_config_registry", (tmp_path / "registry").as_uri())
    return tmp_path / "registry"


def archive_of(registry: Path, name: str) -> Path:
    return registry / name / "-" / f"{name.rpartition('/')[2]}-1.0.0.tgz"


def publish(registry: Path, name: str, files: dict[str, bytes] = FILES) -> str:
    """Put an archive there; its hash."""
    file = archive_of(registry, name)
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
    vendor_page.vendor(folder, (library,))
    archive_of(registry, "@scope/a").unlink()
    vendor_page.vendor(folder, (library,))
    assert tree(folder) == {"a.js", "a.LICENSE.txt", "fonts/b.woff2", "versions.json"}
    assert not list(tmp_path.rglob("evil.js"))


@pytest.mark.parametrize("fault", ["other content", "a file is missing", "not there"])
def test_what_was_there_stays_where_that_fails(registry: Path, tmp_path: Path, fault: str):
    expected = publish(registry, "a")
    if fault == "other content":
        publish(registry, "a", FILES | {"package/lib/a.js": b"changed"})
    elif fault == "a file is missing":
        expected = publish(registry, "a", {"package/LICENSE": b"MIT"})
    else:
        archive_of(registry, "a").unlink()
    folder = tmp_path / "vendor"
    folder.mkdir()
    (folder / "a.js").write_text("before")
    with pytest.raises(CannotFetch):
        vendor_page.vendor(folder, (Library("a", "1.0.0", expected, KEPT),))
    assert tree(folder) == {"a.js"} and (folder / "a.js").read_text() == "before"
