"""Cases of `fuzz.py` with faults around a process: closed and full streams, interrupts, limits, sudden death."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from fuzz_cases import Case, Crashed, Known, Refused, check_end
from fuzz_files import own_home

PROMPT = "Find me a restaurant in San Jose."
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("--help",),
    ("generate", "-n", "6", "-p", PROMPT),
    ("generate", "-n", "6", "-p", PROMPT, "--json", "--learn"),
    ("generate", "-n", "6", "-p", "-"),
    ("chat", "-n", "6"),
    ("corpus", "ls"),
    ("doctor",),
)
STREAMS = (
    "<&-",
    ">&-",
    "2>&-",
    ">/dev/full",
    "2>/dev/full",
    "<&- >&-",
    ">&- 2>&-",
    "<&- >&- 2>&-",
    "| true",
    "</dev/null",
)
TIMEOUT_S = 100.0
INTERRUPTED = 130
BEGUN = "import sys; sys.stdout.write('.'); sys.stdout.flush(); from edgespec.__main__ import main; main()"


def cases(rng: random.Random, index: int, texts: Known) -> Case:
    """Case `index` of this kind."""
    name = list(_KINDS)[index % len(_KINDS)]
    label, run = _KINDS[name](rng)
    return Case(f"faults {name}: {label}", run)


Made = tuple[str, Callable[[Path], None]]


def _streams(rng: random.Random) -> Made:
    arguments, closed = rng.choice(COMMANDS), rng.choice(STREAMS)

    def run(folder: Path) -> None:
        own_home(folder)
        with (folder / "said").open("wb") as said:
            command = ["bash", "-c", f'"$0" -m edgespec "$@" {closed}', sys.executable, *arguments]
            done = subprocess.run(command, input=b"hi\n", stdout=said, stderr=said, timeout=TIMEOUT_S, check=False)
        _judge(done.returncode, (folder / "said").read_bytes(), "chat" in arguments)

    return f"{' '.join(arguments[:1])} {closed}", run


def _interrupt(rng: random.Random) -> Made:
    arguments = rng.choice(COMMANDS)
    after_s = rng.choice((0.3, 1.0, 3.0)) * rng.random()

    def run(folder: Path) -> None:
        own_home(folder)
        with (folder / "said").open("wb") as said, _started(arguments, said) as process:
            time.sleep(after_s)
            process.send_signal(signal.SIGINT)
            try:
                code = process.wait(TIMEOUT_S)
            finally:
                process.kill()
        if code == -signal.SIGINT:
            code = INTERRUPTED  # all was done, and Python had put back the system's own answer to Ctrl-C
        _judge(code, (folder / "said").read_bytes(), "chat" in arguments)

    return f"{arguments[0]} after {after_s:.2f} s", run


def _limit(rng: random.Random) -> Made:
    arguments = rng.choice(COMMANDS)
    if rng.random() < 0.5:
        kind, most = resource.RLIMIT_FSIZE, rng.choice((0, 1, 100, 5000, 100_000))
    else:
        kind, most = resource.RLIMIT_NOFILE, rng.randrange(8, 40)

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # what Python does itself, from its start on
        resource.setrlimit(kind, (most, most))

    def run(folder: Path) -> None:
        home = own_home(folder)
        shutil.rmtree(home / "cache")  # so that there is something to write
        command = [sys.executable, "-m", "edgespec", *arguments]
        done = subprocess.run(
            command,
            input=b"hi\n",
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
            preexec_fn=limit,
            # A .pyc that the limit cuts would stay in the environment, where every later import of it fails.
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        )
        _judge(done.returncode, done.stderr, "chat" in arguments)

    return f"{arguments[0]} {'file size' if kind == resource.RLIMIT_FSIZE else 'open files'} {most}", run


def _kill(rng: random.Random) -> Made:
    """What was kept before is whole, and the next run goes on, wherever the last one died."""
    after_s = 2.5 * rng.random()
    adds = rng.random() < 0.5

    def run(folder: Path) -> None:
        home = own_home(folder)
        (folder / "more.txt").write_text("Where would you like to go? " * 5000)
        learning = ("generate", "-n", "40", "-p", PROMPT, "--learn", "--ignore-eos")
        arguments = ("corpus", "add", str(folder / "more.txt")) if adds else learning
        with (folder / "said").open("wb") as said, _started(arguments, said) as process:
            time.sleep(after_s)
            process.kill()
        for again in (("corpus", "ls"), ("generate", "-n", "6", "-p", PROMPT, "--learn")):
            command = [sys.executable, "-m", "edgespec", *again]
            done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
            if done.returncode:
                raise Crashed(f"{again} after a kill: {done.returncode} {done.stderr.decode()[-500:]}")
            if again == ("corpus", "ls") and (b"note.txt" not in done.stdout or b"learnt: 0 " in done.stdout):
                raise Crashed(f"lost: {done.stdout.decode()}")
        if left := [path for path in home.rglob("*.tmp") if path.stat().st_size > 10_000_000]:
            raise Crashed(f"left behind: {left}")

    return f"{'corpus' if adds else 'generate'} after {after_s:.2f} s", run


_KINDS: dict[str, Callable[[random.Random], Made]] = {
    "streams": _streams,
    "interrupt": _interrupt,
    "limit": _limit,
    "kill": _kill,
}


def _started(arguments: tuple[str, ...], said: IO[bytes]) -> subprocess.Popen[bytes]:
    """The command, begun: what Python does before our first line is not ours to answer for."""
    process = subprocess.Popen(
        [sys.executable, "-c", BEGUN, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    process.stdout.read(1)
    return process


def _judge(code: int, said: bytes, is_chat: bool) -> None:
    """Raises Refused, or Crashed for what is no end of a command line."""
    text = said.decode(errors="replace")
    check_end(code, text, is_chat=is_chat)
    if code:
        raise Refused(text or f"code {code}, and nothing that it could be said to")


assert os.name == "posix", "the limits and signals of POSIX are what is tried here"
