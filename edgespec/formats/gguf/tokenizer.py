"""The tokenizer entries of a GGUF -> tokenizer.json and its companions, for engines that read these.

The reverse of `export.gguf.tokenizer`. Two kinds of vocabularies are known: byte-level BPE ("gpt2"), whose splitter
must have an equal among the library's (`SPLITTERS`), and SentencePiece's BPE ("llama"), whose merges follow from the
scores. Any other is refused by name, since a wrong splitter loads silently and tokenises wrongly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError
from edgespec.formats.gguf.header import GgufHeader
from edgespec.formats.gguf.piece_merges import merges_of, refused
from edgespec.formats.gguf.splitters import IGNORE_MERGES, PRE_TOKENIZERS, SPACE, Stage
from edgespec.formats.gguf.values import GgufNumbers, GgufStrings
from edgespec.vocabulary import retyped_names

Json = dict[str, Any]
# Other names of llama.cpp's for a splitter in PRE_TOKENIZERS (src/llama-vocab.cpp).
ALIASES = {
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), "llama-bpe"),
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "stablelm2", "hunyuan"), "qwen2"),
    **dict.fromkeys(("phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "a.x-4.0", "mellum"), "gpt-2"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone"), "smollm"),
    **dict.fromkeys(("llama4",), "gpt-4o"),
}
SPLITTERS = {name: stages for stages, name in PRE_TOKENIZERS.items()}
# These split text as another does and differ from it in what `IGNORE_MERGES` and the bos token say (SmolLM3, OLMo 2).
SPLITTERS |= dict.fromkeys(("smaug-bpe", "dbrx"), SPLITTERS["llama-bpe"])
BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's kinds of tokens
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
BEGIN_WITH_BOS = ("llama-bpe", "tekken")  # where the file does not say, as in llama.cpp
CHANNEL_NAMES = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # llama.cpp always prints them
DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2}, "gpt2": {"bos": 11, "eos": 11}}  # llama.cpp's, where the file has none
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
    made = _byte_level(header, splitter, texts, kinds) if splitter else _sentence_piece(header, texts, kinds)
    added = [
        {"id": index, "content": text, "special": kinds[index] in (CONTROL, UNKNOWN), "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for index, text in enumerate(texts)
        if text and kinds[index] in (CONTROL, USER_DEFINED, UNKNOWN)
    ]
    made["post_processor"] = _with_bos(header, texts, made["post_processor"])
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **made}


def _with_bos(header: GgufHeader, texts: list[str], others: Json | None) -> Json | None:
    """What puts the begin of a text in front, for programs that leave that to tokenizer.json."""
    settings, _ = _settings(header)
    if not settings["add_bos_token"]:
        return others
    bos = settings["bos_token"]
    whole = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    second = [{"SpecialToken": {"id": bos, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {bos: {"id": bos, "ids": [texts.index(bos)], "tokens": [bos]}}
    template = {"type": "TemplateProcessing", "single": whole, "pair": whole + second, "special_tokens": special}
    return template if others is None else {"type": "Sequence", "processors": [others, template]}


def splitter_of(header: GgufHeader) -> str:
    """The name in `SPLITTERS` of a byte-level vocabulary, empty for SentencePiece. Raises ModelFileError for others."""
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind == "llama":
        return ""
    if kind != "gpt2":
        raise ModelFileError(
            f"the GGUF's vocabulary is of the kind {kind!r}; allowed: gpt2 (BPE), llama (SentencePiece)"
        )
    given = str(header.metadata.get("tokenizer.ggml.pre", "default"))
    name = ALIASES.get(given, given)
    if name not in SPLITTERS:
        known = ", ".join(sorted({*SPLITTERS, *ALIASES}))
        raise ModelFileError(f"the GGUF's vocabulary splits text as {given!r}; allowed: {known}")
    return name


def _byte_level(header: GgufHeader, name: str, texts: list[str], kinds: list[int]) -> Json:
    found = header.metadata.get("tokenizer.ggml.merges")
    if not isinstance(found, GgufStrings) or not len(found):
        raise ModelFileError("the GGUF's vocabulary has no merges (tokenizer.ggml.merges)")
    merges = [each.decode("utf-8").split(" ", 1) for each in found]
    vocabulary = {text: index for index, text in enumerate(texts) if text and kinds[index] != UNUSED}
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges, "ignore_merges": name in IGNORE_MERGES}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    stages = [_stage(stage) for stage in SPLITTERS[name]]
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": stages},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": model,
    }


def _stage(stage: Stage) -> Json:
    if stage[0] == "Split":
        return {"type": "Split", "pattern": {"Regex": stage[1]}, "behavior": stage[2], "invert": False}
    if stage[0] == "Digits":
        return {"type": "Digits", "individual_digits": stage[1]}
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": stage[1]}


def _sentence_piece(header: GgufHeader, texts: list[str], kinds: list[int]) -> Json:
    scores = header.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, GgufNumbers) or len(scores.items) != len(texts):
        raise ModelFileError("the GGUF's vocabulary has no score for every token (tokenizer.ggml.scores)")
    vocabulary = {text: index for index, text in enumerate(texts) if text and kinds[index] != UNUSED}
    if {text for text, kind in zip(texts, kinds, strict=True) if kind == BYTE} != BYTES:
        raise refused("its tokens for bytes are not those marked as such")
    unused = {text for text, kind in zip(texts, kinds, strict=True) if kind == UNUSED}
    # Looked for before spaces become SPACE, so that one with SPACE in it is no part of ordinary texts.
    alone = {text for text, kind in zip(texts, kinds, strict=True) if kind == USER_DEFINED and SPACE not in text}
    merges = merges_of(dict(zip(texts, map(float, scores.items), strict=True)), alone, unused)
    unknown = next((text for index, text in enumerate(texts) if kinds[index] == UNKNOWN), None)
    adds_space = bool(header.metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prefix = [{"type": "Prepend", "prepend": SPACE}] if adds_space else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges, "byte_fallback": True, "fuse_unk": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": model | {"unk_token": unknown},
    }


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
