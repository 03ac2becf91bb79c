"""All exceptions that edgespec raises. Imports nothing of edgespec.

EdgespecError
├── UsageError                  the caller's input cannot be used; the command line exits with code 2
│   ├── ConfigError             unknown or contradictory option; bad value in a flag, the environment or a config file
│   ├── SamplingError           a sampling setting out of range
│   ├── PromptError             empty prompt, or messages that cannot be shown
│   │   └── PromptTooLong       a prompt longer than the context
│   ├── ModelNotFound           no such registry name or file
│   └── ModelFileError          the file is not a usable model: truncated, corrupt or unsupported
├── VocabularyMismatch          target and draft do not share token ids
├── DownloadError               a file could not be fetched whole: network, hub, checksum; finished parts are kept
├── CapabilityError             the engine, model or build does not support the request
├── EngineError                 a valid call failed in the engine
│   ├── BatchError              rows that no engine accepts: a bug in the caller, never passed to the library
│   ├── ContextFull             the KV cache is full
│   ├── Unreachable             an RPC server does not answer, or was lost in a pass; the next pass connects again
│   └── Cancelled               `cancel()` was called during a pass; the cache is as before the pass
└── StateError                  a saved state, conversation or cache of another model; a closed model; a file that
                                cannot be written
    └── Busy                    another generation uses the model, and waiting would deadlock or exceed the limit
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

# The names in Python of options that messages name by their flags; the table of options says them.
PYTHON_NAMES: dict[str, str] = {}
_SWITCHES: set[str] = set()
_CHOICES: set[str] = set()  # options whose values are names
_FLAG = re.compile(
    r"edgespec [a-z][^.;:)]*"  # a command, which is for the command line
    r"|(?:-[a-z]+/)?--(no-)?([a-z]+(?:-[a-z]+)*)(?: (?!or\b|and\b|to\b|is\b|with\b)([a-z0-9-]+)\b)?"
)
_speaks_cli = False


def name_option(key: str, name: str, *, is_switch: bool, is_name: bool) -> None:
    """Have messages for Python say `name` for the flag --`key`."""
    PYTHON_NAMES[key] = name
    (_SWITCHES if is_switch else _CHOICES if is_name else set()).add(key)


@contextmanager
def spoken_on_the_command_line() -> Iterator[None]:
    """Within it errors name options as flags, as they are written; elsewhere as Python's keywords."""
    global _speaks_cli
    before, _speaks_cli = _speaks_cli, True
    try:
        yield
    finally:
        _speaks_cli = before


def for_python(text: str) -> str:
    """A message that names options by their flags, with Python's names for them."""

    def keyword(found: re.Match[str]) -> str:
        off, flag, value = found.groups()
        if flag not in PYTHON_NAMES:  # or None: a command
            return found[0]
        name, rest = PYTHON_NAMES[flag], f" {value}" if value else ""
        if flag in _SWITCHES:
            return f"{name}={not off}{rest}"
        return f"{name}={value!r}" if value and flag in _CHOICES else f"{name}={rest or '...'}"

    text = _FLAG.sub(keyword, text)
    first = re.split(r"[ :]", text, maxsplit=1)[0]  # which may be an option that has a wrong value
    return PYTHON_NAMES.get(first, first) + text[len(first) :]


class EdgespecError(Exception):
    """Base class. The message names what was given, what is allowed, and the fix."""

    def __str__(self) -> str:
        return self.on_the_command_line if _speaks_cli else for_python(super().__str__())

    @property
    def on_the_command_line(self) -> str:
        """The message for who started a program with flags, such as the server."""
        return super().__str__()


def shown(value: object, most: int = 80) -> str:
    """repr of `value` for an error message, cut after `most` characters."""
    try:
        text = repr(value)
    except Exception as exc:  # any repr may fail; Python itself refuses integers of over 4300 digits
        return f"a {type(value).__name__} that cannot be shown ({type(exc).__name__})"
    return text if len(text) <= most else f"{text[:most]}..."


def shown_path(path: object) -> str:
    """repr of a path for an error message, whole unless it is very long: its end says most."""
    text = repr(str(path))
    return text if len(text) <= 400 else f"{text[:100]}...{text[-297:]}"


class UsageError(EdgespecError):
    pass


class ConfigError(UsageError):
    pass


class SamplingError(UsageError):
    pass


class PromptError(UsageError):
    pass


class PromptTooLong(PromptError):
    """`num_tokens` of the prompt do not fit `context_length`."""

    def __init__(self, message: str, num_tokens: int, context_length: int) -> None:
        super().__init__(message)
        self.num_tokens, self.context_length = num_tokens, context_length


class ModelNotFound(UsageError):
    pass


class ModelFileError(UsageError):
    pass


class VocabularyMismatch(EdgespecError):
    pass


class DownloadError(EdgespecError):
    pass


class CapabilityError(EdgespecError):
    pass


class EngineError(EdgespecError):
    pass


class BatchError(EngineError):
    pass


class ContextFull(EngineError):
    pass


class Unreachable(EngineError):
    pass


class Cancelled(EngineError):
    pass


class StateError(EdgespecError):
    pass


class Busy(StateError):
    """Another generation uses the model, and waiting for it would deadlock or exceed `max_wait_s`."""
