"""Closed or full streams, pipes without a writer, unusable paths: no traceback and no hanging."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import edgespec
from demo import heed_interrupts
from edgespec.chat.conversation import Conversation
from edgespec.errors import ConfigError, EdgespecError, ModelNotFound, StateError
from edgespec.loading.registry import registered_folders, resolve
from edgespec.platform.files import MAX_TEXT_BYTES, read_text
from waiting import until

pytestmark = pytest.mark.skipif(os.name == "nt", reason="shells, pipes and links of POSIX")
FULL = Path("/dev/full")
PYTHON = f"'{sys.executable}' -m edgespec"
NO_ONE = "~nosuchuser/x.gguf"


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(edgespec.__file__).parent.parent))
    monkeypatch.chdir(tmp_path)


def shell(command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """What a shell makes of `command`, in which E stands for ours."""
    script = command.replace("E ", f"{PYTHON} ", 1)
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=timeout_s, check=False)


def assert_one_line(done: subprocess.CompletedProcess[str], code: int, said: str = "") -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert [line.startswith("error: ") for line in done.stderr.splitlines()] in ([True], [])
    assert said in done.stderr


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("E --help >&-", 1, "a standard stream is closed"),
        ("E generate <&-", 1, "a standard stream is closed"),
        ("E nonsense 2>&-", 1, ""),
        ("set -o pipefail; E --help | true", 141, ""),
        ("set -o pipefail; E chat --help | true", 141, ""),
        ("ulimit -n 9; E generate -n 2 -p x", 2, "Too many open files"),
    ],
)
def test_closed_streams(command: str, code: int, said: str) -> None:
    done = shell(command)
    if code == 141 and done.returncode == 0:
        pytest.skip("the reader took all before it left")
    assert_one_line(done, code, said)


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
@pytest.mark.parametrize("arguments", ["--help", "--version", "chat --help", "doctor"])
def test_a_full_disk_under_the_output(arguments: str) -> None:
    assert_one_line(shell(f"E {arguments} >/dev/full"), 1, "No space left on device")
    assert shell("E nonsense 2>/dev/full").returncode == 2


def test_a_pipe_is_read_if_somebody_writes_to_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert_one_line(shell("E bench --prompts pipe"), 2, "pipe")
    assert_one_line(shell("E bench --prompts <(sleep 0.5; echo)"), 2, "with one prompt per line")
    with subprocess.Popen(["bash", "-c", "exec >pipe; sleep 0.3; echo hello"]) as writer:
        texts: list[str] = []
        until(lambda: texts.append(read_text("pipe")) or texts[-1])
        assert texts[-1] == "hello\n"
    assert writer.returncode == 0
    with pytest.raises(StateError, match="not a saved conversation"):
        Conversation.load(tmp_path / "pipe")


def test_what_never_ends_is_not_read() -> None:
    with pytest.raises(OSError, match=f"more than {MAX_TEXT_BYTES >> 20} MiB"):
        read_text("/dev/zero")


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.12, 0.2])
def test_an_interrupt_at_the_very_beginning(after_s: float) -> None:
    # What Python does before our first line is not ours: the interrupt comes when that has begun.
    started = "import edgespec.__main__ as ours, sys; print(flush=True); ours.main()"
    command = [sys.executable, "-c", started, "bench", "--repeat", "1000000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=heed_interrupts, **pipes) as process:  # type: ignore[call-overload]
        try:
            process.stdout.readline()
            time.sleep(0.05 + after_s)  # to interrupt it at several moments; every one will do
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said


# -- paths


@pytest.fixture
def odd(tmp_path: Path) -> list[str]:
    """Paths that cannot be followed, each in its own way."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("x")
    long = "x" * 5000
    return [str(tmp_path / "loop"), str(tmp_path / "file" / "below"), long, f"a/{long}", "nul\0", NO_ONE, "\udcff"]


@pytest.mark.parametrize("suffix", ["", ".gguf", ".onnx", "/model.onnx"])
def test_a_model_at_such_a_path_is_not_found(odd: list[str], suffix: str) -> None:
    for path in odd:
        with pytest.raises(ModelNotFound):
            resolve(path + suffix)
        with pytest.raises(ModelNotFound, match="draft"):
            resolve("demo", draft=Path(path + suffix))
        for given in ({"model": path + suffix}, {"heads": path, "drafter": "eagle"}, {"medium": path}):
            with pytest.raises(EdgespecError):
                edgespec.load(**given)  # type: ignore[arg-type]


def test_folders_that_cannot_be_read_hide_no_other_models(
    odd: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "loop").symlink_to(models / "loop")
    (models / "dangling").symlink_to(models / "nothing")
    (models / "file").write_text("x")
    (models / "folder").mkdir()
    (models / "folder" / "manifest.toml").symlink_to(models / "folder" / "manifest.toml")
    for place in (str(models), *(path for path in odd if "\0" not in path)):
        monkeypatch.setenv("EDGESPEC_MODELS", place)
        assert "demo" in registered_folders()


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "context-length = " + "9" * 5000, "\udcff", "a"])
def test_files_of_settings_that_overtax_their_reader(tmp_path: Path, text: str) -> None:
    from edgespec.config.sources import resolve as settings_of

    (tmp_path / "config.toml").write_text(text, errors="surrogateescape")
    (tmp_path / "manifest.toml").write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"config\.toml"):
        settings_of({}, {}, tmp_path / "config.toml")
    with pytest.raises(EdgespecError, match=r"manifest\.toml"):
        resolve(str(tmp_path))
    with pytest.raises(StateError):
        Conversation.load(tmp_path / "config.toml")
