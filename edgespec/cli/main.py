"""The `edgespec` command: finds the subcommand, and turns every failure into one line and an exit code.

Exit codes: 0 done, 1 the engine, a download or a file failed, or a check found a difference, 2 bad input, 130
interrupted, 141 the reader of our output went away.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from edgespec import __version__
from edgespec.cli import as_typed, has_escapes, help_all_option, shows_all
from edgespec.cli.terminal import complain, note, report_progress, set_verbosity, verbosity
from edgespec.errors import CapabilityError, EdgespecError, UsageError, VocabularyMismatch, spoken_on_the_command_line
from edgespec.installation import cause_of, has_memory_limit

BAD_INPUT, FAILED, INTERRUPTED, BROKEN_PIPE = 2, 1, 130, 141
# Modules are imported when their command runs: `edgespec --help` must not pay for numpy, jinja2 or an engine.
_EVERYDAY = {
    "chat": "Talk to a model",
    "run": "Answer one prompt; without one, chat",
    "serve": "A page in the browser, and the APIs of OpenAI, Anthropic and Ollama",
    "ls": "List the models that are here; --all: those to pull, too",
    "show": "What a model is, can do and takes",
    "pull": "Get a model, with a draft that fits it",
    "plan": "The memory that a model would take, and whether it fits",
    "bench": "Measure the speedup on this machine",
    "export": "Convert a Hugging Face model or a GGUF",
    "doctor": "Whether all is well here, and how to get what is missing",
}
_MORE = {
    "drafts": "Rank the draft models for a target",
    "race": "Watch plain and speculative decoding side by side",
    "verify": "Check that speculation changes no token",
    "add": "Give a model file or folder that is here a name",
    "rm": "Remove a pulled or added model",
    "corpus": "Your own texts to draft from, and what --learn stored",
    "rpc-server": "Lend this machine's devices to a model on another one",
}
COMMANDS = {**_EVERYDAY, **_MORE}
ALIASES = {"generate": "run", "list": "ls", "remove": "rm", "pair": "drafts"}
# Short commands that share a module.
_HOMES = dict.fromkeys(("ls", "show", "plan", "pull", "add", "rm", "drafts"), "models") | {"verify": "bench"}
_RAISE_LIMITS = "Raise its limits (ulimit -v, ulimit -d), or close other programs"
# What writing to a pipe that nobody reads any more fails with.
_READER_GONE = (errno.EPIPE, errno.EINVAL) if os.name == "nt" else (errno.EPIPE,)
_NO_MEMORY = f"this process needs more memory than it may have. {_RAISE_LIMITS}"
_COMPLETE = "_EDGESPEC_COMPLETE"  # set by the shell whose Tab key was pressed
_ANSWERS = "edgespec run MODEL 'TEXT' answers one prompt"
_EPILOG = """\b
First steps:  edgespec chat          or  edgespec run MODEL "Hello"
Models:       edgespec ls --all      then  edgespec pull NAME
Completion:   eval "$(_EDGESPEC_COMPLETE=bash_source edgespec)" in ~/.bashrc"""


class CommandGroup(click.Group):
    """A group that knows its commands by name and reports errors in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        if cmd_name not in COMMANDS:
            return None
        if has_memory_limit():  # numpy's OpenBLAS needs 32 MiB for each of its threads, or ends the process
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        home = _HOMES.get(cmd_name)
        module = importlib.import_module(f"edgespec.cli.{home or cmd_name.replace('-', '_')}")
        command: click.Command = getattr(module, cmd_name if home else "command")
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] = ALIASES.get(args[0], args[0])
        if name not in COMMANDS and not name.startswith("-"):
            from edgespec.config.table import did_you_mean

            known = did_you_mean(name, (*COMMANDS, *ALIASES)) or f"; known: {', '.join(COMMANDS)}"
            raise click.UsageError(f"no such command '{name}'{known}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections = {"Commands": _EVERYDAY} | ({"More": _MORE} if shows_all(ctx) else {})
        for title, commands in sections.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(max(map(len, COMMANDS))), text) for name, text in commands.items()])

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **extra: Any) -> Any:
        """Run and leave the process, as click's own does but for errors, and arguments, which may hold * and %.

        A reader of our output that went away is 141, where click would leave with 1.
        """
        given, name = sys.argv[1:] if args is None else list(args), prog_name or "edgespec"
        extra.setdefault("color", None if has_escapes() else False)
        _make_streams_tolerant()
        if instruction := os.environ.get(_COMPLETE):
            from click.shell_completion import shell_complete

            sys.exit(shell_complete(self, {}, name, _COMPLETE, instruction))
        logger = logging.getLogger("edgespec")
        if not any(isinstance(handler, _Notes) for handler in logger.handlers):
            logger.addHandler(_Notes(logging.INFO))
        logger.setLevel(logging.INFO)
        try:
            with spoken_on_the_command_line():
                code = self._run(name, given, **extra)
            sys.stdout.flush()  # here and not at exit, where a full disk would go unnoticed or end in a traceback
        except (KeyboardInterrupt, EOFError, click.Abort):
            code = INTERRUPTED
            click.echo("\ninterrupted", err=True)
        except click.ClickException as exc:
            code = _report(describe(exc), BAD_INPUT)
        except EdgespecError as exc:
            code = _report(as_typed(exc), exit_code(exc))
        except SystemExit as exc:
            if not isinstance(exc.__context__, BrokenPipeError):
                raise
            code = BROKEN_PIPE  # rich, which prints the tables, leaves with 1
        except OSError as exc:
            said = f"{exc.filename or 'output'}: {exc.strerror or exc}"
            if exc.errno in _READER_GONE and exc.filename is None:
                code = BROKEN_PIPE
            else:
                code = _report(_NO_MEMORY if exc.errno == errno.ENOMEM else said, FAILED)
        except MemoryError:  # nothing may be imported here
            code = _report(_NO_MEMORY, FAILED)
        except Exception as exc:
            if not (_is_for_want_of_memory(exc) and has_memory_limit()):
                raise
            needs = "a library needs more memory than this process may have"
            code = _report(f"{needs}: {cause_of(exc)}. {_RAISE_LIMITS}", FAILED)
        _let_go_of_output()
        sys.exit(code if isinstance(code, int) else 0)

    def _run(self, name: str, args: list[str], **extra: Any) -> Any:
        try:
            with self.make_context(name, args, **extra) as context:
                return self.invoke(context)
        except click.exceptions.Exit as exc:
            return exc.exit_code


