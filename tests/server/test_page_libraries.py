"""How the page's libraries are fetched: from a registry that is a folder here, with archives made here."""

from __future__ import annotations

import base64
import hashlib
import io
import sys
import tarfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import vendor_page
from vendor_page import CannotFetch, Library

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
