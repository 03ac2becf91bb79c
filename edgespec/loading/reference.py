"""What a user may name to get a model: a catalogue entry, a hub repository, or the address of one; with a quantisation.

`qwen3-8b`, `qwen3-8b:Q8_0`, `Qwen/Qwen3-8B-GGUF:Q4_K_M`, `https://huggingface.co/Qwen/Qwen3-8B-GGUF`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from edgespec.errors import ModelNotFound, shown
from edgespec.loading.catalogue import Entry, entries
from edgespec.loading.hub import REPO, endpoint

_HUBS = ("huggingface.co", "hf.co", "www.huggingface.co")
_NAME = re.compile(r"[^\W_]([\w.-]{0,98}[\w-])?")
MOST_NAME_BYTES = 200  # file systems allow 255, and parts are added to it
_RESERVED = re.compile(r"(con|prn|aux|nul|(com|lpt)\d)(\..*)?", re.IGNORECASE)  # Windows has devices of these names


@dataclass(frozen=True, slots=True)
class Reference:
    """A model to get: a catalogue `entry`, or a `repo` of the hub; `wanted` is a quantisation or file name or empty."""

    text: str
    entry: Entry | None
    repo: str
    wanted: str
    revision: str = ""

    @property
    def name(self) -> str:
        """The name that it gets on this machine."""
        base = (
            self.entry.name
            if self.entry
            else re.sub(r"[-_.]GGUF$", "", self.repo.rpartition("/")[2], flags=re.IGNORECASE)
        )
        suffix = re.sub(r"\.(gguf|onnx)$", "", self.wanted.rpartition("/")[2]).lower()
        return f"{base}-{suffix}" if suffix else base


def parse(text: str) -> Reference:
    """What `text` names. Raises ModelNotFound, with the nearest known name."""
    if "://" in text:
        return _from_address(text)
    text = without_hub(text)
    base, _, wanted = text.partition(":")
    if base in entries():
        entry = entries()[base]
        return Reference(text, entry, entry.repo, wanted, entry.revision)
    if REPO.fullmatch(base):
        return Reference(text, None, base, wanted)
    if base.lower() in entries():
        return parse(base.lower() + (f":{wanted}" if wanted else ""))
    near = difflib.get_close_matches(base.lower(), entries(), 3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ModelNotFound(
        f"{shown(text)} is not a known model: {hint}edgespec ls --all lists them; or give a hub repository such as "
        "Qwen/Qwen3-8B-GGUF:Q4_K_M"
    )


def without_hub(text: str) -> str:
    """`text` without the name of the hub in front, with which Ollama has it: hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M."""
    hub, _, rest = text.partition("/")
    return rest if hub.lower() in _HUBS else text


def check_name(name: str) -> str:
    """`name`, if a folder may be called so. Raises ModelNotFound."""
    if not _NAME.fullmatch(name) or _RESERVED.fullmatch(name):
        raise ModelNotFound(f"{shown(name)} is not a valid name: use letters, digits, '.', '_' and '-'")
    if len(name.encode()) > MOST_NAME_BYTES:
        raise ModelNotFound(
            f"{shown(name)} is too long for a folder: it has {len(name.encode())} bytes, at most {MOST_NAME_BYTES} are "
            "allowed"
        )
    return name


def _from_address(text: str) -> Reference:
    """ORG/NAME, and behind /blob/ or /resolve/ a revision and a file."""
    url = urlsplit(text)
    if url.hostname not in (*_HUBS, urlsplit(endpoint()).hostname):
        raise ModelNotFound(f"{text} is not on the hub ({endpoint()}): fetch the file yourself, then edgespec add FILE")
    parts = [unquote(part) for part in url.path.strip("/").split("/")]
    repo = "/".join(parts[:2])
    if not REPO.fullmatch(repo):
        raise ModelNotFound(
            f"{text} does not name a repository: give one, as in https://huggingface.co/Qwen/Qwen3-8B-GGUF"
        )
    is_file = len(parts) > 4 and parts[2] in ("blob", "resolve", "raw")
    revision = parts[3] if len(parts) > 3 and parts[2] in ("blob", "resolve", "raw", "tree") else ""
    return Reference(text, None, repo, "/".join(parts[4:]) if is_file else "", "" if revision == "main" else revision)
