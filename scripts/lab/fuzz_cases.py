"""What the cases of `fuzz.py` have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from edgespec.errors import EdgespecError

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
Known = dict[str, str]
"""What undamaged models say, by name."""


class Garbage(Exception):
    """It ended well, and what it said is wrong."""


class Crashed(Exception):
    """A process that was started ended in another way than by an answer or one line."""


class Refused(EdgespecError):
    """The command line refused, in one line."""


@dataclass(frozen=True)
class Case:
    """`run` gets an empty folder of its own and ends well, or raises what the verdict is made from."""

    label: str
    run: Callable[[Path], None]


def command_line(arguments: Sequence[str], *, allowed: Sequence[int] = (0,), stdin: str = "") -> int:
    """Run a command in this process; its exit code. Raises Refused for one line of error, Crashed for anything else."""
    from edgespec.cli.main import cli

    done = CliRunner().invoke(cli, list(arguments), input=stdin)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    check_end(done.exit_code, done.stderr, is_chat="chat" in arguments)
    if done.exit_code not in allowed:
        raise Refused(done.stderr or f"code {done.exit_code}")
    return done.exit_code


def check_end(code: int, said: str, *, is_chat: bool = False) -> None:
    """Raises Crashed where a program ended in another way than the command line may."""
    if "Traceback" in said or "Exception ignored" in said:
        raise Crashed(f"code {code}: {said[-2000:]}")
    if code not in (0, 1, 2, 130, 141):
        raise Crashed(f"code {code}: {said[-500:]}")
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if len(errors) > 1 and not is_chat:
        raise Crashed(f"code {code}, {len(errors)} lines of error: {said[-500:]}")
