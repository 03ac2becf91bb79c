"""Maps the pre-tokenizer of tokenizer.json to llama.cpp's name for the same one.

llama.cpp accepts a wrong name silently and tokenises wrongly, so anything that is not in these tables is rejected.
"""

from __future__ import annotations

from typing import Any

from edgespec.errors import ModelFileError

Tokenizer = dict[str, Any]
Stage = tuple[Any, ...]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS, _REST = r"|[^\r\n\p{L}\p{N}]?\p{L}+", r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD, _SLASHES = r"[^\r\n\p{L}\p{N}]?", r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = _CONTRACTIONS + _WORDS + r"|\p{N}" + _REST
LLAMA3 = _CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST
TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}" + _SLASHES
GPT_4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}" + _SLASHES
)
_BYTES_ONLY, _BYTES_AND_WORDS = ("ByteLevel", False), ("ByteLevel", True)
# Pre-tokenizer stages -> llama.cpp's name.
PRE_TOKENIZERS: dict[tuple[Stage, ...], str] = {
    (("Split", QWEN2, "Isolated"), _BYTES_ONLY): "qwen2",
    (("Split", LLAMA3, "Isolated"), _BYTES_ONLY): "llama-bpe",
    (_BYTES_AND_WORDS,): "gpt-2",
    (("Digits", True), _BYTES_AND_WORDS): "smollm",
    (("Split", TEKKEN, "Isolated"), _BYTES_ONLY): "tekken",
    (("Split", GPT_4O, "Isolated"), _BYTES_ONLY): "gpt-4o",
}
# With these, llama.cpp does not apply merges to a word that is a token.
IGNORE_MERGES = frozenset({"llama-bpe", "tekken"})
# With these, llama.cpp's own splitter takes combining marks for no part of a word.
SPLIT_AT_MARKS = frozenset({"tekken", "gpt-4o"})
SPACE = "\u2581"


def flatten(node: Any, list_key: str) -> list[dict[str, Any]]:
    """The stages of a nested Sequence, in order."""
    if node is None:
        return []
    if node.get("type") == "Sequence":
        return [stage for item in node.get(list_key, []) for stage in flatten(item, list_key)]
    return [node]


def _stage(node: dict[str, Any]) -> Stage:
    kind = node.get("type")
    if kind == "Split":
        behaviour = node.get("behavior", "Isolated")
        return kind, _pattern(node), behaviour if not node.get("invert") else f"{behaviour} inverted"
    if kind == "ByteLevel" and not node.get("add_prefix_space"):
        return kind, bool(node.get("use_regex", True))
    if kind == "Digits":
        return kind, bool(node.get("individual_digits"))
    return kind, str(node)


def _pattern(node: dict[str, Any]) -> str:
    pattern = node.get("pattern")
    return str(pattern.get("Regex", pattern.get("String"))) if isinstance(pattern, dict) else str(pattern)


def is_spm(tokenizer: Tokenizer) -> bool:
    """Whether this is SentencePiece-style BPE, in which unknown characters become byte tokens."""
    return bool(tokenizer.get("model", {}).get("byte_fallback"))


def pre_tokenizer_name(tokenizer: Tokenizer) -> str:
    """llama.cpp's name for a byte-level tokenizer's pre-tokenizer. Raises ModelFileError if it has none."""
    stages = tuple(_stage(node) for node in flatten(tokenizer.get("pre_tokenizer"), "pretokenizers"))
    name = PRE_TOKENIZERS.get(stages)
    if name is None:
        known = ", ".join(PRE_TOKENIZERS.values())
        raise ModelFileError(f"tokenizer.json splits text by {stages or None!r}, which is none of: {known}")
    normalisers = [node.get("type") for node in flatten(tokenizer.get("normalizer"), "normalizers")]
    if set(normalisers) - {"NFC"}:
        raise ModelFileError(f"tokenizer.json has the normalizers {normalisers}; allowed: none, NFC")
    if tokenizer.get("model", {}).get("ignore_merges") and name not in IGNORE_MERGES:
        allowed = ", ".join(sorted(IGNORE_MERGES))
        raise ModelFileError(f"tokenizer.json sets ignore_merges; llama.cpp does so for {allowed}, not for {name}")
    return name


def begins_with_space(tokenizer: Tokenizer) -> bool:
    """Whether an SPM tokenizer adds a leading space. Raises ModelFileError for unsupported normalizers."""
    normalisers = [_normaliser(node) for node in flatten(tokenizer.get("normalizer"), "normalizers")]
    splitters = flatten(tokenizer.get("pre_tokenizer"), "pretokenizers")
    replace, prepend = ("Replace", " ", SPACE), ("Prepend", SPACE)
    on_spaces = all(node.get("type") == "Split" and _pattern(node) == " " for node in splitters)
    if on_spaces and normalisers in ([prepend, replace], [replace]):
        return prepend in normalisers
    if not normalisers and len(splitters) == 1 and splitters[0].get("type") == "Metaspace":
        settings = splitters[0]
        scheme = settings.get("prepend_scheme", "always")
        if not settings.get("split", True) and settings.get("replacement") == SPACE:
            return bool(scheme != "never")
    raise ModelFileError(
        f"tokenizer.json handles spaces by {normalisers} and {splitters}; allowed: as Llama 2 and Mistral "
        "(leading space, spaces as \u2581), as Gemma (spaces as \u2581)"
    )


def _normaliser(node: dict[str, Any]) -> Stage:
    kind = node.get("type")
    if kind == "Prepend":
        return kind, node.get("prepend")
    if kind == "Replace":
        return kind, _pattern(node), node.get("content")
    return kind, str(node)
