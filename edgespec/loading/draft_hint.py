"""Names a draft model for a GGUF that has none: one that lies beside it, or a small model of its family."""

from __future__ import annotations

import re
from pathlib import Path

from edgespec.errors import ModelFileError
from edgespec.formats.gguf.gemma4_drafter import TARGET as GEMMA4
from edgespec.formats.gguf.header import GgufHeader, read_header
from edgespec.formats.gguf.kind import has_mtp, may_have_mtp
from edgespec.formats.manifest import ModelPair
from edgespec.installation import quoted
from edgespec.loading.catalogue import entries
from edgespec.loading.registry import is_known
from edgespec.platform import disk_cache

# A draft pays where its passes are much cheaper than the target's; below half a gigabyte a target is too cheap itself.
_LEAST_TARGET_BYTES, _LEAST_RATIO = 500 << 20, 4
_MOST_NEIGHBOURS = 20  # headers that are read: each holds a whole vocabulary
# Pattern of "architecture name tokenizer", and the smallest model of that family in the catalogue.
_FAMILIES = (
    (r"\bsmollm2\b", "smollm2-135m"),
    (r"^qwen3\b", "qwen3-0.6b"),
    (r"^qwen2\b", "qwen2.5-0.5b"),
    (r"^gemma3\b", "gemma-3-270m"),
    (r"^llama\b.*\bllama-bpe$", "llama-3.2-1b"),
)


def new_draft_hint(pair: ModelPair) -> str | None:
    """`draft_hint`, the first time that it is asked for this file on this machine; None from then on."""
    path = pair.files["target"].path
    key = disk_cache.key_of("draft hint", disk_cache.file_key(path))
    if disk_cache.is_marked("hints", key):
        return None
    disk_cache.mark("hints", key, path)
    return draft_hint(pair)


def draft_hint(pair: ModelPair) -> str | None:
    """One line that says which draft would speed this pair up; None where it has one or a draft would not gain."""
    file = pair.files["target"]
    if pair.draft is not None or pair.heads or not file.is_gguf:
        return None
    try:
        num_bytes = file.path.stat().st_size
        if num_bytes < _LEAST_TARGET_BYTES:
            return None
        header = read_header(file.path)
        if has_mtp(header):
            return None
        neighbour = _neighbour(file.path, header, num_bytes)
    except (OSError, ModelFileError):
        return None
    if neighbour is not None:
        flag = f"-md {quoted(str(neighbour))}"
        return f"{pair.name} has no draft model; {neighbour.name} in the same folder fits: {flag}"
    if may_have_mtp(header):
        return (
            f"{pair.name} has no draft model; GGUF files of such models that were converted with their multi-token "
            "prediction layer (mostly named MTP) draft for themselves, and the layer alone (mtp-*.gguf) drafts with -md"
        )
    if header.architecture == GEMMA4:
        return (
            f"{pair.name} has no draft; the drafter that Google trained for it (mtp-*.gguf, converted from "
            "google/gemma-4-*-it-assistant) drafts with -md"
        )
    family = _family(header, num_bytes)
    if family is None:
        return None
    get = "" if is_known(family) else f"edgespec pull {family}, then "
    return f"{pair.name} has no draft model; {family} usually makes it faster: {get}-md {family}"


def _neighbour(path: Path, header: GgufHeader, num_bytes: int) -> Path | None:
    """The largest .gguf in the same folder that is small enough and has the same vocabulary."""
    sizes = {each: each.stat().st_size for each in path.parent.glob("*.gguf") if each != path and each.is_file()}
    small = sorted((each for each in sizes if sizes[each] * _LEAST_RATIO <= num_bytes), key=lambda each: -sizes[each])
    for each in small[:_MOST_NEIGHBOURS]:
        try:
            if header.shares_vocabulary(read_header(each)):
                return each
        except (OSError, ModelFileError):
            continue
    return None


def _family(header: GgufHeader, num_bytes: int) -> str | None:
    names = (header.metadata.get(key, "") for key in ("general.name", "general.basename", "tokenizer.ggml.pre"))
    described = " ".join((header.architecture, *map(str, names))).lower()
    for pattern, name in _FAMILIES:
        if re.search(pattern, described):
            return name if entries()[name].guessed_bytes() * _LEAST_RATIO <= num_bytes else None
    return None
