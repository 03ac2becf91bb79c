"""A GGUF's tokenizer metadata, from tokenizer.json, tokenizer_config.json and generation_config.json, and its check.

The check is needed because llama.cpp silently accepts a wrong pre-tokenizer. Three known differences of llama.cpp are
ignored: it does not compose characters (NFC), with Metaspace tokenizers (newer Mistral) it adds a space before text
that begins with one or follows a special token, and with the splitters "tekken" and "gpt-4o" (Mistral Nemo, Llama 4) it
ends a word at a combining mark, as in Hindi.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf

from edgespec.engines.llamacpp.tokenizer import VocabularyFile
from edgespec.errors import ModelFileError
from edgespec.export.check import PROBE_TEXTS, read_tokenizer
from edgespec.formats.checkpoint import Checkpoint, chat_template, read_json, read_optional_json
from edgespec.formats.gguf.tokenizer import (
    BYTES,
    SPACE,
    SPLIT_AT_MARKS,
    begins_with_space,
    flatten,
    is_spm,
    pre_tokenizer_name,
)

Settings = dict[str, Any]
UNREACHABLE = -1e6  # the score of a token that no merge produces


def write_tokenizer(writer: gguf.GGUFWriter, checkpoint: Checkpoint, vocab_size: int) -> None:
    """Write the tokenizer metadata. Raises ModelFileError for a damaged tokenizer or one that llama.cpp lacks."""
    try:
        _write_tokenizer(writer, checkpoint, vocab_size)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise ModelFileError(
            f"{checkpoint.folder / 'tokenizer.json'} is not a valid tokenizer: {type(error).__name__} {error}"
        ) from error


def _write_tokenizer(writer: gguf.GGUFWriter, checkpoint: Checkpoint, vocab_size: int) -> None:
    folder = checkpoint.folder
    tokenizer, settings = read_json(folder / "tokenizer.json"), read_json(folder / "tokenizer_config.json")
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        kind = model.get("type") if isinstance(model, dict) else None
        raise ModelFileError(
            f"{folder / 'tokenizer.json'} holds a {kind} tokenizer; allowed: byte-level BPE, and BPE with byte fallback"
        )
    texts, types = token_list(tokenizer, vocab_size)
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model.get("merges", [])]
    if is_spm(tokenizer):
        _write_spm(writer, tokenizer, texts, types, merges)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_tokenizer_name(tokenizer))
        writer.add_token_list(texts)
        writer.add_token_types(types)
        writer.add_token_merges([" ".join(pair) for pair in merges])
    _write_special_ids(writer, checkpoint, settings, texts)
    if template := chat_template(folder, settings):
        writer.add_chat_template(template)


def _write_spm(
    writer: gguf.GGUFWriter, tokenizer: Settings, texts: list[str], types: list[int], merges: list[tuple[str, ...]]
) -> None:
    adds_space = begins_with_space(tokenizer)
    if missing := BYTES - set(texts):
        raise ModelFileError(f"tokenizer.json has no token for {len(missing)} of 256 bytes, such as {min(missing)}")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(texts)
    writer.add_token_scores(merge_scores(texts, merges))
    writer.add_token_types(types)
    writer.add_add_space_prefix(adds_space)
    unknown = tokenizer["model"].get("unk_token")
    if unknown is not None and unknown in texts:
        writer.add_unk_token_id(texts.index(unknown))


def merge_scores(texts: list[str], merges: list[tuple[str, ...]]) -> list[float]:
    """Token scores that make SPM merge in the order of `merges`: the earlier a merge, the higher its token's score."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    return [-(1.0 + ranks[text]) if text in ranks else UNREACHABLE for text in texts]


def token_list(tokenizer: Settings, vocab_size: int) -> tuple[list[str], list[int]]:
    """Texts and llama.cpp types of ids 0..vocab_size-1; ids missing in the tokenizer become unused padding."""
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    texts: list[str] = [""] * vocab_size
    types = [int(gguf.TokenType.UNUSED)] * vocab_size
    byte_texts = BYTES if is_spm(tokenizer) else set()
    for text, index in vocab.items():
        if not 0 <= index < vocab_size:
            raise ModelFileError(f"tokenizer.json gives {text!r} the id {index}, config.json has {vocab_size} ids")
        kind = gguf.TokenType.BYTE if text in byte_texts else gguf.TokenType.NORMAL
        texts[index], types[index] = text, int(kind)
    for added in tokenizer.get("added_tokens", []):
        # Skip ids without an embedding, such as Gemma 3's image token.
        if added["id"] < vocab_size:
            texts[added["id"]], types[added["id"]] = added["content"], _added_type(added, tokenizer)
    taken = set(texts)
    for index, text in enumerate(texts):
        if types[index] == gguf.TokenType.UNUSED:
            padding = f"[PAD{index}]"
            while padding in taken:
                padding += "_"
            texts[index] = padding
        elif not text:
            raise ModelFileError(f"tokenizer.json gives the id {index} an empty text")
    return texts, types


def _added_type(added: Settings, tokenizer: Settings) -> int:
    if added["content"] == tokenizer["model"].get("unk_token") and is_spm(tokenizer):
        return int(gguf.TokenType.UNKNOWN)
    if added["special"]:
        return int(gguf.TokenType.CONTROL)
    if is_spm(tokenizer) and SPACE in added["content"]:
        # Runs of spaces. As user-defined tokens, llama.cpp would match and print them with the space placeholder.
        return int(gguf.TokenType.NORMAL)
    return int(gguf.TokenType.USER_DEFINED)


