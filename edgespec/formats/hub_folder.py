"""The small files of a model folder as Hugging Face stores it: JSON objects and the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError

CHAT_TEMPLATE = "chat_template.jinja"
FOLDER_FIX = "give a folder as Hugging Face models are stored"


def read_json(path: Path, *, fix: str = FOLDER_FIX) -> dict[str, Any]:
    """One JSON object. Raises ModelFileError, which names the `fix`, for anything else and for a missing file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFileError(f"{path} is missing: {fix}") from error
    except (OSError, ValueError, RecursionError) as error:  # ValueError: JSON, UTF-8, an integer without end
        raise ModelFileError(f"{path} cannot be read as JSON: {error}; {fix}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} holds a {type(value).__name__}, an object was expected; {fix}")
    return value


def read_optional_json(path: Path, *, fix: str = FOLDER_FIX) -> dict[str, Any]:
    """`read_json`, but an empty object where there is no such file."""
    return read_json(path, fix=fix) if path.is_file() else {}


def chat_template(folder: Path, settings: Mapping[str, Any], *, fix: str = FOLDER_FIX) -> str | None:
    """From chat_template.jinja, else from `settings` (tokenizer_config.json); of several named ones the default.

    Raises ModelFileError for a file that cannot be read.
    """
    path = folder / CHAT_TEMPLATE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(f"{path} cannot be read: {error}; {fix}") from error
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default", next(iter(named.values()), None))
    return found if isinstance(found, str) else None
