"""A checked request for one generation, and the checks of the arguments of the Python API; the errors name the fix."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from edgespec.config.options import GenerateOptions, Sampling
from edgespec.config.values import DrafterName, RuleName
from edgespec.engines.base import EngineFacts
from edgespec.errors import CapabilityError, ConfigError, EdgespecError, PromptError, shown
from edgespec.reports import RoundRecord
from edgespec.sampling.sampler import Sampler
from edgespec.types import TokenIds

Given = TypeVar("Given")
Returned = TypeVar("Returned")
Params = ParamSpec("Params")


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request for one generation. `on_round` is called after every round, before its tokens are emitted."""

    prompt_ids: TokenIds
    sampler: Sampler
    options: GenerateOptions
    drafter: DrafterName
    rule: RuleName
    on_round: Callable[[RoundRecord], None] | None
    predicted_ids: TokenIds | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What of its schema or grammar is not kept."""
        return () if self.sampler.constraint is None else self.sampler.constraint.facts.notes


def of_kind(name: str, given: Given, kind: type[Given], error: type[EdgespecError]) -> Given:
    """`given` if it is a `kind`; else raises `error`, which for a dict says how to convert it."""
    if not isinstance(given, kind):
        fix = f": write {kind.__name__}(**{name})" if isinstance(given, dict) else ""
        raise error(f"{name} must be {kind.__name__}, got {type(given).__name__}{fix}")
    return given


def checked_ids(given: object, vocabulary_size: int) -> TokenIds:
    """`given` as token ids [n].

    Raises PromptError unless it is a sequence of whole numbers within the vocabulary (bool is not a number).
    """
    listed = given.tolist() if isinstance(given, np.ndarray) and given.ndim == 1 else given
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes | bytearray):
        kind = f"an array of shape {given.shape}" if isinstance(given, np.ndarray) else shown(given)
        raise PromptError(f"a prompt must be text or a list of token ids, got {kind}")
    wrong = [kind for kind in set(map(type, listed)) if kind is bool or not issubclass(kind, int | np.integer)]
    if wrong:
        names = ", ".join(sorted(kind.__name__ for kind in wrong))
        raise PromptError(f"a prompt's token ids must be whole numbers, got {names}")
    if listed and not (min(listed) >= 0 and max(listed) < vocabulary_size):
        raise PromptError(f"a prompt token id is outside the vocabulary 0..{vocabulary_size - 1}")
    return np.array(listed, np.int32)


def checked_chat(messages: object) -> Sequence[Mapping[str, Any]]:
    """`messages` if it is a list of mappings, else raises PromptError; their content is checked when rendered."""
    if isinstance(messages, str):
        raise PromptError(
            'messages must be a list such as [{"role": "user", "content": "..."}], got a str: wrap it in a message'
        )
    return _objects("messages", messages, '{"role": "user", "content": "..."}')


def checked_tools(tools: object) -> Sequence[Mapping[str, Any]] | None:
    """`tools` if it is None or a list of mappings, else raises PromptError."""
    return None if tools is None else _objects("tools", tools, '{"type": "function", "function": {"name": "..."}}')


def _objects(name: str, given: object, example: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(given, Sequence) or not all(isinstance(each, Mapping) for each in given):
        raise PromptError(f"{name} must be a list such as [{example}], got {type(given).__name__}")
    return given


def require_writer(facts: EngineFacts) -> None:
    """Raises CapabilityError for a model that gives embeddings only."""
    if not facts.writes:
        raise CapabilityError(
            f"{facts.architecture} models read a whole text at once: they give embeddings, and write no text. Load one "
            "that writes token by token, such as a Llama or Qwen"
        )


def refuses_unknown_keywords(method: Callable[Params, Returned]) -> Callable[Params, Returned]:
    """Decorator: a keyword that `method` does not have raises ConfigError, which names the class that has it."""
    known = tuple(name for name in inspect.signature(method).parameters if name != "self")
    owners = {name: kind.__name__ for kind in (Sampling, GenerateOptions) for name in kind.__dataclass_fields__}

    @wraps(method)
    def checked(*args: Params.args, **kwargs: Params.kwargs) -> Returned:
        for name in kwargs:
            if name not in known:
                owner = owners.get(name)
                part = {"Sampling": "sampling", "GenerateOptions": "options"}.get(owner or "")
                fix = f"write {part}={owner}({name}=...)" if owner else f"known: {', '.join(known)}"
                raise ConfigError(f"{method.__name__}() has no keyword {name!r}: {fix}")
        return method(*args, **kwargs)

    return checked
