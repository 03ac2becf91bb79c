"""Names a draft model for a GGUF that has none: one that lies beside it, or a small model of its family."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from edgespec.engines import disk_cache
from edgespec.errors import ModelFileError
from edgespec.formats.gguf.header import GgufHeader, read_header
from edgespec.formats.manifest import ModelPair

# A draft pays where its passes are much cheaper than the target's; below half a gigabyte a target is too cheap itself.
_LEAST_TARGET_BYTES, _LEAST_RATIO = 500 << 20, 4
_MOST_NEIGHBOURS = 20  # headers that are read: each holds a whole vocabulary
_COMPARED_TOKENS = 4096
# Pattern of "architecture name tokenizer", smallest model of that family and its size as a Q8_0 GGUF.
_FAMILIES = (
    (r"\bsmollm2\b", "SmolLM2-135M-Instruct", 145 << 20),
    (r"^qwen3\b", "Qwen3-0.6B", 640 << 20),
    (r"^qwen2\b", "Qwen2.5-0.5B-Instruct", 530 << 20),
    (r"^gemma3\b", "gemma-3-270m-it", 290 << 20),
    (r"^llama\b.*\bllama-bpe$", "Llama-3.2-1B-Instruct", 1320 << 20),
)


def new_draft_hint(pair: ModelPair) -> str | None:
    """`draft_hint`, the first time that it is asked for this file on this machine; None from then on."""
    path = pair.files["target"].path
    key = disk_cache.key_of("draft hint", disk_cache.file_key(path))
    if disk_cache.get("hints", key, disk_cache.CHECKED_FILE) is not None:
        return None
    disk_cache.put("hints", key, {"path": str(path)})
    return draft_hint(pair)


def draft_hint(pair: ModelPair) -> str | None:
    """One line that says which draft would speed this pair up; None where it has one or a draft would not gain."""
    file = pair.files["target"]
    if pair.draft is not None or pair.heads or file.engine != "llamacpp":
        return None
    try:
        num_bytes = file.path.stat().st_size
        if num_bytes < _LEAST_TARGET_BYTES:
            return None
        header = read_header(file.path)
        neighbour = _neighbour(file.path, header, num_bytes)
    except (OSError, ModelFileError):
        return None
    if neighbour is not None:
        return f"{pair.name} has no draft model; {neighbour.name} beside it fits: -md {shlex.quote(str(neighbour))}"
    family = _family(header, num_bytes)
    if family is None:
        return None
    return f"{pair.name} has no draft model; a GGUF of {family} usually makes it faster: -md FILE"


def _neighbour(path: Path, header: GgufHeader, num_bytes: int) -> Path | None:
    """The largest .gguf in the same folder that is small enough and has the same vocabulary."""
    sizes = {each: each.stat().st_size for each in path.parent.glob("*.gguf") if each != path and each.is_file()}
    small = sorted((each for each in sizes if sizes[each] * _LEAST_RATIO <= num_bytes), key=lambda each: -sizes[each])
    for each in small[:_MOST_NEIGHBOURS]:
        try:
            if _same_vocabulary(header, read_header(each)):
                return each
        except (OSError, ModelFileError):
            continue
    return None


def _same_vocabulary(one: GgufHeader, other: GgufHeader) -> bool:
    """By kind and first tokens only: loading compares all of them, and names the first that differs."""
    keys = ("tokenizer.ggml.model", "tokenizer.ggml.pre")
    if any(one.metadata.get(key) != other.metadata.get(key) for key in keys) or not one.tokens:
        return False
    return list(one.tokens[:_COMPARED_TOKENS]) == list(other.tokens[:_COMPARED_TOKENS])


def _family(header: GgufHeader, num_bytes: int) -> str | None:
    names = (header.metadata.get(key, "") for key in ("general.name", "general.basename", "tokenizer.ggml.pre"))
    described = " ".join((header.architecture, *map(str, names))).lower()
    for pattern, name, draft_bytes in _FAMILIES:
        if re.search(pattern, described):
            return name if draft_bytes * _LEAST_RATIO <= num_bytes else None
    return None
