"""All exceptions that edgespec raises. Imports nothing.

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


class EdgespecError(Exception):
    """Base class. The message names what was given, what is allowed, and the fix."""


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
