"""A chat template that the user gives, for a model whose own is broken or missing."""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import ConfigError

_MOST_CHARACTERS = 1 << 20  # published templates have a few ten thousand


def read_template(path: Path | None) -> str | None:
    """The Jinja source in a file; None where none is given. Raises ConfigError for a file that is no chat template."""
    if path is None:
        return None
    try:
        with path.open(encoding="utf-8") as file:
            source = file.read(_MOST_CHARACTERS + 1)
    except (OSError, ValueError) as exc:  # ValueError: no UTF-8, a NUL in the name
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"chat-template-file: {path} cannot be read: {reason}") from exc
    if len(source) > _MOST_CHARACTERS:
        raise ConfigError(f"chat-template-file: {path} has more than {_MOST_CHARACTERS} characters: no chat template")
    from edgespec.chat.template import template_problem

    problem = template_problem(source)
    if problem is None and "messages" not in source:
        problem = "it does not mention 'messages', which a template writes as text"
    if problem is not None:
        raise ConfigError(f"chat-template-file: {path} is not a Jinja chat template: {problem}")
    return source