class _Notes(logging.Handler):
    """Shows what the library logs: warnings always, what it is busy with while the user waits or with --verbose."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.levelno >= logging.WARNING or verbosity() == "verbose":
            note(f"note: {message}")
        else:
            report_progress(message)


@click.group(
    "edgespec",
    cls=CommandGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EPILOG,
)
@click.version_option(__version__, "-V", "--version", message="edgespec %(version)s", help="Show the version")
@help_all_option("Show all commands")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run language models on this machine, faster through speculative decoding."""
    set_verbosity("normal")
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> NoReturn:
    if None in (sys.stdin, sys.stdout, sys.stderr):
        sys.exit("error: a standard stream is closed: give it /dev/null")
    cli.main()
    raise AssertionError("the group's main leaves the process")


def exit_code(error: EdgespecError) -> int:
    """2 for what the caller can change in the input, 1 for what went wrong inside."""
    return BAD_INPUT if isinstance(error, (UsageError, VocabularyMismatch, CapabilityError)) else FAILED


def describe(error: click.ClickException) -> str:
    """click's message in one line; an unknown option names the nearest known one."""
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        from edgespec.config.table import did_you_mean

        known = [flag for p in error.ctx.command.get_params(error.ctx) for flag in (*p.opts, *p.secondary_opts)]
        flags = [flag for flag in known if flag.startswith("-")]
        hint = did_you_mean(error.option_name, flags) or f"; see {error.ctx.command_path} --help"
        if error.option_name in ("-p", "--prompt"):
            hint = f"; {_ANSWERS}"
        return f"no such option '{error.option_name}'{hint}"
    message = error.format_message().rstrip(".")
    if isinstance(error, click.UsageError) and error.ctx is not None and "unexpected extra argument" in message:
        message += f"; {_ANSWERS}" if error.ctx.info_name == "chat" else ""
    if isinstance(error, click.BadOptionUsage) and error.option_name in ("--think", "--thinking"):
        message += "; --no-thinking turns it off"
    return message[:1].lower() + message[1:]


def _is_for_want_of_memory(exc: BaseException) -> bool:
    """Whether too little memory explains it: no thread could be started, or importing a module failed in any way."""
    if isinstance(exc, RuntimeError) and "start new thread" in str(exc):
        return True
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(exc.__traceback__))
    return isinstance(exc, ImportError) or any(file.startswith("<frozen importlib") for file in files)


def _report(message: str, code: int) -> int:
    with contextlib.suppress(OSError):  # stderr is gone; the exit code remains
        complain(message)
    return code


def _let_go_of_output() -> None:
    """The interpreter flushes its streams once more at exit: what cannot be written goes nowhere then."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


def _make_streams_tolerant() -> None:
    """A terminal that lacks a character shows a substitute instead of ending the program.

    Files and pipes get UTF-8, which is what edgespec reads, and not the 256 characters of Windows' own encoding.
    """
    is_own = os.name == "nt" and "PYTHONIOENCODING" not in os.environ
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8" if is_own and not stream.isatty() else None, errors="replace")
