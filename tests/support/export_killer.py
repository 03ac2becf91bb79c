"""Kills exports at random moments and looks at what they leave; a program, so that forked children stay out of pytest.

    python export_killer.py SOURCE FOLDER MOMENTS

Prints one JSON object: how many kills came before the pair had its name.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from edgespec.cli.main import cli
from edgespec.errors import ModelFileError
from edgespec.formats.manifest import MANIFEST, read_pair, sha256_of


def start(source: Path, output: Path, log: Path) -> int:
    """An export in a forked child, which has everything imported already; its process id."""
    child = os.fork()
    if child == 0:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        code = 1
        try:
            cli.main(["export", str(source), "-o", str(output), "--no-check", "--to", "both"])
        except SystemExit as exc:
            code = exc.code if isinstance(exc.code, int) else 1
        finally:
            os._exit(code)
    return child


def finished_folders(base: Path) -> list[Path]:
    """Folders that pass for a pair."""
    found = []
    for manifest in base.rglob(MANIFEST):
        with contextlib.suppress(ModelFileError):
            read_pair(manifest.parent)
            found.append(manifest.parent)
    return found


def contents(folder: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in folder.rglob("*") if path.is_file()}


def main(source: Path, base: Path, moments: int) -> None:
    output, log = base / "pair", base / "log.txt"
    began = time.monotonic()
    assert os.waitpid(start(source, output, log), 0)[1] == 0, log.read_text()
    took = time.monotonic() - began
    wanted = contents(output)
    early = 0
    randomness = random.Random(0)
    for _ in range(moments):
        shutil.rmtree(output)
        child = start(source, output, log)
        time.sleep(randomness.uniform(0, took))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        early += not output.exists()
        for folder in finished_folders(base):
            assert contents(folder) == wanted, f"{folder} looks finished and is not"
        if not output.exists():
            status = os.waitpid(start(source, output, log), 0)[1]
            assert status == 0, log.read_text()
        assert contents(output) == wanted
        left = {path.name for path in base.iterdir()}
        # The working folder, where the kill came between the last rename and its removal.
        assert left <= {".pair.export", ".pair.export.lock", "log.txt", "pair"}, left
    print(json.dumps({"early": early, "seconds": took}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
