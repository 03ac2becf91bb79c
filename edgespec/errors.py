"""Every error that edgespec raises on purpose. Imports nothing.

EdgespecError
├── UsageError                  the caller's input cannot be used; the command line exits with code 2
│   ├── ConfigError             unknown or contradictory option, bad value in flag, environment or config file
│   ├── SamplingError           a sampling setting out of range
│   ├── PromptError             empty prompt, or longer than the context
│   ├── ModelNotFound           no such registry name or file
│   └── ModelFileError          a file that is not a usable model: truncated, corrupt, unsupported
├── VocabularyMismatch          target and draft do not share token ids
├── CapabilityError             the engine, model or build cannot do what was asked
├── EngineError                 the engine failed in a call that was valid
│   ├── BatchError              rows that no engine accepts; a bug in the caller, never passed on to the library
│   ├── ContextFull             no room left in the KV cache
│   └── Cancelled               `cancel()` was called during a pass; the cache is as before the pass
└── StateError                  a saved state, conversation or cache that does not belong here; a closed model; a file
                                that cannot be written
    └── Busy                    another generation has the model's turn, and waiting for it cannot end or is not wanted
"""

from __future__ import annotations


class EdgespecError(Exception):
    """Root of the tree. The message says what was given, what is allowed, and the fix."""


def shown(value: object, most: int = 80) -> str:
    """`value` as an error message quotes it: its repr, cut after `most` characters."""
    try:
        text = repr(value)
    except Exception as exc:  # whatever was given: of an integer of over 4300 digits Python makes no text
        return f"a {type(value).__name__} that cannot be shown ({type(exc).__name__})"
    return text if len(text) <= most else f"{text[:most]}..."


class UsageError(EdgespecError):
    pass


class ConfigError(UsageError):
    pass


class SamplingError(UsageError):
    pass


class PromptError(UsageError):
    pass


class ModelNotFound(UsageError):
    pass


class ModelFileError(UsageError):
    pass


class VocabularyMismatch(EdgespecError):
    pass


class CapabilityError(EdgespecError):
    pass


class EngineError(EdgespecError):
    pass


class BatchError(EngineError):
    pass


class ContextFull(EngineError):
    pass


class Cancelled(EngineError):
    pass


class StateError(EdgespecError):
    pass


class Busy(StateError):
    """Another generation has the model's turn, and waiting for it cannot end or is not wanted."""
