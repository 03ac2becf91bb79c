"""Writes the manifest of an exported pair: licence, recommended sampling, and the files with checksums."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from edgespec.config.options import Sampling
from edgespec.config.values import is_number
from edgespec.errors import SamplingError
from edgespec.formats.manifest import MANIFEST, MANIFEST_FORMAT
from edgespec.platform.files import write_atomically

# name in generation_config.json -> name in a manifest
SAMPLING_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}


def card_licence(folder: Path) -> str:
    """The licence named in a model card's front matter; empty if there is none."""
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    matter = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
    found = {key: _entry(matter.group(1), key) for key in ("license", "license_name")} if matter else {}
    if found.get("license", "") in ("", "other"):
        return found.get("license_name", "") or found.get("license", "")
    return found["license"]


def _entry(matter: str, key: str) -> str:
    """A scalar of YAML front matter, or the first item of a list."""
    found = re.search(rf"^{key}:[ \t]*(?:\n[ \t]*-[ \t]*)?([^\n]*)$", matter, re.MULTILINE)
    return found.group(1).strip().strip("'\"[]") if found else ""


def recommended_sampling(folder: Path) -> dict[str, float]:
    """Sampling settings of generation_config.json, by their name in `Sampling`; empty if it does not sample."""
    try:
        settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(settings, dict) or not settings.get("do_sample"):
        return {}
    chosen = {ours: settings[theirs] for theirs, ours in SAMPLING_NAMES.items() if is_number(settings.get(theirs))}
    return {key: value for key, value in chosen.items() if _is_allowed(key, value)}


def _is_allowed(key: str, value: float) -> bool:
    try:
        Sampling(**{key: value})  # type: ignore[arg-type]
    except SamplingError:
        return False
    return True


def write_manifest(folder: Path, values: Mapping[str, Any]) -> Path:
    """Write `values` atomically as the folder's manifest. Raises StateError if that fails."""
    path = folder / MANIFEST
    write_atomically(path, tomli_w.dumps({"format": MANIFEST_FORMAT, **values}))
    return path
