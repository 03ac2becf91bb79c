"""Files appear complete or not at all, a failure names the file and the fix; where a user's files lie."""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
from pathlib import Path

import pytest

from edgespec.errors import ConfigError, StateError
from edgespec.loading.registry import models_folder
from edgespec.platform.files import atomic_file, user_folder, write_atomically, write_errors


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# writing


def test_contents_replace_a_file_and_leave_nothing_else(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", "one")
    write_atomically(tmp_path / "a", b"tw\xc3\xb6")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "twö"
    assert names(tmp_path) == ["a"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no permission bits")
def test_a_file_is_private_only_when_asked(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_atomically(tmp_path / "shared", "x")
        write_atomically(tmp_path / "own", "x", private=True)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("shared", "own")]
    assert modes == [0o644, 0o600]


def test_folders_are_made_only_when_asked(tmp_path: Path) -> None:
    with pytest.raises(
        StateError, match=r"page cannot be written: No such file or directory; free some space, or choose"
    ):
        write_atomically(tmp_path / "no" / "page", "x")
    write_atomically(tmp_path / "new" / "deep" / "page", "x", parents=True)
    with pytest.raises(StateError, match="cannot be written"):
        write_atomically(tmp_path / "new" / "deep" / "page" / "below", "x", parents=True)


def test_a_file_that_many_write_at_once_is_one_of_theirs(tmp_path: Path) -> None:
    texts = [letter * 200_000 for letter in "abcdefgh"]
    writers = [threading.Thread(target=write_atomically, args=(tmp_path / "a", text)) for text in texts]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert (tmp_path / "a").read_text() in texts
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_a_block_raises_leaves_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(error), atomic_file(tmp_path / "a") as temporary:
        temporary.write_text("half")
        raise error
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]
    with atomic_file(tmp_path / "a") as temporary:
        temporary.write_text("new")
        assert (tmp_path / "a").read_text() == "old"
    assert (tmp_path / "a").read_text() == "new" and names(tmp_path) == ["a"]


def test_a_failure_names_the_file_the_reason_and_the_fix(tmp_path: Path) -> None:
    with (
        pytest.raises(StateError, match=r"a cannot be written: No space left on device; try again$"),
        write_errors(tmp_path / "a", fix="try again"),
    ):
        raise OSError(28, "No space left on device")
    with (
        pytest.raises(StateError, match=r"is the disk full\? \(stopped at byte 9\)"),
        write_errors(tmp_path, RuntimeError),
    ):
        raise RuntimeError("stopped at byte 9")  # as torch says it
    with pytest.raises(RuntimeError), write_errors(tmp_path):
        raise RuntimeError("a bug")


@pytest.mark.parametrize(("number", "fix"), [(errno.ENOSPC, "free some space"), (errno.EROFS, "choose another place")])
def test_space_is_of_use_only_where_one_may_write(tmp_path: Path, number: int, fix: str) -> None:
    with pytest.raises(StateError, match=rf"cannot be written: .*; {fix}"), write_errors(tmp_path):
        raise OSError(number, os.strerror(number))


# a user's own folders


def test_edgespec_home_holds_everything(tmp_path: Path) -> None:
    given = {"EDGESPEC_HOME": str(tmp_path), "XDG_CACHE_HOME": "/x"}
    assert {kind: user_folder(kind, given) for kind in ("config", "data", "state")} == dict.fromkeys(
        ("config", "data", "state"), tmp_path
    )
    assert user_folder("cache", given) == tmp_path / "cache"


def test_a_tilde_in_edgespec_home_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell has replaced it in a service's settings or an .env file."""
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(tmp_path))
    assert user_folder("config", {"EDGESPEC_HOME": "~/own"}) == tmp_path / "own"
    assert user_folder("cache", {"EDGESPEC_HOME": "~/own"}) == tmp_path / "own/cache"
    monkeypatch.setenv("EDGESPEC_MODELS", "~/models")
    assert models_folder() == tmp_path / "models"


@pytest.mark.skipif(sys.platform != "linux", reason="checks the folders of Linux")
def test_the_folders_of_linux_stay_where_they_have_always_been(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("CONFIG", "DATA", "STATE", "CACHE"):
        monkeypatch.delenv(f"XDG_{kind}_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    places = {"config": ".config", "data": ".local/share", "state": ".local/state", "cache": ".cache"}
    for kind, place in places.items():
        assert user_folder(kind, {}) == Path("/home/somebody", place, "edgespec")  # type: ignore[arg-type]
        assert user_folder(kind, {f"XDG_{kind.upper()}_HOME": "/x"}) == Path("/x/edgespec")  # type: ignore[arg-type]


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(ConfigError, match="EDGESPEC_HOME"):
        user_folder("config", {})


# Windows


@pytest.mark.parametrize("refusals", [3, sys.maxsize])
def test_a_file_that_somebody_reads_is_replaced_after_it(tmp_path: Path, monkeypatch, refusals: int) -> None:
    """Windows refuses to rename over a file that is open: for a moment that is waited for, and then an error."""
    rename, left = Path.replace, iter(range(refusals))

    def refused(self: Path, target: Path) -> Path:
        for _ in left:
            raise PermissionError(errno.EACCES, "Access is denied")
        return rename(self, target)

    monkeypatch.setattr("edgespec.platform.files._IN_USE_S", 2.0 if refusals == 3 else 0.05)
    monkeypatch.setattr(Path, "replace", refused)
    if refusals > 3:
        with pytest.raises(StateError, match="Access is denied"):
            write_atomically(tmp_path / "a", "one")
        assert names(tmp_path) == []
    else:
        write_atomically(tmp_path / "a", "one")
        assert (tmp_path / "a").read_text(encoding="utf-8") == "one"
        assert names(tmp_path) == ["a"]
