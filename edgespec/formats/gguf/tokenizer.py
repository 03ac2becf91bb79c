"""The tokenizer entries of a GGUF -> tokenizer.json and its companions, and the pre-tokenizers that both sides know.

The reverse of `export.gguf.tokenizer`. Two kinds of vocabularies are known: byte-level BPE ("gpt2"), whose splitter
must have an equal among the library's, and SentencePiece's BPE ("llama"), whose merges follow from the scores.
llama.cpp accepts a wrong splitter silently and tokenises wrongly, so that any other is refused by name.

SentencePiece: llama.cpp joins the two neighbours whose text is the token with the best score, of equal scores the first
in the text, whatever kind of token it is. The library `tokenizers` joins the pair of the lowest rank. No merge ever
crosses the ends of a token that is made later, so a token is always made of the same two parts: those that are left
when its own text is split. With one rank for each token, in the order of scores, both do the same. Ranks are never
equal. Tokens of equal scores can have an order only if a text never decides between them otherwise.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from graphlib import CycleError, TopologicalSorter
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError
from edgespec.formats.gguf.header import GgufHeader, GgufNumbers, GgufStrings
from edgespec.vocabulary import retyped_names

Scores = Mapping[str, float]
Parts = Mapping[str, tuple[str, str]]


def merges_of(scores: Scores, alone: Set[str], unused: Set[str]) -> list[tuple[str, str]]:
    """Pairs of tokens in the order of their ranks.

    `scores`: of all tokens, by text; `alone`: tokens that are cut out of a text before anything is joined; `unused`:
    tokens that the library does not know. Raises ModelFileError for a vocabulary that it cannot use as llama.cpp does.
    """
    parts = {text: found for text in scores if text not in alone and (found := _parts(text, scores))}

    def is_made(text: str) -> bool:
        return (text in parts or len(text) == 1) and not any(name in text for name in alone)

    for text in filter(is_made, unused):
        raise refused(f"its token {text!r} is marked as unused, and llama.cpp makes it of text all the same")
    for text, pair in parts.items():
        if not scores.keys() >= {*pair} and is_made(text):
            raise refused(f"its token {text!r} has a letter that is no token")
    known = scores.keys() - unused
    ranked = sorted((text for text, pair in parts.items() if known >= {text, *pair}), key=lambda text: -scores[text])
    ordered: list[str] = []
    for _, texts in groupby(ranked, key=scores.__getitem__):
        equal = list(texts)
        ordered += _ordered(list(filter(is_made, equal)), parts, scores) if len(equal) > 1 else equal
    return [parts[text] for text in ordered]


def _parts(text: str, scores: Scores) -> tuple[str, str] | None:
    """The last two parts of which llama.cpp makes this text; None if it never does."""
    left, never = list(text), -math.inf
    joined = [scores.get(one + other, never) for one, other in pairwise(left)]
    while len(joined) > 1:
        at = joined.index(best := max(joined))
        if best == never:
            return None
        left[at : at + 2] = [left[at] + left[at + 1]]
        del joined[at]
        if at:
            joined[at - 1] = scores.get(left[at - 1] + left[at], never)
        if at < len(joined):
            joined[at] = scores.get(left[at] + left[at + 1], never)
    return (left[0], left[1]) if joined else None


def _ordered(texts: list[str], parts: Parts, scores: Scores) -> Iterable[str]:
    """Tokens of equal scores, each before those that begin with the part that it ends with.

    If joining one of them can lead to joining more before the others are looked at, it matters where they are.
    """
    if len(texts) < 2:
        return texts
    if len({*"".join(texts)}) == 1 and all(parts[text] == (text[:-1], text[-1]) for text in texts):
        return sorted(texts, key=len, reverse=True)  # a run of spaces (Llama 2, Phi) grows from its left to its longest
    ending = defaultdict(list)
    for text in texts:
        ending[parts[text][1]].append(text)
    before = {text: [other for other in ending[parts[text][0]] if other != text] for text in texts}
    goes_on = {part for text, pair in parts.items() for part in pair if scores[text] >= scores.get(part, math.inf)}
    try:
        if not goes_on.isdisjoint(texts):
            raise CycleError
        return list(TopologicalSorter(before).static_order())
    except CycleError as exc:
        raise refused(
            f"{len(texts)} of its tokens have equal scores, such as {texts[0]!r} and {texts[1]!r}, and llama.cpp joins "
            "those that come first in a text"
        ) from exc


def refused(reason: str) -> ModelFileError:
    return ModelFileError(
        f"the GGUF's vocabulary has no tokenizer.json that splits text as llama.cpp does: {reason}. Run the GGUF as it "
        "is, or export the folder of the original model"
    )


Tokenizer = dict[str, Any]
Stage = tuple[Any, ...]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS, _REST = r"|[^\r\n\p{L}\p{N}]?\p{L}+", r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD, _SLASHES = r"[^\r\n\p{L}\p{N}]?", r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = _CONTRACTIONS + _WORDS + r"|\p{N}" + _REST
QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}" + _REST.replace(r"\p{L}", r"\p{L}\p{M}")
SEED = _CONTRACTIONS + _WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = _CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST
TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}" + _SLASHES
GPT_4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}" + _SLASHES
)
_BYTES_ONLY, _BYTES_AND_WORDS = ("ByteLevel", False), ("ByteLevel", True)
# Pre-tokenizer stages -> llama.cpp's name.
PRE_TOKENIZERS: dict[tuple[Stage, ...], str] = {
    (("Split", QWEN2, "Isolated"), _BYTES_ONLY): "qwen2",
    (("Split", QWEN35, "Isolated"), _BYTES_ONLY): "qwen35",
    (("Split", LLAMA3, "Isolated"), _BYTES_ONLY): "llama-bpe",
    (_BYTES_AND_WORDS,): "gpt-2",
    (("Digits", True), _BYTES_AND_WORDS): "smollm",
    (("Split", TEKKEN, "Isolated"), _BYTES_ONLY): "tekken",
    (("Split", GPT_4O, "Isolated"), _BYTES_ONLY): "gpt-4o",
}
# With these, llama.cpp does not apply merges to a word that is a token.
IGNORE_MERGES = frozenset({"llama-bpe", "tekken", "glm4"})
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
        allowed = ", ".join(sorted(IGNORE_MERGES & {*PRE_TOKENIZERS.values()}))
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


Json = dict[str, Any]
# Other names of llama.cpp's for a splitter in PRE_TOKENIZERS (src/llama-vocab.cpp).
ALIASES = {
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), "llama-bpe"),
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "stablelm2", "hunyuan"), "qwen2"),
    **dict.fromkeys(("phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "a.x-4.0"), "gpt-2"),
    **dict.fromkeys(("mellum", "exaone4"), "gpt-2"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone"), "smollm"),
    **dict.fromkeys(("llama4",), "gpt-4o"),
}
SPLITTERS = {name: stages for stages, name in PRE_TOKENIZERS.items()}
# These split text as another does and differ from it in what `IGNORE_MERGES` and the bos token say (SmolLM3, OLMo 2).
SPLITTERS |= dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe", "glm4"), SPLITTERS["llama-bpe"])
SPLITTERS["seed-coder"] = ("Split", SEED, "Isolated"), _BYTES_ONLY
BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's kinds of tokens
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
BEGIN_WITH_BOS = ("llama-bpe", "tekken")  # where the file does not say, as in llama.cpp
CHANNEL_NAMES = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # llama.cpp always prints them
SPM_KINDS = ("llama", "gemma4")  # the latter's merges are in the file
# llama.cpp's, where the file has none.
DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2}, "gpt2": {"bos": 11, "eos": 11}, "gemma4": {"bos": 2, "eos": 1}}
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def tokenizer_texts(header: GgufHeader) -> dict[str, str]:
    """What `FILES` contain. Raises ModelFileError for a vocabulary that has no equal there."""
    contents = tokenizer_json(header), *_settings(header)
    return {name: json.dumps(found, ensure_ascii=False) for name, found in zip(FILES, contents, strict=True)}


def write_tokenizer_files(header: GgufHeader, folder: Path) -> None:
    """Write `FILES` into `folder`. Raises as `tokenizer_texts`, and OSError."""
    for name, content in tokenizer_texts(header).items():
        (folder / name).write_text(content, encoding="utf-8")


def tokenizer_json(header: GgufHeader) -> Json:
    """What the library `tokenizers` reads, for the vocabulary in the header. Raises ModelFileError."""
    texts = _texts(header)
    kinds = _kinds(header, texts)
    splitter = splitter_of(header)
    vocabulary = {text: index for index, text in enumerate(texts) if text and kinds[index] != UNUSED}
    made = _byte_level(header, splitter) if splitter else _sentence_piece(header, texts, kinds)
    made["model"] = {"type": "BPE", "vocab": vocabulary, **made["model"]}
    added = [
        {"id": index, "content": text, "special": kinds[index] in (CONTROL, UNKNOWN), "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for index, text in enumerate(texts)
        if text and kinds[index] in (CONTROL, USER_DEFINED, UNKNOWN)
    ]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **made}


def splitter_of(header: GgufHeader) -> str:
    """The name in `SPLITTERS` of a byte-level vocabulary, empty for SentencePiece. Raises ModelFileError for others."""
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind in SPM_KINDS:
        return ""
    if kind != "gpt2":
        raise ModelFileError(
            f"the GGUF's vocabulary is of the kind {kind!r}; allowed: gpt2 (BPE), llama and gemma4 (SentencePiece)"
        )
    given = str(header.metadata.get("tokenizer.ggml.pre", "default"))
    name = ALIASES.get(given, given)
    if name not in SPLITTERS:
        known = ", ".join(sorted({*SPLITTERS, *ALIASES}))
        raise ModelFileError(f"the GGUF's vocabulary splits text as {given!r}; allowed: {known}")
    return name


def _byte_level(header: GgufHeader, name: str) -> Json:
    byte_level = _stage_json(_BYTES_ONLY)
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [_stage_json(stage) for stage in SPLITTERS[name]]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {"merges": _merges(header), "ignore_merges": name in IGNORE_MERGES},
    }


def _merges(header: GgufHeader) -> list[list[str]]:
    found = header.metadata.get("tokenizer.ggml.merges")
    if not isinstance(found, GgufStrings) or not found.count:
        raise ModelFileError("the GGUF's vocabulary has no merges (tokenizer.ggml.merges)")
    return [each.decode("utf-8", "backslashreplace").split(" ", 1) for each in found.items]  # unknown to the vocabulary


def _stage_json(stage: Stage) -> Json:
    if stage[0] == "Split":
        return {"type": "Split", "pattern": {"Regex": stage[1]}, "behavior": stage[2], "invert": False}
    if stage[0] == "Digits":
        return {"type": "Digits", "individual_digits": stage[1]}
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": stage[1]}


def _sentence_piece(header: GgufHeader, texts: list[str], kinds: list[int]) -> Json:
    has_merges = header.metadata.get("tokenizer.ggml.model") == "gemma4"
    if {text for text, kind in zip(texts, kinds, strict=True) if kind == BYTE} != BYTES:
        raise refused("its tokens for bytes are not those marked as such")
    merges = _merges(header) if has_merges else _merges_of_scores(header, texts, kinds)
    unknown = next((text for index, text in enumerate(texts) if kinds[index] == UNKNOWN), None)
    adds_space = bool(header.metadata.get("tokenizer.ggml.add_space_prefix", not has_merges))
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prefix = [{"type": "Prepend", "prepend": SPACE}] if adds_space else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        # llama.cpp joins no line break with what is no line break.
        "pre_tokenizer": _stage_json(("Split", r"\n+", "Isolated")) if has_merges else None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {"merges": merges, "byte_fallback": True, "fuse_unk": True, "unk_token": unknown},
    }


def _merges_of_scores(header: GgufHeader, texts: list[str], kinds: list[int]) -> list[tuple[str, str]]:
    scores = header.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, GgufNumbers) or len(scores.items) != len(texts):
        raise ModelFileError("the GGUF's vocabulary has no score for every token (tokenizer.ggml.scores)")
    unused = {text for text, kind in zip(texts, kinds, strict=True) if kind == UNUSED}
    # Looked for before spaces become SPACE, so that one with SPACE in it is no part of ordinary texts.
    alone = {text for text, kind in zip(texts, kinds, strict=True) if kind == USER_DEFINED and SPACE not in text}
    return merges_of(dict(zip(texts, map(float, scores.items), strict=True)), alone, unused)


def _texts(header: GgufHeader) -> list[str]:
    try:
        texts = [each.decode("utf-8") for each in header.tokens]
    except UnicodeDecodeError as exc:
        raise ModelFileError(f"the GGUF's vocabulary holds a token that is not UTF-8 ({exc})") from exc
    if not texts:
        raise ModelFileError("the GGUF has no vocabulary (tokenizer.ggml.tokens): its tokenizer cannot be converted")
    return texts


def _kinds(header: GgufHeader, texts: list[str]) -> list[int]:
    found = header.metadata.get("tokenizer.ggml.token_type")
    given = [int(kind) for kind in found.items] if isinstance(found, GgufNumbers) else [NORMAL] * len(texts)
    if len(given) != len(texts):
        raise ModelFileError(f"the GGUF has {len(texts)} tokens and {len(given)} kinds of tokens; it is damaged")
    known = {*texts}
    retyped = dict.fromkeys(retyped_names(known.__contains__), CONTROL)
    retyped |= dict.fromkeys(CHANNEL_NAMES, USER_DEFINED)
    retyped |= {"<|end|>": USER_DEFINED} if {"<|return|>", "<|call|>"} <= known else {}
    retyped |= {"</s>": NORMAL} if "<|tool_response>" in known else {}
    return [retyped.get(text, kind) for text, kind in zip(texts, given, strict=True)]


def _settings(header: GgufHeader) -> tuple[Json, Json]:
    """tokenizer_config.json and generation_config.json: special tokens, the chat template, what ends a text."""
    texts = _texts(header)

    model = str(header.metadata.get("tokenizer.ggml.model"))
    ids = dict(DEFAULT_IDS.get(model, {}))
    for key in ids:
        given = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(given, int) and 0 <= given < len(texts):
            ids[key] = given
    settings: Json = {f"{key}_token": texts[index] for key, index in ids.items() if index < len(texts)}
    name = str(header.metadata.get("tokenizer.ggml.pre", ""))
    adds = header.metadata.get(
        "tokenizer.ggml.add_bos_token", model == "llama" or ALIASES.get(name, name) in BEGIN_WITH_BOS
    )
    settings["add_bos_token"] = bool(adds) and "bos_token" in settings
    template = header.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    ends = [header.metadata.get(f"tokenizer.ggml.{key}") for key in END_KEYS]
    return settings, {"eos_token_id": sorted({each for each in ends if isinstance(each, int)})}
