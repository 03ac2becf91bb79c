#!/usr/bin/env python3
"""Fetch the libraries of the chat page from the npm registry, to edgespec/server/static/vendor. Standard library only.

    python scripts/vendor_page.py

Markdown, formulas, highlighted code and the text of PDFs. They are no part of the repository, and are in its wheels;
without them the page draws Markdown by itself (static/markdown.js) and the rest as text. Each version is pinned with
the registry's hash of its archive. npm fetches them from the registry that it is set up with; without npm,
npm_config_registry names one.
The build of a wheel and scripts/run.py do the same. EDGESPEC_PAGE_LIBRARIES=none leaves them out.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path
from typing import NamedTuple

VENDOR = Path(__file__).resolve().parents[1] / "edgespec" / "server" / "static" / "vendor"
VERSIONS = "versions.json"  # names and versions of what a folder holds
WITHIN_S = 60.0
ANSWERS_WITHIN_S = 10.0


class Library(NamedTuple):
    """A package of npm. `files`: those of its archive that are kept, a folder with all below it -> their name here."""

    name: str
    version: str
    integrity: str
    files: dict[str, str]


LIBRARIES = (
    Library(
        "marked",
        "18.2.1",
        "sha512-ii4bxCTCqqwpT86XZWgJNs+ZnAIZksmLGYMViWA7PDIXYIeNo1x6cDdX3JOip9NM/cI6p8z57FxliACboTruMA==",
        {"lib/marked.esm.js": "marked.js", "LICENSE": "marked.LICENSE.txt"},
    ),
    Library(
        "@highlightjs/cdn-assets",
        "11.12.0",
        "sha512-KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1cgDTVj6R8vH0zgiNDEGjpDw==",
        {"es/highlight.min.js": "highlight.js", "LICENSE": "highlight.LICENSE.txt"},
    ),
    Library(
        "katex",
        "0.19.1",
        "sha512-jG8uKntjSEcm2EpQOh0XturpPuuC9r3Sq5HLHdsFdWZT27E672SF19QEi+of0/YeOy15lDgRhKvr5614uRrEfA==",
        {
            "dist/katex.min.js": "katex.js",
            "dist/katex.min.css": "katex.css",
            "dist/fonts": "fonts",
            "LICENSE": "katex.LICENSE.txt",
        },
    ),
    Library(  # pdf.js of Mozilla (Apache-2.0) without its viewer, in one file
        "unpdf",
        "1.7.0",
        "sha512-MiDhbougTETOvbw/x3hnNr18jzFFrlSitevfO/BHInvtUx68R3Fke9A36GLQfN1LpG1NiJZaV4oPvjioPk9vKQ==",
        {"dist/pdfjs.mjs": "pdf.js", "LICENSE": "pdf.LICENSE.txt"},
    ),
)


class CannotFetch(Exception):
    """The libraries cannot be had: no network, or not what was expected."""


def are_wanted() -> bool:
    return os.environ.get("EDGESPEC_PAGE_LIBRARIES", "").lower() != "none"


def vendor(folder: Path = VENDOR, libraries: tuple[Library, ...] = LIBRARIES) -> None:
    """Have `folder` hold the libraries in these versions, and nothing else. Raises CannotFetch, and leaves it then."""
    wanted = json.dumps({each.name: each.version for each in libraries}, indent=1) + "\n"
    try:
        if (folder / VERSIONS).read_text(encoding="utf-8") == wanted:
            return
    except OSError:
        pass
    try:
        with tempfile.TemporaryDirectory(prefix="edgespec-page-") as name:
            scratch, made = Path(name), Path(name) / "vendor"
            made.mkdir()
            for library in libraries:
                unpack(fetch(library, scratch), library, made)
            (made / VERSIONS).write_text(wanted, encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(made, folder, dirs_exist_ok=True)
    except (OSError, tarfile.TarError, subprocess.SubprocessError) as exc:
        raise CannotFetch(f"{type(exc).__name__}: {exc}") from exc


def fetch(library: Library, scratch: Path) -> bytes:
    """The archive of a library, checked."""
    found = fetch_with_npm(library, scratch) or fetch_plainly(library)
    kind, _, expected = library.integrity.partition("-")
    if base64.b64encode(hashlib.new(kind, found).digest()).decode() != expected:
        raise CannotFetch(f"{library.name} {library.version} from the registry is not the file that was expected")
    return found


def fetch_with_npm(library: Library, scratch: Path) -> bytes:
    """Empty without npm, or where it fails."""
    npm = shutil.which("npm")
    if npm is None:
        return b""
    options = ("--silent", "--fetch-retries=0", f"--fetch-timeout={1000 * ANSWERS_WITHIN_S:.0f}", "--ignore-scripts")
    command = [npm, "pack", f"{library.name}@{library.version}", *options]
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    written = scratch / (done.stdout.strip().splitlines() or [""])[-1]
    return written.read_bytes() if done.returncode == 0 and written.is_file() else b""


def fetch_plainly(library: Library) -> bytes:
    registry = os.environ.get("npm_config_registry") or os.environ.get("NPM_CONFIG_REGISTRY")  # noqa: SIM112 - npm's name
    if not registry:
        raise CannotFetch("they need npm, or npm_config_registry with the address of a registry")
    address = f"{registry.rstrip('/')}/{library.name}/-/{library.name.rpartition('/')[2]}-{library.version}.tgz"
    with urllib.request.urlopen(address, timeout=ANSWERS_WITHIN_S) as answered:
        found: bytes = answered.read()
    return found


def unpack(archive: bytes, library: Library, folder: Path) -> None:
    """Write what is kept. Names in an archive become no paths: only those that were asked for are read."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        held = {each.name.partition("/")[2]: each for each in members if each.isfile()}
        for source, name in library.files.items():
            found = [each for each in held if each == source or each.rpartition("/")[0] == source]
            if not found:
                raise CannotFetch(f"{library.name} {library.version} holds no {source}")
            for each in found:
                if source != each and not each.endswith(".woff2"):  # every browser reads these
                    continue
                path = folder / name if source == each else folder / name / each.rpartition("/")[2]
                path.parent.mkdir(exist_ok=True)
                content = members.extractfile(held[each])
                assert content is not None
                path.write_bytes(content.read())


def main() -> int:
    if not are_wanted():
        return 0
    try:
        vendor()
    except CannotFetch as exc:
        print(f"error: the page's libraries cannot be fetched: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