def _write_special_ids(writer: gguf.GGUFWriter, checkpoint: Checkpoint, settings: Settings, texts: list[str]) -> None:
    """Those that tokenizer_config.json omits, too: llama.cpp would use id 11 (or 1 and 2) for them."""
    ids, found = {text: index for index, text in enumerate(texts)}, dict[str, int]()
    for key in ("bos", "eos", "pad"):
        text = _token_text(settings.get(f"{key}_token"))
        if text in ids:
            found[key] = ids[text]
        elif text is not None and key != "pad":  # which was added behind the vocabulary, as for training
            raise ModelFileError(f"tokenizer_config.json names {key}_token {text!r}, which tokenizer.json lacks")
    begins = adds_bos(checkpoint.folder, settings) and "bos" in found
    ends = [index for index in _end_ids(checkpoint) if 0 <= index < len(texts) and index != found.get("eos")]
    if "eos" not in found and not ends:
        raise ModelFileError(f"{checkpoint.folder}: tokenizer_config.json and config.json name no eos token")
    if "eos" not in found:
        found["eos"] = ends.pop(0)
    if ends:
        found["eot"] = ends[0]
    index = checkpoint.config.get("bos_token_id")
    found.setdefault("bos", index if isinstance(index, int) and 0 <= index < len(texts) else found["eos"])
    for key, index in found.items():
        getattr(writer, f"add_{key}_token_id")(index)
    writer.add_add_bos_token(begins)
    writer.add_add_eos_token(False)


def _token_text(value: Any) -> str | None:
    """The text of a special token in tokenizer_config.json, given as a string or an object."""
    found = value.get("content") if isinstance(value, dict) else value
    return None if found is None else str(found)


def _end_ids(checkpoint: Checkpoint) -> list[int]:
    """End token ids, from generation_config.json or else config.json."""
    value = read_optional_json(checkpoint.folder / "generation_config.json").get("eos_token_id")
    value = checkpoint.config.get("eos_token_id") if value is None else value
    listed = value if isinstance(value, list) else [value]
    return [index for index in listed if isinstance(index, int)]


def adds_bos(folder: Path, settings: Settings) -> bool:
    """Whether texts begin with the bos token, as tokenizer_config.json says or else the library does."""
    if settings.get("add_bos_token") is not None:
        return bool(settings["add_bos_token"])
    bos = _token_text(settings.get("bos_token"))
    return bos is not None and read_tokenizer(folder).encode("a").tokens[:1] == [bos]


# the check

SAMPLED_TOKENS = 400
SAMPLED_SPECIALS = 8


def check_tokenizer(folder: Path, gguf_path: Path) -> int:
    """Check all probe texts; returns their number.

    Raises ModelFileError, naming the first text that differs.
    """
    theirs, source = read_tokenizer(folder), read_json(folder / "tokenizer.json")
    with VocabularyFile(gguf_path) as ours:
        checked = 0
        for text in probes(theirs, source, ours.size):
            wanted, given = theirs.encode(text, add_special_tokens=False).ids, ours.encode(text, parse_special=True)
            if wanted != given:
                raise ModelFileError(
                    f"{gguf_path} does not tokenise as {folder}: {text[:80]!r} becomes {given[:12]}, "
                    f"expected {wanted[:12]}. This tokenizer is not supported"
                )
            checked += 1
        wants_bos = adds_bos(folder, read_json(folder / "tokenizer_config.json"))
        if wants_bos != ours.adds_bos:
            raise ModelFileError(f"{gguf_path}: add_bos is {ours.adds_bos}, {folder} says {wants_bos}")
    return checked


def probes(tokenizer: Any, source: dict[str, Any], vocab_size: int) -> Iterator[str]:
    """The probe texts: fixed ones, single tokens of the vocabulary, and texts around special tokens."""
    splitters = [node.get("type") for node in flatten(source.get("pre_tokenizer"), "pretokenizers")]
    composes = bool(flatten(source.get("normalizer"), "normalizers"))
    has_metaspace = "Metaspace" in splitters
    splits_marks = not is_spm(source) and pre_tokenizer_name(source) in SPLIT_AT_MARKS
    size = min(tokenizer.get_vocab_size(with_added_tokens=False), vocab_size)
    sampled = range(0, size, max(size // SAMPLED_TOKENS, 1))
    tokens = (tokenizer.decode([index], skip_special_tokens=False) for index in sampled)
    for text in (*PROBE_TEXTS.values(), *tokens):
        is_whole = text and "\ufffd" not in text
        is_stable = not composes or unicodedata.normalize("NFC", text) == text
        is_split = splits_marks and any(unicodedata.category(letter).startswith("M") for letter in text)
        if is_whole and is_stable and not is_split and not (has_metaspace and text.startswith(" ")):
            yield text
    if has_metaspace:
        return
    for added in source.get("added_tokens", [])[:SAMPLED_SPECIALS]:
        if added["id"] < vocab_size and added["special"]:
            yield f"{added['content']}Hello{added['content']}\nworld"
